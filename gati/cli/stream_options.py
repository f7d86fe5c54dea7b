"""Options that `gati stream` and `gati replay` share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

import typer

from gati.cli.options import given
from gati.errors import AdaptError

OF_LEARNING = (
    *("--sampling", "--interval", "--window", "--window-inputs", "--held-share", "--blocks", "--variants"),
    *("--margin", "--recall", "--delay"),
)

Source = Annotated[
    str,
    typer.Option(
        "--source",
        metavar="SOURCE",
        help="A video, a folder of images, camera:0, opencv:0, or an rtsp:// address.",
    ),
]
Recording = Annotated[
    str,
    typer.Option(
        "--source", metavar="SOURCE", help="A video file, also at an http:// address, or a folder of images."
    ),
]
Regions = Annotated[
    list[str] | None,
    typer.Option("--region", metavar="X,Y,W,H", help="Part of the picture, in pixels; may be repeated."),
]
Every = Annotated[
    str | None, typer.Option(metavar="TIME", help="At most one picture per interval, such as 1s.")
]
Fps = Annotated[float | None, typer.Option(help="At most this many pictures per second.")]
Authority = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Certificates (PEM) to trust for an https:// or rtsps:// source; default: the system's.",
    ),
]
Accuracy = Annotated[float | None, typer.Option(help="Agreement to keep; the composition's unless given.")]
Margin = Annotated[
    float, typer.Option(help="Safety margin for new caches, as a share of the tolerated disagreement.")
]
Threads = Annotated[int | None, typer.Option(help="Threads that the network uses; as measured unless given.")]
Recall = Annotated[
    bool,
    typer.Option(
        "--recall/--no-recall",
        help="Use memory: answer inputs similar to earlier ones from it (exit 'recall').",
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of retraining, and of a replay's draws.")]
WindowInputs = Annotated[
    int | None,
    typer.Option(metavar="N", help="Samples kept to retrain on; 700 unless given."),
]
HeldShare = Annotated[
    float,
    typer.Option(metavar="SHARE", help="Share of samples held back from training, to choose settings on."),
]
Blocks = Annotated[
    str | None,
    typer.Option(
        metavar="A,B", help="Blocks at which new caches are tried; three early blocks unless given."
    ),
]
Variants = Annotated[
    str, typer.Option(metavar="A,B", help="Variants of new caches to try, such as 'grid(64)'.")
]


def places(regions: Sequence[str] | None) -> int:
    """How many places memory has room for: of more regions, each is forgotten before its next picture."""
    from gati.adaptation.settings import AdaptSettings

    return max(AdaptSettings.places, len(regions or ()))


def refuse_ignored(context: typer.Context, ignored: Collection[str], without: str) -> None:
    """Check that none of these options is given where nothing is learned. Raises AdaptError."""
    found = [each for each in given(context) if each in ignored]
    if "--recall" in found and not context.params["recall"]:  # --no-recall: so it is
        found.remove("--recall")
    if named := ", ".join(found):
        raise AdaptError(
            f"{named} cannot be used {without}: nothing is learned; use --adapt, or leave out {named}"
        )
