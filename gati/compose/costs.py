"""What the network and the lookups cost on a backend other than the one that `explore` measured on.

Measured once on this machine, kept as `profiles/BACKEND.json` in the library. Lookups of one architecture on
one shape of hidden output cost the same, so a few dozen measurements stand for all trials. A lookup is part
of its stretch's graph; it adds its own graph's time less that of an empty call, plus what a cut costs.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gati.errors import BackendError, LibraryError
from gati.explore.library import Library
from gati.files import atomic_write_text
from gati.types import BlockProfile, Profile, Trial

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BackendCosts", "on_backend", "read_costs"]

FORMAT = 1
REPETITIONS = 60


@dataclass(frozen=True)
class BackendCosts:
    """Latencies of one backend; `lookup_ms` by hidden shape and variant, the call and the cut included."""

    profile: Profile
    cut_ms: float
    lookup_ms: dict[str, float]

    def to_json(self) -> str:
        """Serialise to strict JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> BackendCosts:
        """Parse what `to_json` wrote. Raises LibraryError."""
        try:
            raw = json.loads(text)
            if int(raw["format"]) > FORMAT:
                raise LibraryError(f"{where} is of a newer format; upgrade gati, or delete it")
            blocks = tuple(
                BlockProfile(**{**block, "output_shape": tuple(block["output_shape"])})
                for block in raw["profile"]["blocks"]
            )
            profile = Profile(**{**raw["profile"], "blocks": blocks})
            return cls(profile, float(raw["cut_ms"]), dict(raw["lookup_ms"]))
        except (ValueError, KeyError, TypeError) as error:
            message = f"{where} is damaged ({error}): delete it, gati compose measures again"
            raise LibraryError(message) from error


class CostedLibrary(Library):
    """A library with the latencies of another backend in place of those that `explore` measured."""

    def __init__(self, library: Library, costs: BackendCosts) -> None:
        super().__init__(library.directory)
        self.__dict__["manifest"] = replace(library.manifest, profile=costs.profile)
        shapes = {block.index: block.output_shape for block in costs.profile.blocks}
        self.__dict__["trials"] = tuple(
            replace(
                trial,
                lookup_ms=costs.lookup_ms.get(_key(shapes[trial.block_index], trial.variant)),
                overlapped_lookup_ms=None,
                overlapped_penalty_ms=None,
            )
            for trial in library.trials
        )


def read_costs(library: Library, backend: str) -> BackendCosts | None:
    """Return what was measured before, with as many threads as now; None if nothing was."""
    path = _path(library, backend)
    if not path.is_file():
        return None
    import torch

    costs = BackendCosts.from_json(path.read_text(encoding="utf-8"), str(path))
    return costs if costs.profile.threads == torch.get_num_threads() else None


def on_backend(
    library: Library, backend: str, *, progress: Callable[[int, int], None] | None = None
) -> Library:
    """Return the library with the latencies of `backend`, measured now unless they were before.

    Raises BackendError for a backend that is unknown or not installed here, and as `load_model` does.
    """
    if backend == library.manifest.profile.backend:
        return library
    costs = read_costs(library, backend)
    if costs is None:
        costs = measure(library, backend, progress)
        atomic_write_text(_path(library, backend), costs.to_json())
    return CostedLibrary(library, costs)


def measure(library: Library, backend: str, progress: Callable[[int, int], None] | None) -> BackendCosts:
    """Measure base model, blocks, a cut and every architecture of cache on `backend`."""
    import torch

    from gati.caches import load_cache
    from gati.model.load import load_model
    from gati.model.segments import trace
    from gati.runtime.backends import get_backend
    from gati.runtime.profile import measure_cut, measure_lookup, measure_profile

    get_backend(backend)  # refuses what is not there before a model is loaded
    manifest = library.manifest
    if manifest.profile.device != "cpu":
        raise BackendError(f"backend '{backend}' runs on the cpu, this library is of a GPU; use torch")
    loaded = load_model(manifest.model_source, manifest.checkpoint_path)
    if loaded.checkpoint_sha256 != manifest.checkpoint_sha256:
        raise LibraryError(
            f"the library in {library.directory} was made from weights {manifest.checkpoint_sha256[:12]}, "
            f"but {manifest.checkpoint_path or manifest.model_source} now has {loaded.checkpoint_sha256[:12]}; "
            "bring the old checkpoint back or run gati explore again"
        )
    example = torch.randn(2, *manifest.input_shape, generator=torch.Generator().manual_seed(0))
    traced = trace(loaded.module, example, [block.name for block in manifest.blocks])
    profile = measure_profile(traced, repetitions=REPETITIONS, backend=backend)
    cut = measure_cut(traced, backend=backend)
    first = _one_of_each(library)
    lookups: dict[str, float] = {}
    for done, (key, trial) in enumerate(first.items(), start=1):
        cache = load_cache(library.cache_path(trial.trial_id))
        hidden = torch.randn(1, *cache.hidden_shape)
        alone_ms = measure_lookup(cache, hidden, backend=backend, between=_runner(traced, backend))
        lookups[key] = max(0.0, alone_ms - cut.call_ms) + cut.cut_ms
        if progress is not None:
            progress(done, len(first))
    return BackendCosts(profile, cut.cut_ms, lookups)


def _runner(traced: Any, backend: str) -> Callable[[], Any]:
    from gati.runtime.backends import get_backend

    base = get_backend(backend).path(traced, []).base
    example = traced.example()
    return lambda: base(example)


def _one_of_each(library: Library) -> dict[str, Trial]:
    shapes = {block.index: block.output_shape for block in library.manifest.blocks}
    found: dict[str, Trial] = {}
    for trial in library.trials:
        if trial.status == "trained":
            found.setdefault(_key(shapes[trial.block_index], trial.variant), trial)
    return found


def _key(hidden_shape: tuple[int, ...], variant: str) -> str:
    return f"{'x'.join(map(str, hidden_shape))} {variant}"


def _path(library: Library, backend: str) -> Path:
    return library.directory / "profiles" / f"{backend}.json"
