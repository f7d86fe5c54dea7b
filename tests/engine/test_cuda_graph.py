"""Backend cuda-graph: what is launched when, on a fake device; answers, on a real one where there is one."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from gati.composition.backends import choose_backend
from gati.composition.load import load
from gati.costs.profile import measure_lookup, measure_profile
from gati.engine.backends import BACKENDS, CudaGraphBackend, get_backend
from gati.engine.backends.cuda_device import Device, why_no_cuda
from gati.engine.concurrent import ConcurrentEngine
from gati.engine.engine import Engine
from gati.engine.exits import EngineExit
from gati.errors import BackendError
from gati.exploration.library import Library
from gati.model.segments import TracedModel, trace
from gati.types import Placement
from tests.engine.fake_device import FakeDevice, Order
from tests.engine.networks import (
    BLOCKS,
    CLASSES,
    Cache,
    ConstantScore,
    exits,
    inputs,
    moved,
    network,
    ready,
    selective_exits,
    traced_network,
)
from tests.engine.served import rewrite

PLACEMENTS: tuple[Placement, ...] = ("inline", "overlapped")
ORDERS: tuple[Order, ...] = get_args(Order)
NEVER = (math.inf,) * 3
needs_cuda = pytest.mark.skipif(why_no_cuda() is not None, reason=f"needs a CUDA device: {why_no_cuda()}")
no_cuda = pytest.mark.skipif(why_no_cuda() is None, reason="there is a CUDA device")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[FakeDevice]]:
    """Makes backend cuda-graph run on fake devices; returns those made, in order."""

    def install(order: Order = "needed", *, pays: bool = False) -> list[FakeDevice]:
        made: list[FakeDevice] = []

        def device(_self: CudaGraphBackend, _device: torch.device) -> Device:
            made.append(FakeDevice(order, pays=pays))
            return made[-1]

        monkeypatch.setattr(CudaGraphBackend, "device", device)
        monkeypatch.setattr(CudaGraphBackend, "unavailable", classmethod(lambda cls: None))
        return made

    return install


Fake = Callable[..., list[FakeDevice]]


def launched(device: FakeDevice) -> list[str]:
    """Graphs launched and waits of the host since the last time."""
    return [call for call in device.calls() if "graph" in call or call == "host waits"]


def asked(engine: Engine, device: FakeDevice, x: Tensor) -> tuple[str, list[str]]:
    device.calls()
    return engine(x)[0].exit, launched(device)


class Wide(nn.Module):
    """Two blocks; the request itself crosses the cuts and is changed in place, as is a hidden output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        torch.relu_(x)
        hidden = self.first(x)
        again = self.second(hidden)
        hidden += again
        result: Tensor = self.head((hidden + x).mean((2, 3)))
        return result


def wide() -> TracedModel:
    torch.manual_seed(4)
    return trace(ready(Wide()), torch.randn(2, 1, 6, 6), ["first", "second"])


# Contracts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("pays", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_answers_are_those_of_backend_torch(
    fake: Fake, placement: Placement, pays: bool, order: Order
) -> None:
    fake(order, pays=pays)
    traced = traced_network()
    plain = Engine(traced, selective_exits(traced))
    engine = Engine(traced, selective_exits(traced, placement), backend="cuda-graph")
    expected = [plain(x)[0] for x in inputs(40).split(1)]
    assert {answer.exit for answer in expected} == {*BLOCKS, "base"}
    for x, wanted in zip(inputs(40).split(1), expected, strict=True):
        (answer,) = engine(x)
        assert (answer.exit, answer.class_index) == (wanted.exit, wanted.class_index)
        assert torch.equal(answer.probabilities, wanted.probabilities)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("rows", [1, 5])
def test_with_thresholds_at_infinity_the_outputs_equal_the_base_models_bit_for_bit(
    fake: Fake, placement: Placement, rows: int
) -> None:
    fake(pays=True)
    module = network()
    engine = Engine(traced_network(module), exits(NEVER, placement), backend="cuda-graph")
    for seed in (2, 3):
        x = inputs(rows, seed)
        for ours, base in zip(engine(x), engine.base(x), strict=True):
            assert ours.exit == base.exit == "base"
            assert torch.equal(ours.probabilities, base.probabilities)


def test_an_answer_stays_when_the_next_request_comes(fake: Fake) -> None:
    fake()
    engine = Engine(traced_network(), exits((0.0, 2.0, 2.0)), backend="cuda-graph")
    never = Engine(traced_network(), exits(NEVER), backend="cuda-graph")
    for each in (engine, never):
        first = each(inputs(1))[0].probabilities
        kept = first.clone()
        each(inputs(1, seed=9))
        assert torch.equal(first, kept)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_changes_in_place_reach_neither_the_request_nor_a_lookup(
    fake: Fake, placement: Placement, order: Order
) -> None:
    """The hidden output changes later, and the request at once: both are copied."""
    fake(order, pays=True)
    traced = wide()
    assert traced.changes_input
    torch.manual_seed(5)
    leaving = [
        EngineExit("first", ready(Cache()), 0.5, placement),
        EngineExit("second", ready(Cache()), 0.5, placement),
    ]
    engine = Engine(traced, leaving, backend="cuda-graph")
    plain = Engine(traced, [replace(each, placement="inline") for each in leaving])
    seen = set()
    for x in inputs(30).split(1):
        before = x.clone()
        (answer,), (wanted,) = engine(x), plain(x)
        assert torch.equal(x, before)
        assert answer.exit == wanted.exit
        assert torch.equal(answer.probabilities, wanted.probabilities)
        assert torch.equal(engine.base(x)[0].probabilities, plain.base(x)[0].probabilities)
        seen.add(answer.exit)
    assert len(seen) > 1


def test_a_late_lookup_reads_the_hidden_output_as_it_was(fake: Fake) -> None:
    """The network has changed it in place by the time the lookup runs."""
    made = fake("main first")
    traced = wide()
    leaving = EngineExit("first", ready(Cache()), 0.0, "overlapped")
    engine = Engine(traced, [leaving], backend="cuda-graph")
    made[-1].slow = 1000
    plain = Engine(traced, [replace(leaving, placement="inline")])
    for x in inputs(3).split(1):
        assert torch.equal(engine(x)[0].probabilities, plain(x)[0].probabilities)


def test_batches_run_as_on_backend_torch(fake: Fake) -> None:
    made = fake()
    traced = traced_network()
    engine = Engine(traced, selective_exits(traced), backend="cuda-graph")
    plain = Engine(traced, selective_exits(traced))
    alone = made[-1]
    alone.calls()
    x = inputs(12)
    for ours, wanted in zip(engine(x), plain(x), strict=True):
        assert (ours.exit, ours.class_index) == (wanted.exit, wanted.class_index)
    assert not launched(alone)
    assert engine(inputs(0)) == []


@pytest.mark.parametrize("order", ORDERS)
def test_batches_of_any_size_give_the_answers_of_backend_torch(fake: Fake, order: Order) -> None:
    """Sizes between those that are captured are filled up, larger ones are not captured."""
    made = fake(order)
    traced = traced_network()
    engine = Engine(traced, selective_exits(traced), backend="cuda-graph")
    plain = Engine(traced, selective_exits(traced))
    for seed, rows in enumerate((2, 3, 5, 8, 5, 31, 33, 2)):
        x = inputs(rows, seed)
        for ours, wanted in zip((*engine(x), *engine.base(x)), (*plain(x), *plain.base(x)), strict=True):
            assert (ours.exit, ours.class_index) == (wanted.exit, wanted.class_index)
            torch.testing.assert_close(ours.probabilities, wanted.probabilities)
    captured = [device.captured for device in made]
    engine(inputs(7, 99))
    assert [device.captured for device in made] == captured


def test_graphs_of_batches_and_of_the_base_model_alone_share_no_memory(fake: Fake) -> None:
    """They run at the same time, and graphs of one device overwrite each other's results."""
    made = fake()
    traced = traced_network()
    engine = Engine(traced, selective_exits(traced), backend="cuda-graph")

    def captured_by(work: Callable[[], object]) -> set[int]:
        before = [device.captured for device in made]
        work()
        return {at for at, device in enumerate(made) if device.captured > before[at]}

    alone = captured_by(lambda: engine.base(inputs(1)))
    together = captured_by(lambda: (engine(inputs(5)), engine.base(inputs(5))))
    assert alone and together and not alone & together


def test_after_a_batch_that_fails_the_next_one_gets_its_own_answers(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fake()
    traced = traced_network()
    engine = Engine(traced, selective_exits(traced), backend="cuda-graph")
    plain = Engine(traced, selective_exits(traced))
    engine(inputs(4))

    def fails(*_: object) -> None:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(FakeDevice, "taken", fails)
        with pytest.raises(RuntimeError, match="device lost"):
            engine(inputs(4, seed=3))
    x = inputs(4, seed=4)
    assert [one.class_index for one in engine(x)] == [one.class_index for one in plain(x)]
    assert made


def test_a_score_that_is_no_number_is_a_miss(fake: Fake) -> None:
    fake()
    leaving = EngineExit("blocks.0", ready(ConstantScore(math.nan)), -math.inf)
    assert Engine(traced_network(), [leaving], backend="cuda-graph")(inputs(1))[0].exit == "base"


# What is launched when --------------------------------------------------------------------------------------


def test_a_segment_longer_than_a_round_trip_is_launched_once_the_score_is_known(fake: Fake) -> None:
    made = fake(pays=False)
    first = Engine(traced_network(), exits((0.0, 0.0, 0.0)), backend="cuda-graph")
    assert asked(first, made[-1], inputs(1)) == ("blocks.0", ["main: graph 0", "host waits"])
    second = Engine(traced_network(), exits((2.0, 0.0, 0.0)), backend="cuda-graph")
    assert asked(second, made[-1], inputs(1)) == (
        "blocks.1",
        ["main: graph 0", "host waits", "main: graph 1", "host waits"],
    )


def test_a_short_segment_is_launched_before_the_score_is_known_and_none_after_it(fake: Fake) -> None:
    made = fake(pays=True)
    first = Engine(traced_network(), exits((0.0, 0.0, 0.0)), backend="cuda-graph")
    assert asked(first, made[-1], inputs(1)) == ("blocks.0", ["main: graph 0", "main: graph 1", "host waits"])
    never = Engine(traced_network(), exits(NEVER), backend="cuda-graph")
    assert asked(never, made[-1], inputs(1)) == (
        "base",
        [
            "main: graph 0",
            "main: graph 1",
            "host waits",
            "main: graph 2",
            "host waits",
            "main: graph 3",
            "host waits",
            "host waits",
        ],
    )


def test_the_host_waits_for_the_score_alone_not_for_the_segment_launched_meanwhile(fake: Fake) -> None:
    made = fake(pays=True)
    engine = Engine(traced_network(), exits((0.0, 0.0, 0.0)), backend="cuda-graph")
    device = made[-1]
    with torch.inference_mode():
        device.drain()
    device.done.clear()
    engine(inputs(1))
    assert device.done == ["graph 0"]
    assert device.outstanding
    x = inputs(1, seed=8)
    expected = Engine(traced_network(), exits((0.0, 0.0, 0.0)))(x)[0]
    assert torch.equal(engine(x)[0].probabilities, expected.probabilities)


def test_copies_are_parts_of_the_graphs(fake: Fake) -> None:
    made = fake()
    engine = Engine(traced_network(), exits(NEVER), backend="cuda-graph")
    made[-1].calls()
    engine(inputs(1))
    assert not any("copy" in call for call in made[-1].calls())


def test_an_overlapped_lookup_is_forked_by_an_event_and_joined_before_the_answer(fake: Fake) -> None:
    made = fake()
    (leaving, *_) = exits(NEVER, "overlapped")
    engine = Engine(traced_network(), [leaving], backend="cuda-graph")
    device = made[-1]
    device.slow = 100
    device.calls()
    assert engine(inputs(1))[0].exit == "base"
    calls = device.calls()
    fork = calls.index("lookups: graph 1")
    assert calls[fork - 3 : fork] == ["main: graph 0", "main: record", "lookups: wait"]
    assert calls[fork + 1] == "lookups: record"
    after = [call for call in calls[fork + 1 :] if "graph" in call or call == "host waits"]
    assert after == ["main: graph 2", "main: graph 3", "main: graph 4", "host waits", "host waits"]


def test_an_overlapped_hit_that_is_known_early_stops_the_network_there(fake: Fake) -> None:
    made = fake()
    leaving, *_ = exits((0.0, 0.0, 0.0), "overlapped")
    engine = Engine(traced_network(), [leaving], backend="cuda-graph")
    name, calls = asked(engine, made[-1], inputs(1))
    assert name == "blocks.0"
    assert "main: graph 2" not in calls
    assert not engine.overlapped  # it takes no cores


def test_the_host_runs_two_blocks_ahead_of_the_device_at_most(fake: Fake) -> None:
    """Four pieces, the lookup after the first late: as the last is launched, the first is through."""
    made = fake()
    leaving, *_ = exits(NEVER, "overlapped")
    engine = Engine(traced_network(), [leaving], backend="cuda-graph")
    device = made[-1]
    with torch.inference_mode():
        device.drain()
    device.slow, device.longest = 1000, 0
    engine(inputs(1))
    assert device.longest == 3


def test_one_lookup_at_a_time_across_placements(fake: Fake) -> None:
    made = fake()
    first, second, third = exits(NEVER, "overlapped")
    mixed = [first, replace(second, placement="inline"), third]
    engine = Engine(traced_network(), mixed, backend="cuda-graph")
    made[-1].slow = 1000
    name, calls = asked(engine, made[-1], inputs(1))
    assert name == "base"
    assert calls[:4] == ["main: graph 0", "lookups: graph 1", "host waits", "main: graph 2"]
    expected = Engine(traced_network(), exits(NEVER)).base(inputs(1))[0]
    assert torch.equal(engine(inputs(1))[0].probabilities, expected.probabilities)


def test_after_a_failure_the_next_request_gets_its_own_answer(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fake("main first")
    traced = traced_network()
    engine = Engine(traced, selective_exits(traced, "overlapped"), backend="cuda-graph")
    plain = Engine(traced, selective_exits(traced))
    replay, broken = made[-1].replay, 0

    def fails(graph: int, lane: str) -> None:
        nonlocal broken
        broken += 1
        if broken == 3:
            raise RuntimeError("device lost")
        replay(graph, lane)  # type: ignore[arg-type]

    monkeypatch.setattr(made[-1], "replay", fails)
    made[-1].slow = 1000
    with pytest.raises(RuntimeError, match="device lost"):
        engine(inputs(1))
    # the lookup left behind is joined, and all of the request is waited for
    assert made[-1].calls()[-3:] == ["main: wait", "main: record", "host waits"]
    made[-1].slow = 0
    monkeypatch.setattr(made[-1], "replay", replay)
    for x in inputs(10, seed=6).split(1):
        assert torch.equal(engine(x)[0].probabilities, plain(x)[0].probabilities)


def test_many_threads_may_ask(fake: Fake) -> None:
    fake()
    traced = traced_network()
    engine = Engine(traced, selective_exits(traced), backend="cuda-graph")
    x = inputs(48)
    plain = Engine(traced, selective_exits(traced))
    expected = [plain(row)[0].class_index for row in x.split(1)]
    found: dict[int, int] = {}

    def ask(rows: range) -> None:
        for row in rows:
            found[row] = engine(x[row : row + 1])[0].class_index

    threads = [threading.Thread(target=ask, args=(range(start, 48, 4),)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[row] for row in range(48)] == expected
    with ConcurrentEngine(engine, workers=2) as served:
        answers = [served.submit(row) for row in x.split(1)]
        assert [each.result().class_index for each in answers] == expected


# Costs and choice -------------------------------------------------------------------------------------------


def test_segments_are_timed_as_graphs_and_lookups_with_reading_the_score(fake: Fake) -> None:
    made = fake()
    profile = measure_profile(traced_network(), repetitions=2, backend="cuda-graph")
    assert profile.backend == "cuda-graph"
    reach = [block.reach_ms for block in profile.blocks]
    assert reach == sorted(reach) and reach[-1] <= profile.base_ms
    assert any("graph" in call for device in made for call in device.log)
    cache, hidden = ready(Cache()), torch.randn(1, 8, 6, 6)
    assert measure_lookup(cache, hidden, backend="cuda-graph") > 0
    with torch.inference_mode():
        found = get_backend("cuda-graph").timed_lookup(cache, hidden)(hidden)  # type: ignore[attr-defined]
        wanted = cache(hidden)
    assert torch.equal(found[0], wanted[0])
    assert float(found[1]) == float(wanted[1])


def test_a_network_that_cannot_be_captured_says_where(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake()

    def refuses(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nlong text")

    monkeypatch.setattr(FakeDevice, "capture", refuses)
    with pytest.raises(BackendError, match=r"up to block 'blocks.0': operation not .* capturing; use --back"):
        Engine(traced_network(), exits(), backend="cuda-graph")


@no_cuda
def test_without_a_device_the_message_says_what_is_needed(directory: object) -> None:
    line = r"^backend cuda-graph needs a CUDA device; load with --device cuda \(torch .*CUDA.*\)$"
    with pytest.raises(BackendError, match=line):
        get_backend("cuda-graph")
    assert not CudaGraphBackend.installed()
    rewrite(directory, backend="cuda-graph")  # type: ignore[arg-type]
    with pytest.raises(BackendError, match=line):
        load(directory, device="cpu")  # type: ignore[arg-type]


def test_a_network_on_the_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaGraphBackend, "unavailable", classmethod(lambda cls: None))
    with pytest.raises(BackendError, match="needs a CUDA device; load with --device cuda$"):
        Engine(traced_network(), exits(), backend="cuda-graph")


@pytest.mark.parametrize(("device", "tried"), [("cpu", False), ("cuda:0", True)])
def test_auto_considers_it_only_where_the_library_was_measured_on_cuda(
    directory: object, monkeypatch: pytest.MonkeyPatch, device: str, tried: bool
) -> None:
    from gati.composition import backends
    from gati.composition.plans import Settings

    library = Library(directory)  # type: ignore[arg-type]
    profile = replace(library.manifest.profile, device=device)
    library.__dict__["manifest"] = replace(library.manifest, profile=profile)
    monkeypatch.setattr(CudaGraphBackend, "unavailable", classmethod(lambda cls: None))
    seen: list[str] = []

    def network_times(found: Library, names: list[str], pieces: object) -> dict[str, float]:
        seen.extend(names)
        return {}

    monkeypatch.setattr(backends, "network_times", network_times)
    choose_backend(library, Settings(backend="auto", objective="exact"))
    assert ("cuda-graph" in seen) == tried
    assert ("openvino" in seen) == (not tried and BACKENDS["openvino"].installed())


# On a real device -------------------------------------------------------------------------------------------


def on_cuda(placement: Placement) -> tuple[TracedModel, list[EngineExit]]:
    return moved("cuda", selective_exits(traced_network(), placement))


@needs_cuda
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_on_cuda_answers_are_those_of_backend_torch(placement: Placement) -> None:
    traced, leaving = on_cuda(placement)
    graphs = Engine(traced, leaving, backend="cuda-graph")
    plain = Engine(traced, [replace(each, placement="inline") for each in leaving])
    seen = set()
    for x in inputs(300).split(1):
        (ours,), (wanted,) = graphs(x), plain(x)
        assert (ours.exit, ours.class_index) == (wanted.exit, wanted.class_index)
        torch.testing.assert_close(ours.probabilities, wanted.probabilities, rtol=1e-3, atol=1e-3)
        seen.add(ours.exit)
    assert seen == {*BLOCKS, "base"}


@needs_cuda
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_on_cuda_thresholds_at_infinity_equal_the_base_model_bit_for_bit(placement: Placement) -> None:
    traced, leaving = on_cuda(placement)
    engine = Engine(traced, [replace(each, threshold=math.inf) for each in leaving], backend="cuda-graph")
    for x in inputs(100).split(1):
        assert torch.equal(engine(x)[0].probabilities, engine.base(x)[0].probabilities)


@needs_cuda
def test_on_cuda_other_streams_may_ask_in_turn() -> None:
    traced, leaving = on_cuda("inline")
    engine = Engine(traced, leaving, backend="cuda-graph")
    expected = [engine(x)[0] for x in inputs(50).split(1)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    for number, (x, wanted) in enumerate(zip(inputs(50).split(1), expected, strict=True)):
        with torch.cuda.stream(streams[number % 2]):
            assert engine(x)[0].exit == wanted.exit


@needs_cuda
def test_on_cuda_costs_are_measured() -> None:
    traced, leaving = on_cuda("inline")
    assert measure_profile(traced, repetitions=5, backend="cuda-graph").base_ms > 0
    hidden = torch.randn(1, *traced.hidden_shapes[BLOCKS[0]], device="cuda")
    assert measure_lookup(leaving[0].cache, hidden, backend="cuda-graph") > 0
