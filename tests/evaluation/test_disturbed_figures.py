"""Figures taken on a busy machine: measured again, marked if they stay so; clocks are made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gati.cli.render import evaluation as render
from gati.costs.graph import by_turns_ms, profile_between
from gati.costs.profile import measure_in_turns, measure_profile
from gati.engine.engine import Engine, Prediction
from gati.evaluation.evaluate import Evaluation, evaluate_engine
from gati.evaluation.timing import BenchEntry, measure_latency
from gati.model.alike import work_of
from gati.model.data import load_data
from gati.model.segments import TracedModel, trace
from gati.types import Profile
from tests.engine.clocks import MadeUp
from tests.engine.networks import BLOCKS, Cache, exits, inputs, ready, traced_network
from tests.engine.served import PREPROCESSING, images

pytestmark = pytest.mark.usefixtures("measured_again")

Milliseconds = Callable[[int], float]


class Clocked(Engine):
    """Requests take as long as they are said to, by their number."""

    def __init__(self, machine: MadeUp, gati_ms: Milliseconds, base_ms: Milliseconds) -> None:
        super().__init__(traced_network(), exits((0.5, 0.5, 0.5)))
        self.machine, self.gati_ms, self.base_ms = machine, gati_ms, base_ms
        self.asked = {"gati": 0, "base": 0}

    def __call__(self, x: Tensor) -> list[Prediction]:
        self._pass("gati", self.gati_ms)
        return super().__call__(x)

    def base(self, x: Tensor) -> list[Prediction]:
        self._pass("base", self.base_ms)
        return super().base(x)

    def _pass(self, who: str, times: Milliseconds) -> None:
        self.machine.request(times(self.asked[who]))
        self.asked[who] += 1


def evaluated(tmp_path: Path, machine: MadeUp, base_ms: Milliseconds, count: int = 300) -> Evaluation:
    np.savez(tmp_path / "test.npz", images=images(count))
    data = load_data(tmp_path / "test.npz", PREPROCESSING, what="test data")
    return evaluate_engine(Clocked(machine, lambda number: 1.0, base_ms), data, machine=machine)


def test_on_a_quiet_machine_nothing_is_marked(tmp_path: Path) -> None:
    found = evaluated(tmp_path, MadeUp(), lambda number: 2.0)
    assert not found.disturbed and found.disturbance == ""
    assert found.gain == pytest.approx(2.0)
    assert found.n == 300 and sum(each.hits for each in found.exits) == round(300 * found.hit_rate)


def test_a_disturbed_round_is_measured_again_and_its_first_times_do_not_count(tmp_path: Path) -> None:
    """The 20 requests before are warm-up; the first round then has one request in three ten times as long."""
    busy = range(20, 276, 3)
    found = evaluated(tmp_path, MadeUp(), lambda number: 20.0 if number in busy else 2.0)
    assert not found.disturbed
    assert (found.base_latency_ms.mean, found.gain) == (pytest.approx(2.0), pytest.approx(2.0))


def test_a_gain_that_stays_disturbed_is_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluated(tmp_path, MadeUp(), lambda number: 20.0 if number % 3 == 0 else 2.0)
    assert found.disturbed and found.disturbance.startswith("2 of 2 rounds stayed disturbed")
    raw = json.loads(found.to_json())
    assert raw["disturbed"] is True and raw["disturbance"] == found.disturbance
    render(found)
    out = capsys.readouterr().out
    assert f"gain {found.gain:.2f}x (disturbed)" in out
    assert f"do not quote these latencies: {found.disturbance}; measure again on an idle machine" in out


def test_a_program_that_slows_every_request_alike_is_noticed(tmp_path: Path) -> None:
    found = evaluated(tmp_path, MadeUp(waiting=lambda number: 0.4), lambda number: 2.0)
    assert found.disturbed
    assert "other programs used the processor for" in found.disturbance


def test_answers_are_counted_once_however_often_they_are_timed(tmp_path: Path) -> None:
    quiet = evaluated(tmp_path, MadeUp(), lambda number: 2.0)
    busy = evaluated(tmp_path, MadeUp(waiting=lambda number: 0.4), lambda number: 2.0)
    for name in ("n", "agreement", "hit_rate", "exits", "classes"):
        assert getattr(quiet, name) == getattr(busy, name)


def test_bench_measures_again_and_says_what_stayed_disturbed() -> None:
    x = inputs(40)
    for busy, disturbed in ((range(0), 0), (range(80, 90), 0), (range(0, 10**6, 3), 2)):
        machine = MadeUp()
        engine = Clocked(machine, lambda _: 1.0, lambda number, busy=busy: 30.0 if number in busy else 2.0)
        contenders = [BenchEntry("base", engine, early=False), BenchEntry("gati", engine, early=True)]
        found = measure_latency(contenders, lambda i: x[i : i + 1], 40, 2, machine=machine)
        assert found.disturbed == disturbed
        base, ours = contenders
        assert [len(times) for times in base.times_ms + ours.times_ms] == [40] * 4
        assert len(base.answers) == len(ours.answers) == 40
        if not disturbed:
            assert set(base.times_ms[0] + base.times_ms[1]) == {2.0}


class OfLengths(Clocked):
    """As a network that reads texts: a dark picture is a short one, and takes a third of the time."""

    def shortened(self, x: Tensor) -> Tensor:
        return x[..., :2] if float(x.mean()) < 0.0 else x

    def __call__(self, x: Tensor) -> list[Prediction]:
        self._pass("gati", lambda number: self.gati_ms(number) * self.shortened(x).shape[-1])
        return Engine.__call__(self, x)

    def base(self, x: Tensor) -> list[Prediction]:
        self._pass("base", lambda number: self.base_ms(number) * self.shortened(x).shape[-1])
        return Engine.base(self, x)


@pytest.mark.parametrize("order", ["mixed", "short ones first"])
@pytest.mark.parametrize("busy", [False, True])
def test_that_texts_differ_in_length_is_no_disturbance(tmp_path: Path, order: str, busy: bool) -> None:
    short = np.arange(320) % 5 > 0 if order == "mixed" else np.arange(320) < 180
    pictures = np.broadcast_to(np.where(short, 0, 255).astype(np.uint8)[:, None, None, None], (320, 6, 6, 1))
    np.savez(tmp_path / "test.npz", images=pictures)
    data = load_data(tmp_path / "test.npz", PREPROCESSING, what="test data")

    def base_ms(number: int) -> float:
        return 20.0 if busy and number % 3 == 0 else 2.0

    machine = MadeUp()
    engine = OfLengths(machine, lambda _: 1.0, base_ms)
    found = evaluate_engine(engine, data, machine=machine)
    assert found.disturbed == busy
    if not busy:
        assert found.base_latency_ms.mean == pytest.approx(2.0 * np.where(short, 2, 6).mean())
    x = data.images(range(320))
    contenders = [BenchEntry("base", engine, early=False), BenchEntry("gati", engine, early=True)]
    assert (
        measure_latency(contenders, lambda i: x[i : i + 1], 320, 1, machine=machine).disturbed > 0
    ) == busy


class Forgetful(Clocked):
    """The first requests after another method's take long: its weights are no longer in the caches."""

    last, since = "", 0

    def _pass(self, who: str, times: Milliseconds) -> None:
        self.since = self.since + 1 if who == self.last else 0
        self.last = who
        super()._pass(who, lambda number: times(number) + 50.0 * (self.since < 3))


def test_a_method_does_not_pay_for_what_another_did_to_the_caches(tmp_path: Path) -> None:
    np.savez(tmp_path / "test.npz", images=images(300))
    data = load_data(tmp_path / "test.npz", PREPROCESSING, what="test data")
    machine, x = MadeUp(), inputs(150)
    engine = Forgetful(machine, lambda _: 1.0, lambda _: 2.0)
    found = evaluate_engine(engine, data, machine=machine, repetitions=2)
    assert (found.base_latency_ms.p99, found.latency_ms.p99) == (pytest.approx(2.0), pytest.approx(1.0))
    contenders = [BenchEntry("base", engine, early=False), BenchEntry("gati", engine, early=True)]
    measure_latency(contenders, lambda i: x[i : i + 1], len(x), 2, machine=machine)
    assert [set(each.times_ms[0] + each.times_ms[1]) for each in contenders] == [{2.0}, {1.0}]
    assert contenders[0].answers == [each.class_index for each in engine.base(x)]


# Blocks that do the same work -------------------------------------------------------------------------------


class Three(nn.Module):
    """Three equal blocks, then a wider one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *[nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(3)],
            nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU()),
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.blocks(x).mean((2, 3)))
        return result


NAMES = tuple(f"blocks.{index}" for index in range(4))


def three() -> TracedModel:
    torch.manual_seed(0)
    return trace(ready(Three()), torch.randn(2, 4, 6, 6), NAMES)


def test_blocks_of_the_same_operators_and_shapes_do_the_same_work() -> None:
    *work, last = work_of(three(), NAMES)
    assert work[0] == work[1] == work[2] != work[3]
    assert last not in work


class Fork(nn.Module):
    """Three convolutions of one input, multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Conv2d(4, 4, 1) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = (branch(x) for branch in self.branches)
        return torch.addcmul(first, second, third)


def test_names_of_values_make_no_difference() -> None:
    """They are numbered through the network, so that their order changes from 9 to 10."""
    blocks = tuple(str(index) for index in range(6))
    network = nn.Sequential(*[Fork() for _ in blocks], nn.Flatten(), nn.Linear(4 * 36, 3))
    work = work_of(trace(ready(network), torch.randn(2, 4, 6, 6), blocks), blocks)
    assert len(set(work[:6])) == 1


def test_equal_blocks_have_equal_times_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Identical blocks of a ViT once took 1.7 % to 21 % of the latency."""
    draw = np.random.default_rng(0)

    def walk(*_: object) -> list[float]:
        own = [1.0, 1.0, 1.0, 2.0, 0.5] * draw.lognormal(0.0, 0.5, 5) + [0.0, 0.2, 0.9, 0.0, 0.0]
        return [float(each) for each in own.cumsum()]

    monkeypatch.setattr("gati.costs.profile._walk_ms", walk)
    profile = measure_profile(three(), repetitions=15)
    first, second, third, fourth = (block.latency_ms for block in profile.blocks)
    assert first == pytest.approx(second) == pytest.approx(third)
    assert fourth > first
    assert profile.blocks[-1].reach_ms == pytest.approx(first + second + third + fourth)
    assert profile.blocks[-1].reach_ms < profile.base_ms


def test_equal_blocks_between_measured_ones_share_their_time() -> None:
    known = measure_profile(three(), repetitions=2)
    work = work_of(three(), NAMES)[:-1]
    found = profile_between(known, "openvino", [0, 2], [0.1, 2.9], 5.0, work=work)
    first, second, third, _ = (block.latency_ms for block in found.blocks)
    assert first == pytest.approx(second) == pytest.approx(third)
    assert found.blocks[2].reach_ms == pytest.approx(2.9)


# Marks ------------------------------------------------------------------------------------------------------


class Graph:
    """Each request takes as long as the next of `times`, again and again."""

    def __init__(self, machine: MadeUp, *times: float) -> None:
        self.machine, self.times, self.asked = machine, times, 0

    def answer(self, x: Tensor) -> tuple[Tensor, int]:
        self.machine.request(self.times[self.asked % len(self.times)])
        self.asked += 1
        return x, 0


def test_costs_of_graphs_say_when_they_were_disturbed() -> None:
    for times, count in (((2.0,), 0), ((2.0, 2.0, 30.0), 1)):
        notes: list[str] = []
        machine = MadeUp()
        graphs = [Graph(machine, *times), Graph(machine, 1.0)]
        assert by_turns_ms(graphs, inputs(1), notes, machine) == [2.0, 1.0]  # type: ignore[arg-type]
        assert len(notes) == count


def test_a_profile_and_a_lookup_say_when_they_were_disturbed() -> None:
    for share, disturbed in ((0.0, False), (0.5, True)):
        notes: list[str] = []
        machine = Ticking(share)
        profile = measure_profile(traced_network(), BLOCKS, repetitions=6, machine=machine)
        measure_in_turns(ready(Cache()), torch.randn(1, 8, 6, 6), int, notes=notes, machine=machine)
        assert bool(profile.disturbance) == bool(notes) == disturbed
        assert isinstance(profile, Profile) and profile.base_ms > 0.0


class Ticking(MadeUp):
    """Each look at the clock takes a millisecond."""

    def __init__(self, share: float) -> None:
        super().__init__(waiting=lambda number: share)

    def now_ns(self) -> int:
        self.request(1.0)
        return super().now_ns()
