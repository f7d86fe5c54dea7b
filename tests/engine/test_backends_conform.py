"""What every backend promises, whatever it is: a new one in the registry goes through this as it stands."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from gati.engine.backends import BACKENDS, GraphBackend, get_backend
from gati.engine.engine import Engine
from gati.engine.exits import EngineExit
from gati.errors import DataError
from tests.engine.networks import BLOCKS, CLASSES, moved, traced_network
from tests.engine.test_graph_backends import exits, requests

SLOW = ("torch-compile",)  # compiles C++


def _here(name: str) -> bool:
    kind = BACKENDS[name]
    return kind.installed() and (torch.cuda.is_available() or "cpu" in kind.devices)


every_backend = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(
            name,
            marks=[
                pytest.mark.skipif(
                    not _here(name), reason=f"{name} is not installed or not for this machine"
                ),
                *([pytest.mark.slow] if name in SLOW else []),
            ],
        )
        for name in sorted(BACKENDS)
    ],
)


def engine_on(backend: str, leaving: list[EngineExit], folder: Path) -> Engine:
    """An engine; a backend that must be calibrated gets graphs made before, as `gati compose` keeps them."""
    kind, graphs = BACKENDS[backend], None
    if "cpu" not in kind.devices:
        return Engine(*moved("cuda", leaving), backend=backend, version="v7")
    if issubclass(kind, GraphBackend) and kind.calibrated:
        executes = get_backend(backend, calibration=requests(30))
        assert isinstance(executes, GraphBackend)
        graphs = folder / "exits.zip", folder / "base.zip"
        for path, chosen in zip(graphs, (leaving, []), strict=True):
            (model,) = executes.assembled(traced_network(), [chosen], "logits")
            path.write_bytes(model)
    return Engine(traced_network(), leaving, backend=backend, version="v7", graphs=graphs)


@pytest.mark.slow
@every_backend
def test_answers_come_in_order_and_do_not_depend_on_the_batch(backend: str, tmp_path: Path) -> None:
    x = requests(12)
    with engine_on(backend, exits(0.45, 0.4), tmp_path) as engine:
        together, alone = engine(x), [engine(row)[0] for row in x.split(1)]
        with pytest.raises(DataError, match="the network takes a tensor of shape"):
            engine(torch.zeros(1, 3, 9, 9))
        assert engine(x[:0]) == engine.base(x[:0]) == []
    assert len({answer.exit for answer in alone}) > 1
    for one, other in zip(together, alone, strict=True):
        assert (one.exit, one.class_index) == (other.exit, other.class_index)
        assert torch.allclose(one.probabilities, other.probabilities, atol=1e-5)
    for answer in alone:
        assert answer.exit in (*BLOCKS, "base") and answer.version == "v7"
        assert answer.probabilities.shape == (CLASSES,)
        assert float(answer.probabilities.sum()) == pytest.approx(1.0, abs=1e-3)
        assert answer.class_index == int(answer.probabilities.argmax())


@pytest.mark.slow
@every_backend
def test_a_miss_costs_no_accuracy(backend: str, tmp_path: Path) -> None:
    """To the bit where segments run one by one; a graph with exits may round otherwise than one without."""
    coarse = 0.03 if BACKENDS[backend].precision != "f32" else 1e-5
    within = coarse if issubclass(BACKENDS[backend], GraphBackend) else 0.0
    with engine_on(backend, exits(math.inf, math.inf), tmp_path) as engine:
        for row in requests(6).split(1):
            (answer,), (base,) = engine(row), engine.base(row)
            assert answer.exit == base.exit == "base"
            assert torch.allclose(answer.probabilities, base.probabilities, rtol=0.0, atol=within)


@pytest.mark.slow
@every_backend
def test_who_always_hits_leaves_at_the_first_exit(backend: str, tmp_path: Path) -> None:
    with engine_on(backend, exits(-1.0, -1.0), tmp_path) as engine:
        assert {answer.exit for answer in engine(requests(4))} == {BLOCKS[0]}
        assert {answer.exit for answer in engine.base(requests(2))} == {"base"}
