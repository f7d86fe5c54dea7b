"""A cascade of two networks: who answers, and how its threshold is set."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path

import pytest

import gati
from gati.engine.backends import BACKENDS
from gati.engine.engine import Engine
from gati.evaluation.cascade import SMALLER, Cascade
from tests.conftest import Demo
from tests.engine.networks import network, traced_network
from tests.engine.test_graph_backends import requests


@pytest.mark.parametrize(("threshold", "exit"), [(0.0, SMALLER), (2.0, "base")])
def test_the_smaller_network_answers_where_it_is_sure_enough(threshold: float, exit: str) -> None:
    larger, smaller = Engine(traced_network(network(seed=1))), Engine(traced_network(network(seed=2)))
    cascade = Cascade("cascade torch", larger, early=False, smaller=smaller, threshold=threshold)
    judge = smaller if exit == SMALLER else larger
    for x in requests(5).split(1):
        answer = cascade.answer(x)
        assert answer.exit == exit
        assert answer.class_index == judge.base(x)[0].class_index


@pytest.mark.slow
def test_a_network_before_itself_answers_everything_and_always_agrees(
    demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("gati.evaluation.bench"), "BACKENDS", {"torch": BACKENDS["torch"]})
    library = tmp_path / "library"
    shutil.copytree(demo.library, library)
    result = gati.bench(
        library, demo.folder / "test.npz", limit=40, repetitions=1, seconds=0.05, cascade=demo.library
    )
    row = next(row for row in result.rows if row.name == "cascade torch")
    assert (row.hit_rate, row.agreement, row.kind) == (1.0, 1.0, "peer")
    base = next(row for row in result.rows if row.name == "base torch")
    assert row.memory_bytes == 2 * base.memory_bytes
    assert "set on the select split" in row.detail
    assert "8" not in row.throughput
    gati.report(library)
    assert "cascade torch" in (library / "report.html").read_text(encoding="utf-8")


def test_a_library_that_does_not_fit_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    from tests.engine.served import images, make_served

    monkeypatch.setattr(import_module("gati.evaluation.bench"), "BACKENDS", {"torch": BACKENDS["torch"]})
    library = make_served(tmp_path)
    np.savez(tmp_path / "test.npz", images=images(6))
    result = gati.bench(library, tmp_path / "test.npz", repetitions=1, seconds=0, cascade=library)
    reasons = {left.name: left.reason for left in result.left_out}
    assert "does not say where the held-out inputs are" in reasons["cascade torch"]
