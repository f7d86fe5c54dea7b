"""`explore` says so if training taught the caches nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gati.exploration.explore import explore
from gati.exploration.learned import Usual, told_if_nothing, usual_answer
from gati.exploration.progress import SilentProgress
from gati.types import Trial, TrialId
from tests.exploration.networks import Net, digit_files
from tests.exploration.quick import few_steps

TRIAL = Trial(
    TrialId("input--student-8"),
    0,
    "input",
    "student(8)",
    "trained",
    images_seen=5_000,
    agreement=0.11,
    hit_rate_at_97=0.0,
    hit_rate_at_99=0.0,
)
USUAL = Usual(0.12, 1_000)


class Lottery(Net):
    """Its answer is a number that all pixels decide alike: no cache learns it in a moment."""

    def forward(self, x: Tensor) -> Tensor:
        levels = (x * 255).round().long().flatten(1)
        drawn = (levels * (1 + torch.arange(levels.shape[1]) ** 2)).sum(1) % 9973 % 10
        return super().forward(x) * 1e-3 + nn.functional.one_hot(drawn, 10)


class Notes(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_the_usual_answer_is_counted_on_the_select_split_only() -> None:
    classes = np.array([1, 1, 2, 0, 0, 0, 0], dtype=np.int64)
    split = np.array([0, 0, 0, 1, 1, 1, 1], dtype=np.uint8)
    assert usual_answer(classes, split) == Usual(pytest.approx(2 / 3), 3)


def test_what_agrees_as_often_as_the_most_frequent_answer_has_learned_nothing() -> None:
    assert USUAL.is_all(TRIAL)
    assert USUAL.is_all(replace(TRIAL, agreement=0.14))  # by chance
    assert not USUAL.is_all(replace(TRIAL, agreement=0.2))


def test_few_inputs_tell_nothing() -> None:
    assert not Usual(0.5, 30).is_all(replace(TRIAL, agreement=0.5))
    assert Usual(0.5, 300).is_all(replace(TRIAL, agreement=0.5))


def test_where_nearly_all_inputs_have_one_answer_naming_it_is_useful() -> None:
    assert not Usual(0.98, 1_000).is_all(replace(TRIAL, agreement=0.98, hit_rate_at_97=1.0))


def test_what_was_not_trained_cannot_have_failed_to_learn() -> None:
    companion = replace(TRIAL, images_seen=0)
    skipped = replace(TRIAL, status="skipped", agreement=None)
    assert not USUAL.is_all(companion) and not USUAL.is_all(skipped)
    assert told_if_nothing([companion, skipped], USUAL, 100) == ""


def test_one_cache_that_learned_is_enough() -> None:
    assert told_if_nothing([TRIAL, replace(TRIAL, agreement=0.9)], USUAL, 1_000) == ""
    told = told_if_nothing([TRIAL, replace(TRIAL, status="failed", agreement=None)], USUAL, 1_000)
    assert "taught the caches nothing: after 5 passes" in told and "(12 %)" in told


@given(st.integers(1, 2_000), st.floats(0.1, 1.0), st.floats(0.0, 1.0))
def test_more_agreement_is_never_less_learned(inputs: int, share: float, agreement: float) -> None:
    usual = Usual(share, inputs)
    if not usual.is_all(replace(TRIAL, agreement=agreement)):
        assert not usual.is_all(replace(TRIAL, agreement=min(1.0, agreement + 0.1)))


@pytest.mark.slow
@pytest.mark.parametrize(("network", "teaches"), [("Lottery", False), ("Net", True)])
def test_explore_tells_it(
    network: str, teaches: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_steps(monkeypatch)
    said = Notes()
    explore(
        f"{__file__}:{network}",
        **digit_files(tmp_path),
        out=tmp_path / "out",
        variants=["grid(16)", "student(8)"],
        blocks="blocks.[12]",
        epochs=2,
        progress=said,
    )
    text = "\n".join(said.notes)
    assert ("taught the caches nothing" in text) is not teaches
    if not teaches:
        assert "not clearly better than always giving" in text
