"""Backends that compile the network into one graph: the network's answers, work saved, what is missing."""

from __future__ import annotations

import inspect
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from gati.engine.backends import BACKENDS, GraphBackend, get_backend, segment_backend
from gati.engine.engine import Engine
from gati.engine.exits import EngineExit
from gati.errors import BackendError
from gati.model.segments import TracedModel
from tests.engine.networks import BLOCKS, Cache, traced_network
from tests.engine.test_forked import printed
from tests.starting import heavy_imports_of

pytestmark = pytest.mark.slow

NAMES = sorted(
    name for name, kind in BACKENDS.items() if issubclass(kind, GraphBackend) and kind.in_float32()
)

graph_backend = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(
            name, marks=pytest.mark.skipif(not BACKENDS[name].installed(), reason=f"{name} is not installed")
        )
        for name in NAMES
    ],
)


def requests(count: int) -> torch.Tensor:
    return torch.randn(count, 1, 6, 6, generator=torch.Generator().manual_seed(3))


def exits(*thresholds: float) -> list[EngineExit]:
    torch.manual_seed(0)
    return [
        EngineExit(block, Cache().eval(), threshold)
        for block, threshold in zip(BLOCKS, thresholds, strict=False)
    ]


def scores(traced: TracedModel, leaving: EngineExit, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        score: torch.Tensor = leaving.cache(traced.cut([leaving.block])[0].run(x.clone())[0])[1]
    return score


def test_both_engines_are_known() -> None:
    assert NAMES == ["onnxruntime", "openvino"]


@graph_backend
def test_without_exits_the_answers_are_the_networks_own(backend: str) -> None:
    traced = traced_network()
    engine = Engine(traced, backend=backend)
    for x in requests(10).split(1):
        for (answer,) in (engine(x), engine.base(x)):
            assert torch.allclose(answer.probabilities, traced.base(x).softmax(1)[0], atol=1e-5)
            assert answer.exit == "base"


@graph_backend
def test_a_miss_is_the_base_models_answer_but_for_rounding(backend: str) -> None:
    """A compiler may fuse a network with exits otherwise than without: bit for bit is torch's promise."""
    engine = Engine(traced_network(), exits(1e30, 1e30, 1e30), backend=backend)
    for x in requests(10).split(1):
        (answer,), (base,) = engine(x), engine.base(x)
        assert answer.exit == "base"
        assert torch.allclose(answer.probabilities, base.probabilities, rtol=0, atol=1e-6)


@graph_backend
def test_exits_probabilities_and_classes_are_those_of_the_torch_backend(backend: str) -> None:
    """Thresholds lie between the scores, so that rounding cannot decide."""
    traced, x = traced_network(), requests(60)
    middles = [float(scores(traced, each, x).sort().values[29:31].mean()) for each in exits(0.0, 0.0)]
    fast, plain = (Engine(traced, exits(*middles), backend=name) for name in (backend, "torch"))
    left = set()
    for ours, theirs in zip(fast(x), plain(x), strict=True):
        assert ours.exit == theirs.exit
        assert ours.class_index == theirs.class_index
        assert torch.allclose(ours.probabilities, theirs.probabilities, atol=1e-5)
        left.add(ours.exit)
    assert len(left) == 3


@graph_backend
def test_an_input_gets_the_same_answer_whatever_its_batch_and_keeps_it(backend: str) -> None:
    engine = Engine(traced_network(), exits(0.5, 0.4), backend=backend)
    x = requests(9)
    together = engine(x)
    kept = [answer.probabilities.clone() for answer in together]
    for one, row, before in zip(together, x.split(1), kept, strict=True):
        (other,) = engine(row)
        assert one.exit == other.exit
        assert torch.equal(before, other.probabilities)
        assert torch.equal(one.probabilities, before), "the engine's own tensor was handed out"


def test_after_a_hit_the_rest_of_the_network_is_not_run() -> None:
    """What comes after a decision lies in its else-branch, and nowhere else."""
    pytest.importorskip("onnx", reason="onnx is not installed")
    from gati.engine.graph.assemble import assemble
    from gati.engine.graph.stages import build_stages

    graph = assemble(build_stages(traced_network(), exits(0.5, 0.5), "logits"), "test").graph
    convolutions = []
    while True:
        convolutions.append(sum(node.op_type == "Conv" for node in graph.node))
        decisions = [node for node in graph.node if node.op_type == "If"]
        if not decisions:
            break
        (decision,) = decisions
        branches = {attribute.name: attribute.g for attribute in decision.attribute}
        assert not any(node.op_type == "Conv" for node in branches["then_branch"].node)
        graph = branches["else_branch"]
    assert convolutions == [2, 1, 1]


@graph_backend
def test_nan_scores_are_misses(backend: str) -> None:
    class Undecided(Cache):
        def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            probabilities, score = super().forward(hidden)
            return probabilities, score - 2.0 * score.clamp_min(1e9).sqrt() * float("inf") * 0.0

    engine = Engine(traced_network(), [EngineExit(BLOCKS[0], Undecided().eval(), -1e30)], backend=backend)
    assert engine(requests(1))[0].exit == "base"


@graph_backend
def test_overlapped_lookups_are_refused_in_one_line(backend: str) -> None:
    beside = [EngineExit(BLOCKS[0], Cache().eval(), 0.5, "overlapped")]
    with pytest.raises(
        BackendError, match=f"backend '{backend}' runs lookups inside its graph; compose with"
    ):
        Engine(traced_network(), beside, backend=backend)


@pytest.mark.parametrize("backend", NAMES)
def test_without_a_package_the_message_says_what_to_install(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gati.engine.backends.base.find_spec", lambda name: None)
    with pytest.raises(BackendError, match=rf"needs {backend}, .*pip install 'gati\[{backend}\]'"):
        get_backend(backend)
    assert not BACKENDS[backend].installed()


@graph_backend
def test_segments_are_asked_of_torch(backend: str) -> None:
    with pytest.raises(BackendError, match=f"backend '{backend}' cannot run segments one by one; use torch"):
        segment_backend(backend)


KEPT = """
import sys
from itertools import pairwise
from pathlib import Path
from gati.engine.engine import Engine
from tests.engine.networks import exits, inputs, traced_network

backend, *kept = sys.argv[1:]
engine = Engine(traced_network(), exits()[:1], backend=backend, graphs=tuple(map(Path, kept)))
engine(inputs(5)), engine.base(inputs(5))
"""


@graph_backend
def test_a_converted_network_is_kept_and_read_again(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, x = (tmp_path / "exits.onnx", tmp_path / "base.onnx"), requests(5)
    first = Engine(traced_network(), exits(0.5), backend=backend, graphs=kept)
    answers = [*first(x), *first.base(x)]
    assert all(path.is_file() for path in kept)
    assert not heavy_imports_of(KEPT, backend, *map(str, kept))
    monkeypatch.setattr(
        "gati.engine.graph.stages.build_stages", lambda *arguments: pytest.fail("it was converted again")
    )
    again = Engine(traced_network(), exits(0.5), backend=backend, graphs=kept)
    for before, after in zip(answers, [*again(x), *again.base(x)], strict=True):
        assert torch.equal(before.probabilities, after.probabilities)
        assert before.exit == after.exit


RESIDUAL = """
import torch
from torch import nn
from gati.engine.engine import Engine
from gati.model.segments import trace
from tests.engine.networks import ready

class Residual(nn.Module):
    def __init__(self, meet, *, attends=False):
        super().__init__()
        layers = (nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(2))
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(64, 5)
        self.meet, self.attends = meet, attends

    def forward(self, x):
        if self.attends:
            x = (torch.softmax(x @ x.transpose(1, 2), -1) @ x).mean(1)
        for block in self.blocks:
            x = self.meet(x, block(x))
        return self.head(x)

def gated(x, y):
    return x * torch.sigmoid(y)

vectors, sequences = torch.randn(2, 64), torch.randn(2, 3, 64)
for network, x in ((Residual(torch.add), vectors), (Residual(gated, attends=True), sequences)):
    traced = trace(ready(network), x, [])
    engines = [Engine(traced, backend=name, threads=1) for name in ("openvino", "torch")]
    ours, theirs = (engine(x[:1])[0].probabilities for engine in engines)
    print(torch.allclose(ours, theirs, atol=1e-5), flush=True)
"""


@pytest.mark.skipif(not BACKENDS["openvino"].installed(), reason="openvino is not installed")
def test_residual_layers_of_vectors_do_not_crash_openvino() -> None:
    """As in networks for tables: its compiler ended the process without a word."""
    assert printed(RESIDUAL) == ["True"] * 2


@pytest.mark.skipif(not BACKENDS["openvino"].installed(), reason="openvino is not installed")
def test_networks_may_be_deep() -> None:
    """Nothing may follow them by recursion, which Python limits. Compiling a thousand layers takes long."""
    from onnx import TensorProto, helper

    names = [f"hidden{number}" for number in range(300)]
    chain = [helper.make_node("Relu", [x], [y]) for x, y in pairwise(["x", *names])]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in ("x", "sum")]
    chain.append(helper.make_node("Add", [names[-1], names[-2]], ["sum"]))
    graph = helper.make_graph(chain, "deep", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    backend, limit = get_backend("openvino"), sys.getrecursionlimit()
    assert isinstance(backend, GraphBackend)
    backend.compile(model.SerializeToString(), threads=1)  # imports what it needs
    sys.setrecursionlimit(len(inspect.stack()) + 100)
    try:
        backend.compile(model.SerializeToString(), threads=1)
    finally:
        sys.setrecursionlimit(limit)


@graph_backend
def test_where_nothing_can_be_kept_it_is_converted_each_time(backend: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    kept = (tmp_path / "file" / "exits.onnx", tmp_path / "file" / "base.onnx")
    engine = Engine(traced_network(), exits(-1.0), backend=backend, graphs=kept)
    assert engine(requests(1))[0].exit == BLOCKS[0]


@graph_backend
@pytest.mark.parametrize("contents", [b"", b"not a graph"])
def test_a_damaged_graph_is_one_line_that_names_the_file(
    tmp_path: Path, backend: str, contents: bytes
) -> None:
    kept = tmp_path / "kept.onnx"
    kept.write_bytes(contents)
    with pytest.raises(
        BackendError, match=r"cannot read .*kept\.onnx: .*; if the file is damaged, delete it"
    ):
        Engine(traced_network(), backend=backend, graphs=(kept, kept))
    kept.unlink()
    assert Engine(traced_network(), backend=backend, graphs=(kept, kept))(requests(1))
