"""The verb `gati explore`; `gati.cli` registers it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click
import typer

import gati
from gati.cli import render
from gati.cli.options import (
    Checkpoint,
    ClassNamesFile,
    CompanionCheckpoints,
    Companions,
    Device,
    LabelMapFile,
    Mean,
    Model,
    Resize,
    Std,
    budget_of,
    numbers,
    pairs,
    split_list,
)
from gati.units import parse_duration

__all__ = ["explore"]


def explore(
    model: Model,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="VAL",
            help="Inputs the model was not trained on: an .npz of images, of `inputs`, or of arrays named as "
            "its arguments (input_ids, attention_mask); a folder of class folders; or a callable.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the cache library goes.")] = None,
    checkpoint: Checkpoint = None,
    train_data: Annotated[
        str | None, typer.Option(metavar="MORE", help="More inputs to train on; the model's own will do.")
    ] = None,
    pattern: Annotated[
        str | None, typer.Option("--blocks", metavar="PATTERN", help="Only blocks that match.")
    ] = None,
    variants: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Such as 'reduced(112),student(48)' or 'default,published'; '' for companions alone.",
        ),
    ] = None,
    companion: Companions = None,
    companion_checkpoint: CompanionCheckpoints = None,
    device: Device = "cpu",
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Train as much as fits: 25m unless --epochs is given. 'none' trains as long as it takes.",
        ),
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(metavar="N", help="Passes of exits over the training inputs; students make 3 N."),
    ] = None,
    more: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Train the library DIR, given in place of MODEL, for so much longer."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same library.")] = 0,
    mean: Mean = None,
    std: Std = None,
    resize: Resize = None,
    class_names: ClassNamesFile = None,
    label_map: LabelMapFile = None,
) -> None:
    """Train and measure learned caches, and write the cache library DIR.

    What lookups cost is measured first. Then what reads the network's input is trained: a student, or a copy
    of the network for half of the pixels a side where pictures are large and that costs little. Exits at a
    few blocks follow. What is named with --blocks and --variants is all trained. Labels are not needed.
    Interrupted, the same command goes on where it stopped.

    With --more, what a library has is trained further: caches that get better take the place of older ones,
    and compositions that are there stay as they are.

    A companion is a smaller network for the same classes: asked first, it answers what it is sure of, so that
    compose chooses among cascades, too, and certifies them. The library keeps all that it needs of it.

    What compose certifies assumes that VAL was drawn independently from what will be served: pictures are,
    frames of one video are not. Copies are found and kept together; what VAL has is left out of MORE.
    """
    from gati.exploration.progress import open_progress

    if more is not None:
        _refuse_with_more(
            blocks=pattern,
            variants=variants,
            companion=companion,
            out=out,
            checkpoint=checkpoint,
            budget=budget,
            epochs=epochs,
        )
        budget_s = parse_duration(more)
        library = gati.explore_more(
            model, budget_s=budget_s, data=data, train_data=train_data, progress=open_progress()
        )
        render.library(library)
        return
    if data is None or out is None:
        raise click.UsageError(f"Missing option '{'--data' if data is None else '--out'}'")
    library = gati.explore(
        model,
        checkpoint,
        data=data,
        train_data=train_data,
        out=out,
        blocks=pattern,
        variants=None if variants is None else split_list(variants),
        device=device,
        epochs=epochs,
        budget_s=budget_of(budget, epochs),
        seed=seed,
        mean=numbers("--mean", mean),
        std=numbers("--std", std),
        resize=resize,
        class_names=class_names,
        label_map=label_map,
        companions=pairs(companion, companion_checkpoint),
        progress=open_progress(),
    )
    render.library(library)


def _refuse_with_more(**given: object) -> None:
    """What a library was explored with it keeps. Raises a usage error."""
    for name, value in given.items():
        if value is not None:
            raise click.UsageError(f"'--{name}' does not go with '--more': the library keeps its own")
