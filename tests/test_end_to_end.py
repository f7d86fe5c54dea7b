"""A network that nobody prepared for Gati goes all the way through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

import gati
from gati.cli import run
from gati.exploration import stages


@pytest.mark.slow
def test_a_torchvision_network_with_random_weights_goes_all_the_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random weights answer nearly always the same, so nothing is asked of the gain."""
    monkeypatch.setattr(stages, "LEAST_EXIT_STEPS", 4)  # so there is nothing to learn, either
    digits = (load_digits().images[:240] * 15).astype(np.uint8)  # [240, 8, 8]
    pictures = digits.repeat(8, 1).repeat(8, 2)[..., None].repeat(3, 3)  # [240, 64, 64, 3]
    np.savez(tmp_path / "val.npz", images=pictures[:160])
    np.savez(tmp_path / "test.npz", images=pictures[160:])
    library = str(tmp_path / "library")

    explored = ["explore", "torchvision:resnet18", "--data", str(tmp_path / "val.npz"), "--out", library]
    assert run([*explored, "--resize", "32", "--variants", "grid(64)", "--epochs", "1"]) == 0
    assert "weights of torchvision:resnet18 are random" in capsys.readouterr().err
    assert [block.name for block in gati.Library.open(library).manifest.blocks] == [
        f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1)
    ]

    assert run(["compose", library, "--accuracy", "0.9", "--backend", "torch"]) == 0
    assert "gati evaluate" in capsys.readouterr().out

    report = tmp_path / "evaluation.json"
    assert run(["evaluate", library, "--data", str(tmp_path / "test.npz"), "--json", str(report)]) == 0
    measured = json.loads(report.read_text())
    assert measured["n"] == 80
    assert (measured["accuracy"], measured["base_accuracy"]) == (None, None)  # there are no labels
    assert measured["agreement"] >= 0.8
    assert set(measured["latency_ms"]) == {"mean", "p50", "p90", "p99"}
