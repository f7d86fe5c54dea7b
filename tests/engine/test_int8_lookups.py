"""Lookups in 8-bit integers inside a float32 network: what stays exact and what becomes coarse."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper

from gati.caches import LearnedCache
from gati.engine.backends import BACKENDS, GraphBackend, get_backend
from gati.engine.engine import Engine
from gati.engine.exits import EngineExit
from gati.engine.graph import integers, quantise_lookups
from gati.engine.graph.convert import Converter
from gati.engine.graph.stages import GraphStages
from gati.errors import BackendError
from tests.engine.networks import BLOCKS, CLASSES, traced_network
from tests.engine.test_graph_backends import requests, scores

SHAPE = (8, 6, 6)
NEVER = 1e30

pytestmark = pytest.mark.skipif(
    not BACKENDS["onnxruntime-int8-lookups"].installed(), reason="no ONNX Runtime, which quantises"
)
backends = pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(not BACKENDS[name].installed(), reason=f"{name} is not installed"),
        )
        for name in ("openvino-int8-lookups", "onnxruntime-int8-lookups")
    ],
)


CONVERTED = Converter()  # of one network with the same caches throughout


@cache
def learned_cache(index: int) -> LearnedCache:
    torch.manual_seed(index)
    return LearnedCache("pyramid(8)", SHAPE, CLASSES, "maximum-probability")


def exits(*thresholds: float) -> list[EngineExit]:
    return [
        EngineExit(block, learned_cache(index), threshold)
        for index, (block, threshold) in enumerate(zip(BLOCKS, thresholds, strict=False))
    ]


def calibrated(name: str, count: int = 60) -> GraphBackend:
    backend = get_backend(name, calibration=requests(count))
    assert isinstance(backend, GraphBackend)
    return backend


def kept(folder: Path, name: str, leaving: list[EngineExit]) -> tuple[Path, Path]:
    """The networks that `gati compose` keeps."""
    backend = calibrated(name)
    for file, chosen in (("exits", leaving), ("base", [])):
        (model,) = backend.assembled(traced_network(), [chosen], "logits", convert=CONVERTED, cuts=BLOCKS)
        (folder / file).write_bytes(model)
    return folder / "exits", folder / "base"


def nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nodes(attribute.g)


def models(name: str, *settings: list[EngineExit]) -> list[onnx.ModelProto]:
    made = calibrated(name).assembled(traced_network(), settings, "logits", convert=CONVERTED, cuts=BLOCKS)
    return [onnx.load_from_string(model) for model in made]


@pytest.mark.slow
@backends
def test_only_lookups_are_quantised_and_their_last_layer_is_not(name: str) -> None:
    (model,) = models(name, exits(0.5, 0.5))
    quantised = [node.name for node in nodes(model.graph) if node.op_type == "QuantizeLinear"]
    lookups = [node for node in nodes(model.graph) if node.name.startswith("lookup")]
    layers = [node for node in lookups if node.op_type == "Gemm"]
    assert quantised and all(each.startswith(("lookup_0/", "lookup_1/")) for each in quantised)
    made_by = {output: node.op_type for node in nodes(model.graph) for output in node.output}
    assert [made_by[each.input[0]] for each in layers] == ["Concat", "Concat"], "fed in float32"


@pytest.mark.slow
@backends
def test_what_misses_gets_the_answer_of_the_network_in_float32(tmp_path: Path, name: str) -> None:
    leaving = exits(NEVER, NEVER)
    engine = Engine(traced_network(), leaving, backend=name, graphs=kept(tmp_path, name, leaving))
    plain = Engine(traced_network(), backend=name.removesuffix("-int8-lookups"))
    assert engine.precision == "f32" and not BACKENDS[name].in_float32()
    for x in requests(20).split(1):
        (own,) = plain.base(x)
        for (answer,) in (engine(x), engine.base(x)):
            assert answer.exit == "base"
            assert torch.allclose(answer.probabilities, own.probabilities, atol=1e-5)


@pytest.mark.slow
@backends
def test_lookups_are_close_and_leave_at_the_threshold_asked_for(tmp_path: Path, name: str) -> None:
    traced, x = traced_network(), requests(60)
    exact = scores(traced, exits(0.0)[0], x)
    middle = float(exact.sort().values[29:31].mean())
    leaving = exits(middle)
    engine = Engine(traced, leaving, backend=name, graphs=kept(tmp_path, name, leaving))
    answers = engine(x)
    early = torch.tensor([answer.exit == BLOCKS[0] for answer in answers])
    found = torch.stack([answer.probabilities.amax() for answer in answers])[early]
    assert 20 <= int(early.sum()) <= 40, "half of the scores lie above the threshold, but for rounding"
    assert bool((found >= middle).all())
    assert torch.allclose(found, exact[early], atol=0.05)
    assert len(found.unique()) > len(found) // 2, "scores are not rounded to a few steps"


@backends
def test_settings_of_the_same_caches_differ_in_thresholds_alone(name: str) -> None:
    leaving = exits(0.2)
    other = [EngineExit(leaving[0].block, leaving[0].cache, 0.7)]
    first, second = models(name, leaving, other)
    weights = [
        [each.raw_data for each in model.graph.initializer if each.name.startswith("lookup")]
        for model in (first, second)
    ]
    assert weights[0] and weights[0] == weights[1]


@backends
def test_exits_of_later_settings_are_quantised_too(name: str) -> None:
    backend = calibrated(name)
    early, late = exits(0.5)[0], exits(0.5, 0.5)[1]
    for leaving in ([early], [late], [early, late]):
        (model,) = backend.assembled(traced_network(), [leaving], "logits", convert=CONVERTED, cuts=BLOCKS)
        quantised = {
            node.name.partition("/")[0]
            for node in nodes(onnx.load_from_string(model).graph)
            if node.op_type == "QuantizeLinear"
        }
        assert quantised == {f"lookup_{index}" for index in range(len(leaving))}


def weights_of(graph: onnx.GraphProto) -> Iterator[np.ndarray]:
    yield from (
        numpy_helper.to_array(each) for each in graph.initializer if each.data_type == TensorProto.INT8
    )
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from weights_of(attribute.g)


@backends
def test_a_lookup_is_quantised_once_for_all_commands(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[int] = []
    plain = quantise_lookups.quantise_lookup

    def counted(model: onnx.ModelProto, hidden: np.ndarray) -> onnx.ModelProto:
        times.append(len(hidden))
        return plain(model, hidden)

    monkeypatch.setattr(quantise_lookups, "quantise_lookup", counted)

    def made(count: int) -> bytes:
        backend = get_backend(name, calibration=requests(count), kept=tmp_path)
        assert isinstance(backend, GraphBackend)
        (model,) = backend.assembled(traced_network(), [exits(0.5)], "logits", convert=CONVERTED, cuts=BLOCKS)
        return model

    first = made(40)
    assert made(40) == first and times == [40]
    made(20)
    other = not quantise_lookups.sums_are_exact()
    monkeypatch.setattr(quantise_lookups, "sums_are_exact", lambda: other)
    made(20)
    assert times == [40, 20, 20], "by other inputs, and for other processors, it is another one"


@pytest.mark.slow
@backends
def test_the_network_runs_once_for_all_lookups_at_a_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[set[str]] = []
    plain = quantise_lookups._hidden_outputs

    def noting(stages: GraphStages, inputs: torch.Tensor, blocks: Collection[str]) -> dict[str, torch.Tensor]:
        ran.append(set(blocks))
        return plain(stages, inputs, blocks)

    monkeypatch.setattr(quantise_lookups, "_hidden_outputs", noting)
    monkeypatch.setattr(quantise_lookups, "quantise_lookup", lambda model, hidden: model)
    backend = calibrated(name)
    first, second = exits(0.5, 0.5)
    other = EngineExit(first.block, learned_cache(1), 0.5)
    for leaving in ([first], [other], [other, second], [first, second]):
        list(backend.assembled(traced_network(), [leaving], "logits", convert=CONVERTED, cuts=BLOCKS))
    assert ran == [{first.block}, {second.block}]


@pytest.mark.slow
@backends
def test_a_lookup_made_for_processors_that_add_exactly_does_not_run_on_others(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without VNNI sums of 8-bit products overflow, so answers would not be those that were certified."""
    leaving = exits(0.5)
    for exact in (True, False):
        for module in ("integers", "quantise_lookups"):
            monkeypatch.setattr(f"gati.engine.graph.{module}.sums_are_exact", lambda exact=exact: exact)
        (tmp_path / str(exact)).mkdir()
        kept(tmp_path / str(exact), name, leaving)
        model = onnx.load(tmp_path / str(exact) / "exits")
        largest = max(int(np.abs(each.astype(int)).max()) for each in weights_of(model.graph) if each.size)
        assert largest == (127 if exact else 64)
    files = {each: (tmp_path / each / "exits", tmp_path / each / "base") for each in ("True", "False")}
    assert Engine(traced_network(), leaving, backend=name, graphs=files["False"])(requests(1))
    with pytest.raises(BackendError, match=r"exits was made on .*\(VNNI\), .*; compose again here"):
        Engine(traced_network(), leaving, backend=name, graphs=files["True"])
    assert Engine(traced_network(), backend=name, graphs=(files["True"][1],) * 2)(requests(1))
    monkeypatch.setattr("gati.engine.graph.integers.sums_are_exact", lambda: True)
    for graphs in files.values():
        assert Engine(traced_network(), leaving, backend=name, graphs=graphs)(requests(1))


@pytest.mark.parametrize(
    ("machine", "flags", "exact"),
    [
        ("x86_64", "fpu avx2 avx512f avx512_vnni", True),
        ("x86_64", "fpu avx2 avx_vnni", True),
        ("x86_64", "fpu avx2 avx512f", False),
        ("x86_64", None, False),
        ("aarch64", None, True),
    ],
)
def test_processors_tell_whether_they_add_exactly(
    tmp_path: Path, machine: str, flags: str | None, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    if flags is not None:
        info.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(integers, "_INFO", info)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert integers.sums_are_exact.__wrapped__() == exact


@backends
def test_without_calibration_only_networks_without_exits_are_made(name: str) -> None:
    with pytest.raises(BackendError, match=f"'{name}' has no stored quantised lookups .*gati compose again"):
        Engine(traced_network(), exits(0.5), backend=name)
    assert Engine(traced_network(), backend=name)(requests(1))[0].exit == "base"


@backends
def test_without_onnx_runtime_the_message_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "gati.engine.backends.base.find_spec", lambda name: None if name == "onnxruntime" else find_spec(name)
    )
    assert not BACKENDS[name].installed()
    with pytest.raises(BackendError, match=r"onnxruntime, not installed here: pip install"):
        get_backend(name)
