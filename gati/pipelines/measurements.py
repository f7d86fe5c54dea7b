"""The file of measurements next to a pipeline's TOML: `NAME.toml` has `NAME.measured.json`.

The file is strict, readable JSON. `latency_ms` of an option are at most `KEPT_SAMPLES` numbers, sorted:
each is the mean of an equal part of the measured latencies.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gati.documents import DocumentKind
from gati.errors import PipelineError
from gati.pipelines.fields import number, table, text

FORMAT = 1
_MEASUREMENTS = DocumentKind(FORMAT, PipelineError, "run gati pipeline measure")
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
    exits: dict[str, float] = field(default_factory=dict)
    backend: str = ""
    levels: tuple[float, ...] = ()
    behaviours: tuple[BehaviourMeasurement, ...] = ()


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
        _MEASUREMENTS.write(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> Measurements:
        """Read what `save` wrote. Raises `PipelineError` for a damaged file or a newer format."""
        document = _MEASUREMENTS.read(path)
        with _MEASUREMENTS.reading(str(path)):
            if document["format"] != FORMAT:
                raise ValueError(f"format {document['format']} was written by an older Gati")
            return _measurements(document, str(path))


def measurements_file(path: Path) -> Path:
    """Path of the measurements of the pipeline file `path`."""
    return path.with_suffix(".measured.json")


def _measurements(raw: dict[str, Any], where: str) -> Measurements:
    stages = {
        name: StageMeasurement(
            int(stage["inputs"]),
            {label: number(share, f"{where}: share", 0.0, 1.0) for label, share in stage["shares"].items()},
            {
                option: _option(values, f"{where}: stage '{name}', option '{option}'")
                for option, values in stage["options"].items()
            },
            _classes(stage.get("classes")),
            None if stage.get("after") is None else tuple(map(str, stage["after"])),
        )
        for name, stage in table(raw["stages"], f"{where}: stages").items()
    }
    return Measurements(
        raw["pipeline"],
        raw["data"],
        raw["data_sha256"],
        raw["device"],
        int(raw["threads"]),
        raw["created"],
        stages,
    )


def _classes(raw: dict[str, list[int]] | None) -> dict[str, tuple[int, ...]] | None:
    return None if raw is None else {label: tuple(map(int, indices)) for label, indices in raw.items()}


def _option(raw: dict[str, Any], where: str) -> OptionMeasurement:
    accuracy = raw["accuracy"]
    levels = tuple(number(level, f"{where}: levels", 0.0, 1.0) for level in raw["levels"])
    return OptionMeasurement(
        text(raw["source"], f"{where}: source"),
        None if accuracy is None else number(accuracy, f"{where}: accuracy", 0.0, 1.0),
        tuple(number(value, f"{where}: latency_ms", 0.0, float("inf")) for value in raw["latency_ms"]),
        dict(raw["exits"]),
        str(raw["backend"]),
        levels,
        tuple(_behaviour(entry, len(levels) + 1, where) for entry in raw["behaviours"]),
    )


def _behaviour(raw: dict[str, Any], levels: int, where: str) -> BehaviourMeasurement:
    after, level = raw["after"], raw["level"]
    found = BehaviourMeasurement(
        None if after is None else text(after, f"{where}: after"),
        None if level is None else int(level),
        tuple(number(share, f"{where}: shares", 0.0, 1.0) for share in raw["shares"]),
        tuple(number(value, f"{where}: accuracies", 0.0, 1.0) for value in raw["accuracies"]),
        tuple(tuple(float(value) for value in values) for values in raw["latencies_ms"]),
    )
    if {len(found.shares), len(found.accuracies), len(found.latencies_ms)} != {levels}:
        raise PipelineError(
            f"{where}: a behaviour needs one entry for each of {levels} levels; run gati pipeline measure"
        )
    return found
