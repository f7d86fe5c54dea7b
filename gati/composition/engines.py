"""A library's network on the engine that will serve it: prepared, run, and stored as a file."""

from __future__ import annotations

import copy
import hashlib
import json
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gati.composition.composition import Composition
from gati.composition.pieces import Pieces
from gati.composition.problem import Candidate
from gati.composition.stored_graphs import graph_folder, store_graphs
from gati.documents import values_of
from gati.engine.backends import BACKENDS, GraphBackend, get_backend
from gati.engine.backends.int8_lookups import Int8Lookups
from gati.engine.checks import prepared_on
from gati.engine.exits import EngineExit
from gati.errors import BackendError, CompositionError
from gati.exploration.library import SELECT, Library, TrialOutcomes, file_sha256
from gati.exploration.splits import held_out
from gati.model.sequence import Data
from gati.types import TrialId
from gati.version import __version__

Setting = tuple[tuple[TrialId, float], ...]  # exits in forward order, with thresholds
Answers = tuple[NDArray[np.int64], NDArray[np.int64]]  # where each input left, and its class

_CALIBRATION_INPUTS = 300
_CHUNK = 64
_LEAST_SCORE = float(np.finfo(np.float32).min)  # as a threshold: every input leaves


class EngineAnswers:
    """The engine's answers to the held-out inputs, for one setting of exits at a time.

    The answers of an engine of reduced precision differ from the tables of outcomes, even without hits, so
    the engine itself runs. Raises DataError if the inputs are missing, BackendError if the engine fails, and
    as `traced_network`.
    """

    def __init__(self, library: Library, backend: str, pieces: Pieces) -> None:
        self._library = library
        self._pieces = pieces
        self._backend = graph_backend(library, backend, pieces)
        self._inputs, self._split = pieces.held_out
        self._rows = np.arange(len(self._inputs))
        self._of_split: dict[int, EngineAnswers] = {}
        self._blocks = {trial.trial_id: trial.block for trial in library.trials}
        self._answers: dict[Setting, Answers] = {}
        self._cuts: dict[tuple[TrialId, ...], frozenset[str]] = {}

    def __call__(self, candidates: Sequence[Candidate]) -> Answers:
        """Return the exit of each held-out input (the number of exits for none) and its class, both [n]."""
        self.ask([candidates])
        return self._answers[_setting(candidates)]

    def lookups(self, trial_id: TrialId, rows: NDArray[np.int64]) -> TrialOutcomes:
        """Score and class of one lookup on the held-out inputs `rows`, as this engine computes them."""
        (model,) = self._assembled([((trial_id, _LEAST_SCORE),)], self._pieces.cuts)
        probabilities = torch.cat([answer[0] for answer in self._each(model, rows)])
        with torch.inference_mode():
            score = self._pieces.cache(trial_id).selector(probabilities)
        return TrialOutcomes(score.numpy().astype(np.float32), probabilities.argmax(1).numpy())

    def of_split(self, split: int) -> EngineAnswers:
        """Return the answers of the same engine to the inputs of one split; -1 stands for all others.

        Running an engine takes long, and what is chosen on one split must not look at the other.
        """
        if split not in self._of_split:
            self._of_split[split] = self._over(self._inputs, np.flatnonzero(self._split == split))
        return self._of_split[split]

    def elsewhere(self, inputs: Data) -> EngineAnswers:
        """Return the answers of the same engine to other inputs."""
        return self._over(inputs, np.arange(len(inputs)))

    def _over(self, inputs: Data, rows: NDArray[np.int64]) -> EngineAnswers:
        """The same engine for `rows` of `inputs`; both share converted networks."""
        other = copy.copy(self)
        other._inputs, other._rows, other._answers, other._of_split = inputs, rows, {}, {}
        return other

    def announce(self, path: Iterable[Sequence[Candidate]]) -> None:
        """Cut the network so that graphs of these settings share pieces; nothing is run."""
        self._cut_for([_setting(candidates) for candidates in path])

    def ask(self, path: Iterable[Sequence[Candidate]]) -> None:
        """Run many settings; those that differ only in thresholds are converted once."""
        self._ask(_setting(candidates) for candidates in path)

    def _ask(self, path: Iterable[Setting]) -> None:
        wanted = _alike_together(setting for setting in set(path) if setting not in self._answers)
        self._cut_for(wanted)
        for _, group in groupby(wanted, key=_exits_of):
            alike = list(_outermost_first(list(group)))
            for setting, model in zip(alike, self._networks(alike), strict=True):  # one network at a time
                self._answers[setting] = self._answered(setting, model)

    def _cut_for(self, settings: Sequence[Setting]) -> None:
        """Cut every further graph after the blocks of all these settings, so that they share pieces."""
        self._pieces.cuts.update(self._blocks[trial_id] for setting in settings for trial_id, _ in setting)

    def _networks(self, alike: Sequence[Setting]) -> Iterator[bytes]:
        """The networks with these exits, which differ only in thresholds; the same ones each time."""
        exits = tuple(_exits_of(alike[0]))
        return self._assembled(alike, self._cuts.setdefault(exits, frozenset(self._pieces.cuts)))

    def _assembled(self, alike: Sequence[Setting], cuts: Collection[str]) -> Iterator[bytes]:
        pieces, kind = self._pieces, self._library.manifest.outputs_kind
        exits = [self._exits(setting) for setting in alike]
        with prepared_on(self._backend.name):
            yield from self._backend.assembled(pieces.traced, exits, kind, convert=pieces.convert, cuts=cuts)

    def keep(self, composition: Composition) -> Composition:
        """Store the networks with its exits, and without any; return it bound to the former.

        Raises StorageError.
        """
        settings: tuple[Setting, Setting] = (_setting_of(composition), ())
        early, base = (model for setting in settings for model in self._networks([setting]))
        found = replace(composition, graph_sha256=hashlib.sha256(early).hexdigest())
        files = _files_of(self._library, found)
        store_graphs(graph_folder(self._library.directory), dict(zip(files, (early, base), strict=True)))
        return found

    def _answered(self, setting: Setting, model: bytes) -> Answers:
        """The engine's answers with these exits; inputs that neighbouring settings decide are not run."""
        neighbours = _neighbours(setting, self._answers)
        if neighbours is None:
            open_rows = self._rows
            left_at, answer = (np.full(len(self._inputs), -1, dtype=np.int64) for _ in range(2))
        else:
            (left_at, answer), (left_earlier_at, other_answer) = neighbours
            open_rows = np.flatnonzero((left_at != left_earlier_at) | (answer != other_answer))
            left_at, answer = left_at.copy(), answer.copy()
        left_at[open_rows], answer[open_rows] = self._run(model, open_rows)
        return left_at, answer

    def _run(self, model: bytes, rows: NDArray[np.int64]) -> Answers:
        answers = [(left_at, int(found.argmax())) for found, left_at in self._each(model, rows)]
        left_at, answer = np.array(answers, dtype=np.int64).reshape(-1, 2).T.copy()
        return left_at, answer

    def _each(self, model: bytes, rows: NDArray[np.int64]) -> Iterator[tuple[Tensor, int]]:
        """Yield the probabilities [1, K] of each input, and where it left."""
        if not len(rows):
            return
        with prepared_on(self._backend.name):
            graph = self._backend.compile(model)
        for start in range(0, len(rows), _CHUNK):
            for x in self._inputs.images(rows[start : start + _CHUNK]).split(1):
                with prepared_on(self._backend.name):
                    found = graph.answer(x)
                yield found

    def _exits(self, setting: Setting) -> list[EngineExit]:
        return [
            EngineExit(self._blocks[trial_id], self._pieces.cache(trial_id), threshold)
            for trial_id, threshold in setting
        ]


def _exits_of(setting: Setting) -> list[TrialId]:
    return [trial_id for trial_id, _ in setting]


def _alike_together(settings: Iterable[Setting]) -> list[Setting]:
    """The settings, those of the same exits one after another, by thresholds."""
    return sorted(settings, key=lambda setting: (_exits_of(setting), setting))


def _outermost_first(settings: Sequence[Setting]) -> Iterator[Setting]:
    """The first, the last, the middle one, then each half likewise: most get neighbours on both sides."""
    if settings:
        yield settings[0]
    if len(settings) > 1:
        yield settings[-1]
    halves = deque([settings])
    while halves:
        part = halves.popleft()
        if len(part) > 2:
            middle = len(part) // 2
            yield part[middle]
            halves += (part[: middle + 1], part[middle:])


def _neighbours(setting: Setting, known: Mapping[Setting, Answers]) -> tuple[Answers, Answers] | None:
    """Answers of the nearest stricter and the nearest looser setting of the same exits; None without both.

    When thresholds fall, an input leaves at the same exit or an earlier one. So an input that leaves at the
    same exit in both settings also leaves there in all settings between them.
    """
    names = _exits_of(setting)
    strict: Setting | None = None
    loose: Setting | None = None
    for other in known:
        if not names or _exits_of(other) != names:
            continue
        if _at_least(other, setting) and (strict is None or _at_least(strict, other)):
            strict = other
        if _at_least(setting, other) and (loose is None or _at_least(other, loose)):
            loose = other
    return None if strict is None or loose is None else (known[strict], known[loose])


def _at_least(strict: Setting, loose: Setting) -> bool:
    """Whether no threshold of `strict` is below that of `loose`."""
    return all(a >= b for (_, a), (_, b) in zip(strict, loose, strict=True))


def graph_backend(
    library: Library, name: str, pieces: Pieces | None = None, *, calibrate_on: int = _CALIBRATION_INPUTS
) -> GraphBackend:
    """Return a backend that compiles graphs, calibrated on `calibrate_on` select inputs if necessary.

    Raises BackendError for a backend that is unknown, not installed or of another kind, and DataError if it
    needs calibration and the held-out inputs are missing.
    """
    executes = get_backend(name)
    if isinstance(executes, GraphBackend) and executes.calibrated:
        inputs, split = held_out(library) if pieces is None else pieces.held_out
        rows = np.flatnonzero(split == SELECT)[:calibrate_on]
        # those that are only timed are not worth their place on the disk
        folder = graph_folder(library.directory) if calibrate_on == _CALIBRATION_INPUTS else None
        kept = {"kept": folder} if isinstance(executes, Int8Lookups) else {}
        executes = get_backend(name, calibration=inputs.images(rows), **kept)
    if not isinstance(executes, GraphBackend):
        raise BackendError(f"backend '{name}' compiles no graphs; choose openvino or onnxruntime")
    return executes


def graph_kind(backend: str) -> type[GraphBackend] | None:
    """The class of a backend that compiles graphs, installed or not; None for any other."""
    kind = BACKENDS.get(backend)
    return kind if kind is not None and issubclass(kind, GraphBackend) else None


def graphs_needed(library: Library) -> set[str]:
    """The names, without suffix, of the networks of all compositions and of the plain one on each backend.

    Versions of the model, which may be stored elsewhere, share the plain one. Raises CompositionError for a
    composition that cannot be read.
    """
    plain = (base_graph_file(library, name) for name in BACKENDS if graph_kind(name) is not None)
    needed = {path.stem for path in plain}
    for name in library.compositions():
        found = Composition.load(library.composition_path(name))
        needed |= {path.stem for path in _files_of(library, found)}
    return needed


def graphs_of(library: Library, composition: Composition) -> tuple[Path, Path]:
    """Return the files of a composition's converted networks, with and without its exits.

    They need not exist, and are made again. But where the engine's own answers were counted, these speak of
    one network: raises CompositionError if the file with the exits is then missing, or has changed, or if the
    exits have.
    """
    early, base = _files_of(library, composition)
    digest = composition.graph_sha256
    if digest is not None and not (early.is_file() and file_sha256(early) == digest):
        raise CompositionError(
            f"{early}, the network of composition '{composition.name}', is missing, or one of them has "
            "changed: restore them, or run gati compose again"
        )
    return early, base


def base_graph_file(library: Library, backend: str) -> Path:
    """The file of the converted network without exits, which all compositions and versions share."""
    return graph_files(library, [], backend)[1]


def bound(library: Library, composition: Composition) -> Composition:
    """The composition with the sha256 of the network that serves it, which those of an older Gati lack.

    Unchanged in float32, and if no network is stored.
    """
    kind = graph_kind(composition.backend)
    if composition.graph_sha256 is not None or kind is None or kind.in_float32():
        return composition
    early = _files_of(library, composition)[0]
    return replace(composition, graph_sha256=file_sha256(early)) if early.is_file() else composition


def keep_bound(library: Library, before: Composition, composition: Composition) -> None:
    """Store the network of `before` as that of `composition`, which `bound` returned. Raises StorageError."""
    (served, _), (kept, _) = _files_of(library, before), _files_of(library, composition)
    if kept != served:
        store_graphs(graph_folder(library.directory), {kept: served.read_bytes()})


def _files_of(library: Library, composition: Composition) -> tuple[Path, Path]:
    setting, digest = _setting_of(composition), composition.graph_sha256
    early, base = graph_files(library, setting, composition.backend)
    if digest is not None:  # never replaced by the network of another composition, also of another version
        named = hashlib.sha256(f"{digest} {setting!r}".encode()).hexdigest()
        early = early.with_name(f"{named[:16]}{early.suffix}")
    return early, base


def graph_files(
    library: Library, setting: Sequence[tuple[TrialId, float]], backend: str
) -> tuple[Path, Path]:
    """Return files for the networks with and without these exits, named by what these are made from."""
    kind = graph_kind(backend)
    stored_as = "onnx" if kind is None else kind.stored_as
    manifest = library.manifest
    # The probe tells apart code that computes differently with the same weights.
    network = json.dumps([manifest.checkpoint_sha256, manifest.input_shape, values_of(manifest.probe)])
    base = hashlib.sha256(f"{__version__} {torch.__version__} {stored_as} {network}".encode())
    early_exit = base.copy()
    for trial_id, threshold in setting:
        early_exit.update(f"{trial_id} {threshold!r}".encode())
        cache = library.cache_path(trial_id)
        early_exit.update(cache.read_bytes() if cache.is_file() else b"")
    suffix = "onnx" if stored_as.startswith("onnx") else "zip"
    names = (f"{each.hexdigest()[:16]}.{suffix}" for each in (early_exit, base))
    first, second = (graph_folder(library.directory) / name for name in names)
    return first, second


def _setting_of(composition: Composition) -> Setting:
    return tuple((leaving.trial_id, float(leaving.threshold)) for leaving in composition.exits)


def _setting(candidates: Sequence[Candidate]) -> Setting:
    return tuple((candidate.trial_id, candidate.threshold) for candidate in candidates)
