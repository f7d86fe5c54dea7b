"""Reading a pipeline file, with the measurements next to it, as a `Pipeline`."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gati.errors import PipelineError
from gati.files import lasting_source
from gati.pipelines.check import check_graph, outputs_of
from gati.pipelines.distribution import Distribution
from gati.pipelines.fields import CheckedTable, number, table, text, texts
from gati.pipelines.labels import LabelMap
from gati.pipelines.measurements import Measurements, OptionMeasurement, StageMeasurement, measurements_file
from gati.pipelines.pipeline import (
    Behaviour,
    CacheLibrary,
    Edge,
    Finding,
    Option,
    Pipeline,
    PlainModel,
    Stage,
    describe_source,
)
from gati.types import NAME_RULE, is_name


def load_pipeline(path: str | Path, *, measured: bool = True) -> Pipeline:
    """Read a pipeline from a TOML file, with the measurements that `gati pipeline measure` stored next to it.

    Folders and checkpoints are relative to the file. They are not opened: the scheduler does not need them.
    `measured=False` ignores the measurements; options may then lack latency or accuracy.

    **Raises:** `PipelineError`, whose message says what is wrong, in which stage, and what to do.
    """
    file = Path(path)
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise PipelineError(f"no pipeline file {file}; check the path") from None
    except IsADirectoryError:
        raise PipelineError(f"{file} is a folder; give the pipeline's TOML file") from None
    except (OSError, ValueError) as error:
        raise PipelineError(f"{file}: not readable as TOML ({error}); correct it") from error
    found = (
        Measurements.load(measurements_file(file)) if measured and measurements_file(file).is_file() else None
    )
    return parse_pipeline(document, file, found, measured=measured)


def parse_pipeline(
    document: Mapping[str, Any],
    path: str | Path = "pipeline.toml",
    measurements: Measurements | None = None,
    *,
    measured: bool = True,
) -> Pipeline:
    """As `load_pipeline`, from a parsed file; `path` gives the default name and the folder."""
    file = Path(path)
    top = CheckedTable(document, str(file))
    given = top.take("name")
    name = _valid_name(file.stem if given is None else given, "name", str(file))
    declared_input = top.take("input")
    classes = _class_names(top, ())
    stages = {}
    for key, value in table(top.take("stages"), top.at("stages")).items():
        where = f"{file}: stage '{_valid_name(key, 'stage', str(file))}'"
        kept = None if measurements is None else measurements.stages.get(key)
        stages[key] = _stage(key, table(value, where), classes, kept, file.parent, where, measured)
    edges = _edges(top.take("edges"), str(file))
    top.finish()
    order, first = check_graph(
        stages, edges, None if declared_input is None else text(declared_input, top.at("input")), str(file)
    )
    ordered, outputs = {key: stages[key] for key in order}, outputs_of(order, edges)
    found = Pipeline(name, ordered, edges, first, outputs, classes, file)
    if measurements is None:
        return found
    _check_edges(found, measurements, str(file))
    return _with_known_findings(found)


def _check_edges(pipeline: Pipeline, measurements: Measurements, where: str) -> None:
    """Raise `PipelineError` if a stage was measured on what another stage had found before it."""
    for name, stage in pipeline.stages.items():
        kept = measurements.stages.get(name)
        now = [edge.source for edge in pipeline.edges_to[name]]
        if kept is None or kept.after is None or sorted(kept.after) == sorted(now):
            continue
        if any(finding is not None for one in stage.options.values() for finding in one.behaviours):
            then, afterwards = (" and ".join(f"'{each}'" for each in names) for names in (kept.after, now))
            raise PipelineError(
                f"{where}: stage '{name}' was measured after {then} but now follows {afterwards or 'none'}; "
                "run gati pipeline measure"
            )


def _with_known_findings(pipeline: Pipeline) -> Pipeline:
    """The pipeline without behaviours after findings that it cannot tell apart.

    An option whose figures are in the file has no levels: all of its answers would count as its surest ones.
    """
    stages = {}
    for name, stage in pipeline.stages.items():
        before = [pipeline.stages[edge.source].options for edge in pipeline.edges_to[name]]
        untold = {key for options in before for key, option in options.items() if not option.levels}
        options = {}
        for key, option in stage.options.items():
            kept = {
                finding: behaviour
                for finding, behaviour in option.behaviours.items()
                if finding is None or finding.option not in untold
            }
            options[key] = replace(option, behaviours=kept)
        stages[name] = replace(stage, options=options)
    return replace(pipeline, stages=stages)


def _stage(
    name: str,
    values: Mapping[str, Any],
    classes: tuple[str, ...],
    kept: StageMeasurement | None,
    folder: Path,
    where: str,
    measured: bool,
) -> Stage:
    fields = CheckedTable(values, where)
    groups = _groups(fields, classes)
    labels = tuple(groups)
    try:
        truth = LabelMap.from_groups(groups, classes)
    except PipelineError as error:
        raise PipelineError(f"{where}: {error}") from None
    given_shares = fields.take("shares")
    stale = kept is not None and not _fits(kept, truth)
    kept = None if stale else kept
    options = {}
    for key, value in table(fields.take("options"), fields.at("options")).items():
        here = f"{where}, option '{_valid_name(key, 'option', where)}'"
        known = None if kept is None else kept.options.get(key)
        options[key] = _option(
            key, table(value, here), groups, classes, known, folder, here, measured and not stale
        )
    fields.finish()
    if measured and stale and any(one.accuracy is None or one.latency is None for one in options.values()):
        raise PipelineError(f"{where} was measured with other labels or classes; run gati pipeline measure")
    shares = given_shares if given_shares is not None or kept is None else kept.shares or None
    return Stage(name, labels, options, truth, _shares(shares, labels, fields.at("shares")))


def _option(
    name: str,
    values: Mapping[str, Any],
    groups: Mapping[str, Sequence[str]],
    classes: tuple[str, ...],
    kept: OptionMeasurement | None,
    folder: Path,
    where: str,
    measured: bool,
) -> Option:
    fields = CheckedTable(values, where)
    own_classes = _class_names(fields, classes)
    if own_classes != classes and all(label in own_classes for label in groups):
        groups = {label: (label,) for label in groups}  # a network whose outputs are the labels themselves
    try:
        label_map = LabelMap.from_groups(groups, own_classes)
    except PipelineError as error:
        raise PipelineError(f"{where}: {error}") from None
    source = _source(fields, folder)
    accuracy, latency = fields.take("accuracy"), fields.take("latency_ms")
    fields.finish()
    option = Option(
        name,
        source,
        label_map,
        None if accuracy is None else number(accuracy, fields.at("accuracy"), 0.0, 1.0),
        None if latency is None else _latency(latency, fields.at("latency_ms")),
        class_names=own_classes,
    )
    option = _with_measurements(option, kept, folder, where, measured)
    if measured and (option.accuracy is None or option.latency is None):
        if kept is not None and option.latency is not None:
            raise PipelineError(
                f"{where} was measured on data without labels, so its accuracy is unknown; run gati pipeline "
                "measure on labelled data, or write accuracy into the file"
            )
        missing = "latency_ms" if option.latency is None else "accuracy"
        raise PipelineError(
            f"{where} has no measurements ({missing}); run gati pipeline measure, or write it into the file"
        )
    return option


def _fits(kept: StageMeasurement, truth: LabelMap) -> bool:
    """Whether a stage was measured with the labels and classes that it has now, as far as is known."""
    same = not kept.shares or kept.shares.keys() == set(truth.labels)
    return same and kept.classes in (None, truth.by_label)


def _with_measurements(
    option: Option, kept: OptionMeasurement | None, folder: Path, where: str, measured: bool
) -> Option:
    """Values in the file take precedence over measurements."""
    if kept is None or (option.accuracy is not None and option.latency is not None):
        return option
    described = describe_source(option.source, folder)
    then = kept.source.replace(f"{os.path.abspath(folder)}/", "")  # older versions wrote whole paths
    if described not in (kept.source, then):
        if measured:
            raise PipelineError(
                f"{where} was measured as {kept.source} but is now {described}; run gati pipeline measure"
            )
        return option
    latency = option.latency or _latency(list(kept.latency_ms), f"{where}: latency_ms")
    accuracy = kept.accuracy if option.accuracy is None else option.accuracy
    if accuracy != kept.accuracy or option.latency is not None:
        return replace(option, accuracy=accuracy, latency=latency)
    behaviours = {
        None if known.after is None or known.level is None else Finding(known.after, known.level): Behaviour(
            known.shares,
            known.accuracies,
            tuple(_latency(list(values), f"{where}: latencies_ms") for values in known.latencies_ms),
        )
        for known in kept.behaviours
    }
    return replace(option, accuracy=accuracy, latency=latency, levels=kept.levels, behaviours=behaviours)


def _source(fields: CheckedTable, folder: Path) -> CacheLibrary | PlainModel:
    library, composition, caches = (fields.take(key) for key in ("library", "composition", "caches"))
    model, checkpoint = fields.take("model"), fields.take("checkpoint")
    if (library is None) == (model is None):
        found = "neither" if library is None else "both"
        raise PipelineError(f"{fields.where} names {found}; give either library or model")
    if model is not None:
        for key, value in (("composition", composition), ("caches", caches)):
            if value is not None:
                raise PipelineError(f"{fields.at(key)} applies to library, not to model; remove it")
        file = None if checkpoint is None else folder / text(checkpoint, fields.at("checkpoint"))
        return PlainModel(lasting_source(text(model, fields.at("model")), folder), file)
    if checkpoint is not None:
        raise PipelineError(f"{fields.at('checkpoint')} applies to model, not to library; remove it")
    if not isinstance(caches, bool | None):
        raise PipelineError(f"{fields.at('caches')} is {caches!r}; write true or false")
    directory = folder / text(library, fields.at("library"))
    if caches is False:
        if composition is not None:
            raise PipelineError(f"{fields.at('composition')} has no effect with caches = false; remove one")
        return CacheLibrary(directory, None)
    chosen = "default" if composition is None else _valid_name(composition, "composition", fields.where)
    return CacheLibrary(directory, chosen)


def _latency(value: Any, where: str) -> Distribution:
    values = value if isinstance(value, list) else [value]
    samples = [number(item, where, 0.0, float("inf")) for item in values]
    try:
        return Distribution.from_samples(samples)
    except PipelineError as error:
        raise PipelineError(f"{where}: {error}") from None


def _groups(fields: CheckedTable, classes: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    groups, restricted = fields.take("groups"), fields.take("classes")
    if groups is not None and restricted is not None:
        raise PipelineError(f"{fields.where} has both groups and classes; give only one")
    if groups is not None:
        entries = table(groups, fields.at("groups"))
        return {label: texts(members, fields.at(f"groups.{label}")) for label, members in entries.items()}
    names = classes if restricted is None else texts(restricted, fields.at("classes"))
    if not names:
        raise PipelineError(f"{fields.where} has no labels; give class_names, the classes of its outputs")
    return {name: (name,) for name in names}


def _class_names(fields: CheckedTable, inherited: tuple[str, ...]) -> tuple[str, ...]:
    names = fields.take("class_names")
    return inherited if names is None else texts(names, fields.at("class_names"))


def _shares(value: Any, labels: tuple[str, ...], where: str) -> tuple[float, ...]:
    if value is None:
        return tuple(1.0 / len(labels) for _ in labels)
    given = table(value, where)
    if set(given) != set(labels):
        raise PipelineError(
            f"{where} names {', '.join(given)}; give one share for each of {', '.join(labels)}"
        )
    shares = [number(given[label], where, 0.0, 1.0) for label in labels]
    if abs(sum(shares) - 1.0) > 1e-3:
        raise PipelineError(f"{where} sums to {sum(shares):g}; make it 1")
    return tuple(share / sum(shares) for share in shares)


def _edges(value: Any, where: str) -> tuple[Edge, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise PipelineError(f"{where}: edges is {value!r}; give a list of {{ from = ..., to = ... }}")
    edges = []
    for index, entry in enumerate(value):
        here = f"{where}: edges[{index}]"
        fields = CheckedTable(table(entry, here), here)
        source, target = (text(fields.take(key), fields.at(key)) for key in ("from", "to"))
        when = fields.take("when")
        fields.finish()
        held = None if when is None else frozenset(texts(when, fields.at("when")))
        edges.append(Edge(source, target, held))
    return tuple(edges)


def _valid_name(value: Any, what: str, where: str) -> str:
    if not isinstance(value, str) or not is_name(value):
        raise PipelineError(f"{where}: {what} {value!r} is not a valid name; use {NAME_RULE}")
    return value
