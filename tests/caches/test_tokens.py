"""Predictors of tokens: padding never changes an answer, however much of it there is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.caches import TOKEN_VARIANTS, build_predictor, token_students
from gati.errors import VariantError
from gati.model.inputs import TensorInputs

ALL = (*TOKEN_VARIANTS, "tokens-first(32)")
CHANNELS, CLASSES = 8, 5


@pytest.mark.parametrize("variant", ALL)
@settings(deadline=None, max_examples=25)
@given(length=st.integers(1, 9), padding=st.integers(0, 12), seed=st.integers(0, 99))
def test_padding_changes_nothing(variant: str, length: int, padding: int, seed: int) -> None:
    torch.manual_seed(seed)
    predictor = build_predictor(variant, (length, CHANNELS), CLASSES).eval()
    sentences = torch.randn(3, length, CHANNELS)
    longer = torch.cat((sentences, torch.zeros(3, padding, CHANNELS)), 1)
    expected = predictor(sentences)
    assert expected.shape == (3, CLASSES)
    torch.testing.assert_close(predictor(longer), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", TOKEN_VARIANTS)
def test_every_token_counts(variant: str) -> None:
    torch.manual_seed(0)
    predictor = build_predictor(variant, (6, CHANNELS), CLASSES).eval()
    x = torch.randn(1, 6, CHANNELS)
    changed = x.clone()
    changed[0, 5] += 3.0
    assert not torch.allclose(predictor(x), predictor(changed), atol=1e-4)


@pytest.mark.parametrize("variant", ALL)
def test_a_sequence_without_tokens_is_answered(variant: str) -> None:
    predictor = build_predictor(variant, (4, CHANNELS), CLASSES).eval()
    assert torch.isfinite(predictor(torch.zeros(2, 4, CHANNELS))).all()


@pytest.mark.parametrize("variant", ALL)
def test_maps_are_not_tokens(variant: str) -> None:
    with pytest.raises(VariantError, match=r"it reads tokens \(length, channels\)"):
        build_predictor(variant, (8, 4, 4), CLASSES)


@settings(deadline=None, max_examples=25)
@given(length=st.integers(1, 9), padding=st.integers(0, 12), seed=st.integers(0, 99))
def test_a_student_reads_ids_where_the_mask_says_so(length: int, padding: int, seed: int) -> None:
    torch.manual_seed(seed)
    whole = length + padding
    student = build_predictor("tokens-student(8,30,1,0)", (2, whole), CLASSES).eval()
    ids = torch.randint(0, 30, (3, whole))
    mask = (torch.arange(whole) < length).long().expand(3, whole)
    expected = student(torch.stack((mask, ids), 1))
    torch.testing.assert_close(student(torch.stack((mask, ids * mask), 1).float()), expected)
    alone = build_predictor("tokens-student(8,30,1,0)", (2, length), CLASSES).eval()
    alone.load_state_dict(student.state_dict())
    shorter = alone(torch.stack((mask, ids), 1)[:, :, :length])
    torch.testing.assert_close(shorter, expected, rtol=1e-4, atol=1e-5)


def test_which_student_fits_follows_from_the_arrays() -> None:
    ids = np.arange(12).reshape(3, 4)
    both = TensorInputs.of({"attention_mask": np.ones((3, 4), bool), "input_ids": ids}, "data")
    read = TensorInputs(tuple(replace(part, rows=30) if part.high > 1 else part for part in both.parts))
    assert token_students(read) == ("tokens-student(64,30,1,0)",)
    assert token_students(both) == ()  # no embedding reads them
    assert token_students(TensorInputs.of({"inputs": ids * 0.5}, "data")) == ()
    alone = TensorInputs((replace(both.parts[1], rows=30),))
    assert token_students(alone) == ("tokens-student(64,30,0,0)",)
    assert build_predictor("tokens-student(64,30,0,0)", (4,), 5)(torch.tensor(ids)).shape == (3, 5)
