"""Where memory is short, a network gets fewer inputs at a time, and answers the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gati
from gati.composition.batches import in_fitting_batches
from gati.composition.further import Further
from gati.engine.engine import Engine
from gati.evaluation import cascade as cascading
from gati.evaluation import evaluate as evaluating
from gati.evaluation import timing
from gati.evaluation.bench import float32_classes
from gati.evaluation.cascade import build_cascade
from gati.evaluation.evaluate import evaluate_engine
from gati.exploration import memory
from gati.exploration.library import SELECT, BaseOutcomes, Library
from gati.model.data import load_data
from gati.model.identity import CopyCounts
from gati.model.sequence import Data
from gati.types import Trial, TrialId
from tests.engine.clocks import MadeUp
from tests.engine.networks import BLOCKS, network, traced_network
from tests.engine.served import PREPROCESSING, images, make_served
from tests.evaluation.test_disturbed_figures import Clocked

NEED = 2**18  # bytes of a few inputs


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many inputs the first layer of a network got, each time that one was asked for its answers."""
    found: list[int] = []
    forward = nn.Conv2d.forward

    def counted(layer: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
        if layer.in_channels == 1:
            found.append(len(x))
        return forward(layer, x)

    monkeypatch.setattr(nn.Conv2d, "forward", counted)
    return found


def classes(folder: Path) -> Any:
    module = network(seed=5)
    return float32_classes(module, more(folder), torch.device("cpu"))


def more(folder: Path) -> Data:
    np.savez(folder / "more.npz", images=images(40))
    return load_data(folder / "more.npz", PREPROCESSING, what="further inputs")


def certified(folder: Path) -> Any:
    more(folder)
    return gati.certify(folder / "library", folder / "more.npz").certificate


def further(folder: Path) -> Any:
    """What base model and cache answer to further inputs of `gati compose`, in the order of the inputs."""
    library = Library(folder / "library")
    library.write_trials([Trial(TrialId("trial-0"), 0, BLOCKS[0], "pool-linear(64)", "trained")], [])
    inputs = more(folder)
    asked = Further(
        inputs=inputs, copies=CopyCounts.once(40), data="more", identity="more", identities=inputs.identities
    )
    base_class = asked.answer(Library.open(library.directory), [TrialId("trial-0")])
    found = asked.outcomes[TrialId("trial-0")]
    return np.stack([base_class, found.predicted, found.score])


@pytest.mark.parametrize("ask", [classes, certified, further])
def test_fewer_inputs_are_answered_at_a_time(
    tmp_path: Path, batches: list[int], monkeypatch: pytest.MonkeyPatch, ask: Callable[[Path], Any]
) -> None:
    make_served(tmp_path)
    batches.clear()
    plenty = ask(tmp_path)
    assert max(batches) == 40
    batches.clear()
    monkeypatch.setattr(memory, "available_bytes", lambda: NEED)
    few = ask(tmp_path)
    assert max(batches) < 40
    assert np.allclose(few, plenty, atol=1e-5) if isinstance(few, np.ndarray) else few == plenty


def test_a_gpu_that_lacks_memory_gets_fewer(
    tmp_path: Path, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = nn.Linear.forward

    def small(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 12:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(layer, x)

    plenty = classes(tmp_path)
    monkeypatch.setattr(nn.Linear, "forward", small)
    assert np.array_equal(classes(tmp_path), plenty)


def test_a_cascade_has_the_same_threshold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It depends on the order of the answers: all but the nine that it is least sure of agree."""
    library, engine = Library(make_served(tmp_path)), Engine(traced_network(network(seed=5)))
    outputs = network(seed=5)(PREPROCESSING(images(40)))
    base_class, split = outputs.argmax(1).numpy(), np.full(40, SELECT, dtype=np.uint8)
    probability = outputs.softmax(1).amax(1)
    base_class[probability.argsort()[:9]] += 1
    library.write_base_outcomes(BaseOutcomes(base_class, base_class, split))
    data, taken = more(tmp_path), []
    of_data = data.images
    monkeypatch.setattr(data, "images", lambda rows: taken.append(len(rows)) or of_data(rows))
    monkeypatch.setattr(cascading, "held_out", lambda _: (data, split))
    monkeypatch.setattr(cascading, "in_fitting_batches", partial(in_fitting_batches, most=7))
    found = build_cascade(library, library, engine, engine, 0.99)
    assert found.threshold == pytest.approx(float(probability.sort().values[9]), abs=1e-5)
    assert taken == [1, 7, 7, 7, 7, 7, 5], "the first shows how much memory an input takes"


def test_evaluate_keeps_few_large_inputs_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = make_served(tmp_path)
    np.savez(tmp_path / "test.npz", images=images(30))
    whole = gati.evaluate(library, tmp_path / "test.npz")
    monkeypatch.setattr(evaluating, "HELD_BYTES", 7 * PREPROCESSING(images(1)).nbytes)
    taken: list[int] = []
    monkeypatch.setattr(
        evaluating,
        "check_base_outputs",
        lambda outputs: taken.append(len(outputs)) or outputs,
    )
    found = gati.evaluate(library, tmp_path / "test.npz")
    assert taken == [7, 7, 7, 7, 2]
    assert (found.n, found.agreement, found.exits) == (whole.n, whole.agreement, whole.exits)


class Listening(Clocked):
    """Notes who answers each request."""

    asked_in_order = ""

    def _pass(self, who: str, times: Callable[[int], float]) -> None:
        self.asked_in_order += who[0]
        super()._pass(who, times)


@pytest.mark.parametrize("held", [7, 64], ids=["one turn a chunk", "all in one chunk"])
def test_network_and_caches_take_the_first_turn_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    """Also for large inputs, of which memory holds a single turn: who comes second finds warm caches."""
    monkeypatch.setattr(evaluating, "HELD_BYTES", held * PREPROCESSING(images(1)).nbytes)
    monkeypatch.setattr(evaluating, "IN_A_ROW", 7)
    monkeypatch.setattr(timing, "_WAKING_REQUESTS", 0)
    machine = MadeUp()
    engine = Listening(machine, lambda number: 1.0, lambda number: 2.0)
    evaluate_engine(engine, more(tmp_path).subset(range(28)), machine=machine)
    turns = 2 * (7 * "b" + 7 * "g" + 7 * "g" + 7 * "b")
    assert engine.asked_in_order.endswith(turns)
