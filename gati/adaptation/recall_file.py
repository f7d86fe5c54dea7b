"""Keeps a memory across restarts: its proofs next to the watches, its contents in a separate file.

    keeper = MemoryKeeper(standing, path, identity)
    recall = Recall(..., known=keeper.known())
    keeper.watch(recall)
    ...
    if keeper.is_due():
        keeper.save()           # in the background

A proof is valid only for the contents it was made with. If the file is missing, damaged, older than an
hour, or from another network, promise or source of requests, memory and proofs start over. After a kill,
memory resumes with contents at most half a minute old; later audits still count, and the guard continues.

The names of places are kept next to the proofs, and do not age: what audits prove of caches lives longer than
contents, and a place that is added meanwhile is still new. So is one whose contents are dropped: it may show
something else by now.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from gati.adaptation.memory import FEATURES
from gati.adaptation.recall import Recall, levels_in
from gati.adaptation.recall_records import Remembered
from gati.adaptation.recall_settings import MOST
from gati.engine.exits import BASE, Prediction
from gati.errors import StorageError
from gati.files import atomic_write_bytes
from gati.guard.standing import Standing

if TYPE_CHECKING:
    from gati.composition.load import OpenedModel  # slow: brings in onnx

_log = logging.getLogger(__name__)

_PART, _PLACES_PART = "memory", "places"
_FORMAT = 2
_MAX_AGE_S = 3600.0
_SAVED_EVERY_S = 30.0


class MemoryKeeper:
    """Keeps one memory. `identity` identifies the network and the promise; `path` None keeps nothing.

    What was remembered of another origin than that of `standing` is dropped. `standing` keeps its state, the
    file at `path` its contents. Call `save` from one thread at a time.
    """

    def __init__(
        self,
        standing: Standing,
        path: Path | None,
        identity: str,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._standing, self._path, self._anywhere = standing, path, identity
        self._identity = f"{identity} {standing.origin}" if standing.origin else identity
        self._now = now
        self._saved_s = time.monotonic()
        self._recall: Recall | None = None
        self._resumes = False  # with the proofs of an earlier memory
        self._failing = False

    def known(self) -> Remembered | None:
        """What an earlier run saved: names of places, and the contents if trusted; None without either."""
        (names, settled), contents = self._names(), self._contents()
        self._resumes = contents is not None
        if contents is not None:
            return contents._replace(names=names, settled=settled)
        return Remembered.only(names, settled=settled) if settled else None

    def _names(self) -> tuple[tuple[str, ...], bool]:
        """The places learned from by earlier runs of the same origin, and whether these learned enough."""
        kept = self._standing.kept(_PLACES_PART, math.inf)
        if not isinstance(kept, dict) or kept.get("origin") != self._standing.origin:
            return (), False
        listed = kept.get("names")
        names = tuple(name for name in listed if isinstance(name, str)) if isinstance(listed, list) else ()
        return names, kept.get("settled") is True or bool(names)

    def _contents(self) -> Remembered | None:
        """The contents saved by an earlier run; None if they are missing or not trusted."""
        state = self._standing.kept(_PART, _MAX_AGE_S)
        if self._path is None or not isinstance(state, dict):
            return None
        if (identity := str(state.get("identity"))) != self._identity:
            self._standing.elsewhere |= identity.startswith(self._anywhere)
            return None
        try:
            with np.load(io.BytesIO(self._path.read_bytes()), allow_pickle=False) as arrays:
                return self._read(state, arrays)
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            if not isinstance(error, FileNotFoundError) or any(levels_in(state)):  # else it was never saved
                _log.warning("memory starts empty: %s: %s", self._path, error)
            return None

    def watch(self, recall: Recall) -> None:
        """Save this memory from now on."""
        self._recall = recall
        if self._standing.is_shared and self._resumes:
            recall.prove_apart()
        if self._path is not None:
            origin = self._standing.origin
            self._standing.keep(
                _PART, lambda: {"identity": self._identity, **recall.state()}, heed=self._heed
            )
            self._standing.keep(
                _PLACES_PART,
                lambda: {"origin": origin, "names": list(recall.names), "settled": recall.settled},
            )

    def _heed(self, before: Any, theirs: Any) -> None:
        """Heed what the guard of another process withdrew, if both began with the same memory."""
        same = self._resumes and isinstance(theirs, dict) and theirs.get("identity") == self._identity
        if same and self._recall is not None and self._recall.heed(before, theirs):
            _log.warning("memory answers less: the guard of the process before withdrew settings of it")

    def is_due(self) -> bool:
        """Whether it is time to save. If so, schedules the next save half a minute later."""
        if self._path is None or time.monotonic() - self._saved_s < _SAVED_EVERY_S:
            return False
        self._saved_s = time.monotonic()
        return True

    def save(self) -> None:
        """Save the contents of the memory. A failure is logged once, and the old file stays."""
        if self._path is None or self._recall is None or not self._standing.is_owned:
            return
        try:
            atomic_write_bytes(self._path, _packed(self._recall.remembered(), self._header()))
        except StorageError as error:
            if not self._failing:
                _log.error("memory cannot be saved: %s", error)
            self._failing = True
        else:
            self._failing = False

    def _header(self) -> dict[str, Any]:
        return {"format": _FORMAT, "identity": self._identity, "saved_s": self._now()}

    def _read(self, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Remembered | None:
        header = json.loads(bytes(arrays["header"]))
        age_s = self._now() - float(header["saved_s"])
        if header["format"] != _FORMAT or header["identity"] != self._identity:
            raise ValueError("it belongs to another network, promise or Gati version")
        if not -_SAVED_EVERY_S <= age_s <= _MAX_AGE_S:
            raise ValueError(f"it is {age_s:.0f} s old")
        places = {}
        for at, name in enumerate(header["places"]):
            sketches = np.asarray(arrays[f"sketches-{at}"], dtype=np.float32)
            likely = torch.from_numpy(np.asarray(arrays[f"probabilities-{at}"], dtype=np.float32))
            said = zip(arrays[f"classes-{at}"].tolist(), likely, header["said"][at], strict=True)
            answers = [Prediction(index, each, BASE, *rest) for index, each, rest in said]
            if sketches.ndim != 2 or len(sketches) != len(answers) or not np.isfinite(sketches).all():
                raise ValueError(f"the entries of place {at} are damaged")
            places[name] = sketches, answers, np.asarray(arrays[f"scenes-{at}"], dtype=np.int64)
        labelled = arrays["features"], arrays["wrong"], np.asarray(arrays["scenes"], dtype=np.int64)
        if labelled[0].shape[1:] != (FEATURES,) or arrays["looked"].shape[1:] != (FEATURES,):
            raise ValueError("its features have another shape")
        finite = np.isfinite(arrays["features"]).all() and np.isfinite(arrays["looked"]).all()
        if len({len(each) for each in labelled}) > 1 or not finite:
            raise ValueError("its features are damaged")
        new = arrays["new_scenes"].tolist() if "new_scenes" in arrays else ()  # missing in older files
        return Remembered(state, places, labelled, arrays["looked"], [(scene, shown) for scene, shown in new])


def memory_file(standing: Path | None) -> Path | None:
    """The file for the contents of a memory whose state is in the file `standing`."""
    return None if standing is None else standing.with_name(f"{standing.stem}-memory.npz")


def network_identity(model: OpenedModel) -> str:
    """Identifies what answers come from: weights, preprocessing and the names of classes."""
    made_of = [model.checkpoint_sha256, model.preprocessing.to_json(), model.class_names]
    return hashlib.sha256(json.dumps(made_of, default=list).encode()).hexdigest()


def memory_identity(network: str, agreement: float, delta: float) -> str:
    """Identifies a memory by its network, its promise, the error probability of all proofs, and settings."""
    return f"{network} {agreement:g} {delta:g} {MOST}"


def _packed(known: Remembered, header: dict[str, Any]) -> bytes:
    arrays: dict[str, NDArray[Any]] = {
        "features": known.labelled[0],
        "wrong": known.labelled[1],
        "scenes": known.labelled[2],
        "looked": known.looked,
        "new_scenes": np.array(known.new_scenes, dtype=np.int64).reshape(-1, 2),
    }
    said = []
    for at, (sketches, answers, scenes) in enumerate(known.places.values()):
        arrays[f"sketches-{at}"], arrays[f"scenes-{at}"] = sketches, scenes
        arrays[f"classes-{at}"] = np.array([each.class_index for each in answers], dtype=np.int64)
        likely = [each.probabilities.float().numpy() for each in answers]
        arrays[f"probabilities-{at}"] = np.stack(likely)
        said.append([(each.version, each.class_name) for each in answers])
    header |= {"places": list(known.places), "said": said}
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    out = io.BytesIO()
    np.savez(out, **arrays)  # type: ignore[arg-type]
    return out.getvalue()
