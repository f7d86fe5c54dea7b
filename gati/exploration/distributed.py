"""The executor that trains groups on a Ray cluster. No other module of this room knows about Ray.

The driver decides on groups, steps and engines before training starts; they do not depend on the number of
workers. A worker is a Ray actor with its own process. It trains a group in short slices and returns the
training state every minute. The driver stores that state in the same place as a run without Ray. When a
worker dies, another one resumes its group from the stored state; when the driver dies, the same command
resumes all of them. The driver measures latencies before the first worker starts and after the last one ends.
"""

from __future__ import annotations

import importlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch

from gati.engine.threads import on_threads
from gati.errors import BackendError, GatiError, first_line, one_line
from gati.exploration.candidates import Specification
from gati.exploration.connecting import connect
from gati.exploration.executors import (
    Executor,
    LocalExecutor,
    OngoingRun,
    announcement,
    begun_again,
    divided,
    tell_unanswered,
)
from gati.exploration.groups import Classroom, GroupTask, TrialResult
from gati.exploration.memory import is_lack_of_memory
from gati.exploration.pace import LATENESS, allowance
from gati.exploration.workers import Slice, WorkerPlace, WorkerProcess
from gati.files import atomic_write_bytes
from gati.model.segments import TracedModel
from gati.model.source import user_files
from gati.version import __version__

_SLICE_S = 2.0
_MOST_DEATHS = 3  # of workers in a row without any progress
_PATIENCE_S = 20.0


def trained_on(address: str | None, cores: int, gpus: int) -> dict[str, str]:
    """The settings of workers that affect the weights of a library; empty without Ray.

    **Raises:** `BackendError` for impossible numbers, or if Ray is not installed.
    """
    if cores < 1 or gpus < 0:
        raise BackendError(f"a worker needs at least 1 core and 0 or more GPUs (got {cores} and {gpus})")
    if address is None:
        return {}
    if find_spec("ray") is None:
        raise BackendError("--ray needs Ray, not installed here: pip install 'gati[ray]'")
    return {"workers": f"{cores} cores" + (f", {gpus} GPUs" if gpus else "")}


@contextmanager
def opened_executor(address: str | None, *, cores: int = 1, gpus: int = 0) -> Iterator[Executor]:
    """Open an executor on the Ray cluster at `address`, or in this process if `address` is None.

    Each worker gets `cores` cores and `gpus` GPUs. `"auto"` is the cluster on this machine or the one that
    RAY_ADDRESS names; `"local"` starts one on this machine and stops it on exit. Workers are stopped on exit.

    **Raises:** `BackendError` if there is no such cluster.
    """
    if address is None:
        yield LocalExecutor()
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray: Any = importlib.import_module("ray")
    connects = not ray.is_initialized()
    if connects:
        connect(ray, address)
    executor = RayExecutor(ray, cores=cores, gpus=gpus)
    try:
        yield executor
    finally:
        executor.close()
        if connects:
            ray.shutdown()


@dataclass
class _Worker:
    """The driver's record of a worker; `host` is empty until it has started."""

    actor: Any
    host: str = ""
    task: GroupTask | None = None
    saved_at: float = 0.0


class _Stage:
    """The tasks of a stage, which of them wait for a worker, and the progress of each."""

    def __init__(self, tasks: Iterable[GroupTask], classroom: Classroom, run: OngoingRun) -> None:
        self.classroom, self.run = classroom, run
        self.waiting = deque(sorted(tasks, key=_work_of, reverse=True))  # the largest first
        self.tasks = {task.name: task for task in self.waiting}
        self.name = " and ".join(dict.fromkeys(task.lesson.name for task in self.waiting))
        self.total = sum(task.plan.steps for task in self.waiting)
        self.steps = dict.fromkeys(self.tasks, 0)
        self.deaths = dict.fromkeys(self.tasks, 0)
        self._end_s: float | None = None

    def allowed_s(self, task: GroupTask, at_once: int) -> float | None:
        """Seconds that a task may take if `at_once` tasks run in parallel; None without a budget."""
        if task.plan.planned_s is None:
            return None
        if self._end_s is None:
            whole_s = sum(each.plan.planned_s or 0.0 for each in self.tasks.values())
            planned_s = (1.0 + LATENESS) * whole_s
            left_s = self.run.budget.left_s()  # less, if an earlier run lagged before it was interrupted
            self._end_s = self.run.budget.spent_s + (planned_s if left_s is None else min(planned_s, left_s))
        left_s = self._end_s - self.run.budget.spent_s
        waiting_s = sum(each.plan.planned_s or 0.0 for each in self.waiting)
        return allowance(left_s, task.plan.planned_s, waiting_s, at_once)

    def reach(self, task: GroupTask, step: int, detail: str) -> None:
        """Report progress; repeated steps do not count."""
        further = step - self.steps[task.name]
        if further > 0:
            self.steps[task.name] = step
            self.run.progress.advance(further, detail)

    def announce(self) -> None:
        """Report how many steps there are, and how many are done."""
        self.run.progress.stage(self.name, self.total, sum(self.steps.values()))

    def begin_again(self, task: GroupTask, error: Exception) -> None:
        """Let a task wait to train in smaller batches, as `begun_again`."""
        again = begun_again(self.classroom, task, self.run, error)
        self.tasks[again.name] = again
        self.total += again.plan.steps - task.plan.steps
        self.steps[again.name] = 0
        self.waiting.appendleft(again)
        self.announce()

    def finish(self, task: GroupTask) -> None:
        """Remove a finished task."""
        del self.tasks[task.name]


class RayExecutor:
    """Trains groups on the workers of the Ray cluster that `ray`, the module, is connected to."""

    concurrent = True

    def __init__(self, ray: Any, *, cores: int = 1, gpus: int = 0) -> None:
        self._ray, self._cores, self._gpus = ray, cores, gpus
        self._workers: list[_Worker] = []
        self._calls: dict[Any, tuple[_Worker, str]] = {}
        self._shared: tuple[Classroom, Any] | None = None
        self._places: set[str] = set()
        self._failed_starts = 0
        self._reported_waiting = False

    def groups(self, items: Sequence[Specification], traced: TracedModel) -> list[list[Specification]]:
        """Small groups, which do not depend on the cluster."""
        return divided(items, traced)

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Use as many threads as a worker while the context is open."""
        with on_threads(self._cores):
            yield

    def train(
        self, classroom: Classroom, tasks: Iterable[GroupTask], run: OngoingRun
    ) -> Iterator[tuple[GroupTask, list[TrialResult]]]:
        """Train all tasks, one at a time on each worker.

        **Raises:** `BackendError` if workers keep dying or cannot start, and any error of a training.
        """
        stage = _Stage(tasks, classroom, run)
        if not stage.tasks:
            return
        for task in stage.tasks.values():
            run.progress.note(announcement(classroom, task))
        stage.announce()
        for worker in self._workers:
            if worker.host and worker.task is None:
                self._give(worker, stage)
        self._request_workers(classroom, len(stage.tasks))
        while stage.tasks:
            ready, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=_PATIENCE_S)
            if not ready:
                self._report_if_none_started(run)
                continue
            worker, called = self._calls.pop(ready[0])
            answer = self._answer(ready[0], worker, called, stage)
            if answer is None:
                self._request_workers(classroom, len(stage.tasks))
            elif called == "install":
                device = "cuda" if self._gpus else "cpu"
                self._call(worker, "start", self._share(classroom), self._cores, device)
            elif isinstance(answer, WorkerPlace):
                self._register(worker, answer, run)
                self._give(worker, stage)
            elif isinstance(answer, list):
                task, worker.task = _task_of(worker), None
                stage.finish(task)
                self._give(worker, stage)
                yield task, answer
            else:
                self._continue(worker, answer, stage)

    def close(self) -> None:
        """Stop all workers."""
        for worker in self._workers:
            self._ray.kill(worker.actor)
        self._workers, self._calls, self._shared = [], {}, None

    # Workers --------------------------------------------------------------------------------------------

    def _request_workers(self, classroom: Classroom, count: int) -> None:
        """Request workers until there are `count`; the cluster starts them when it has capacity."""
        remote = self._ray.remote(
            num_cpus=self._cores,
            num_gpus=self._gpus,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
        )(WorkerProcess)
        while len(self._workers) < count:
            worker = _Worker(remote.remote())
            self._workers.append(worker)
            self._call(worker, "install", user_files(), [os.getcwd()])

    def _share(self, classroom: Classroom) -> Any:
        """The classroom in the cluster's object store, from which each node fetches it once."""
        if self._shared is None or self._shared[0] is not classroom:
            home = classroom.device
            try:
                reference = self._ray.put(replace(classroom, module=classroom.module.cpu()))
            except Exception as error:  # pickling fails with whatever the user's objects raise
                raise BackendError(
                    f"the network or its data cannot be sent to Ray workers ({one_line(error)}): name the "
                    "network as package.module:callable or file.py:callable, and the data as .npz or folder"
                ) from error
            finally:
                classroom.module.to(home)
            self._shared = classroom, reference
        return self._shared[1]

    def _call(self, worker: _Worker, method: str, *arguments: Any) -> None:
        self._calls[getattr(worker.actor, method).remote(*arguments)] = worker, method

    def _register(self, worker: _Worker, place: WorkerPlace, run: OngoingRun) -> None:
        """Register a worker that has started. Raises `BackendError` if its versions differ from ours."""
        self._failed_starts = 0
        worker.host = place.host
        if (place.gati, place.torch) != (__version__, torch.__version__):
            raise BackendError(
                f"the Ray worker on {place.host} has gati {place.gati} and torch {place.torch}, this machine "
                f"{__version__} and {torch.__version__}: install the same versions everywhere"
            )
        self._places.add(place.processor)
        if len(self._places) > 1:
            run.progress.note(
                f"the worker on {place.host} computes with {place.processor}, others do not: another run "
                "with the same seed may give different weights"
            )

    def _give(self, worker: _Worker, stage: _Stage) -> None:
        """Give an idle worker the next waiting task, if there is one."""
        if not stage.waiting:
            return
        task = worker.task = stage.waiting.popleft()
        path = stage.run.state.training_path(task.name)
        state = path.read_bytes() if path.is_file() else None
        at_once = sum(each.task is not None for each in self._workers)
        worker.saved_at = stage.run.budget.clock()
        self._call(worker, "begin", _on_cpu(task), state, stage.allowed_s(task, at_once))

    def _continue(self, worker: _Worker, answer: int | Slice, stage: _Stage) -> None:
        """Process a worker's progress, and request the next slice or, at the end, the measurements."""
        task, run = _task_of(worker), stage.run
        if isinstance(answer, int):
            stage.reach(task, answer, f"{worker.host} starts")
        else:
            stage.reach(task, answer.step, f"loss {answer.loss:.3f} on {worker.host}")
            if answer.state is not None:
                atomic_write_bytes(run.state.training_path(task.name), answer.state)
                stage.deaths[task.name] = 0
                worker.saved_at = run.budget.clock()
                run.budget.note()
            if answer.ended:
                tell_unanswered(task, answer.unanswered_batches, run.progress)
                self._call(worker, "measure")
                return
        self._call(worker, "advance", _SLICE_S, run.budget.clock() - worker.saved_at >= run.save_every_s)

    # Failures -------------------------------------------------------------------------------------------

    def _answer(self, reference: Any, worker: _Worker, called: str, stage: _Stage) -> Any:
        """A worker's answer; None if it died or lacked memory: its task then waits to begin again."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.RayTaskError as error:
            if worker.task is None or not is_lack_of_memory(error.cause):
                raise _own_error(error.cause, worker.host, called) from error
            task, worker.task = worker.task, None
            stage.begin_again(task, error.cause)
            self._give(worker, stage)
            return None
        except errors.RayError as error:  # the worker, its node or the connection is lost
            self._replace_worker(worker, stage, first_line(error))
            return None

    def _replace_worker(self, worker: _Worker, stage: _Stage, reason: str) -> None:
        """Hand the task of a dead worker to another one. Raises `BackendError` if too many died."""
        self._workers.remove(worker)
        self._ray.kill(worker.actor)  # it may only be unreachable; it must stop
        task = worker.task
        if task is None:
            self._failed_starts += 1
            if self._failed_starts >= _MOST_DEATHS:
                raise BackendError(
                    f"{self._failed_starts} Ray workers in a row did not start ({reason}): check that gati "
                    "is installed on every node; the same command resumes"
                )
            return
        stage.deaths[task.name] += 1
        if stage.deaths[task.name] >= _MOST_DEATHS:
            raise BackendError(
                f"{_MOST_DEATHS} Ray workers in a row died while training {task.name} ({reason}): give each "
                "more memory, or run fewer per node (--ray-cores); the same command resumes"
            )
        stage.run.progress.note(f"lost the worker on {worker.host}: another one resumes {task.name}")
        stage.waiting.appendleft(task)
        idle = next((each for each in self._workers if each.host and each.task is None), None)
        if idle is not None:
            self._give(idle, stage)

    def _report_if_none_started(self, run: OngoingRun) -> None:
        if self._reported_waiting or any(worker.host for worker in self._workers):
            return
        self._reported_waiting = True
        resources = self._ray.cluster_resources()
        run.progress.note(
            f"waiting for a Ray worker with {self._cores} cores and {self._gpus} GPUs: the cluster has "
            f"{resources.get('CPU', 0):g} cores and {resources.get('GPU', 0):g} GPUs in all"
        )


def _own_error(cause: BaseException, host: str, called: str) -> GatiError:
    """Turn the exception of a call on a worker into a one-line `GatiError`."""
    if isinstance(cause, GatiError):
        return cause
    where = f"on {host}" if host else "on a Ray worker"
    hint = "every node needs the packages and folders that the network and its data use"
    if called in ("install", "start"):
        return BackendError(f"the network or its data do not load {where} ({one_line(cause)}): {hint}")
    return BackendError(f"training failed {where} ({one_line(cause)}): {hint}; the same command resumes")


def _work_of(task: GroupTask) -> float:
    """The relative duration of a task, to start long ones first."""
    if task.plan.planned_s is not None:
        return task.plan.planned_s
    return task.plan.steps * sum(item.trial.lookup_ms or 0.0 for item in task.specifications)


def _on_cpu(task: GroupTask) -> GroupTask:
    emphasis = task.lesson.emphasis
    if emphasis is None:
        return task
    on_cpu = replace(emphasis, predictor=emphasis.predictor.cpu())
    return replace(task, lesson=task.lesson._replace(emphasis=on_cpu))


def _task_of(worker: _Worker) -> GroupTask:
    assert worker.task is not None, "the worker has no task"
    return worker.task
