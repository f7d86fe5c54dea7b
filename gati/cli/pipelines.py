"""The verbs about pipelines: `gati pipeline check` and `gati pipeline measure`; `gati.cli` registers them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gati.cli import render
from gati.cli.options import Device, examples_below

if TYPE_CHECKING:
    from gati.pipelines.pipeline import Pipeline

__all__ = ["pipeline"]

pipeline = typer.Typer(
    name="pipeline",
    help="Check and measure pipelines of models.",
    no_args_is_help=True,
    epilog=examples_below("gati pipeline check FILE", "gati pipeline measure FILE --data known.npz"),
)

PipelineFile = Annotated[Path, typer.Argument(metavar="FILE", help="The pipeline, in TOML.")]


@pipeline.command()
def check(file: PipelineFile) -> None:
    """Say whether FILE is a pipeline, and show its stages with their options."""
    from gati.pipelines import load_pipeline
    from gati.pipelines.measurements import beside

    _show(load_pipeline(file, measured=beside(file).is_file()))


@pipeline.command()
def measure(
    file: PipelineFile,
    data: Annotated[
        str, typer.Option(metavar="DATA", help="Inputs with labels that no option's training has seen.")
    ],
    limit: Annotated[int | None, typer.Option(metavar="N", help="Only the first N inputs.")] = None,
    device: Device = "cpu",
    threads: Annotated[int | None, typer.Option(metavar="N", help="That torch computes with.")] = None,
) -> None:
    """Measure latency and accuracy of every option on DATA, and store them next to FILE."""
    from gati.pipelines import load_pipeline
    from gati.pipelines.measure import measure_pipeline
    from gati.pipelines.measurements import beside

    counter = render.counter("measured")
    measure_pipeline(file, data, limit=limit, device=device, threads=threads, progress=counter)
    _show(load_pipeline(file))
    typer.echo(f"wrote {beside(file)}")


def _show(found: Pipeline) -> None:
    for name, stage in found.stages.items():
        before = ", ".join(
            edge.source + (f" says {' or '.join(sorted(edge.when))}" if edge.when else "")
            for edge in found.edges_to[name]
        )
        typer.echo(f"{name}: {' | '.join(stage.labels)}" + (f"; after {before}" if before else ""))
        for option in stage.options.values():
            accuracy = "not measured" if option.accuracy is None else f"{option.accuracy:.1%} right"
            latency = ""
            if option.latency is not None:
                tail = option.latency.quantile_ms(0.95)
                latency = f", {option.latency.mean_ms:.2f} ms, 95th percentile {tail:.2f} ms"
            typer.echo(f"  {option.name}: {accuracy}{latency}")
