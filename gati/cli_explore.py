"""The verb `gati explore`; `gati.cli` registers it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import gati
from gati import cli_render
from gati.cli_options import (
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
    numbers,
    pairs,
    split_list,
)

__all__ = ["explore"]


def explore(
    model: Model,
    data: Annotated[
        str,
        typer.Option(
            metavar="VAL",
            help="Inputs the model was not trained on: an .npz, a folder of class folders, or a callable.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the cache library goes.")],
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
            help="Such as 'fc(512),conv(3,1)' or 'default,published'; '' for companions alone.",
        ),
    ] = None,
    companion: Companions = None,
    companion_checkpoint: CompanionCheckpoints = None,
    device: Device = "cpu",
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="End by then with the best so far; 'none' trains to the end.")
    ] = "24m",
    epochs: Annotated[
        float | None, typer.Option(metavar="N", help="Passes over the training inputs, if not the default.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same library.")] = 0,
    mean: Mean = None,
    std: Std = None,
    resize: Resize = None,
    class_names: ClassNamesFile = None,
    label_map: LabelMapFile = None,
) -> None:
    """Train and measure every cache variant after every block, and write the cache library DIR.

    Labels are not needed. Interrupted, the same command goes on where it stopped.

    A companion is a smaller network for the same classes: asked first, it answers what it is sure of, so that
    compose chooses among cascades, too, and certifies them (give it a larger --slowdown: what the first is
    not sure of pays for both). The library keeps all that it needs of it.

    What compose certifies assumes that VAL was drawn independently from what will be served: pictures are,
    frames of one video are not. Copies are found and kept together; what VAL has is left out of MORE.
    """
    from gati.explore.progress import open_progress
    from gati.units import parse_duration

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
        budget_s=None if budget == "none" else parse_duration(budget),
        seed=seed,
        mean=numbers("--mean", mean),
        std=numbers("--std", std),
        resize=resize,
        class_names=class_names,
        label_map=label_map,
        companions=pairs(companion, companion_checkpoint),
        progress=open_progress(),
    )
    cli_render.library(library)
