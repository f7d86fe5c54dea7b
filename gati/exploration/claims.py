"""What `explore` finds in its folder: the same exploration, finished, or another one that it may replace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gati.errors import DataError, LibraryError, ModelError
from gati.exploration.library import Library, Manifest
from gati.exploration.network import load_network
from gati.exploration.progress import Progress
from gati.exploration.splits import explored_inputs
from gati.exploration.state import RunState, by_content, places_in
from gati.model.labels import names_of_classes
from gati.model.load import LoadedModel
from gati.model.sequence import Data
from gati.variants import FAMILIES
from gati.version import __version__

_COMPARED = 64  # inputs
_OF_VERSION = {"gati", "families"}  # settings that say which Gati, not what it was asked for


def is_finished(
    library: Library,
    state: RunState,
    settings: Mapping[str, Any],
    loaded: LoadedModel,
    held: Data,
    sources: tuple[Any, Any | None],
    progress: Progress,
) -> bool:
    """Whether the folder holds the exploration with these settings, finished; a note says so.

    Its manifest gets the present places of network and inputs, if they have moved. `held` is what the first
    of the `sources` is now; the second one is for training only.
    """
    if not library.manifest_path.is_file():
        return False
    known = _found_again(library, settings, loaded, held, sources)
    if known is None:
        return False
    if _differing(state.claimed(), library.manifest.settings) is None:
        state.clear()  # killed between the manifest and this, it would refuse every further round
    if known != library.manifest:
        library.write_manifest(known)
        progress.note(f"{library.directory} has the new places of network and inputs now")
    progress.note(_already_finished(library, held))
    return True


def claim_folder(library: Library, state: RunState, settings: Mapping[str, Any], progress: Progress) -> None:
    """Begin or resume the exploration with these settings; a note says if it replaces another, finished one.

    **Raises:** `LibraryError` if the folder holds another one that is unfinished, has compositions or is by
    another version of Gati.
    """
    check_nothing_depends_on(library)
    if library.manifest_path.is_file():
        progress.note(_replacing(library, settings))
    state.claim({**settings, "families": FAMILIES})


def check_nothing_depends_on(library: Library, claim: RunState | None = None) -> None:
    """Refuse to replace caches that compositions use: their certificates are about these caches.

    The `claim` of the exploration that was to replace them is given up, if nothing is replaced yet.
    """
    if named := library.compositions():
        if claim is not None and library.manifest_path.is_file():
            claim.clear()  # else the library, which is whole, could not be trained further
        raise LibraryError(
            f"{library.directory} holds another exploration, with compositions of its caches "
            f"({', '.join(named)}): choose another --out, or delete {library.composition_path().parent} first"
        )


def _differing(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """The first setting in which two explorations differ, None if they are the same.

    That another version of Gati made a library is no reason to make it again, nor that it did not look for
    how the network's processor rounds.
    """
    before, now = _without_rounding(known), _without_rounding(wanted)
    names = sorted((known.keys() | wanted.keys()) - _OF_VERSION)
    return next((name for name in names if before.get(name) != now.get(name)), None)


def _without_rounding(settings: Mapping[str, Any]) -> dict[str, Any]:
    preprocessing = dict(settings.get("preprocessing") or {})
    preprocessing.pop("crop_rounds_down", None)
    return {**settings, "preprocessing": preprocessing}


def _found_again(
    library: Library,
    settings: Mapping[str, Any],
    loaded: LoadedModel,
    held: Data,
    sources: tuple[Any, Any | None],
) -> Manifest | None:
    """The manifest of a finished exploration with these settings, with the present places; None for another.

    Network and inputs may have moved since; then they must still be the same, with the same class names.
    `held` is what the first of the `sources` is now; the second one is for training only.
    """
    known = library.manifest
    if _differing(by_content(known.settings), by_content(settings)) is not None:
        return None
    now = replace(
        known,
        model_source=loaded.source,
        checkpoint_path=loaded.checkpoint_path,
        settings={**known.settings, **places_in(settings)},
    )
    moved = {name for name in settings if now.settings.get(name) != known.settings.get(name)}
    names = settings.get("class_names", loaded.class_names)
    if moved and names_of_classes(known.classes, names, held, settings.get("label_map")) != known.class_names:
        return None
    try:
        if "model" in moved:
            there = Library(library.directory)
            there.manifest = now
            load_network(there, torch.device("cpu"))
        if moved & {"data", "train_data"}:
            found = explored_inputs(library, *sources).held_out.fingerprint
            if found != known.data["held_out"].rpartition(" ")[2]:  # with other labels, or more inputs
                return None
    except (DataError, LibraryError, ModelError):
        return None
    return now


def _already_finished(library: Library, held: Data) -> str:
    """A note that there is nothing to do, and what could be. `held` are the inputs that are given now."""
    by = library.manifest.settings.get("gati")
    older = "" if by == __version__ else f" by Gati {by}"
    if _has_changed(library, held):
        return (
            f"{library.directory} is already finished{older}, with other inputs than {held.name} has now: "
            "choose another --out to explore with these"
        )
    return (
        f"{library.directory} is already finished{older}: gati explore --more trains it further; to explore "
        "anew, choose another --out"
    )


def _has_changed(library: Library, held: Data) -> bool:
    """Whether the inputs under the same name are other ones than were explored; does not read them all."""
    record = library.input_record()
    if record is None or not len(record.rows):
        return False  # an older Gati kept no record
    if int(record.rows.max()) >= len(held):
        return True
    few = np.linspace(0, len(record.rows) - 1, _COMPARED).astype(np.int64)
    return not np.array_equal(record.identities[few], held.identify(record.rows[few]))


def _replacing(library: Library, settings: Mapping[str, Any]) -> str:
    """A note that another exploration is replaced. Raises `LibraryError` for one by another Gati.

    There, the command may be the same: what it means by default can change from one version to the next.
    """
    found = library.manifest.settings
    by, name = found.get("gati"), _differing(found, settings)
    if by != __version__:
        raise LibraryError(
            f"{library.directory} holds a finished exploration by Gati {by} with another {name}: choose "
            f"another --out to explore with {__version__}, or delete {library.directory} first"
        )
    return f"replacing the finished exploration in {library.directory}, which had another {name}"
