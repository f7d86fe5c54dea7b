"""Where a library keeps costs: in one folder for each processor, number of threads and set of versions.

    profiles/CONDITIONS/BACKEND.json    the latencies of one backend
    profiles/CONDITIONS/networks.json   of the plain network on several, see `gati.composition.networks`

So machines that share a library, and programs with other versions of the same packages, neither use each
other's latencies nor replace them. An older Gati kept its files in `profiles` itself.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from gati.costs.hardware import conditions_here, processor_name
from gati.documents import DocumentKind, values_of
from gati.errors import LibraryError
from gati.exploration.library import Library
from gati.files import atomic_write_text
from gati.types import Conditions, Profile
from gati.variants import FAMILIES, as_called_now

# In format 1, lookups were timed outside the network; in 2, noise could make them free; up to 3, variants had
# older names (see `as_called_now`).
FORMAT = 4
_COSTS = DocumentKind(FORMAT, LibraryError, "delete it, gati compose measures again")


@dataclass(frozen=True)
class BackendCosts:
    """Latencies of one backend; `lookup_ms` is by hidden shape and variant, and includes the decision."""

    profile: Profile
    if_ms: float
    lookup_ms: dict[str, float]

    def to_json(self) -> str:
        """Serialise to strict JSON."""
        return _COSTS.text_of({"disturbed": bool(self.profile.disturbance), **values_of(self)})

    @classmethod
    def from_json(cls, text: str, where: str) -> BackendCosts | None:
        """Parse what `to_json` wrote; None if an older Gati measured differently. Raises LibraryError."""
        raw = _COSTS.parse(text, where)
        if raw["format"] < 3:
            return None
        found = _COSTS.record(cls, raw, where)
        families = 1 if raw["format"] < FORMAT else FAMILIES
        return replace(
            found, lookup_ms={_called_now(key, families): value for key, value in found.lookup_ms.items()}
        )


def costs_path(library: Library, backend: str, conditions: Conditions) -> Path:
    """The file of a backend's costs under these conditions, or of `networks` instead of a backend."""
    named = f"{conditions.processor} {conditions.threads} {conditions.software}"
    folder = hashlib.sha256(named.encode()).hexdigest()[:8]
    return library.directory / "profiles" / folder / f"{backend}.json"


def older_path(library: Library, backend: str) -> Path:
    """The file in which an older Gati kept them."""
    return library.directory / "profiles" / f"{backend}.json"


def kept_paths(library: Library, backend: str, conditions: Conditions) -> list[Path]:
    """The files that exist for these conditions: the present one, then an older Gati's."""
    paths = (costs_path(library, backend, conditions), older_path(library, backend))
    return [path for path in paths if path.is_file()]


def is_valid_here(measured: Conditions, device: str) -> bool:
    """Whether what was measured then would be measured now; what is not known counts as the same."""
    here = conditions_here(device)
    return (
        measured.threads == here.threads
        and measured.processor in ("", here.processor)
        and measured.software in ("", here.software)
    )


def keep_costs(library: Library, costs: BackendCosts) -> None:
    """Store costs. Raises StorageError."""
    path = costs_path(library, costs.profile.backend, costs.profile.conditions)
    atomic_write_text(path, costs.to_json())


def kept_costs(library: Library, backend: str) -> BackendCosts | None:
    """The stored costs of `backend` that are of use here; None without any.

    Also those of a GPU that is not in this machine, which cannot measure them. Raises LibraryError for a
    damaged file.
    """
    for path in kept_paths(library, backend, conditions_here(library.manifest.profile.device)):
        costs = _read(path)
        if costs is not None and is_valid_here(costs.profile.conditions, costs.profile.device):
            return costs
    return next((each for each in _every(library, backend) if not processor_name(each.profile.device)), None)


def costs_under(library: Library, backend: str, conditions: Conditions | None) -> BackendCosts | None:
    """The stored costs of `backend` under these conditions; if they are gone or None, any, rather of here.

    Raises LibraryError for a damaged file.
    """
    every = _every(library, backend)
    exact = next((each for each in every if each.profile.conditions == conditions), None)
    return exact or kept_costs(library, backend) or next(iter(every), None)


def _every(library: Library, backend: str) -> list[BackendCosts]:
    paths = [*(library.directory / "profiles").glob(f"*/{backend}.json"), older_path(library, backend)]
    return [costs for path in sorted(paths) if (costs := _read(path)) is not None]


def _read(path: Path) -> BackendCosts | None:
    if not path.is_file():
        return None
    with _COSTS.reading(str(path)):
        text = path.read_text(encoding="utf-8")
    return BackendCosts.from_json(text, str(path))


def _called_now(key: str, families: int) -> str:
    shape, _, variant = key.partition(" ")
    return f"{shape} {as_called_now(variant, families)}"
