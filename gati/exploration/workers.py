"""A worker, which trains a group in slices of time and returns its state on request.

It does not depend on its caller. Slices are measured in wall-clock time, but they do not affect the result: a
training that was sliced differently, or resumed from a state on another machine, ends with the same weights.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from gati.allocation import freed_memory_kept
from gati.exploration.devices import on_device
from gati.exploration.groups import (
    Classroom,
    GroupTask,
    TrialResult,
    group_training,
    measured_trials,
    timekeeper,
)
from gati.exploration.precision import bfloat16_pays
from gati.exploration.train import SharedTraining
from gati.model.source import UserFile, install_user_files
from gati.version import __version__


class WorkerPlace(NamedTuple):
    """Where a worker runs, and the properties on which its numerical results depend."""

    host: str
    gati: str
    torch: str
    processor: str  # the instruction set that torch uses


class Slice(NamedTuple):
    """The result of a slice of training. `state` is what `SharedTraining.save` writes, if requested.

    `unanswered_batches` are those of the whole training, as in `SharedTraining`.
    """

    step: int
    loss: float
    ended: bool
    state: bytes | None
    unanswered_batches: int = 0


class WorkerProcess:
    """Trains groups of one classroom, one after the other, in a process of its own.

    First `install`: the process needs the user's files before it unpickles what they define. Then `start`,
    and for each group `begin`, `advance` until a slice says that training has ended, and `measure`.
    """

    def __init__(self) -> None:
        self._classroom: Classroom | None = None
        self._threads = 1
        self._task: GroupTask | None = None
        self._training: SharedTraining | None = None
        self._losses: Iterator[float] = iter(())
        self._loss = 0.0
        self._held = ExitStack()

    def install(self, files: Sequence[UserFile], folders: Sequence[str]) -> bool:
        """As `install_user_files`."""
        install_user_files(files, folders)
        return True

    def start(self, classroom: Classroom, threads: int, device: str) -> WorkerPlace:
        """Prepare to train on `device` with `threads` threads."""
        self._classroom, self._threads = replace(classroom, device=torch.device(device)), threads
        processor = torch.backends.cpu.get_cpu_capability() if device == "cpu" else "GPU"
        processor += " with bfloat16" if bfloat16_pays() else ""
        return WorkerPlace(socket.gethostname(), __version__, torch.__version__, processor)

    def begin(self, task: GroupTask, state: bytes | None, allowed_s: float | None) -> int:
        """Prepare to train `task`, from `state` if given; return the number of steps already done.

        All steps together should take at most `allowed_s` seconds; training is shortened if it lags behind.
        None means no limit.
        """
        classroom = self._started
        self._held.close()
        self._training, self._task, self._losses = None, None, iter(())  # its memory may be needed
        self._held.enter_context(freed_memory_kept())
        self._held.enter_context(on_device(classroom.device))
        torch.set_num_threads(self._threads)
        classroom.module.to(classroom.device)
        if task.lesson.emphasis is not None:
            task.lesson.emphasis.predictor.to(classroom.device)
        training = group_training(classroom, task, time.perf_counter)
        if state is not None:
            with TemporaryDirectory() as folder:
                path = Path(folder) / "state.safetensors"
                path.write_bytes(state)
                training.restore(path)
        self._task, self._training, self._loss = task, training, 0.0
        self._losses = training.run(timekeeper(task.plan, training, allowed_s, time.perf_counter))
        return training.step

    def advance(self, seconds: float, want_state: bool) -> Slice:
        """Train for about `seconds`, at least one step. The state is returned on request, and at the end."""
        began, ended = time.perf_counter(), False
        while True:
            loss = next(self._losses, None)
            if loss is None:
                ended = True
                break
            self._loss = loss
            if time.perf_counter() - began >= seconds:
                break
        state = self._state() if want_state or ended else None
        return Slice(self._running.step, self._loss, ended, state, self._running.unanswered_batches)

    def measure(self) -> list[TrialResult]:
        """Measure the trained caches."""
        if self._task is None:
            raise ValueError("call begin first")
        found = measured_trials(self._started, self._running, self._task.specifications)
        self._training = self._task = None
        self._held.close()
        return found

    @property
    def _started(self) -> Classroom:
        if self._classroom is None:
            raise ValueError("call start first")
        return self._classroom

    @property
    def _running(self) -> SharedTraining:
        if self._training is None:
            raise ValueError("call begin first")
        return self._training

    def _state(self) -> bytes:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "state.safetensors"
            self._running.save(path)
            return path.read_bytes()
