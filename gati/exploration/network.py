"""The base model of a cache library, loaded and checked."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gati.errors import BackendError, LibraryError
from gati.exploration.library import Library, NetworkProbe
from gati.model.lengths import with_lengths
from gati.model.load import load_model
from gati.model.packed import packed
from gati.model.preprocess import Preprocessing
from gati.model.segments import TracedModel, trace

_EXAMPLE_SEED = 0
_PROBED = 16  # classes
# Engines and devices round differently, by less than this share of the largest score.
_ROUNDING = {"cpu": 1e-2, "cuda": 5e-2}


class Network(NamedTuple):
    """A base model as the user's code built it, and the same ready to be cut; they share their weights."""

    module: nn.Module
    traced: TracedModel


def load_network(library: Library, device: torch.device) -> Network:
    """Load the base model on `device`; the model's own code runs.

    **Raises:** `LibraryError` for other weights than the library was made from, and for other code that
    computes something else with them; and as `load_model` does.
    """
    manifest = library.manifest
    loaded = load_model(manifest.model_source, manifest.checkpoint_path)
    if loaded.checkpoint_sha256 != manifest.checkpoint_sha256:
        raise LibraryError(
            f"the library in {library.directory} was made from weights {manifest.checkpoint_sha256[:12]}, "
            f"but {manifest.checkpoint_path or manifest.model_source} now has "
            f"{loaded.checkpoint_sha256[:12]}; restore the old checkpoint or run gati explore again"
        )
    preprocessing = library.preprocessing
    tensors = preprocessing.tensors
    module = loaded.module if tensors is None else packed(loaded.module, tensors)
    module = module.to(device)
    example = example_of(preprocessing, manifest.input_shape).to(device)
    names = [block.name for block in manifest.blocks]
    traced = trace(module, example, names)
    if manifest.probe is not None and _computes_otherwise(manifest.probe, probe_of(traced, example), device):
        raise LibraryError(
            f"{manifest.model_source} computes something else than when the library in {library.directory} "
            "was made, although its weights are the same: caches and certificates are not about it; restore "
            "its code or run gati explore again"
        )
    return Network(module, with_lengths(traced, module, example, preprocessing))


def probe_of(traced: TracedModel, example: Tensor) -> NetworkProbe:
    """What a network answers to the first input of `example_of`."""
    x = example[:1]
    with torch.inference_mode():
        scores = traced.base(x.to(traced.device, copy=True))[0, :_PROBED]
    identity = hashlib.sha256(x.cpu().numpy().tobytes()).hexdigest()
    return NetworkProbe(input_sha256=identity, scores=tuple(scores.double().cpu().nan_to_num().tolist()))


def _computes_otherwise(known: NetworkProbe, found: NetworkProbe, device: torch.device) -> bool:
    """False also where the input is another, made by another version of NumPy."""
    if known.input_sha256 != found.input_sha256:
        return False
    if len(known.scores) != len(found.scores):
        return True
    before, now = np.array(known.scores), np.array(found.scores)
    return bool(np.abs(before - now).max() > _ROUNDING[device.type] * max(1.0, np.abs(before).max()))


def example_of(preprocessing: Preprocessing, input_shape: tuple[int, ...]) -> Tensor:
    """Two inputs of noise, or of random values that the network's arrays may have; the same everywhere."""
    if preprocessing.tensors is not None:
        return preprocessing.tensors.example()
    noise = np.random.RandomState(_EXAMPLE_SEED).standard_normal((2, *input_shape))  # the same in any version
    return torch.from_numpy(noise.astype(np.float32))


def traced_network(library: Library, devices: Collection[str] = ("cpu",)) -> TracedModel:
    """Load the base model and make it ready to be cut, on the device that the library was measured on.

    Raises BackendError for a library measured on another kind of device than `devices`, and as
    `load_network` does.
    """
    device = torch.device(library.manifest.profile.device)
    if device.type not in devices and device.type == "cpu":
        raise BackendError("this library was measured on the cpu; run gati explore again with --device cuda")
    if device.type not in devices:
        raise BackendError(
            "this library was measured on a GPU, that backend runs on the cpu; use torch or cuda-graph"
        )
    return load_network(library, device).traced
