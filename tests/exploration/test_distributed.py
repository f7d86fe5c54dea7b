"""Training elsewhere: what is trained is decided before, and does not depend on who trains it or who dies."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gati.caches import build_predictor, distillation_loss, reads_input
from gati.errors import BackendError
from gati.exploration import distributed
from gati.exploration.augment import Augmentation
from gati.exploration.budget import Budget
from gati.exploration.candidates import Specification, trial_name
from gati.exploration.distributed import RayExecutor, opened_executor, trained_on
from gati.exploration.executors import Executor, LocalExecutor, OngoingRun, begun_again, divided
from gati.exploration.explore import explore
from gati.exploration.groups import (
    Classroom,
    FailedTrial,
    GroupLesson,
    GroupTask,
    TrainedTrial,
    TrialResult,
)
from gati.exploration.pace import allowance
from gati.exploration.progress import SilentProgress
from gati.exploration.recipes import EXITS, STUDENTS
from gati.exploration.state import RunState, StagePlan
from gati.model.data import load_data
from gati.model.load import load_model
from gati.model.segments import trace
from gati.model.source import install_user_files, user_files
from gati.types import Trial
from tests.exploration.fake_ray import FakeRay
from tests.exploration.killing import Killed
from tests.exploration.networks import Net, write_digits

NETWORKS = Path(__file__).parent / "networks.py"


@pytest.fixture(scope="module")
def classroom(tmp_path_factory: pytest.TempPathFactory) -> Classroom:
    held, more = write_digits(tmp_path_factory.mktemp("digits"), count=300)
    loaded = load_model(f"{NETWORKS}:Net")
    held_out = load_data(held, loaded.preprocessing)
    with torch.no_grad():
        base_class = loaded.module(held_out.images(np.arange(300))).argmax(1).numpy()
    return Classroom(
        loaded.module,
        load_data(more, loaded.preprocessing).subset(range(96)),
        held_out,
        (np.arange(300) % 3 > 0).astype(np.uint8),
        base_class,
        "logits",
        10,
        32,
        0,
        torch.device("cpu"),
    )


@pytest.fixture(autouse=True)
def _short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_SLICE_S", 0.0)  # a step each


def specification(block: str, variant: str, shape: tuple[int, ...]) -> Specification:
    return Specification(
        Trial(trial_name(block, variant), 0, block, variant, "trained", lookup_ms=0.1), shape
    )


def tasks(planned_s: float | None = None) -> list[GroupTask]:
    plan = StagePlan(12, planned_s, "torch")
    student = specification("input", "student(8)", (1, 8, 8))
    exits = [specification(f"blocks.{index}", "grid(8)", (8, 8, 8)) for index in (1, 2)]
    students, lesson = (
        GroupLesson("students", STUDENTS, Augmentation()),
        GroupLesson("exits", EXITS, Augmentation()),
    )
    return [
        GroupTask("students", students, (student,), plan),
        *(GroupTask(item.trial.block, lesson, (item,), plan) for item in exits),
    ]


class _Notes(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.advanced = self.total = self.done = 0

    def stage(self, name: str, total: int | None, done: int = 0, most_s: float | None = None) -> None:
        self.total, self.done = total or 0, done

    def advance(self, steps: int, detail: str = "") -> None:
        self.advanced += steps
        self.done += steps

    def note(self, text: str) -> None:
        self.notes.append(text)


def trained(
    executor: Executor,
    classroom: Classroom,
    folder: Path,
    progress: SilentProgress | None = None,
    given: list[GroupTask] | None = None,
    save_every_s: float = 0.0,
) -> dict[str, list[TrialResult]]:
    state, ticks = RunState(folder), count()
    budget = Budget(None, lambda: float(next(ticks)), 0.0, state)
    run = OngoingRun(state, budget, progress or SilentProgress(), save_every_s)
    return {task.name: found for task, found in executor.train(classroom, given or tasks(), run)}


def assert_same(one: dict[str, list[TrialResult]], two: dict[str, list[TrialResult]]) -> None:
    assert one.keys() == two.keys()
    for name in one:
        for first, second in zip(one[name], two[name], strict=True):
            assert isinstance(first, TrainedTrial) and isinstance(second, TrainedTrial)
            assert first.loss == second.loss and first.images_seen == second.images_seen
            for key, tensor in first.weights.items():
                assert torch.equal(tensor, second.weights[key]), (name, key)
            weights = second.measured.cache.state_dict()
            for key, tensor in first.measured.cache.state_dict().items():
                assert torch.equal(tensor, weights[key]), (name, key)
            assert np.array_equal(first.measured.outcomes.score, second.measured.outcomes.score)
            assert first.measured.points == second.measured.points


@pytest.fixture(scope="module")
def expected(classroom: Classroom, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[TrialResult]]:
    """What this process makes of the same groups, with one thread as workers have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return trained(LocalExecutor(), classroom, tmp_path_factory.mktemp("local"))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers_gives_what_this_process_gives(
    classroom: Classroom, expected: dict[str, list[TrialResult]], tmp_path: Path, workers: int
) -> None:
    ray, progress = FakeRay(workers), _Notes()
    assert_same(expected, trained(RayExecutor(ray), classroom, tmp_path, progress))
    assert progress.advanced == 36
    assert ray.options["num_cpus"] == 1 and ray.options["num_gpus"] == 0


@pytest.mark.parametrize("doomed", [4, 9, 20])
def test_when_a_worker_dies_its_group_goes_on_from_what_it_saved(
    classroom: Classroom, expected: dict[str, list[TrialResult]], tmp_path: Path, doomed: int
) -> None:
    ray, progress = FakeRay(2, lambda number, method: number == doomed), _Notes()
    assert_same(expected, trained(RayExecutor(ray), classroom, tmp_path, progress))
    assert progress.advanced == 36, "what is done again is not counted again"
    assert ray.made == 4
    lost = [note for note in progress.notes if note.startswith("lost the worker on ")]
    assert len(lost) == (doomed > 4), "the first four calls start two workers, which have no group yet"


@pytest.mark.slow
def test_workers_that_die_again_and_again_end_it_in_one_line_and_the_state_stays(
    classroom: Classroom, expected: dict[str, list[TrialResult]], tmp_path: Path
) -> None:
    saved: Callable[[int, str], bool] = lambda number, method: number > 20 and method == "advance"  # noqa: E731
    with pytest.raises(BackendError, match=r"3 Ray workers in a row died while .* same command resumes"):
        trained(RayExecutor(FakeRay(1, saved)), classroom, tmp_path)
    assert list(tmp_path.glob(".state/*.safetensors"))
    assert_same(expected, trained(LocalExecutor(), classroom, tmp_path))


def test_workers_that_never_start_end_it_in_one_line(classroom: Classroom, tmp_path: Path) -> None:
    ray = FakeRay(3, lambda number, method: method == "install")
    with pytest.raises(BackendError, match="3 Ray workers in a row did not start .* gati is installed"):
        trained(RayExecutor(ray), classroom, tmp_path)


def test_what_a_training_raises_comes_through_as_it_is(classroom: Classroom, tmp_path: Path) -> None:
    unusable: Any = "bright"
    task = tasks()[1]
    broken = replace(task, lesson=task.lesson._replace(augmentation=Augmentation(light=unusable)))
    with pytest.raises(BackendError, match=r"training failed on .*Error.*resumes") as caught:
        trained(RayExecutor(FakeRay(1)), classroom, tmp_path, given=[broken])
    assert "\n" not in str(caught.value)


def test_a_training_that_lacks_memory_begins_again_with_half_the_inputs_wherever_it_runs(
    classroom: Classroom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small_gpu(logits: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        if len(logits) > 10:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return distillation_loss(logits, *arguments, **options)

    monkeypatch.setattr("gati.exploration.train.distillation_loss", small_gpu)
    progress, given = _Notes(), tasks()[1:]
    found = trained(RayExecutor(FakeRay(2)), classroom, tmp_path / "ray", progress, given=given)
    assert progress.notes.count("too little memory: exits begin again with 8 inputs a step") == 2
    assert progress.total == 2 * 48 and progress.done == 2 * 48
    assert_same(trained(LocalExecutor(), classroom, tmp_path / "here", given=given), found)
    plan = RunState(tmp_path / "ray").plan(given[0].name)
    assert plan is not None and (plan.steps, plan.batch_size) == (48, 8), "a resumed run keeps them"


@pytest.mark.parametrize("executor", [LocalExecutor(), RayExecutor(FakeRay(1))], ids=["here", "ray"])
def test_a_training_that_cannot_be_built_does_not_end_the_others(
    executor: Executor, classroom: Classroom, tmp_path: Path
) -> None:
    _, first, second = tasks()
    item = first.specifications[0]
    broken = replace(first, weights={item.trial.trial_id: {}})
    found = trained(executor, classroom, tmp_path, given=[broken, second])
    (failed,) = found[first.name]
    assert isinstance(failed, FailedTrial) and "RuntimeError: Error(s) in loading state_dict" in failed.reason
    assert isinstance(found[second.name][0], TrainedTrial)


@pytest.mark.parametrize("executor", [LocalExecutor(), RayExecutor(FakeRay(1))], ids=["here", "ray"])
def test_a_training_whose_predictor_has_changed_since_it_was_saved_begins_again(
    executor: Executor, classroom: Classroom, tmp_path: Path
) -> None:
    _, first, second = tasks()
    item = first.specifications[0]
    wider = replace(item, trial=replace(item.trial, variant="grid(16)"))
    trained(LocalExecutor(), classroom, tmp_path, given=[replace(first, specifications=(wider,))])
    said = _Notes()
    found = trained(executor, classroom, tmp_path, said, given=[first, second])
    assert_same(trained(executor, classroom, tmp_path / "anew", given=[first, second]), found)
    if isinstance(executor, LocalExecutor):
        assert "exits begin again: the code of a predictor has changed" in said.notes


def test_a_run_that_ends_while_a_training_begins_again_keeps_no_state_of_another_plan(
    classroom: Classroom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, task = RunState(tmp_path), tasks()[1]
    state.write_plan(task.name, task.plan)
    state.training_path(task.name).write_bytes(b"of the old plan")

    def killed(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(RunState, "write_plan", killed)
    run = OngoingRun(state, Budget(None, lambda: 0.0, 0.0, state), SilentProgress(), 0.0)
    with pytest.raises(Killed):
        begun_again(classroom, task, run, torch.OutOfMemoryError("CUDA out of memory"))
    assert not state.training_path(task.name).exists()


@pytest.mark.parametrize("executor", [LocalExecutor(), RayExecutor(FakeRay(1))], ids=["here", "ray"])
def test_a_training_that_gives_nan_does_not_end_the_others(
    executor: Executor, classroom: Classroom, tmp_path: Path
) -> None:
    _, first, second = tasks()
    poisoned = GroupTask(
        first.name, first.lesson, first.specifications, first.plan, _poison(classroom, first)
    )
    found = trained(executor, classroom, tmp_path, given=[poisoned, second])
    assert found[first.name] == [FailedTrial("its training gave NaN: check the hidden outputs of that block")]
    assert isinstance(found[second.name][0], TrainedTrial)


class _Faint(Net):
    """Has no answer to the brighter half of the inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        brightness = x.mean((1, 2, 3))
        dark = brightness < brightness.median()
        return torch.where(dark[:, None], super().forward(x), torch.nan)


@pytest.mark.parametrize("executor", [LocalExecutor(), RayExecutor(FakeRay(1))], ids=["here", "ray"])
def test_that_inputs_have_no_answers_is_told_wherever_it_trains(
    executor: Executor, classroom: Classroom, tmp_path: Path
) -> None:
    network, notes = _Faint(), _Notes()
    network.load_state_dict(classroom.module.state_dict())
    faint = replace(classroom, module=network.eval())
    found = trained(executor, faint, tmp_path, notes, given=tasks()[1:2])
    assert all(isinstance(each, TrainedTrial) for trials in found.values() for each in trials)
    (told,) = (note for note in notes.notes if "batches had inputs that the network answers with NaN" in note)
    assert told.startswith("exits: ")


def _poison(classroom: Classroom, task: GroupTask) -> dict[Any, dict[str, torch.Tensor]]:
    item = task.specifications[0]
    state = build_predictor(item.trial.variant, item.hidden_shape, classroom.classes).state_dict()
    weights = {key: value * torch.nan if value.is_floating_point() else value for key, value in state.items()}
    return {item.trial.trial_id: weights}


def test_a_network_that_cannot_travel_is_one_line(classroom: Classroom, tmp_path: Path) -> None:
    class Local(Net):
        """Nobody finds it by its name."""

    with pytest.raises(BackendError, match="cannot be sent to Ray workers .* file.py:callable"):
        trained(RayExecutor(FakeRay(1)), replace(classroom, module=Local().eval()), tmp_path)


@pytest.mark.slow
def test_without_room_it_says_so_once(classroom: Classroom, tmp_path: Path) -> None:
    class Late(FakeRay):
        def wait(self, *given: Any, **settings: Any) -> tuple[list[Any], list[Any]]:
            found = super().wait(*given, **settings)
            self.workers = 1 if progress.notes[-1].startswith("waiting") else 0
            return found

    ray, progress = Late(0), _Notes()
    trained(RayExecutor(ray, cores=8), classroom, tmp_path, progress)
    said = [note for note in progress.notes if note.startswith("waiting")]
    assert said == [
        "waiting for a Ray worker with 8 cores and 0 GPUs: the cluster has 0 cores and 0 GPUs in all"
    ]


# Groups and time ------------------------------------------------------------------------------------------


def test_groups_keep_every_trial_in_order_and_share_what_is_dear() -> None:
    network = Net().eval()
    blocks = [f"blocks.{index}" for index in range(4)]
    traced = trace(network, torch.zeros(2, 1, 8, 8), ("input", *blocks))
    items = [
        *(specification("input", f"student({width})", (1, 8, 8)) for width in (8, 16)),
        *(
            specification(block, variant, (8, 8, 8))
            for block in blocks
            for variant in ("grid(16)", "pyramid(64)", "fc(16)")
        ),
    ]
    groups = divided(items, traced)
    assert [item for group in groups for item in group] == items
    assert all(len(group) == 1 for group in groups if reads_input(group[0].trial.variant))
    ends = [group[-1].trial.variant for group in groups[2:]]
    assert ends == [*4 * ["pyramid(64)"], "fc(16)"], "what costs more than four such blocks ends a group"
    cheap = [specification(block, "grid(16)", (8, 8, 8)) for block in blocks]
    assert len(divided(cheap, traced)) == 1


@given(
    st.lists(st.floats(0.1, 1e4), min_size=1, max_size=8),
    st.floats(0, 1e5),
)
def test_one_at_a_time_training_ends_in_time_and_nobody_is_left_out(
    planned_s: list[float], left_s: float
) -> None:
    used_s = 0.0
    for number, own_s in enumerate(planned_s):
        allowed_s = allowance(left_s - used_s, own_s, sum(planned_s[number + 1 :]), 1)
        assert allowed_s == pytest.approx(left_s * own_s / sum(planned_s), rel=1e-6, abs=1e-6)
        assert allowance(left_s - used_s, own_s, sum(planned_s[number + 1 :]), 3) >= allowed_s
        used_s += allowed_s
    assert used_s <= left_s * (1 + 1e-9) + 1e-9


@pytest.mark.slow
def test_a_slow_worker_hurries_only_when_the_budget_would_not_last(
    classroom: Classroom, expected: dict[str, list[TrialResult]], tmp_path: Path
) -> None:
    """The time of a whole stage, 3,600 s by plan, is what counts: nothing here takes as long."""
    found = trained(RayExecutor(FakeRay(2)), classroom, tmp_path, given=tasks(planned_s=1200.0))
    assert_same(expected, found)
    late = trained(RayExecutor(FakeRay(1)), classroom, tmp_path / "late", given=tasks(planned_s=1e-9))
    assert all(trial.images_seen < 12 * 32 for trials in late.values() for trial in trials)


# What travels ---------------------------------------------------------------------------------------------


def test_files_of_the_user_travel_under_their_names(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WIDTH = 3\n")
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom beside import WIDTH\n\n"
        "class Mine(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(WIDTH, 2)\n"
    )
    made = load_model(f"{tmp_path / 'mine.py'}:Mine").module
    (tmp_path / "gone.py").write_text((tmp_path / "mine.py").read_text(encoding="utf-8"), encoding="utf-8")
    load_model(f"{tmp_path / 'gone.py'}:Mine")
    (tmp_path / "gone.py").unlink()
    files = [each for each in user_files() if each.path == str(tmp_path / "mine.py")]
    assert len(files) == 1
    del sys.modules[files[0].module]
    install_user_files(files)
    again = sys.modules[files[0].module].Mine()
    assert type(again).__qualname__ == type(made).__qualname__ and type(again) is not type(made)
    install_user_files(files)
    assert type(again) is sys.modules[files[0].module].Mine, "what is there already stays"


@pytest.fixture
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(distributed, "find_spec", lambda name: None)
    yield


@pytest.mark.usefixtures("_without_ray")
def test_without_ray_installed_it_is_one_line_and_nothing_is_written(
    classroom: Classroom, tmp_path: Path
) -> None:
    held, _ = write_digits(tmp_path)
    with pytest.raises(
        BackendError, match=r"^--ray needs Ray, not installed here: pip install 'gati\[ray\]'$"
    ):
        explore(f"{NETWORKS}:Net", data=held, out=tmp_path / "out", ray="auto")
    assert not (tmp_path / "out").exists()
    assert trained_on(None, 1, 0) == {}
    with opened_executor(None) as executor:
        assert isinstance(executor, LocalExecutor)


def test_a_worker_without_a_core_is_one_line() -> None:
    with pytest.raises(BackendError, match="at least 1 core"):
        trained_on("auto", 0, 0)
    assert trained_on("auto", 2, 1) == {"workers": "2 cores, 1 GPUs"}


@pytest.mark.parametrize(
    ("given", "named", "reached"),
    [
        ("auto", None, "auto"),
        ("auto", "", "auto"),
        ("auto", "local", "local"),
        ("auto", "ray://head:1", "ray://head:1"),
        ("local", "ray://head:1", "local"),
    ],
)
def test_ray_address_names_the_cluster_unless_another_is_given(
    given: str, named: str | None, reached: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = FakeRay(1)
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if named is not None:
        monkeypatch.setenv("RAY_ADDRESS", named)
    with opened_executor(given):
        assert ray.connected["address"] == reached
        # a cluster that is there already has its dashboard, or not
        assert ray.connected.get("include_dashboard") == (False if reached == "local" else None)
    assert not ray.connected


def test_where_no_cluster_listens_it_is_one_line_at_once() -> None:
    pytest.importorskip("ray", reason="needs gati[ray]")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # bound, but not listening: refused
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        message = rf"^no Ray cluster at {address} \(.*refused\): start one with ray start --head, or give"
        with pytest.raises(BackendError, match=message), opened_executor(address):
            raise AssertionError("nothing was opened")
