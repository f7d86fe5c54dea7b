"""Learned caches as safetensors files: weights, and the architecture in the file's metadata."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from gati.caches.cache import LearnedCache
from gati.errors import LibraryError, first_line
from gati.files import atomic_write
from gati.variants import FAMILIES, as_called_now

__all__ = ["load_cache", "save_cache"]


def save_cache(path: Path | str, cache: LearnedCache, metadata: dict[str, str] | None = None) -> None:
    """Write a cache atomically; `metadata` (text only) is kept beside the architecture."""
    architecture = {
        "variant": cache.variant,
        "hidden_shape": list(cache.hidden_shape),
        "classes": cache.classes,
        "selector": cache.selector_name,
        "families": FAMILIES,
    }
    notes = {**(metadata or {}), "gati": json.dumps(architecture)}
    tensors = {name: tensor.contiguous() for name, tensor in cache.state_dict().items()}
    atomic_write(Path(path), lambda temporary: save_file(tensors, temporary, notes))


def load_cache(path: Path | str) -> LearnedCache:
    """Read a cache that `save_cache` wrote, on the CPU, in eval mode.

    **Raises:** `LibraryError` if the file is missing, damaged, or does not fit its architecture;
    `VariantError` if its family is not registered here.
    """
    try:
        with safe_open(path, framework="pt") as handle:
            metadata = handle.metadata() or {}
        architecture = json.loads(metadata["gati"])
        cache = LearnedCache(
            as_called_now(architecture["variant"], architecture.get("families", 1)),
            tuple(architecture["hidden_shape"]),
            architecture["classes"],
            architecture["selector"],
        )
        cache.load_state_dict(load_file(path))
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        message = f"{path} is not a learned cache ({first_line(error)}): run gati explore again"
        raise LibraryError(message) from error
    return cache
