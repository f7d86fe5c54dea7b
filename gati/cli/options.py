"""Options that several verbs share, and the parsers of their values."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Literal

import typer

from gati.errors import BackendError, DataError, GatiError, StorageError
from gati.units import parse_duration

EXPLORE_BUDGET = "25m"
_THIS_CLUSTER = "auto"  # Ray's name for the running cluster
_PRINTS = "gati.prints"  # key of the option whose results go to standard output
_HOME = re.compile(r"(--[a-z-]+=)(~.*)", re.DOTALL)

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="torchvision:NAME, timm:NAME, package.module:callable, file.py:callable, a torch.export file, "
        "or a folder with a BERT classifier.",
    ),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Weights: safetensors, or a torch file that loads with weights_only=True."
    ),
]
LibraryDir = Annotated[
    Path, typer.Argument(metavar="DIR", help="The cache library that gati explore --out wrote.")
]
CompositionName = Annotated[
    str, typer.Option("--composition", metavar="NAME", help="Which composition of the library to use.")
]
Mean = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Mean per channel of images in 0..1, if the model has none."),
]
Std = Annotated[str | None, typer.Option(metavar="LIST", help="Standard deviation per channel, with --mean.")]
Resize = Annotated[
    int | None, typer.Option(metavar="PIXELS", help="Resize the shorter side to this; 0: do not resize.")
]
SampleRate = Annotated[
    int | None,
    typer.Option("--sample-rate", metavar="HERTZ", help="Sample rate of recordings, if the model has none."),
]
Seconds = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Length of recordings: longer ones are cut, shorter ones padded."),
]
TokenizerFile = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        metavar="FILE",
        help="The tokenizer.json of a model that takes text; --data is then CSV or Parquet.",
    ),
]
MaxLength = Annotated[
    int | None,
    typer.Option(
        "--max-length", metavar="TOKENS", help="Longer texts are truncated; default: the tokenizer's limit."
    ),
]
TextColumn = Annotated[
    str | None,
    typer.Option("--text-column", metavar="NAME", help="Column of texts in tables; default: 'text'."),
]
LabelColumn = Annotated[
    str | None,
    typer.Option(
        "--label-column", metavar="NAME", help="Column of classes in tables; default: 'label', if it exists."
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, or cuda:1 and so on.")]
LibraryDevice = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, or cuda:1 and so on; the one the library was measured on unless given."),
]
Limit = Annotated[
    int | None, typer.Option(metavar="N", help="Only N inputs, drawn from all parts of the data.")
]
Slowdown = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Limit on the cost of all lookups for an input that misses every cache, as a share of the "
        "network's latency; default: 1, inf: no limit. With 0.05 it takes at most 5 % longer than without "
        "caches.",
    ),
]
ComposeThreads = Annotated[
    str | None,
    typer.Option(
        "--threads",
        metavar="N|auto",
        help="Threads that run the network while latencies are measured; default: as in explore. auto times "
        "the plain network with 1, 2, 4 and so on up to all cores, and takes the fastest number.",
    ),
]
CertifyData = Annotated[
    str | None,
    typer.Option(
        metavar="MORE",
        help="Inputs that explore has not seen, labelled or not: certify on these as well.",
    ),
]
ClassNamesFile = Annotated[
    Path | None,
    typer.Option(
        "--class-names",
        metavar="FILE",
        help="The network's class names in order, one per line or a JSON list.",
    ),
]
LabelMapFile = Annotated[
    Path | None,
    typer.Option(
        "--label-map",
        metavar="FILE",
        help="JSON object: folder name or label number to the network's class number, where they differ.",
    ),
]
Companions = Annotated[
    list[str] | None,
    typer.Option(
        "--companion",
        metavar="MODEL",
        help="A smaller network that runs first, named as MODEL is, or 'itself'; repeat it for several.",
    ),
]
CompanionCheckpoints = Annotated[
    list[str] | None,
    typer.Option(
        "--companion-checkpoint",
        metavar="FILE",
        help="Weights of the companions, in their order; 'none' for one that includes its own.",
    ),
]


def written_to(context: typer.Context, option: typer.CallbackParam, path: Path | None) -> Path | None:
    """As `file_of`, for an option that may be left out."""
    return None if path is None else file_of(context, option.opts[0], path)


def file_of(context: typer.Context, option: str, path: Path) -> Path:
    """The file that an option names, `-` for standard output: what else is shown goes to standard error then.

    So `gati evaluate ... --json - | jq` reads JSON only. Raises StorageError, before any work is done, for a
    folder, and for a second option that names standard output.
    """
    if not to_standard_output(path):
        refuse_folder(option, path)
        return path
    other = context.meta.setdefault(_PRINTS, option)
    if other != option:
        raise StorageError(f"{other} and {option} both name standard output; give one of them a file")
    context.with_resource(redirect_stdout(sys.stderr))
    return Path("/dev/stdout")


def refuse_folder(option: str, path: Path) -> None:
    """Check that an option does not name a folder as its file. Raises StorageError."""
    if os.path.isdir(path):  # Path.is_dir raises where this user may not look
        raise StorageError(f"{option} {path} is a folder; give the name of a file")


def to_standard_output(path: str | Path) -> bool:
    """Whether results go to standard output: `-`, or a path such as `/dev/stdout`."""
    from gati.files import is_standard_output

    return str(path) == "-" or is_standard_output(Path(path))


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", callback=written_to, help="Also write the numbers here; - prints only them."
    ),
]
PageFile = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        callback=written_to,
        help="The page; DIR/report.html by default, - prints it.",
    ),
]


def examples_below(*commands: str) -> str:
    """The end of a help text: example commands."""
    # typer joins the lines of a paragraph, so each example is its own paragraph.
    return "\n\n".join(("Examples:", *(f"  {command}" for command in commands)))


def split_list(text: str) -> tuple[str, ...]:
    """Split at commas, but not inside parentheses: `fc(512),conv(3,1)` has two entries."""
    entries, depth = [""], 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            entries.append("")
        else:
            entries[-1] += character
    return tuple(entry.strip() for entry in entries if entry.strip())


def budget_of(text: str | None, epochs: float | None) -> float | None:
    """Seconds that `explore` may take: 25 minutes if neither a budget nor a number of epochs is given.

    Raises GatiError.
    """
    if text == "none" or (text is None and epochs is not None):
        return None
    return parse_duration(text or EXPLORE_BUDGET)


def numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    """Read `0.5,0.5,0.5`; `option` begins the error message. Raises DataError."""
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        message = f"{option} {text!r} is not a list of numbers; write one per channel, such as 0.5,0.5,0.5"
        raise DataError(message) from None


def pairs(models: list[str] | None, checkpoints: list[str] | None) -> list[tuple[str, str | None]]:
    """Companions with their checkpoints; all None if no checkpoint is given. Raises DataError."""
    given, weights = models or [], checkpoints or []
    if weights and len(weights) != len(given):
        raise DataError(
            f"{len(weights)} --companion-checkpoint for {len(given)} --companion; give one for each, in the "
            "same order, or 'none' for one that includes its own"
        )
    known = [None if weight == "none" else weight for weight in weights] or [None] * len(given)
    return list(zip(given, known, strict=True))


def size_of(text: str | None) -> tuple[int, int] | None:
    """Read `HEIGHTxWIDTH`. Raises DataError."""
    if text is None:
        return None
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise DataError(f"--size {text!r} is not a size in pixels; write HEIGHTxWIDTH, such as 32x32")
    return int(match[1]), int(match[2])


def threads_of(text: str | None) -> int | Literal["auto"] | None:
    """Read a number of threads, or auto. Raises BackendError."""
    if text is None or text == "auto":
        return "auto" if text else None
    try:
        return int(text)
    except ValueError:
        raise BackendError(f"--threads {text!r} is not a number; give one such as 4, or auto") from None


def threads_as_measured(directory: Path, composition: str) -> None:
    """Use as many threads as the composition's latencies were measured with.

    Does nothing where `as_recorded` finds no such number, or if the library cannot be read: the verb then
    raises the error.
    """
    import torch

    from gati.composition.composition import Composition
    from gati.composition.threads import as_recorded
    from gati.exploration.library import Library

    with suppress(GatiError):
        library = Library.open(directory)
        chosen = Composition.load(library.composition_path(composition))
        count = as_recorded(library, chosen.measured_on)
        if count is not None:
            torch.set_num_threads(count)


def given(context: typer.Context) -> list[str]:
    """The options on the command line, such as `--seed`, in the order of the help."""
    found = []
    for each in context.command.params:
        source = context.get_parameter_source(each.name or "")
        if source is not None and source.name == "COMMANDLINE" and each.opts[0].startswith("--"):
            found.append(each.opts[0])
    return found


def with_home(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command, with the home folder in `--out=~/x`: shells expand only `--out ~/x`."""
    found = [(_HOME.fullmatch(each), each) for each in arguments]
    return [each if match is None else match[1] + os.path.expanduser(match[2]) for match, each in found]


def with_addresses(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command, with a default address after a `--ray` that has none."""
    found: list[str] = []
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue="-"):
        found.append(argument)
        if argument == "--ray" and following.startswith("-"):
            found.append(_THIS_CLUSTER)
    return found


# For verbs that serve HTTP, and for verbs that send requests.
Certificate = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Serve HTTPS with this certificate (PEM).")
]
CertificateKey = Annotated[
    Path | None, typer.Option("--certificate-key", metavar="FILE", help="The certificate's key (PEM).")
]
Host = Annotated[str | None, typer.Option(help="Address to listen on; 127.0.0.1 unless given.")]
KeysFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Several keys, with rights and quotas; reread on SIGHUP."),
]
LogLevel = Annotated[
    str | None, typer.Option("--log-level", help="debug, info (one line per request), warning, error.")
]
Port = Annotated[int | None, typer.Option(help="8000 unless given; 0 picks a free port.")]
ServerUrl = Annotated[str, typer.Option("--url", help="Address of gati serve.")]
ServerKey = Annotated[
    str | None, typer.Option("--api-key", envvar="GATI_API_KEY", help="API key, if the server requires one.")
]
SERVER_URL = "http://127.0.0.1:8000"
