"""Budgets of networks that are slow for them: they are kept, or told to be too short after a few answers."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gati.errors import DataError
from gati.exploration import candidates
from gati.exploration.budget import Budget
from gati.exploration.candidates import Specification
from gati.exploration.explore import explore
from gati.exploration.feasible import TimeLimit
from gati.exploration.further import explore_more
from gati.exploration.kept_answers import KeptAnswers
from gati.exploration.library import Library
from gati.exploration.measure import base_batches
from gati.exploration.pace import Pace
from gati.exploration.prepared import MeasuringTimes
from gati.exploration.progress import SilentProgress
from gati.exploration.recipes import EXITS, STUDENTS
from gati.exploration.schedule import (
    ProbeSize,
    affordable,
    answered_batches,
    is_worth_a_step,
    probe_size,
    reserve,
    too_slow_for_exits,
)
from gati.exploration.state import RunState
from gati.types import Trial, TrialId
from tests.exploration.killing import Killed
from tests.exploration.networks import Net, digit_files
from tests.exploration.quick import quick_selectors
from tests.exploration.slow_networks import TIME, SlowNet, on_fake_time, works
from tests.waiting import LONG_S

NET = "tests.exploration.slow_networks:SlowNet"
_TOLERANCE = 1.08  # of the budget: a step or a measurement that has begun is ended


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return digit_files(tmp_path_factory.mktemp("digits"), count=240)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    on_fake_time(monkeypatch)
    monkeypatch.setattr(candidates, "too_slow", lambda *_: "")
    quick_selectors(monkeypatch)
    yield monkeypatch
    TIME.reset(0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variants", "input_s", "budget_s"),
    [
        (("student(8)", "grid(8)"), 0.2, 300.0),
        (("student(8)", "grid(8)"), 0.05, 60.0),
        (("student(8)", "grid(8)"), 1.0, 1500.0),
        (("grid(8)",), 0.2, 300.0),
    ],
    ids=["a fifth of a second", "a minute", "a second", "exits alone"],
)
def test_a_slow_network_is_explored_within_its_budget(
    variants: tuple[str, ...],
    input_s: float,
    budget_s: float,
    files: dict[str, Any],
    tmp_path: Path,
    slow: pytest.MonkeyPatch,
) -> None:
    TIME.reset(input_s)
    library = explore(
        NET, **files, out=tmp_path, variants=variants, blocks="blocks.[12]", budget_s=budget_s, clock=TIME
    )
    assert TIME.now <= _TOLERANCE * budget_s
    trained = [trial for trial in Library.open(library.directory).trials if trial.status == "trained"]
    assert trained and all(trial.hit_rate_at_97 is not None for trial in trained)
    assert all(trial.reason for trial in library.trials if trial.status == "skipped")


@pytest.mark.slow
def test_epochs_within_the_budget_of_a_slow_network_end_in_time(
    files: dict[str, Any], tmp_path: Path, slow: pytest.MonkeyPatch
) -> None:
    TIME.reset(0.2)
    variants = ("student(8)", "grid(8)")
    explore(NET, **files, out=tmp_path, variants=variants, budget_s=300, epochs=2, clock=TIME)
    assert TIME.now <= 1.1 * 300


@pytest.mark.slow
def test_a_budget_that_is_too_short_is_told_after_a_few_answers_and_leaves_nothing(
    files: dict[str, Any], tmp_path: Path, slow: pytest.MonkeyPatch
) -> None:
    TIME.reset(0.2)
    with pytest.raises(DataError) as caught:
        explore(NET, **files, out=tmp_path / "out", variants=["student(8)"], budget_s=60, clock=TIME)
    text = str(caught.value)
    assert text.startswith("the budget of 60 s is too short: the network takes 0.21 s per input, and must")
    assert "give --budget 4m or more, or fewer inputs" in text and "\n" not in text
    assert TIME.now < 12
    assert not (tmp_path / "out").exists()
    explore(NET, **files, out=tmp_path / "out", variants=["student(8)"], budget_s=240, clock=TIME)


@pytest.mark.slow
def test_a_further_round_of_a_slow_network_keeps_its_budget(
    files: dict[str, Any], tmp_path: Path, slow: pytest.MonkeyPatch
) -> None:
    variants = ("student(8)", "grid(8)")
    TIME.reset(0.2)
    library = explore(
        NET, **files, out=tmp_path, variants=variants, blocks="blocks.1", budget_s=300, clock=TIME
    )
    TIME.reset(0.2)
    explore_more(tmp_path, budget_s=200, clock=TIME)
    assert TIME.now <= _TOLERANCE * 200
    assert len(Library.open(tmp_path).trials) >= len(library.trials)


class _Counting(SilentProgress):
    """Counts what a network has answered until training begins, and ends it at a later step."""

    def __init__(self, ends_at: int = -1) -> None:
        self.left, self.before_training = ends_at, -1

    def advance(self, steps: int, detail: str = "") -> None:
        if self.before_training < 0:
            self.before_training = TIME.answered
        self.left -= 1
        if self.left == 0:
            raise Killed


@pytest.mark.slow
def test_what_a_slow_network_has_answered_is_not_asked_again_when_a_run_resumes(
    files: dict[str, Any], tmp_path: Path, slow: pytest.MonkeyPatch
) -> None:
    slow.setattr("gati.exploration.stages._SAVE_EVERY_S", 0.0)
    first, second = _Counting(ends_at=5), _Counting()
    options = {**files, "out": tmp_path, "variants": ["student(8)"], "budget_s": 300, "clock": TIME}
    TIME.reset(0.05)
    with pytest.raises(Killed):
        explore(NET, **options, progress=first)
    spent_s = TIME.now
    TIME.reset(0.05)
    TIME.now = spent_s
    library = explore(NET, **options, progress=second)
    assert first.before_training > 240
    assert second.before_training < 240, "held-out inputs"
    assert [trial.status for trial in library.trials] == ["trained"]


class _KilledWhileMeasuring(SilentProgress):
    """Ends everything as soon as the cost of lookups is measured."""

    def note(self, text: str) -> None:
        if text.startswith("measuring"):
            raise Killed


@pytest.mark.slow
@pytest.mark.parametrize("after", [210, 1000], ids=["while it answers", "while lookups are measured"])
def test_what_a_slow_network_answers_is_kept_before_all_is_known(
    after: int, files: dict[str, Any], tmp_path: Path, slow: pytest.MonkeyPatch
) -> None:
    def killed(*given: Any) -> Iterator[Tensor]:
        for batch in base_batches(*given):
            if TIME.answered > after:
                raise Killed
            yield batch

    slow.setattr("gati.exploration.prepare.base_batches", killed)
    options = {**files, "out": tmp_path, "variants": ["student(8)"], "budget_s": 1500, "clock": TIME}
    options |= {"progress": _KilledWhileMeasuring()}
    TIME.reset(1.0)
    with pytest.raises(Killed):
        explore(NET, **options)
    spent_s = TIME.now
    slow.setattr("gati.exploration.prepare.base_batches", base_batches)
    TIME.reset(1.0)
    with pytest.raises(Killed):
        explore(NET, **options)
    assert TIME.answered < 220, "what a run begins with, and at most a minute of the 240 held-out inputs"
    assert Budget(1500, TIME, TIME.now, RunState(tmp_path)).spent_s >= 0.8 * spent_s
    options["progress"] = None
    slow.setattr("gati.exploration.prepare.profile_at_lengths", _Refused(OSError(errno.EIO, "input error")))
    with pytest.raises(DataError, match="refused"):
        explore(NET, **options)
    with slow.context() as changed, pytest.raises(DataError, match="refused"):
        changed.setattr(SlowNet, "forward", lambda network, x: 2 * Net.forward(network, works(x)))
        TIME.reset(1.0)
        explore(NET, **options)
    assert TIME.answered > 240, "another network, though it gives the same classes"
    slow.setattr("gati.exploration.prepare.profile_at_lengths", _Refused(None))
    with pytest.raises(DataError, match="refused"):
        explore(NET, **options)
    assert not (tmp_path / ".state").exists(), "another command may begin"


class _Refused:
    def __init__(self, cause: Exception | None) -> None:
        self.cause = cause

    def __call__(self, *_: Any) -> Any:
        raise DataError("refused") from self.cause


def test_answers_are_kept_only_for_the_same_inputs_and_only_if_they_are_whole(tmp_path: Path) -> None:
    state, now = RunState(tmp_path), iter(range(0, 10_000, 40))
    budget = Budget(None, lambda: float(next(now)), 0.0, state)
    first = KeptAnswers(state, budget, "these", "network", lambda known: bool(known == "network"))
    first.collect(torch.full((3, 2), float(number)) for number in range(5))
    again = KeptAnswers(state, budget, "these", "network", lambda known: bool(known == "network"))
    assert len(again) == 15 and torch.equal(again.rows, first.rows) and again.seconds == first.seconds
    sorted(state.answers_path.iterdir())[0].unlink()
    for inputs, same in (("these", True), ("others", True), ("these", False)):
        found = KeptAnswers(state, budget, inputs, "network", lambda _, same=same: same)
        assert len(found) == 0 and not state.answers_path.exists()
        first.forget()
        first.collect([torch.zeros(3, 2)] * 5)
        assert sorted(state.answers_path.iterdir())
    last = sorted(state.answers_path.iterdir())[-1]
    last.write_bytes(last.read_bytes()[:-4])  # as a disk that fails leaves it
    assert len(KeptAnswers(state, budget, "these", "network", lambda _: True)) == 0


@pytest.mark.slow
def test_a_companion_that_takes_more_time_than_there_is_is_left_out(
    files: dict[str, Any], tmp_path: Path, slow: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    progress = SilentProgress()
    slow.setattr(progress, "note", notes.append)
    slow.setattr("gati.exploration.companions.seconds_per_input", lambda *_: 0.25)
    TIME.reset(0.05)
    library = explore(
        NET,
        **files,
        out=tmp_path,
        variants=["student(8)"],
        budget_s=60,
        clock=TIME,
        progress=progress,
        companions=[("tests.exploration.networks:Net", None)],
    )
    assert TIME.now <= _TOLERANCE * 60
    companion, student = library.trials
    assert (companion.variant, companion.status) == ("companion(Net)", "skipped")
    assert companion.reason.startswith("measuring it takes 60 of the ")
    assert companion.reason.endswith("seconds left: give it more time")
    assert f"left out companion(Net): {companion.reason}" in notes
    assert student.status == "trained" and not library.cache_path(companion.trial_id).exists()


@pytest.mark.slow
def test_a_library_without_any_cache_is_not_what_a_budget_ends_with(
    files: dict[str, Any], tmp_path: Path, slow: pytest.MonkeyPatch
) -> None:
    TIME.reset(0.2)
    slow.setattr("gati.exploration.planning.is_worth_a_step", lambda *_: False)
    with pytest.raises(
        DataError, match=r"^the budget of 240 s was too short to train anything: .* 8m or more"
    ):
        explore(NET, **files, out=tmp_path, variants=["student(8)"], budget_s=240, clock=TIME)
    assert not (tmp_path / "manifest.json").exists() and not (tmp_path / ".state").exists()


@pytest.mark.parametrize(("input_s", "most"), [(0.01, 24), (8.0, 3), (40.0, 1)])
def test_no_batch_takes_longer_than_half_a_minute_or_one_input(
    input_s: float, most: int, tmp_path: Path
) -> None:
    class Inputs:
        def __len__(self) -> int:
            return 24

        def images(self, indices: Any) -> Tensor:
            return torch.zeros(len(indices), 2)

    TIME.reset(input_s)
    limit = TimeLimit(Budget(1e6, lambda: TIME.now, 0.0, RunState(tmp_path)), 24)
    network = torch.nn.Module()
    network.forward = works
    assert max(map(len, base_batches(network, Inputs(), torch.device("cpu"), limit))) == most


def test_one_slow_batch_is_no_reason_to_end(tmp_path: Path) -> None:
    now = [0.0]
    batches: list[int] = []

    def answer(x: Tensor) -> Tensor:
        batches.append(len(x))
        disturbed = 2.0 if len(batches) == 4 else 1.0
        now[0] += 0.1 * len(x) * disturbed
        return x

    class Inputs:
        def __len__(self) -> int:
            return 400

        def images(self, indices: Any) -> Tensor:
            return torch.zeros(len(indices), 2)

    network = torch.nn.Module()
    network.forward = answer
    limit = TimeLimit(Budget(145.0, lambda: now[0], 0.0, RunState(tmp_path)), 400)
    assert sum(map(len, base_batches(network, Inputs(), torch.device("cpu"), limit))) == 400
    assert len(batches) > 4


class _Listening(SilentProgress):
    """Hears that inputs are read."""

    def __init__(self) -> None:
        self.heard = threading.Event()

    def note(self, text: str) -> None:
        if text.startswith("reading --data and --train-data"):
            self.heard.set()


@pytest.mark.slow
def test_that_inputs_are_read_is_told_while_it_goes_on(
    files: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = _Listening()

    def reads_until_it_is_told(*_: Any, **__: Any) -> Any:
        raise Killed if progress.heard.wait(LONG_S) else AssertionError("nothing was said")

    monkeypatch.setattr("gati.exploration.prepare.split_inputs", reads_until_it_is_told)
    with pytest.raises(Killed):
        explore(NET, **files, out=tmp_path, variants=["student(8)"], epochs=1, progress=progress)


# How much of it is done -----------------------------------------------------------------------------------


def test_steps_of_a_fast_network_are_timed_as_ever_and_those_of_a_slow_one_cost_a_fifth_of_its_time() -> None:
    usual = ProbeSize(8, 128)
    assert probe_size(usual, 0.001, 60.0, 13) == usual
    assert probe_size(usual, 0.0, 0.0, 13) == usual
    for allowed_s in (60.0, 200.0, 900.0):
        size = probe_size(usual, 0.2, allowed_s, 13)
        assert (size.steps + 13) * size.batch_size * 0.2 <= 0.2 * allowed_s
        assert size.steps == 3 and 2 <= size.batch_size < 128
    assert probe_size(usual, 10.0, 1.0, 13) == ProbeSize(3, 2), "layers that normalise need two"


@given(st.floats(1.0, 2000.0), st.floats(0.0, 60.0), st.floats(0.01, 2.0), st.integers(200, 100_000))
def test_what_is_affordable_fits(left_s: float, answer_s: float, learn_s: float, inputs: int) -> None:
    pace = Pace(answer_s, learn_s)
    steps, rounds, places = affordable(left_s, pace, inputs, 128, STUDENTS, students=True)
    whole = max(1, inputs // 128)
    assert rounds is not None and (places is None or 1 <= places <= whole)
    fresh = min(steps, rounds * (places or whole))
    assert fresh * answer_s + steps * learn_s <= max(left_s, answer_s) + 1e-6


def test_a_network_too_slow_for_all_inputs_answers_some_of_them_and_shows_them_again() -> None:
    slow, fast = Pace(25.0, 0.7), Pace(0.5, 0.5)
    assert answered_batches(900.0, fast, 50_000, 128, STUDENTS) is None
    assert answered_batches(900.0, slow, 50_000, 128, EXITS) is None, "their views never repeat"
    places = answered_batches(900.0, slow, 50_000, 128, STUDENTS)
    steps, rounds, same = affordable(900.0, slow, 50_000, 128, STUDENTS, students=True)
    assert places == same == 19 and rounds == 1
    assert steps > 20 * 19, "and not each view once, in 35 steps"


@pytest.mark.parametrize(
    ("pace", "inputs", "up_to_s"),
    [(Pace(25.0, 0.7), 50_000, 120_000), (Pace(6.4, 0.15), 3_500, 4_000), (Pace(2.56, 0.15), 3_500, 4_000)],
)
def test_a_little_more_time_is_never_much_less_training(pace: Pace, inputs: int, up_to_s: int) -> None:
    """As if, once there is time to answer every view, each were shown once and no more."""
    times_s = range(100, up_to_s, up_to_s // 400)
    plans = [affordable(each, pace, inputs, 128, STUDENTS, students=True) for each in times_s]
    assert all(later.steps > 0.5 * earlier.steps for earlier, later in pairwise(plans))
    whole = inputs // 128
    views = [(plan.rounds or 0) * (plan.places or whole) for plan in plans]
    assert all(later > 0.9 * earlier for earlier, later in pairwise(views))
    needed = [plan.steps for each, plan in zip(times_s, plans, strict=True) if each > 0.1 * up_to_s]
    assert min(needed) >= 1_150, "fewer teach little, and are no use of so much time"


def test_a_network_that_answers_fast_enough_shows_new_views_twice() -> None:
    """Which teaches more than to show half as many more often; what has been shown often gives way, too."""
    for left_s, enough in ((600.0, 7), (900.0, 7), (1_300.0, 10)):
        steps, rounds, places = affordable(left_s, Pace(0.17, 0.03), 47_000, 128, STUDENTS, students=True)
        assert (rounds, places) == (enough, None) and steps > 2 * enough * 367


def test_the_network_answers_again_to_measure_exits_and_not_students() -> None:
    student, exit_ = (
        Specification(Trial(TrialId(variant), 0, block, variant, "trained", lookup_ms=1.0), (1, 8, 8))
        for variant, block in (("student(8)", "input"), ("grid(8)", "blocks.1"))
    )
    times = MeasuringTimes(100.0, 3.0, 2.0)
    assert times.of_all([student], 1, base_ms=10.0) == (1.5 * 10 + 3 + 2, 10 + 3)
    assert times.of_all([student, exit_], 2, base_ms=10.0) == (1.5 * 120 + 6 + 4, 120 + 6)


def test_measuring_that_cannot_be_cut_is_reserved_whole() -> None:
    assert reserve(50.0, 100.0) == 35.0
    assert reserve(90.0, 100.0, 60.0) == 60.0
    assert reserve(90.0, 100.0, 200.0) == 100.0
    assert reserve(10.0, 100.0, 5.0) == 10.0


def test_exits_are_left_out_where_a_few_steps_of_them_take_the_time_of_students() -> None:
    assert too_slow_for_exits(1.0, 20.0, 100.0) == ""
    assert too_slow_for_exits(1.0, 30.0, 100.0).startswith(
        "a few steps and measuring take 38 of the 100 seconds that are left"
    )
    assert too_slow_for_exits(6.0, 0.0, 100.0)


def test_a_step_that_does_not_fit_is_begun_only_where_it_is_short() -> None:
    assert is_worth_a_step(2.0, 3.0, 300.0)
    assert is_worth_a_step(2.0, 0.0, 300.0), "as ever"
    assert not is_worth_a_step(25.0, 3.0, 300.0)
    assert is_worth_a_step(25.0, 3.0, None)


def test_fewer_inputs_show_which_augmentations_are_harmless_if_the_network_is_slow(tmp_path: Path) -> None:
    unlimited, budget = (Budget(limit_s, lambda: 0.0, 0.0, RunState(tmp_path)) for limit_s in (None, 300.0))
    assert unlimited.inputs_to_try(10.0) == 128
    assert [budget.inputs_to_try(input_s) for input_s in (0.001, 0.1, 1.0, 10.0)] == [128, 16, 1, 0]


def test_a_budget_is_too_short_only_if_answers_alone_exceed_it(tmp_path: Path) -> None:
    limit = TimeLimit(Budget(300.0, lambda: 0.0, 0.0, RunState(tmp_path)), 600)
    assert limit.is_clear(0.1) and not limit.is_clear(0.2)
    limit.check(8, 0.3)
    limit.check(560, 0.7)
    with pytest.raises(DataError, match=r"takes 0.4 s per input, and must answer 600 .* 10m or more"):
        limit.check(8, 0.4)
    limit.check_training(0.15, measured=600)
    with pytest.raises(DataError, match="the budget of 300 s is too short"):
        limit.check_training(0.2, measured=600)
    unlimited = TimeLimit(Budget(None, lambda: 0.0, 0.0, RunState(tmp_path)), 600)
    assert unlimited.is_clear(1e6)
    unlimited.check(0, 1e6)
