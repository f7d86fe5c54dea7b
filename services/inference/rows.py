"""The inputs of a request, as the network takes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gati.engine.engine import Engine
from gati.errors import RequestError
from gati.model.preprocess import Preprocessing
from gati.model.recordings import decode_recordings
from services.wire.tensors import LONGEST_TEXT, datatype_of, recordings_of, texts_of

LARGE_INPUT_BYTES = 128 * 1024  # from this size on, preprocessing runs in a separate thread


def tokens_of(preprocessing: Preprocessing, tensor: Any) -> NDArray[Any]:
    """The packed tokens of texts, int64 [n, ...]. Raises `RequestError`, `DataError`."""
    texts = texts_of(tensor)
    longest = max(map(len, texts), default=0)
    if longest > LONGEST_TEXT:
        raise RequestError(f"a text of {longest} characters; send at most {LONGEST_TEXT}")
    return preprocessing.from_texts(texts).numpy()


def spectrograms_of(preprocessing: Preprocessing, tensor: Any) -> NDArray[Any]:
    """The spectrograms of recordings, float32 [n, 1, mels, frames]. Raises as `tokens_of`."""
    return decode_recordings(recordings_of(tensor), preprocessing).numpy()


def _as_taken(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """An array converted to the network's dtype, if it fits. Raises `RequestError`."""
    whole = dtype == torch.int64
    if array.dtype.kind not in ("biu" if whole else "f"):
        wanted = "INT64 or other whole numbers" if whole else "FP32"
        raise RequestError(f"the input has datatype {datatype_of(array)}; the network takes {wanted}")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise RequestError("the input has numbers above the largest INT64; send smaller ones")
    with np.errstate(over="ignore"):  # of FP64, which is refused below
        taken = array.astype(np.int64 if whole else np.float32, copy=False)
    if not whole:
        _check_finite(taken)
    return torch.from_numpy(taken)


def _check_finite(array: NDArray[Any]) -> None:
    if not np.isfinite(array).all():
        raise RequestError("the input has values that are not finite in FP32; send numbers up to 3.4e38")


def rows_of(engine: Engine, array: NDArray[Any]) -> list[Tensor]:
    """The inputs [1, ...] of a request as the network takes them. Raises `RequestError`, `DataError`."""
    if engine.preprocessing.tensors is not None:
        x = _as_taken(array, engine.traced.dtype)
    elif array.dtype == np.uint8:
        if array.nbytes > LARGE_INPUT_BYTES:  # one by one: intermediate results of one image at a time
            images = (array[row : row + 1] for row in range(len(array)))
            return [engine.checked(engine.preprocessing(image)) for image in images]
        x = engine.preprocessing(array)
    elif array.dtype == np.float32:
        _check_finite(array)
        x = torch.from_numpy(array)
    else:
        raise RequestError(
            f"the input has datatype {datatype_of(array)}; send FP32 as the network takes it, or UINT8 images"
        )
    return [engine.checked(x[row : row + 1]) for row in range(x.shape[0])]
