"""Where memory is short, a network gets fewer inputs at a time, and answers the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gati
from gati.evaluation import evaluate as evaluating
from gati.evaluation.bench import float32_classes
from gati.exploration import memory
from tests.engine.networks import network
from tests.engine.served import PREPROCESSING, images, make_served

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
    return float32_classes(module, PREPROCESSING(images(40)), torch.device("cpu"))


def certified(folder: Path) -> Any:
    np.savez(folder / "more.npz", images=images(40))
    return gati.certify(folder / "library", folder / "more.npz").certificate


@pytest.mark.parametrize("ask", [classes, certified])
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
    assert np.array_equal(few, plenty) if isinstance(few, np.ndarray) else few == plenty


def test_a_gpu_that_lacks_memory_gets_fewer(batches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    forward = nn.Linear.forward

    def small(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 12:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(layer, x)

    plenty = classes(Path())
    monkeypatch.setattr(nn.Linear, "forward", small)
    assert np.array_equal(classes(Path()), plenty)


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
