"""From a cache library and a composition to an engine that serves it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from gati.caches import load_cache
from gati.compose.composition import Composition, Exit
from gati.compose.engines import graph_files
from gati.errors import BackendError, CompositionError, LibraryError
from gati.explore.library import Library
from gati.model.load import LoadedModel, load_model
from gati.model.preprocess import Preprocessing
from gati.model.segments import TracedModel, trace
from gati.runtime.engine import Engine
from gati.runtime.exits import EngineExit
from gati.runtime.inspect import example_inputs
from gati.types import OutputsKind

__all__ = [
    "OpenedModel",
    "Served",
    "load",
    "load_base",
    "open_model",
    "open_plain_model",
    "open_served",
    "parse_device",
]

_EXAMPLE_SEED = 0


@dataclass(frozen=True)
class Served:
    """An engine with what it was made from; `module` is the base model as the user's code built it."""

    engine: Engine
    module: nn.Module
    library: Library
    composition: Composition


@dataclass(frozen=True)
class OpenedModel:
    """A base model from which engines are made: they share its weights. `library` None has no caches."""

    library: Library | None
    module: nn.Module
    traced: TracedModel
    checkpoint_sha256: str
    preprocessing: Preprocessing
    class_names: Sequence[str] | None = None
    outputs_kind: OutputsKind = "logits"

    def engine(self, composition: Composition, caches: Path | None = None) -> Engine:
        """An engine for a composition of this model.

        `caches` is the folder with the weights of its caches, the library's own if None.

        **Raises:** `CompositionError` for a composition of another checkpoint, `LibraryError` for a cache
        that is missing or does not fit, `BackendError`.
        """
        library = self.library
        if library is None:
            raise CompositionError("a plain model has no caches; run gati explore to make a cache library")
        if composition.checkpoint_sha256 != self.checkpoint_sha256:
            raise CompositionError(
                f"composition '{composition.name}' was made for checkpoint "
                f"{composition.checkpoint_sha256[:12]}, the library in {library.directory} is of "
                f"{self.checkpoint_sha256[:12]}; run gati compose again"
            )
        folder = library.directory / "caches" if caches is None else caches
        settings = [(leaving.trial_id, leaving.threshold) for leaving in composition.exits]
        return self._engine(
            [self._exit(leaving, folder) for leaving in composition.exits],
            composition.backend,
            f"{composition.name}@{self.checkpoint_sha256[:12]}",
            graph_files(library, settings, composition.backend) if caches is None else None,
        )

    def base(self, backend: str = "torch") -> Engine:
        """An engine without caches."""
        return self._engine([], backend, f"base@{self.checkpoint_sha256[:12]}", None)

    def _engine(
        self, exits: list[EngineExit], backend: str, version: str, graphs: tuple[Path, Path] | None
    ) -> Engine:
        return Engine(
            self.traced,
            exits,
            outputs_kind=self.outputs_kind,
            backend=backend,
            version=version,
            class_names=self.class_names,
            preprocessing=self.preprocessing,
            graphs=graphs,
        )

    def _exit(self, leaving: Exit, caches: Path) -> EngineExit:
        cache = load_cache(caches / f"{leaving.trial_id}.safetensors")
        expected = self.traced.hidden_shapes.get(leaving.block)
        if expected != tuple(cache.hidden_shape):
            raise LibraryError(
                f"cache {leaving.trial_id} takes {list(cache.hidden_shape)}, "
                f"block '{leaving.block}' gives {expected and list(expected)}; run gati explore again"
            )
        return EngineExit(
            leaving.block,
            cache.to(self.traced.device),
            leaving.threshold,
            leaving.placement,
            leaving.variant,
            cache.memory_bytes,
        )


def load(
    directory: str | Path,
    *,
    composition: str = "default",
    device: str = "cpu",
    threads: int | None = None,
) -> Engine:
    """Load the base model and the composed caches of a cache library as an engine.

    `threads` sets how many threads torch computes with, for the whole process; None leaves it.
    The model's own code runs (its source is named in the manifest), its checkpoint is checked by sha256.

    Raises:
        LibraryError: no library, a newer one, or one made from another checkpoint.
        CompositionError: no composition of that name, or one for another checkpoint.
        BackendError: unknown or unavailable device or backend.
    """
    return open_served(directory, composition=composition, device=device, threads=threads).engine


def load_base(directory: str | Path, *, device: str = "cpu", threads: int | None = None) -> Engine:
    """Load the base model of a cache library as an engine without caches, on backend `torch`.

    **Raises:** `LibraryError` and `BackendError` as `load` does.
    """
    return open_model(directory, device=device, threads=threads).base()


def open_served(
    directory: str | Path,
    *,
    composition: str = "default",
    device: str = "cpu",
    threads: int | None = None,
) -> Served:
    """As `load`, with the module, the library and the composition beside the engine."""
    library = Library.open(directory)
    chosen = Composition.load(library.composition_path(composition))
    model = open_model(directory, device=device, threads=threads)
    return Served(model.engine(chosen), model.module, library, chosen)


def open_model(
    directory: str | Path, *, device: str = "cpu", threads: int | None = None
) -> OpenedModel:
    """Load the base model of a cache library, to make engines from. Raises as `load` does."""
    target = parse_device(device)
    _set_threads(threads)
    library = Library.open(directory)
    manifest = library.manifest
    module = _load_base(library).module.to(target)
    blocks = [block.name for block in manifest.blocks]
    return OpenedModel(
        library,
        module,
        trace(module, _example(manifest.input_shape, target), blocks),
        manifest.checkpoint_sha256,
        Preprocessing.from_json(manifest.preprocessing),
        manifest.class_names,
        manifest.outputs_kind,
    )


def open_plain_model(
    model: str,
    checkpoint: str | Path | None = None,
    *,
    size: tuple[int, int] | None = None,
    device: str = "cpu",
) -> OpenedModel:
    """Load a network as `gati explore` would take it; `size` is the height and width of its inputs.

    **Raises:** `ModelError`, `CheckpointError`, `BackendError`.
    """
    target = parse_device(device)
    loaded = load_model(model, checkpoint)
    example = example_inputs(loaded, size).to(target)
    return OpenedModel(
        None,
        loaded.module.to(target),
        trace(loaded.module, example, []),
        loaded.checkpoint_sha256,
        loaded.preprocessing,
        loaded.class_names,
    )


def parse_device(name: str) -> torch.device:
    """The device called `name`. Raises BackendError if there is none."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise BackendError(f"unknown device '{name}'; choose cpu or cuda")
    available = torch.cuda.device_count() if device.type == "cuda" else 1
    if (device.index or 0) >= available:
        raise BackendError(f"device '{name}' is not available here ({available} CUDA devices); choose cpu")
    return device


def _set_threads(threads: int | None) -> None:
    if threads is None:
        return
    if threads < 1:
        raise BackendError(f"threads is {threads}; at least 1 is needed")
    torch.set_num_threads(threads)


def _load_base(library: Library) -> LoadedModel:
    manifest = library.manifest
    model = load_model(manifest.model_source, manifest.checkpoint_path)
    if model.checkpoint_sha256 != manifest.checkpoint_sha256:
        raise LibraryError(
            f"the library in {library.directory} was made from weights {manifest.checkpoint_sha256[:12]}, "
            f"but {manifest.checkpoint_path or manifest.model_source} now has "
            f"{model.checkpoint_sha256[:12]}; bring the old checkpoint back or run gati explore again"
        )
    return model


def _example(input_shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_EXAMPLE_SEED)
    return torch.randn(2, *input_shape, generator=generator).to(device)

