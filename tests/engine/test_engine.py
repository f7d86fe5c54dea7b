"""The runtime's contracts: exact misses, saved work, and answers that do not depend on the batch."""

from __future__ import annotations

import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gati.engine.engine import Engine
from gati.engine.exits import EngineExit
from gati.engine.placement import StreamLookups, WorkerLookups
from gati.errors import BackendError, DataError, LibraryError
from gati.model.segments import trace
from gati.types import Placement
from tests.engine.networks import (
    BLOCKS,
    CLASSES,
    Cache,
    ConstantScore,
    exits,
    inputs,
    network,
    ready,
    selective_exits,
    traced_network,
)

PLACEMENTS: tuple[Placement, ...] = ("inline", "overlapped")
NEVER = (math.inf,) * 3
TRACED = traced_network()
ENGINE = Engine(TRACED, selective_exits(TRACED))


class CountConvolutions(TorchDispatchMode):
    """Counts the convolutions that the calling thread executes."""

    count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "conv" in str(func)
        return func(*args, **(kwargs or {}))


def convolutions(engine: Engine, x: Tensor) -> int:
    counter = CountConvolutions()  # type: ignore[no-untyped-call]
    with counter:
        engine(x)
    return counter.count


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("rows", [1, 5])
def test_with_thresholds_at_infinity_the_outputs_equal_the_base_models_bit_for_bit(
    placement: Placement, rows: int
) -> None:
    module, x = network(), inputs(rows)
    with Engine(traced_network(module), exits(NEVER, placement)) as engine:
        answers, base = engine(x), engine.base(x)
    with torch.inference_mode():
        expected = module(x).softmax(1)
    for row in range(rows):
        assert answers[row].exit == base[row].exit == "base"
        assert torch.equal(answers[row].probabilities, base[row].probabilities)
        assert torch.equal(answers[row].probabilities, expected[row])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_hit_is_answered_by_the_first_cache_that_is_sure(placement: Placement) -> None:
    with Engine(TRACED, exits((2.0, 0.0, 0.0), placement)) as engine:
        (answer,) = engine(inputs(1))
    assert answer.exit == "blocks.1"
    assert answer.probabilities.shape == (CLASSES,)
    assert answer.class_index == int(answer.probabilities.argmax())
    assert float(answer.probabilities.sum()) == pytest.approx(1.0)


def test_on_a_hit_the_remaining_segments_are_not_executed() -> None:
    x = inputs(1)
    assert convolutions(Engine(TRACED, exits((0.0, 0.0, 0.0))), x) == 2
    assert convolutions(Engine(TRACED, exits((2.0, 0.0, 0.0))), x) == 3
    assert convolutions(Engine(TRACED, exits(NEVER)), x) == 4


def test_an_overlapped_hit_stops_the_base_model_at_a_later_block() -> None:
    """The next exit waits for the answer, so at most the block in between has run."""
    with Engine(TRACED, exits((0.0, 0.0, 0.0), "overlapped")) as engine:
        assert convolutions(engine, inputs(1)) == 3


def test_a_batch_in_which_all_hit_does_not_go_on() -> None:
    assert convolutions(Engine(TRACED, exits((0.0, 0.0, 0.0))), inputs(6)) == 2


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_both_placements_leave_at_the_same_exits(placement: Placement) -> None:
    expected = [ENGINE(x.unsqueeze(0))[0] for x in inputs(40)]
    assert {answer.exit for answer in expected} == {*BLOCKS, "base"}
    with Engine(TRACED, selective_exits(TRACED, placement)) as engine:
        answers = [engine(x.unsqueeze(0))[0] for x in inputs(40)]
    for answer, wanted in zip(answers, expected, strict=True):
        assert answer.exit == wanted.exit
        assert torch.equal(answer.probabilities, wanted.probabilities)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 17))
def test_the_same_input_gives_the_same_class_whatever_the_batch(seed: int, count: int) -> None:
    x = inputs(count, seed)
    alone = [ENGINE(x[row : row + 1])[0] for row in range(count)]
    together = ENGINE(x)
    assert [(a.class_index, a.exit) for a in together] == [(a.class_index, a.exit) for a in alone]
    assert [a.class_index for a in ENGINE.base(x)] == [
        ENGINE.base(x[row : row + 1])[0].class_index for row in range(count)
    ]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), row=st.integers(0, 7), exit_index=st.integers(0, 2))
def test_a_score_that_equals_its_threshold_decides_alike_in_every_batch(
    seed: int, row: int, exit_index: int
) -> None:
    x = inputs(8, seed)
    segment = TRACED.cut([BLOCKS[exit_index]])[0]
    caches = exits()
    with torch.inference_mode():
        score = float(caches[exit_index].cache(segment.run(x[row : row + 1])[0])[1])
    leaving = caches[exit_index]
    engine = Engine(TRACED, [EngineExit(leaving.block, leaving.cache, score)])
    assert engine(x[row : row + 1])[0].exit == leaving.block
    assert engine(x)[row].exit == leaving.block


def test_predictions_come_in_the_order_of_the_requests() -> None:
    x = inputs(30)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(3))
    straight, shuffled = ENGINE(x), ENGINE(x[order])
    assert len({answer.exit for answer in straight}) == 4
    for position, row in enumerate(order.tolist()):
        assert shuffled[position].class_index == straight[row].class_index
        torch.testing.assert_close(shuffled[position].probabilities, straight[row].probabilities)


def test_an_answer_of_a_batch_holds_no_other_answers() -> None:
    """Else one that is kept, or sent to another process, brings those of all other requests along."""
    softmax = Engine(traced_network(), outputs_kind="probabilities")
    for answer in (*ENGINE(inputs(12)), *softmax(inputs(12)), *softmax.base(inputs(12))):
        assert answer.probabilities.untyped_storage().nbytes() == answer.probabilities.nbytes


def test_an_empty_batch_has_no_predictions() -> None:
    assert ENGINE(inputs(0)) == []
    assert ENGINE.base(inputs(0)) == []


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_score_that_is_no_number_is_a_miss(placement: Placement, rows: int) -> None:
    leaving = EngineExit("blocks.0", ready(ConstantScore(math.nan)), -math.inf, placement)
    with Engine(TRACED, [leaving]) as engine:
        assert [answer.exit for answer in engine(inputs(rows))] == ["base"] * rows


def test_every_answer_carries_the_version_and_the_class_name() -> None:
    engine = Engine(TRACED, exits((0.0, 0.0, 0.0)), version="v7", class_names=["a", "b", "c", "d"])
    (answer,) = engine(inputs(1))
    assert answer.version == engine.base(inputs(1))[0].version == "v7"
    assert answer.class_name == "abcd"[answer.class_index]


def test_probabilities_of_a_base_model_that_ends_in_softmax_stay_as_they_are() -> None:
    module = ready(nn.Sequential(network(), nn.Softmax(1)))
    engine = Engine(trace(module, inputs(2), []), outputs_kind="probabilities")
    with torch.inference_mode():
        assert torch.equal(engine(inputs(1))[0].probabilities, module(inputs(1))[0])


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(1, 3, 6, 6), r"shape \[batch, 1, 6, 6\], got \[1, 3, 6, 6\]"),
        (torch.zeros(1, 6, 6), r"shape \[batch, 1, 6, 6\], got \[1, 6, 6\]"),
        (torch.zeros(()), r"shape \[batch, 1, 6, 6\], got \[\]"),
        (torch.zeros(1, 1, 6, 6, dtype=torch.uint8), "takes torch.float32, got torch.uint8"),
        ([[0.0]], "got list"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_in_one_line(x: Any, message: str) -> None:
    for call in (ENGINE, ENGINE.base):
        with pytest.raises(DataError, match=message) as caught:
            call(x)
        assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_sparse_inputs_are_refused(layout: torch.layout) -> None:
    with pytest.raises(DataError, match=rf"takes dense tensors, got {layout}; call x.to_dense\(\)"):
        ENGINE(inputs(1).to_sparse(layout=layout))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_inputs_are_refused() -> None:
    with pytest.raises(DataError, match="got a nested one; stack inputs of one shape"):
        ENGINE(torch.nested.nested_tensor([*inputs(2)]))


def test_unknown_backends_and_placements_are_refused() -> None:
    with pytest.raises(BackendError, match="unknown backend 'abacus'; choose one of auto, .*torch"):
        Engine(TRACED, backend="abacus")
    with pytest.raises(
        BackendError, match="unknown placement 'elsewhere' at block 'blocks.0'; choose inline or overlapped"
    ):
        leaving = exits()[0]
        Engine(TRACED, [EngineExit(leaving.block, leaving.cache, 0.5, "elsewhere")])  # type: ignore[arg-type]


def test_a_cache_that_does_not_fit_its_block_is_refused() -> None:
    with pytest.raises(LibraryError, match=r"the learned cache Cache does not fit block 'blocks.0'"):
        Engine(TRACED, [EngineExit("blocks.0", ready(Cache(width=5)), 0.5)])


def test_the_callers_input_is_never_changed() -> None:
    module = ready(nn.Sequential(nn.ReLU(inplace=True), network()))
    engine = Engine(trace(module, inputs(2), []))
    for x in (inputs(1), inputs(3)):
        before = x.clone()
        engine(x), engine.base(x)
        assert torch.equal(x, before)


def test_a_network_whose_rows_share_memory_is_answered_row_by_row() -> None:
    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            view = hidden.view(-1, 4, 2)
            out = self.block(hidden)
            view.mul_(2.0)
            result: Tensor = self.head(view.reshape(-1, 8) + hidden + out)
            return result

    class FlatCache(Cache):
        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(hidden[:, :, None, None])

    torch.manual_seed(0)
    module = ready(Sharing())
    x = torch.randn(12, 4)
    engine = Engine(trace(module, x, ["block"]), [EngineExit("block", ready(FlatCache()), 0.75)])
    answers = engine(x)
    assert {answer.exit for answer in answers} == {"block", "base"}
    with torch.inference_mode():
        for row, answer in enumerate(answers):
            if answer.exit == "base":
                assert torch.equal(answer.probabilities, module(x[row : row + 1]).softmax(1)[0])


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system cannot bind threads to cores")
def test_closing_gives_back_cores_and_threads() -> None:
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    engine = Engine(TRACED, exits(NEVER, "overlapped"))
    assert os.sched_getaffinity(0) == cores  # nothing is taken before the first request
    with engine:
        engine(inputs(1))
        if len(cores) > 1:
            assert os.sched_getaffinity(0) < cores
    assert os.sched_getaffinity(0) == cores
    assert torch.get_num_threads() == threads
    engine.close()
    with engine:
        assert engine(inputs(1))[0].exit == "base"  # it can be opened again


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system cannot bind threads to cores")
def test_engines_that_are_open_at_once_share_the_reserved_core() -> None:
    """Each would take one more, and whichever closed last would leave the thread with fewer than before."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    first, second = (Engine(TRACED, exits(NEVER, "overlapped")) for _ in range(2))
    first.open()
    left = os.sched_getaffinity(0)
    second.open()
    assert os.sched_getaffinity(0) == left
    first.close()
    assert os.sched_getaffinity(0) == left
    assert second(inputs(1))[0].exit == "base"
    with ThreadPoolExecutor(1) as another:
        another.submit(second.close).result()
    assert os.sched_getaffinity(0) == cores
    second.close()  # only this thread can set its number of torch threads
    assert torch.get_num_threads() == threads


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system cannot bind threads to cores")
def test_an_engine_gives_lookups_as_many_cores_as_asked() -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 3:
        pytest.skip(f"needs 3 usable cores, has {len(cores)}")
    worker: set[int] = set()

    class Noting(Cache):
        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
            if threading.current_thread().name == "gati-lookup":
                worker.update(os.sched_getaffinity(0))
            if bool(hidden.sum() > 1e9):  # keeps it from being flattened
                return super().forward(hidden)
            return super().forward(hidden)

    leaving = EngineExit("blocks.0", ready(Noting()), math.inf, "overlapped")
    with Engine(TRACED, [leaving], lookup_cores=2) as engine:
        assert os.sched_getaffinity(0) == set(cores[:-2])
        for _ in range(100):  # a lookup that is late is made by the caller
            engine(inputs(1))
    assert worker == set(cores[-2:])
    assert os.sched_getaffinity(0) == set(cores)


def test_what_an_overlapped_lookup_raises_reaches_the_caller_and_the_engine_stays_usable() -> None:
    class Moody(Cache):
        fail = False

        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
            if self.fail:
                raise RuntimeError("out of luck")
            if bool(hidden.sum() > 1e9):  # keeps it from being flattened
                return super().forward(hidden)
            return super().forward(hidden)

    cache = ready(Moody())
    with Engine(TRACED, [EngineExit("blocks.0", cache, 0.0, "overlapped")]) as engine:
        cache.fail = True  # type: ignore[assignment]
        with pytest.raises(RuntimeError, match="out of luck"):
            engine(inputs(1))
        cache.fail = False  # type: ignore[assignment]
        assert engine(inputs(1))[0].exit == "blocks.0"


def test_an_overlapped_lookup_that_does_not_come_is_overtaken() -> None:
    """The worker hangs in the lookup; the calling thread works the answer out itself."""
    caller, hanging = threading.current_thread(), threading.Event()

    def lookup(hidden: Tensor) -> tuple[Tensor, Tensor]:
        if threading.current_thread() is not caller:
            hanging.wait()
        return hidden, hidden.sum().reshape(1)

    with WorkerLookups() as lookups:
        for value in (1.0, 2.0):
            lookups.submit(lookup, torch.full((1, 1), value))
            assert lookups.answer().score == value
        hanging.set()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_on_cuda_both_placements_agree_with_the_base_model(placement: Placement) -> None:
    module = network().cuda()
    traced = trace(module, inputs(2).cuda(), BLOCKS)
    never = [EngineExit(e.block, e.cache.cuda(), e.threshold, e.placement) for e in exits(NEVER, placement)]
    sure = [EngineExit(e.block, e.cache, 0.0, e.placement) for e in never]
    with Engine(traced, never) as engine, Engine(traced, sure) as early:
        for x in inputs(20).split(1):
            assert torch.equal(engine(x)[0].probabilities, engine.base(x)[0].probabilities)
            assert early(x)[0].exit == BLOCKS[0]


def test_a_stream_must_be_opened_before_use() -> None:
    with pytest.raises(RuntimeError, match="open the stream first"):
        StreamLookups(torch.device("cuda")).submit(ready(Cache()), inputs(1))
