"""The verbs that compare and show: `gati bench`, `certify` and `report`; `gati.cli` registers them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import gati
from gati.cli import options, render


def bench(
    directory: options.LibraryDir,
    data: Annotated[str, typer.Option(metavar="TEST", help="Inputs that explore has not seen.")],
    json_file: options.JsonFile = None,
    composition: options.CompositionName = "default",
    limit: options.Limit = None,
    repetitions: Annotated[int, typer.Option(metavar="R", help="Passes over the inputs.")] = 3,
    clients: Annotated[int, typer.Option(metavar="N", help="Concurrent clients, for the throughput.")] = 8,
    seconds: Annotated[
        float, typer.Option(help="Duration of each throughput run; 0 skips them, which is much faster.")
    ] = 1.0,
    threads: Annotated[int | None, typer.Option(metavar="N", help="Threads that torch uses.")] = None,
    cascade: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Library of a smaller network that runs first: a cascade to compare with."
        ),
    ] = None,
    label_map: options.LabelMapFile = None,
) -> None:
    """Compare Gati with the network on every available backend, and with published early exits.

    All take turns in one process, 64 requests each. The result is stored as DIR/bench.json for gati report.
    """
    from gati.files import atomic_write_text

    if threads is None:
        options.threads_as_measured(directory, composition)
    result = gati.bench(
        directory,
        data,
        composition=composition,
        limit=limit,
        repetitions=repetitions,
        clients=clients,
        seconds=seconds,
        threads=threads,
        cascade=cascade,
        label_map=label_map,
        progress=render.counter("measured"),
    )
    render.bench(result)
    if json_file is not None:
        atomic_write_text(json_file, result.to_json())


def certify(
    directory: options.LibraryDir,
    data: Annotated[str, typer.Option(metavar="MORE", help="Inputs that explore has not seen.")],
    composition: options.CompositionName = "default",
    accuracy: Annotated[
        float | None, typer.Option(help="Agreement to certify; the composition's target unless given.")
    ] = None,
    confidence: Annotated[
        float | None, typer.Option(help="Confidence; the composition's unless given.")
    ] = None,
    per_class: Annotated[
        bool, typer.Option("--per-class", help="Certify every class; the default if the composition does.")
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Put the new certificate into the composition.")
    ] = False,
    json_file: options.JsonFile = None,
    device: options.LibraryDevice = None,
    class_names: options.ClassNamesFile = None,
    label_map: options.LabelMapFile = None,
) -> None:
    """Certify a composition again on new data, and compare with the earlier certificate.

    Assumes that the inputs were drawn independently from what will be served; frames of one video are not.
    Inputs that explore has seen, or that earlier attempts counted in other data, and duplicates count only
    if the answers differ. Every attempt is recorded: all attempts on a library share
    one error probability. The composition stays as it is unless --write stores the verdict in it: evaluate
    and predict then go on with caches that were not certified again, with a warning; serve and stream use
    them only once audits have proven them.
    """
    import json

    from gati.files import atomic_write_text

    options.threads_as_measured(directory, composition)
    found = gati.certify(
        directory,
        data,
        composition=composition,
        accuracy=accuracy,
        confidence=confidence,
        per_class=per_class or None,
        write=write,
        device=device,
        class_names=class_names,
        label_map=label_map,
        progress=render.counter("counted"),
    )
    render.recertification(found, composition, written=write)
    if json_file is not None:
        atomic_write_text(json_file, json.dumps(found.to_json(), indent=2, allow_nan=False) + "\n")


def report(
    directory: options.LibraryDir,
    out: options.PageFile = None,
    json_file: options.JsonFile = None,
    composition: options.CompositionName = "default",
) -> None:
    """Write one HTML page: certificate, gain, exits, comparison with peers, trade-off, and every class."""
    import json

    from gati.files import atomic_write_text

    facts = gati.report(directory, composition=composition, out=out)
    if json_file is not None:
        atomic_write_text(json_file, json.dumps(facts, indent=2, allow_nan=False) + "\n")
    typer.echo(f"wrote {directory / 'report.html' if out is None else out}")
