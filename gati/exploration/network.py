"""The base model of a cache library, loaded and checked."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import nn

from gati.errors import BackendError, LibraryError
from gati.exploration.library import Library
from gati.model.lengths import with_lengths
from gati.model.load import load_model
from gati.model.packed import packed
from gati.model.segments import TracedModel, trace

__all__ = ["Network", "load_network", "traced_network"]

_EXAMPLE_SEED = 0


class Network(NamedTuple):
    """A base model as the user's code built it, and the same ready to be cut; they share their weights."""

    module: nn.Module
    traced: TracedModel


def load_network(library: Library, device: torch.device) -> Network:
    """Load the base model on `device`; the model's own code runs.

    **Raises:** `LibraryError` for other weights than the library was made from, and as `load_model` does.
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
    if tensors is None:
        module = loaded.module.to(device)
        generator = torch.Generator().manual_seed(_EXAMPLE_SEED)
        example = torch.randn(2, *manifest.input_shape, generator=generator).to(device)
    else:
        module = packed(loaded.module, tensors).to(device)
        example = tensors.example().to(device)
    names = [block.name for block in manifest.blocks]
    return Network(module, with_lengths(trace(module, example, names), module, example, preprocessing))


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
