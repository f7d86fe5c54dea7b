"""The file of measurements next to a pipeline's TOML: `NAME.toml` has `NAME.measured.json`.

The file is strict, readable JSON. `latency_ms` of an option are at most `KEPT_SAMPLES` numbers, sorted:
each is the mean of an equal part of the measured latencies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gati.documents import DocumentKind, values_of
from gati.errors import PipelineError

_CURE = "run gati pipeline measure"
_MEASUREMENTS = DocumentKind(1, PipelineError, _CURE)
KEPT_SAMPLES = 1000


@dataclass(frozen=True)
class BehaviourMeasurement:
    """Results of an option on inputs that option `after` of the previous stage answered at level `level`.

    `after` is None for all inputs. There is one entry per level of the option's own confidence.
    """

    after: str | None
    level: int | None
    shares: tuple[float, ...]
    accuracies: tuple[float, ...]
    latencies_ms: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class OptionMeasurement:
    """Results of one option on its stage's inputs; `exits` has the share of answers of each exit.

    `source` describes what was measured, so that a changed option is detected. `accuracy` is
    None if the data had no labels.
    """

    source: str
    accuracy: float | None
    latency_ms: tuple[float, ...]
    exits: dict[str, float]
    backend: str
    levels: tuple[float, ...]
    behaviours: tuple[BehaviourMeasurement, ...]


@dataclass(frozen=True)
class StageMeasurement:
    """`inputs`: number of inputs of this stage; `shares` of each label among them, empty without labels.

    `classes` are the indices of each label's classes, and `after` the stages before this one, as they were
    when it was measured. Both are None in files of earlier versions.
    """

    inputs: int
    shares: dict[str, float]
    options: dict[str, OptionMeasurement]
    classes: dict[str, tuple[int, ...]] | None = None
    after: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Measurements:
    """All measurements of a pipeline's options, and the data they were made on."""

    pipeline: str
    data: str
    data_sha256: str
    device: str
    threads: int
    created: str
    stages: dict[str, StageMeasurement]

    def save(self, path: Path) -> None:
        """Write strict JSON, atomically. Raises `StorageError`."""
        _MEASUREMENTS.write(path, values_of(self))

    @classmethod
    def load(cls, path: Path) -> Measurements:
        """Read what `save` wrote. Raises `PipelineError` for a damaged file or a newer format."""
        document = _MEASUREMENTS.read(path)
        if document["format"] < _MEASUREMENTS.format:
            raise PipelineError(f"{path} has format {document['format']}, an older one; {_CURE}")
        found = _MEASUREMENTS.record(cls, document, str(path))
        if not found.stages:
            raise PipelineError(f"{path} has no stages; {_CURE}")
        for name, stage in found.stages.items():
            _check_shares(stage.shares.values(), f"{path}: stage '{name}': shares")
            for key, option in stage.options.items():
                _check(option, f"{path}: stage '{name}', option '{key}'")
        return found


def measurements_file(path: Path) -> Path:
    """Path of the measurements of the pipeline file `path`."""
    return path.parent / f"{path.stem}.measured.json"


def _check(option: OptionMeasurement, where: str) -> None:
    if not option.source:
        raise PipelineError(f"{where}: source is empty; {_CURE}")
    levels = len(option.levels) + 1
    _check_shares(option.levels, f"{where}: levels")
    _check_shares(() if option.accuracy is None else (option.accuracy,), f"{where}: accuracy")
    _check_latencies(option.latency_ms, f"{where}: latency_ms")
    for at, each in enumerate(option.behaviours):
        here = f"{where}: behaviours[{at}]"
        if {len(each.shares), len(each.accuracies), len(each.latencies_ms)} != {levels}:
            raise PipelineError(f"{here} needs one entry for each of {levels} levels; {_CURE}")
        _check_shares(each.shares, f"{here}: shares")
        _check_shares(each.accuracies, f"{here}: accuracies")
        for latencies_ms in each.latencies_ms:
            _check_latencies(latencies_ms, f"{here}: latencies_ms")


def _check_shares(values: Iterable[float], where: str) -> None:
    for value in values:
        if not 0.0 <= value <= 1.0:
            raise PipelineError(f"{where} has {value:g}, not from 0 to 1; {_CURE}")


def _check_latencies(values_ms: Sequence[float], where: str) -> None:
    if not values_ms:
        raise PipelineError(f"{where} is empty; {_CURE}")
    for value in values_ms:
        if value <= 0.0:
            raise PipelineError(f"{where} has {value:g}, not above 0; {_CURE}")
