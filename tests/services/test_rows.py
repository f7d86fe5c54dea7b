"""Inputs of requests, as the network takes them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gati.errors import RequestError
from services.inference.rows import rows_of


def rows(array: Any, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Those of a network that takes arrays."""
    engine: Any = SimpleNamespace(
        preprocessing=SimpleNamespace(tensors=()),
        traced=SimpleNamespace(dtype=dtype),
        checked=lambda x: x,
    )
    return rows_of(engine, array)


@pytest.mark.parametrize("value", [1e39, -1e39, math.inf, math.nan])
def test_numbers_that_are_not_finite_in_float32_are_refused(value: float) -> None:
    """FP64 above its largest number became infinite in silence, and so did the answer's numbers."""
    with pytest.raises(RequestError, match="not finite in FP32; send numbers up to 3.4e38"):
        rows(np.array([[1.0, value]]))


def test_numbers_of_other_widths_are_taken_as_they_are() -> None:
    for given, dtype, taken in (
        (np.array([[3e38, 1e-300]]), torch.float32, [3e38, 0.0]),
        (np.array([[65504.0, -0.5]], dtype=np.float16), torch.float32, [65504.0, -0.5]),
        (np.array([[255, 7]], dtype=np.uint8), torch.int64, [255, 7]),
        (np.array([[2**63 - 1, -1]], dtype=np.int64), torch.int64, [2**63 - 1, -1]),
    ):
        [row] = rows(given, dtype)
        assert row.dtype == dtype and row.tolist() == [torch.tensor(taken, dtype=dtype).tolist()]
    with pytest.raises(RequestError, match="above the largest INT64"):
        rows(np.array([[2**63]], dtype=np.uint64), torch.int64)
