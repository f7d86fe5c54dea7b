"""The verb `gati explore`; `gati.cli` registers it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import gati
from gati.cli import options, render
from gati.errors import DataError
from gati.units import parse_duration

_WITH_MORE = ("--more", "--data", "--train-data", "--ray", "--ray-cores", "--ray-gpus")
_WITH_RAY = ("--ray-cores", "--ray-gpus")


def explore(
    context: typer.Context,
    model: options.Model,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="VAL",
            help="Inputs the model was not trained on: an .npz of images, of `inputs`, or of arrays named as "
            "its arguments (input_ids, attention_mask); a CSV or Parquet file of texts; a folder of class "
            "folders; or a callable.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the cache library.")] = None,
    checkpoint: options.Checkpoint = None,
    train_data: Annotated[
        str | None,
        typer.Option(metavar="MORE", help="More training inputs; the model's own training set will do."),
    ] = None,
    unique: Annotated[
        bool,
        typer.Option(
            "--unique",
            help="Keep one copy of each input of VAL: for data that was oversampled or exported twice.",
        ),
    ] = False,
    pattern: Annotated[
        str | None, typer.Option("--blocks", metavar="PATTERN", help="Only matching blocks.")
    ] = None,
    variants: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Such as 'reduced(128,6),student(48)' or 'default,published'; '' for companions only.",
        ),
    ] = None,
    companion: options.Companions = None,
    companion_checkpoint: options.CompanionCheckpoints = None,
    device: options.Device = "cpu",
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Time limit: 25m unless --epochs is given; 'none' for no limit.",
        ),
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(metavar="N", help="Epochs for exits; students train for 3 N."),
    ] = None,
    more: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Train the library DIR, given in place of MODEL, for this much longer."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the split and of training; see gati.explore.")] = 0,
    mean: options.Mean = None,
    std: options.Std = None,
    resize: options.Resize = None,
    sample_rate: options.SampleRate = None,
    seconds: options.Seconds = None,
    tokenizer: options.TokenizerFile = None,
    max_length: options.MaxLength = None,
    text_column: options.TextColumn = None,
    label_column: options.LabelColumn = None,
    class_names: options.ClassNamesFile = None,
    label_map: options.LabelMapFile = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS]",
            help="Train on a Ray cluster: the one of this machine unless an address is given, HOST:PORT, or "
            "'local' to start one for this command.",
        ),
    ] = None,
    ray_cores: Annotated[
        int, typer.Option(metavar="N", help="Cores of each worker. The number affects the trained weights.")
    ] = 1,
    ray_gpus: Annotated[int, typer.Option(metavar="N", help="GPUs of each worker.")] = 0,
    lookup_cores: Annotated[
        int,
        typer.Option(
            metavar="K",
            help="Cores that overlapped lookups have on the CPU, while measured here and when served; the "
            "network keeps the others.",
        ),
    ] = 1,
) -> None:
    """Train and measure learned caches, and write the cache library DIR.

    Measures the cost of lookups first. Then trains caches that read the network's input: a student or, for
    large images, a copy of the network with fewer pixels and fewer blocks. Exits at a few blocks follow.
    Everything named with --blocks and --variants is trained if the budget allows. Labels are not needed.
    After an interruption, the same command resumes.

    --more trains the caches of an existing library further: those that improve replace the older ones;
    existing compositions stay unchanged.

    A companion is a smaller network for the same classes. It runs first and answers what it is sure of, so
    compose also considers cascades, and certifies them. The library stores all it needs of the companion.
    'itself' is MODEL: on CPUs, lookups may run in 8-bit integers, so the network in 8-bit integers answers
    what it is sure of, and in float32 what is left. By default it is offered, unless it is large.

    With --ray, groups of caches train on the cluster's workers; if a worker dies, another one resumes its
    group. Latencies are measured on this machine: run it on the machine that will serve. See docs/ray.md.

    Certificates assume that VAL was drawn independently from what will be served: true for photographs, not
    for frames of one video. So copies in VAL must be draws of their own, such as queries that recur, or each
    input must be there as often as the others: otherwise give --unique. Inputs of VAL are left out of MORE.
    """
    from gati.exploration.progress import open_progress

    if ray is None and (idle := [each for each in options.given(context) if each in _WITH_RAY]):
        raise DataError(f"{', '.join(idle)} would have no effect without --ray; add that, or leave it out")
    if more is not None:
        if ignored := [each for each in options.given(context) if each not in _WITH_MORE]:
            raise DataError(
                f"{', '.join(ignored)} cannot be used with --more: the library keeps its own settings; "
                "--more TIME DIR trains it for that much longer"
            )
        budget_s = parse_duration(more)
        library = gati.explore_more(
            model,
            budget_s=budget_s,
            data=data,
            train_data=train_data,
            ray=ray,
            ray_cores=ray_cores,
            ray_gpus=ray_gpus,
            progress=open_progress(),
        )
        render.library(library)
        return
    if data is None or out is None:
        raise DataError(
            "--data is missing: give inputs that the network was not trained on (see gati explore --help)"
            if data is None
            else "--out is missing: give a folder for the library (see gati explore --help)"
        )
    library = gati.explore(
        model,
        checkpoint,
        data=data,
        train_data=train_data,
        out=out,
        unique=unique,
        blocks=pattern,
        variants=None if variants is None else options.split_list(variants),
        device=device,
        epochs=epochs,
        budget_s=options.budget_of(budget, epochs),
        seed=seed,
        mean=options.numbers("--mean", mean),
        std=options.numbers("--std", std),
        resize=resize,
        sample_rate=sample_rate,
        seconds=seconds,
        tokenizer=tokenizer,
        max_length=max_length,
        text_column=text_column,
        label_column=label_column,
        class_names=class_names,
        label_map=label_map,
        companions=options.pairs(companion, companion_checkpoint),
        ray=ray,
        ray_cores=ray_cores,
        ray_gpus=ray_gpus,
        lookup_cores=lookup_cores,
        progress=open_progress(),
    )
    render.library(library)
