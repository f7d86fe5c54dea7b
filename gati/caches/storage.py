"""Storage of learned caches as safetensors files: weights, with the architecture in the metadata.

A companion's architecture is its program, stored as an additional byte tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gati.caches.cache import LearnedCache
from gati.caches.companions import Companion, Reading
from gati.errors import LibraryError, ModelError, first_line
from gati.files import atomic_write
from gati.variants import FAMILIES, as_called_now

_PROGRAM = "companion.program"


def separate_weights(module: nn.Module) -> dict[str, Tensor]:
    """Copies of a module's weights on the CPU that share no memory, as safetensors requires."""
    return {
        name: tensor.cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in module.state_dict().items()
    }


def save_cache(path: Path | str, cache: LearnedCache, metadata: dict[str, str] | None = None) -> None:
    """Write a cache atomically; `metadata` (strings only) is stored with the architecture."""
    architecture = {
        "variant": cache.variant,
        "hidden_shape": list(cache.hidden_shape),
        "classes": cache.classes,
        "selector": cache.selector_name,
        "families": FAMILIES,
    }
    tensors = separate_weights(cache)
    if isinstance(cache.predictor, Companion):
        architecture["companion"] = cache.predictor.reading.to_json()
        tensors[_PROGRAM] = torch.frombuffer(bytearray(cache.predictor.program), dtype=torch.uint8)
    notes = {**(metadata or {}), "gati": json.dumps(architecture)}
    atomic_write(Path(path), lambda temporary: save_file(tensors, temporary, notes))


def load_cache(path: Path | str) -> LearnedCache:
    """Read a cache written by `save_cache`, on the CPU, in eval mode.

    **Raises:** `LibraryError` if the file is missing, damaged, or does not fit its architecture;
    `VariantError` if its family is not registered here.
    """
    try:
        with safe_open(path, framework="pt") as handle:
            metadata = handle.metadata() or {}
        architecture = json.loads(metadata["gati"])
        tensors = load_file(path)
        # whatever the program's random numbers, default device and default dtype are
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            cache = LearnedCache(
                as_called_now(architecture["variant"], architecture.get("families", 1)),
                tuple(architecture["hidden_shape"]),
                architecture["classes"],
                architecture["selector"],
                predictor=_companion(architecture, tensors, Path(path)),
            )
        made_here = cache.selector if isinstance(cache.predictor, Companion) else cache
        made_here.float()  # a companion has the precisions of its program
        cache.load_state_dict(tensors)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, RuntimeError, ModelError) as error:
        message = (
            f"{path} is not a learned cache ({first_line(error)}): restore it, or its predictor's code if "
            "that has changed, or run gati explore again with another --out"
        )
        raise LibraryError(message) from error
    return cache


def _companion(architecture: Mapping[str, Any], tensors: dict[str, Tensor], path: Path) -> Companion | None:
    """Return the file's companion with zero weights, or None; removes its program from `tensors`."""
    if "companion" not in architecture:
        return None
    program = tensors.pop(_PROGRAM).numpy().tobytes()
    return Companion(program, Reading.from_json(architecture["companion"]), path)
