"""The verbs about pipelines: `gati pipeline check`, `measure` and `status`; `gati.cli` registers them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from gati.cli import render
from gati.cli.asking import AskedServer
from gati.cli.options import SERVER_URL, Device, Limit, ServerKey, ServerUrl, examples_below
from gati.cli.words import counted, quoted
from gati.units import percent

if TYPE_CHECKING:
    from gati.pipelines.pipeline import Pipeline

_CHECK = "gati pipeline check pipeline.toml"
_MEASURE = "gati pipeline measure pipeline.toml --data known.npz"
_STATUS = "gati pipeline status cifar10 --url http://127.0.0.1:8000"
_MOST_NAMES = 8  # of labels in a line

pipeline = typer.Typer(
    name="pipeline",
    help="Check and measure pipelines of models.",
    no_args_is_help=True,
    epilog=examples_below(_CHECK, _MEASURE, _STATUS),
)

PipelineFile = Annotated[Path, typer.Argument(metavar="FILE", help="The pipeline, in TOML.")]


@pipeline.command(epilog=examples_below(_CHECK))
def check(file: PipelineFile) -> None:
    """Check that FILE is a valid pipeline, and show its stages with their options."""
    from gati.errors import PipelineError
    from gati.pipelines import load_pipeline
    from gati.pipelines.forks import follows
    from gati.pipelines.measurements import measurements_file

    found = load_pipeline(file, measured=measurements_file(file).is_file())
    _show(found)
    options = [option for stage in found.stages.values() for option in stage.options.values()]
    try:
        follows(found)
        plannable = True
    except PipelineError as error:  # only the default policy needs that
        plannable = False
        typer.echo(f"note: {error}")
    if any(option.accuracy is None or option.latency is None for option in options):
        typer.echo(f"next: gati pipeline measure {quoted(file)} --data DATA")
    elif plannable:
        typer.echo(f"next: gati serve {quoted(file)}")


@pipeline.command(epilog=examples_below(_MEASURE, f"{_MEASURE} --limit 500 --threads 1"))
def measure(
    file: PipelineFile,
    data: Annotated[
        str, typer.Option(metavar="DATA", help="Inputs with labels that no option's training has seen.")
    ],
    limit: Limit = None,
    device: Device = "cpu",
    threads: Annotated[
        int | None, typer.Option(metavar="N", help="Threads that torch uses; default: PyTorch's number.")
    ] = None,
) -> None:
    """Measure latency and accuracy of every option on DATA, and store them next to FILE.

    DATA is what gati explore takes; with options that have no cache library (model = ...), only an .npz.
    Folders and classes with names are matched to class_names by name; numbers count in the order of
    class_names.
    """
    from gati.pipelines import load_pipeline
    from gati.pipelines.measure import measure_pipeline
    from gati.pipelines.measurements import measurements_file

    counter = render.counter("measured")
    measure_pipeline(file, data, limit=limit, device=device, threads=threads, progress=counter)
    typer.echo(f"wrote {measurements_file(file)}")
    _show(load_pipeline(file))


@pipeline.command(epilog=examples_below(_STATUS))
def status(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the pipeline in gati serve.")],
    url: ServerUrl = SERVER_URL,
    api_key: ServerKey = None,
) -> None:
    """Show the figures that the planner uses for a served pipeline, and their source."""
    found = AskedServer(url, api_key).ask("GET", f"/v1/pipelines/{quote(name, safe='')}")
    again = counted(found["replans"], "time")
    follows = f"planned again {again}" if found["live"] else "offline figures only"
    typer.echo(f"{name}: policy {found['policy']}, {follows}")
    for stage in found["stages"]:
        typer.echo(f"{stage['name']}: {_either(stage['labels'])}")
        for option in stage["options"]:
            planned = f"{percent(option['accuracy'])} right, mean {option['mean_latency_ms']:.2f} ms"
            typer.echo(f"  {option['name']}: {planned}{_based_on(option['live'])}")


def _based_on(live: Mapping[str, Any] | None) -> str:
    """The source of an option's figures: live traffic, and the remaining weight of the measurement."""
    if live is None:
        return ""
    requests = counted(live["requests"], "request")
    parts = [f"{requests}, {percent(live['prior_share'], 0)} of the figures from the measurement"]
    if live["requests"]:
        taken = zip(("engine", "queue", "transport"), ("engine_ms", "queue_ms", "way_ms"), strict=True)
        spent = " + ".join(f"{what} {live[key] or 0.0:.2f}" for what, key in taken)
        parts.append(f"recently {spent} ms")
    if live["hit_rate"] is not None:
        parts.append(f"{percent(live['hit_rate'], 0)} leave early")
    if live["agreement"] is not None:
        agreement = live["agreement"]
        promised = "" if agreement["promised"] is None else f", promised {percent(agreement['promised'])}"
        parts.append(f"agreement {percent(agreement['expected'])} from {agreement['based_on']}{promised}")
    return "; " + "; ".join(parts)


def _show(found: Pipeline) -> None:
    for name, stage in found.stages.items():
        before = ", ".join(
            edge.source + (f" says {_either(sorted(edge.when), ' or ')}" if edge.when else "")
            for edge in found.edges_to[name]
        )
        typer.echo(f"{name}: {_either(stage.labels)}" + (f"; after {before}" if before else ""))
        for option in stage.options.values():
            accuracy = "not measured" if option.accuracy is None else f"{percent(option.accuracy)} right"
            latency = ""
            if option.latency is not None:
                tail = option.latency.quantile_ms(0.95)
                latency = f", mean {option.latency.mean_ms:.2f} ms, 95th percentile {tail:.2f} ms"
            typer.echo(f"  {option.name}: {accuracy}{latency}")


def _either(labels: Iterable[str], between: str = " | ") -> str:
    """Labels in one line, of many only some."""
    names = list(labels)
    if len(names) > _MOST_NAMES:
        names[_MOST_NAMES - 1 :] = [f"{len(names) - _MOST_NAMES + 1} more"]
    return between.join(names)
