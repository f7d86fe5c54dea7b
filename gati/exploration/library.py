"""The cache library: the directory that `gati explore` writes and every later verb reads.

    manifest.json             model, checkpoint hash, preprocessing, blocks, latencies, seeds, versions
    inputs.safetensors        which inputs were seen, as hashes, and which were held out
    trials.csv                one row per variant and block: cost, agreement, why skipped or failed
    operating_points.csv      hit rate and agreement of every trained variant at many thresholds
    caches/TRIAL.safetensors  weights of predictor and selector
    outcomes/base.safetensors the base model's class of every held-out input, and its split
    outcomes/TRIAL.safetensors  score and class of every held-out input
    training/TRIAL.safetensors  weights to resume training from
    compositions/NAME.json    what `gati compose` chose
    tokenizer.json            of a network that takes text

Reading needs neither torch nor the model.
"""

from __future__ import annotations

import csv
import hashlib
import io
import shutil
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gati.documents import DocumentKind
from gati.errors import CompositionError, LibraryError
from gati.exploration.state import RunState
from gati.files import atomic_write, atomic_write_bytes, atomic_write_text, is_file
from gati.model.identity import CopyCounts
from gati.types import BlockProfile, OperatingPoint, OutputsKind, Profile, Trial, TrialId, is_name
from gati.variants import as_called_now

if TYPE_CHECKING:
    from gati.model.preprocess import Preprocessing
    from gati.model.text import TextTokens

FORMAT = 2  # in format 1, `pool-linear` and `conv2d` were called `pool` and `conv`
# The same command would say that the library is finished.
_CURE = "restore it from a backup, or run gati explore again with another --out"
_MANIFEST = DocumentKind(FORMAT, LibraryError, _CURE)
SELECT, CERTIFY = 0, 1  # values of BaseOutcomes.split


class BaseOutcomes(NamedTuple):
    """What the base model answered on the held-out inputs, all of shape [n]."""

    base_class: npt.NDArray[np.int64]
    label: npt.NDArray[np.int64] | None
    split: npt.NDArray[np.uint8]  # SELECT or CERTIFY


class TrialOutcomes(NamedTuple):
    """What one learned cache answered on the same inputs, both of shape [n].

    Scores on the select split come from selectors that did not see the input (cross-fitting).
    """

    score: npt.NDArray[np.float32]
    predicted: npt.NDArray[np.int64]


class InputRecord(NamedTuple):
    """Which inputs explore has seen. Identities are those of `gati.model.identity`, which ignore labels."""

    rows: npt.NDArray[np.int64]  # [n], the index in the data of each held-out input
    identities: npt.NDArray[np.uint64]  # [n], of the held-out inputs
    copies: npt.NDArray[np.int64]  # [n], how many draws of the certify split it is; 1 in the select split
    seen: npt.NDArray[np.uint64]  # identities of all inputs used to train, select or certify, sorted
    new: npt.NDArray[np.bool_]  # [n], whether no copy of a certify input was used to train or select
    # which of both are among the seen: pictures (True), preprocessed tensors (False); empty if not known
    pictures: npt.NDArray[np.bool_] = np.empty(0, dtype=np.bool_)


@dataclass(frozen=True, kw_only=True)
class HiddenProbe:
    """A few values of a block's hidden output, and the root mean square of all, `scale`."""

    values: tuple[float, ...]
    scale: float


@dataclass(frozen=True, kw_only=True)
class NetworkProbe:
    """The network's answer to one random input, which detects changed code with the same weights.

    `input_sha256` identifies the input, `scores` are the scores of the first classes. `hidden` is by block,
    for code that gives caches something else to read and the same scores; empty in libraries of an older
    Gati.
    """

    input_sha256: str
    scores: tuple[float, ...]
    hidden: dict[str, HiddenProbe] = field(default_factory=dict)

    @classmethod
    def from_values(cls, values: object, where: str) -> NetworkProbe:
        """Read what `values_of` made. Raises `LibraryError` for anything else."""
        return _MANIFEST.record(cls, values, where)


@dataclass(frozen=True)
class Manifest:
    """What the library was made from, and the base model's costs on this machine."""

    model_source: str
    checkpoint_path: str | None
    checkpoint_sha256: str
    preprocessing: dict[str, Any]
    class_names: tuple[str, ...] | None
    classes: int
    outputs_kind: OutputsKind
    input_shape: tuple[int, ...]  # without the batch dimension
    profile: Profile
    seed: int
    counts: dict[str, int]  # number of inputs in train, select and certify
    data: dict[str, str]  # name and fingerprint of each data set
    settings: dict[str, Any]
    versions: dict[str, str]
    peak_memory_bytes: int = 0
    explore_seconds: float = 0.0
    complete: bool = False
    probe: NetworkProbe | None = None  # libraries of an older Gati have none
    format: int = FORMAT

    @property
    def blocks(self) -> tuple[BlockProfile, ...]:
        """The blocks caches were tried at, in forward order."""
        return self.profile.blocks

    def to_json(self) -> str:
        """Serialise to strict JSON that a person can read."""
        return _MANIFEST.text_of(asdict(self))

    @classmethod
    def from_json(cls, text: str, where: str) -> Manifest:
        """Parse what `to_json` wrote. Raises `LibraryError` for a newer format or a damaged file."""
        found = _MANIFEST.record(cls, _MANIFEST.parse(text, where), where)
        with _MANIFEST.reading(where):
            if variants := found.settings.get("variants"):
                renamed = [as_called_now(each, found.format) for each in variants]
                found = replace(found, settings={**found.settings, "variants": renamed})
        if found.class_names is not None and len(found.class_names) != found.classes:
            return replace(found, class_names=None)  # an older Gati stored folder names as class names
        return found


class Library:
    """Read and write one cache library. Construct with `Library(directory)`; `open` also checks it."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)

    @classmethod
    def open(cls, directory: Path | str) -> Library:
        """Open an existing library that is complete enough to compose from.

        **Raises:** `LibraryError` if there is none, it is unfinished, damaged, or of a newer format;
        `StorageError` if it cannot be read.
        """
        library = cls(directory)
        if not is_file(library.manifest_path):
            RunState(library.directory).check_finished()
            below = [str(path.parent) for path in sorted(library.directory.glob("*/manifest.json"))]
            raise LibraryError(
                f"no cache library in {library.directory} (no manifest.json): run gati explore --out first"
                + (f", or give {' or '.join(below[:3])}" if below else "")
            )
        if not library.manifest.complete:
            unfinished = "is unfinished: run the same gati explore command again to resume"
            raise LibraryError(f"the cache library in {library.directory} {unfinished}")
        return library

    # Places ---------------------------------------------------------------------------------------------

    def forget_exploration(self) -> None:
        """Remove the manifest, and what was measured and trained on for it. Caches and outcomes stay."""
        if not self.manifest_path.is_file():
            return  # an interrupted exploration goes on
        for name in ("profiles", "training", "graphs"):  # graphs are of the network as it was then
            if (self.directory / name).is_dir():
                shutil.rmtree(self.directory / name)
        (self.directory / "pareto.json").unlink(missing_ok=True)
        self.manifest_path.unlink()  # last: a killed process begins with this again

    @property
    def manifest_path(self) -> Path:
        """Path of the manifest."""
        return self.directory / "manifest.json"

    @property
    def inputs_path(self) -> Path:
        """Path of the record of the inputs."""
        return self.directory / "inputs.safetensors"

    def cache_path(self, trial_id: TrialId) -> Path:
        """Weights of one learned cache."""
        return self.directory / "caches" / f"{trial_id}.safetensors"

    def outcomes_path(self, trial_id: str) -> Path:
        """Held-out outcomes of one trial, or of the base model for `"base"`."""
        return self.directory / "outcomes" / f"{trial_id}.safetensors"

    def training_path(self, trial_id: TrialId) -> Path:
        """Weights of one predictor as it was trained, normalisation not folded."""
        return self.directory / "training" / f"{trial_id}.safetensors"

    def composition_path(self, name: str = "default") -> Path:
        """Path of the composition of that name. Raises `CompositionError` for what is no name, as a path."""
        if not is_name(name):
            known = ", ".join(self.compositions()) or "default"
            raise CompositionError(f"{name!r} is not the name of a composition; give a name, such as {known}")
        return self.directory / "compositions" / f"{name}.json"

    def compositions(self) -> list[str]:
        """The names of its compositions."""
        return sorted(path.stem for path in self.composition_path().parent.glob("*.json"))

    # Reading --------------------------------------------------------------------------------------------

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest. Raises `LibraryError` as `Manifest.from_json` does."""
        return Manifest.from_json(self._text(self.manifest_path), str(self.manifest_path))

    @cached_property
    def preprocessing(self) -> Preprocessing:
        """The preprocessing of the network's inputs; needs torch. A tokenizer is read from the library.

        **Raises:** `DataError` for a tokenizer that is missing or has changed.
        """
        from gati.model.preprocess import Preprocessing

        found = Preprocessing.from_json(self.manifest.preprocessing, self.directory)
        if found.text is not None:
            found.text.content()  # fail here rather than at the first text
        return found

    @cached_property
    def trials(self) -> tuple[Trial, ...]:
        """Every row of the trials table, in forward order of blocks, with the current names of variants."""
        rows = _read_csv(self.directory / "trials.csv", Trial, self._text)
        families = self.manifest.format if self.manifest_path.is_file() else FORMAT
        return tuple(replace(row, variant=as_called_now(row.variant, families)) for row in rows)

    @cached_property
    def operating_points(self) -> tuple[OperatingPoint, ...]:
        """Hit rate and agreement of each trained trial at many thresholds (select split)."""
        return tuple(_read_csv(self.directory / "operating_points.csv", OperatingPoint, self._text))

    @property
    def has_outcomes(self) -> bool:
        """Whether the per-input outcomes are there (the tables alone are enough for some verbs)."""
        return self.outcomes_path("base").is_file()

    def cache_sha256(self, trial_id: TrialId) -> str | None:
        """The sha256 of the file of one learned cache; None if it is not there."""
        path = self.cache_path(trial_id)
        return file_sha256(path) if path.is_file() else None

    def check_unchanged(self) -> None:
        """Raise `LibraryError` if another exploration has replaced what was read, or has begun to."""
        now, known = Library(self.directory), self.manifest
        places = {name: getattr(known, name) for name in ("model_source", "checkpoint_path", "settings")}
        if not now.manifest_path.is_file() or replace(now.manifest, **places) != known:
            raise LibraryError(
                f"another gati explore has begun to replace the caches in {self.directory} meanwhile: run "
                "this command again once that has finished"
            )

    def base_outcomes(self) -> BaseOutcomes:
        """What the base model answered on every held-out input."""
        arrays = self._arrays(self.outcomes_path("base"))
        return BaseOutcomes(arrays["base_class"], arrays.get("label"), arrays["split"])

    def outcomes(self, trial_id: TrialId) -> TrialOutcomes:
        """What one learned cache answered on every held-out input."""
        arrays = self._arrays(self.outcomes_path(trial_id))
        return TrialOutcomes(arrays["score"], arrays["predicted"])

    def input_record(self) -> InputRecord | None:
        """Which inputs explore has seen; None if an older Gati kept no record."""
        if not self.inputs_path.is_file():
            return None
        arrays = self._arrays(self.inputs_path)
        if "new" not in arrays:  # an older Gati kept all copies in one part
            arrays["new"] = np.ones(len(arrays["rows"]), dtype=np.bool_)
        return InputRecord(**{name: arrays[name] for name in InputRecord._fields if name in arrays})

    def copies(self) -> CopyCounts:
        """How often each held-out input counts, [n]; once if copies were not counted."""
        record, count = self.input_record(), len(self.base_outcomes().split)
        if record is None:
            return CopyCounts.once(count)
        if len(record.copies) != count:
            raise LibraryError(
                f"{self.inputs_path} has {len(record.copies)} inputs, but the outcomes have {count}; {_CURE}"
            )
        return CopyCounts(record.copies, record.new.astype(np.int64))

    def _text(self, path: Path) -> str:
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LibraryError(f"cannot read {path}: {error}; {_CURE}") from error

    def _arrays(self, path: Path) -> dict[str, npt.NDArray[Any]]:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise LibraryError(f"cannot read {path}: {error}; {_CURE}") from error

    # Writing --------------------------------------------------------------------------------------------

    def write_manifest(self, manifest: Manifest) -> None:
        """Replace the manifest, atomically."""
        atomic_write_text(self.manifest_path, manifest.to_json())
        self.__dict__.pop("manifest", None)
        self.__dict__.pop("preprocessing", None)

    def write_tokenizer(self, text: TextTokens) -> None:
        """Write a copy of the tokenizer. Raises `DataError` if it is missing or has changed."""
        from gati.model.text import TOKENIZER

        atomic_write_bytes(self.directory / TOKENIZER, text.content())

    def write_trials(self, trials: list[Trial], points: list[OperatingPoint]) -> None:
        """Replace both tables, each atomically."""
        atomic_write_text(self.directory / "operating_points.csv", _csv(points, OperatingPoint))
        atomic_write_text(self.directory / "trials.csv", _csv(trials, Trial))
        self.__dict__.pop("trials", None)
        self.__dict__.pop("operating_points", None)

    def write_base_outcomes(self, outcomes: BaseOutcomes) -> None:
        """Store the base model's answers on the held-out inputs."""
        arrays = {"base_class": outcomes.base_class, "split": outcomes.split}
        if outcomes.label is not None:
            arrays["label"] = outcomes.label
        self._save(self.outcomes_path("base"), arrays)

    def write_input_record(self, record: InputRecord) -> None:
        """Store which inputs were seen, atomically."""
        self._save(self.inputs_path, record._asdict())

    def write_outcomes(self, trial_id: TrialId, outcomes: TrialOutcomes) -> None:
        """Store one trial's answers on the held-out inputs."""
        self._save(self.outcomes_path(trial_id), {"score": outcomes.score, "predicted": outcomes.predicted})

    def _save(self, path: Path, arrays: dict[str, Any]) -> None:
        from safetensors.numpy import save_file

        contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        atomic_write(path, lambda temporary: save_file(contiguous, temporary))


def file_sha256(path: Path) -> str:
    """The sha256 of a file's content. Raises `LibraryError` for one that cannot be read."""
    try:
        with path.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError as error:
        raise LibraryError(f"cannot read {path}: {error}; {_CURE}") from error


def _csv(rows: list[Any], record: type) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, [field.name for field in fields(record)], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: "" if value is None else value for name, value in asdict(row).items()})
    return out.getvalue()


def _read_csv(path: Path, record: Any, read: Any) -> list[Any]:
    rows = []
    for number, raw in enumerate(csv.DictReader(io.StringIO(read(path))), start=2):
        try:
            rows.append(record(**{f.name: _value(raw[f.name], str(f.type)) for f in fields(record)}))
        except (KeyError, ValueError) as error:
            raise LibraryError(f"{path}, line {number}: {error!r}; {_CURE}") from error
    return rows


def _value(text: str, kind: str) -> Any:
    if kind.endswith("| None") and text == "":
        return None
    if kind.startswith("float"):
        return float(text)
    if kind.startswith("int"):
        return int(text)
    return text
