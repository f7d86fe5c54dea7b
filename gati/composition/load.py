"""Loading a cache library and a composition as an engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gati.caches import load_cache
from gati.composition.composition import Composition, Exit
from gati.composition.engines import graphs_of
from gati.composition.threads import as_measured, lacking_cores
from gati.cores import MOST_THREADS
from gati.engine.engine import Engine
from gati.engine.exits import EngineExit
from gati.engine.threads import granted_threads
from gati.errors import BackendError, CompositionError, LibraryError
from gati.exploration.inspect import example_inputs
from gati.exploration.library import Library, file_sha256
from gati.exploration.network import load_network
from gati.model.load import load_model
from gati.model.preprocess import Preprocessing
from gati.model.segments import TracedModel, trace
from gati.types import OutputsKind

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedModel:
    """A base model from which engines are made; they share its weights. Without `library` it has no caches.

    `module` is the base model as the user's code built it. Backends that compile graphs compile them for
    `threads` threads, for torch's number if None.
    """

    library: Library | None
    module: nn.Module
    traced: TracedModel
    checkpoint_sha256: str
    preprocessing: Preprocessing
    class_names: Sequence[str] | None = None
    outputs_kind: OutputsKind = "logits"
    threads: int | None = None

    def engine(self, composition: Composition, caches: Path | None = None) -> Engine:
        """An engine for a composition of this model. Raises as `exits` does, and `BackendError`."""
        exits = self.exits(composition, caches)
        graphs = None
        if caches is None and self.library is not None:
            graphs = graphs_of(self.library, composition)
        return self.engine_of(exits, composition.name, composition.backend, graphs, composition.lookup_cores)

    def base(self) -> Engine:
        """An engine without caches, on backend `torch`."""
        return self.engine_of([], "base", "torch")

    def exits(self, composition: Composition, caches: Path | None = None) -> list[EngineExit]:
        """The exits of a composition of this model, in its order.

        `caches` is the folder with the weights of its caches, the library's own if None.

        **Raises:** `CompositionError` for a composition of another checkpoint or of other caches with the
        same names, `LibraryError` for a cache that is missing or does not fit.
        """
        library = self.library
        if library is None:
            raise CompositionError("a plain model has no caches; run gati explore to make a cache library")
        if composition.checkpoint_sha256 != self.checkpoint_sha256:
            raise CompositionError(
                f"composition '{composition.name}' was made for checkpoint "
                f"{composition.checkpoint_sha256[:12]}, but the library in {library.directory} is for "
                f"{self.checkpoint_sha256[:12]}; run gati compose again, or retrain"
            )
        folder = library.directory / "caches" if caches is None else caches
        return [self._exit(leaving, folder) for leaving in composition.exits]

    def engine_of(
        self,
        exits: Sequence[EngineExit],
        name: str,
        backend: str,
        graphs: tuple[Path, Path] | None = None,
        lookup_cores: int = 1,
    ) -> Engine:
        """An engine with these exits. `graphs` and `lookup_cores` are as `Engine` takes them.

        The version in its answers consists of `name` and the checkpoint's hash.

        **Raises:** `BackendError`.
        """
        return Engine(
            self.traced,
            exits,
            outputs_kind=self.outputs_kind,
            backend=backend,
            version=f"{name}@{self.checkpoint_sha256[:12]}",
            class_names=self.class_names,
            preprocessing=self.preprocessing,
            graphs=graphs,
            threads=self.threads,
            lookup_cores=lookup_cores,
        )

    def _exit(self, leaving: Exit, caches: Path) -> EngineExit:
        if Path(leaving.trial_id).name != leaving.trial_id:
            raise LibraryError(f"{leaving.trial_id[:80]!r} cannot be the name of a cache; compose again")
        path = caches / f"{leaving.trial_id}.safetensors"
        cache = load_cache(path)
        if leaving.cache_sha256 not in (None, file_sha256(path)):
            raise CompositionError(
                f"{path} is not the cache that this composition was made with, so its certificate does not "
                "apply: run gati compose again"
            )
        expected = self.traced.hidden_shapes.get(leaving.block)
        if expected != tuple(cache.hidden_shape):
            raise LibraryError(
                f"cache {leaving.trial_id} in {caches} takes {list(cache.hidden_shape)}, but "
                f"block '{leaving.block}' outputs {expected and list(expected)}; "
                "run gati explore again, or retrain"
            )
        return EngineExit(
            leaving.block,
            cache.to(self.traced.device),
            leaving.threshold,
            leaving.placement,
            leaving.variant,
            cache.memory_bytes,
        )


@dataclass(frozen=True)
class Served:
    """An engine with the library and composition it was made from."""

    engine: Engine
    model: OpenedModel
    library: Library
    composition: Composition

    @property
    def module(self) -> nn.Module:
        """The base model as the user's code built it."""
        return self.model.module


def load(
    directory: str | Path,
    *,
    composition: str = "default",
    device: str | None = None,
    threads: int | None = None,
) -> Engine:
    """Load the base model and the composed caches of a cache library as an engine.

    `device` is the one the library was measured on unless given. This runs the model's own code, which the
    manifest names, and checks the checkpoint's sha256.

    `threads` sets the number of threads that torch uses, for the whole process. None leaves that unchanged,
    or lowers it to the CPU quota of a container or unit if OMP_NUM_THREADS is not set. A backend that
    compiles graphs then uses the number that the composition was measured with, at most torch's, if that was
    on this machine's processor and OMP_NUM_THREADS is not set. A warning is logged where that number is not
    reached, or torch, as the backend, has another one.

    Raises:
        LibraryError: no library, one of a newer format, or one made from another checkpoint.
        CompositionError: no composition of that name, or one for another checkpoint or other caches.
        BackendError: unknown or unavailable device or backend.
    """
    return open_served(directory, composition=composition, device=device, threads=threads).engine


def load_base(directory: str | Path, *, device: str | None = None, threads: int | None = None) -> Engine:
    """Load the base model of a cache library as an engine without caches, on backend `torch`.

    **Raises:** `LibraryError` and `BackendError` as `load` does.
    """
    return open_model(directory, device=device, threads=threads).base()


def open_served(
    directory: str | Path,
    *,
    composition: str = "default",
    device: str | None = None,
    threads: int | None = None,
) -> Served:
    """As `load`, but also returns the module, the library and the composition."""
    library = Library.open(directory)
    chosen = Composition.of(library, composition)
    model = open_model(directory, device=device, threads=threads)
    measured = None if threads is not None else as_measured(chosen.measured_on, model.traced.device.type)
    if measured is not None:  # a program that gives torch fewer threads shares the cores with others
        model = replace(model, threads=min(measured, torch.get_num_threads()))
    engine = model.engine(chosen)
    if measured not in (None, engine.threads):
        _log.warning(
            "composition '%s' was measured with threads=%d, but runs with %d: its latencies will differ from "
            "those expected; give threads=%d, or call torch.set_num_threads",
            *(composition, measured, engine.threads, measured),
        )
    if lacking := lacking_cores(chosen, model.traced.device.type):
        _log.warning("%s", lacking)
    return Served(engine, model, library, chosen)


def open_model(
    directory: str | Path, *, device: str | None = None, threads: int | None = None
) -> OpenedModel:
    """Load the base model of a cache library, to make engines from. Raises as `load` does."""
    _set_threads(threads)
    library = Library.open(directory)
    manifest = library.manifest
    target = _device_of(library) if device is None else parse_device(device)
    return OpenedModel(
        library,
        *load_network(library, target),
        manifest.checkpoint_sha256,
        library.preprocessing,
        manifest.class_names,
        manifest.outputs_kind,
    )


def open_plain_model(
    model: str,
    checkpoint: str | Path | None = None,
    *,
    size: tuple[int, int] | None = None,
    images: NDArray[np.uint8] | None = None,
    device: str = "cpu",
    threads: int | None = None,
) -> OpenedModel:
    """Load a network as `gati explore` does; `size` is the height and width of its inputs.

    It is traced on `images`, two or more uint8 [N, H, W, C], if given, else on noise.

    **Raises:** `ModelError`, `CheckpointError`, `BackendError`, `DataError` for a single image.
    """
    target = parse_device(device)
    _set_threads(threads)
    loaded = load_model(model, checkpoint)
    example = example_inputs(loaded, size) if images is None else loaded.preprocessing(images[:2])
    module = loaded.module.to(target)
    return OpenedModel(
        None,
        module,
        trace(module, example.to(target), []),
        loaded.checkpoint_sha256,
        loaded.preprocessing,
        loaded.class_names,
    )


def parse_device(name: str) -> torch.device:
    """Return the device named `name`. Raises BackendError if it is not available."""
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


def _device_of(library: Library) -> torch.device:
    """The device that the library was measured on."""
    name = library.manifest.profile.device
    try:
        return parse_device(name)
    except BackendError as error:
        raise BackendError(
            f"the library in {library.directory} was measured on {name}, which is not available here; "
            "its compositions for backend torch also run with --device cpu"
        ) from error


def _set_threads(threads: int | None) -> None:
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise BackendError(f"threads is {threads}; give 1 to {MOST_THREADS}")
    wanted = threads or granted_threads()
    if threads is not None or wanted < torch.get_num_threads():  # not again: see `on_granted_threads`
        torch.set_num_threads(wanted)
