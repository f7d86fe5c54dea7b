"""`gati evict`: eviction policies of prefix and embedding caches; `gati.cli` registers the group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gati.cli import evict_serve, render
from gati.cli.evict_engine import engine
from gati.cli.evict_tables import print_fields, print_outcomes
from gati.cli.options import JsonFile, examples_below, split_list, to_standard_output, written_to
from gati.cli.words import quoted
from gati.errors import EvictError
from gati.units import parse_duration

if TYPE_CHECKING:
    from gati.evict.replays.result import TraceReplay
    from gati.evict.trace.records import Trace

evict = typer.Typer(
    name="evict",
    help="Learned eviction: hit rates of prefix and embedding caches on your own trace.",
    no_args_is_help=True,
    epilog=examples_below(
        "gati evict inspect trace.jsonl.gz",
        "gati evict replay trace.jsonl.gz --size 2000,5000 --policy lru,gati,opt",
        "gati evict compare trace.jsonl.gz --out report.html",
        "gati evict synthesise dialogues.jsonl.gz --out stream.jsonl.gz",
        "gati evict serve learned --continuation continuation",
        "gati evict engine --policy gati --budget 256MiB",
    ),
)


@evict.callback()
def _before(context: typer.Context) -> None:
    context.with_resource(_sleeping_threads())


@contextmanager
def _sleeping_threads() -> Iterator[None]:
    """Torch, if it is imported within this, has threads that sleep while they wait for each other.

    By default they spin after each layer. Where other processes use the cores, they keep the one without a
    core from getting one. What the environment says goes first.
    """
    given = os.environ.get(_WAITING)
    os.environ.setdefault(_WAITING, "passive")
    try:
        yield
    finally:
        if given is None:
            del os.environ[_WAITING]


evict.command(epilog=examples_below(*evict_serve.EXAMPLES))(evict_serve.serve)
evict.command(
    epilog=examples_below(
        "gati evict engine",
        "gati evict engine tinyllama --policy lru --budget 1GiB --port 8001",
        "gati evict engine --access-log today.jsonl && gati evict replay today.jsonl",
        'curl localhost:8000/v1/completions -d \'{"model": "random-0", "prompt": "Hello", "stream": true}\'',
    )
)(engine)

_WAITING = "OMP_WAIT_POLICY"  # which OpenMP reads when it is loaded
_NOISE = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
_NOISY = "lru,laru,gati,fpb,hf"
_NOISY_FLAT = f"{_NOISY},predictive-marker,lmarker,guard"

TraceFile = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE",
        help="JSON lines with hash_ids (Mooncake, Qwen-Bailian), CSV, Parquet or .txt; may be gzipped.",
    ),
]
Flat = Annotated[
    bool,
    typer.Option("--flat", help="The trace has independent blocks, such as embedding rows, not prefixes."),
]
Limit = Annotated[int | None, typer.Option(metavar="N", help="Only the first N requests.")]
Sizes = Annotated[
    str | None, typer.Option("--size", metavar="LIST", help="Cache sizes in blocks; five sizes by default.")
]
Policies = Annotated[
    str,
    typer.Option(
        "--policy", metavar="LIST", help="Policies: lru, gati, laru, opt and others; opt is the optimum."
    ),
]
PredictorName = Annotated[
    str,
    typer.Option(
        "--predictor",
        metavar="NAME",
        help="reuse, oracle, noise:0.3, or a folder that gati evict train wrote.",
    ),
]
ContinuationDir = Annotated[
    Path | None,
    typer.Option(
        "--continuation", metavar="DIR", help="For lpc: the folder that gati evict train --dialogues wrote."
    ),
]
Gap = Annotated[
    str, typer.Option("--gap", metavar="TIME", help="Mean pause before a user's next prompt, for lpc.")
]
CostGrowth = Annotated[
    float,
    typer.Option(
        "--cost-growth",
        metavar="X",
        help="By what share of a first block's time each block before it makes a block dearer to compute; "
        "gati then saves time, not blocks.",
    ),
]
Seeds = Annotated[int, typer.Option("--seeds", metavar="N", help="Replays of randomised policies.")]


@evict.command(
    epilog=examples_below("gati evict inspect trace.jsonl.gz", "gati evict inspect clicks.txt --flat")
)
def inspect(trace: TraceFile, flat: Flat = False, limit: Limit = None, json_file: JsonFile = None) -> None:
    """Describe a trace: requests, blocks, the share of blocks that are reused, and after how long."""
    import json

    from gati.evict.trace.statistics import statistics
    from gati.files import atomic_write_text

    found = statistics(_read(trace, flat, limit))
    if json_file is not None:
        atomic_write_text(json_file, json.dumps(found, indent=2, allow_nan=False) + "\n")
    print_fields(found)
    typer.echo(f"next: gati evict replay {quoted(trace)}{' --flat' if flat else ''}")


@evict.command(
    epilog=examples_below(
        "gati evict replay trace.jsonl.gz --size 2000,5000 --policy lru,gati,opt",
        "gati evict replay trace.jsonl --policy lru,laru,fpb --predictor noise:0.3 --seeds 5 --json out.json",
        "gati evict replay clicks.txt --flat --policy lru,lmarker,opt",
        "gati evict replay stream.jsonl.gz --policy lru,lpc,lpc-oracle --continuation continuation",
        "gati evict replay trace.jsonl.gz --policy lru,gati --cost-growth 0.019",
    )
)
def replay(
    trace: TraceFile,
    sizes: Sizes = None,
    policies: Policies = "lru,gati,opt-leaf,opt",
    predictor: PredictorName = "reuse",
    continuation: ContinuationDir = None,
    gap: Gap = "100s",
    cost_growth: CostGrowth = 0.0,
    seeds: Seeds = 1,
    flat: Flat = False,
    limit: Limit = None,
    json_file: JsonFile = None,
) -> None:
    """Replay a trace on caches of several sizes, and show each policy's hit rate."""
    from gati.evict.replays.page import summary
    from gati.files import atomic_write_text

    found = _read(trace, flat, limit)
    result = _replayed(
        found,
        sizes,
        policies,
        predictor,
        seeds,
        continuation=continuation,
        gap_s=parse_duration(gap),
        cost_growth=cost_growth,
    )
    if json_file is not None:
        atomic_write_text(json_file, result.to_json())
    print_outcomes(summary(result), timed=cost_growth > 0.0)


@evict.command(
    epilog=examples_below(
        "gati evict train yesterday.jsonl.gz --out predictor",
        "gati evict train dialogues.jsonl.gz --dialogues --out continuation",
        "gati evict train dialogues.jsonl.gz --dialogues --encoder minilm --out continuation",
    )
)
def train(
    trace: TraceFile,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the predictor.")],
    dialogues: Annotated[
        bool, typer.Option("--dialogues", help="TRACE holds dialogues: learn which ones continue, for lpc.")
    ] = False,
    encoder: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --dialogues: folder of a MiniLM that encodes prompts; default: hashed words.",
        ),
    ] = None,
    flat: Flat = False,
    limit: Limit = None,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Fit a predictor to a trace, so that a cache starts with a model.

    Replay it on another trace, because it has seen the whole of this one. With --dialogues, a model trains on
    one half and is tested on the other; gati evict synthesise makes streams from the test half.
    """
    from gati.evict.seeds import check_seed
    from gati.evict.train import train as fit

    check_seed(seed, "--seed")
    if dialogues:
        _train_continuation(trace, out, flat, limit, encoder, seed)
        return
    if encoder is not None:
        raise EvictError("--encoder requires --dialogues; add it, or leave out --encoder")
    trained = fit(_read(trace, flat, limit), out, seed=seed, progress=render.counter("requests"))
    typer.echo(f"wrote {out}, trained on {trained['requests']} requests of {trained['name']}")
    typer.echo(f"next: gati evict replay ANOTHER --predictor {quoted(out)}{' --flat' if flat else ''}")


@evict.command(epilog=examples_below("gati evict compare trace.jsonl.gz --out report.html --seeds 5"))
def compare(
    trace: TraceFile,
    out: Annotated[
        Path, typer.Option(metavar="FILE", callback=written_to, help="The page; - prints only it.")
    ],
    sizes: Sizes = None,
    policies: Policies = "lru,slru,fpb,hf,laru,gati,opt-leaf,opt",
    predictor: PredictorName = "reuse",
    continuation: ContinuationDir = None,
    gap: Gap = "100s",
    seeds: Seeds = 1,
    flat: Flat = False,
    limit: Limit = None,
    noise: Annotated[bool, typer.Option(help="Also replay with randomly reversed predictions.")] = True,
    json_file: JsonFile = None,
) -> None:
    """Write one HTML page: hit rates of several policies by size, effect of noise, cost of the guard."""
    from gati.evict.replays.page import page, summary
    from gati.files import atomic_write_text

    found = _read(trace, flat, limit)
    result = _replayed(
        found, sizes, policies, predictor, seeds, continuation=continuation, gap_s=parse_duration(gap)
    )
    curves = []
    if noise:
        sizes_used = sorted({each.capacity_blocks for each in result.outcomes})
        middle = str(sizes_used[len(sizes_used) // 2])
        names = _NOISY_FLAT if found.kind == "flat" else _NOISY
        curves = [(share, _replayed(found, middle, names, f"noise:{share:g}", seeds)) for share in _NOISE]
    atomic_write_text(out, page(result, predictor=predictor, noise=curves))
    if json_file is not None:
        atomic_write_text(json_file, result.to_json())
    print_outcomes(summary(result))
    typer.echo(f"wrote {out}")


@evict.command(
    epilog=examples_below(
        "gati evict synthesise dialogues.jsonl.gz --out stream.jsonl.gz",
        "gati evict synthesise dialogues.jsonl.gz --active 50 --gap 30s --for 1h --all --out stream.jsonl",
    )
)
def synthesise(
    dialogues: Annotated[
        Path,
        typer.Argument(
            metavar="DIALOGUES", help="JSON lines with messages, turns or conversations; may be gzipped."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE", callback=written_to, help="The trace: .jsonl or .jsonl.gz; - prints it as .jsonl."
        ),
    ],
    active: Annotated[
        int, typer.Option(metavar="N", help="Maximum number of concurrent conversations.")
    ] = 200,
    gap: Annotated[str, typer.Option(metavar="TIME", help="Mean pause of users.")] = "100s",
    duration: Annotated[str, typer.Option("--for", metavar="TIME", help="Duration of the stream.")] = "20m",
    block: Annotated[int, typer.Option(metavar="N", help="Words per block.")] = 16,
    every: Annotated[
        bool,
        typer.Option("--all", help="Use all dialogues, not only the half that train does not learn from."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the pauses and of the order.")] = 0,
) -> None:
    """Make a trace from dialogues: users reply after pauses; each request holds the whole conversation."""
    import gzip

    from gati.evict.trace.dialogues import halves, read_dialogues
    from gati.evict.trace.synthesise import StreamSettings, trace_text
    from gati.evict.trace.synthesise import synthesise as stream
    from gati.files import atomic_write_bytes

    printed = to_standard_output(out)
    if not printed and not out.name.endswith((".jsonl", ".jsonl.gz")):
        raise EvictError(f"--out {out}: a trace of JSON lines ends in .jsonl or .jsonl.gz")
    settings = StreamSettings(
        active=active,
        gap_s=parse_duration(gap),
        duration_s=parse_duration(duration),
        block_tokens=block,
        seed=seed,
    )
    found = read_dialogues(dialogues)
    requests = stream(found if every else halves(found)[1], settings)
    content = trace_text(requests).encode()
    atomic_write_bytes(out, gzip.compress(content, mtime=0) if out.suffix == ".gz" else content)
    talks = len({request.talk.conversation for request in requests})
    typer.echo(f"wrote {out}: {len(requests)} requests of {talks} conversations")
    if not printed:
        typer.echo(f"next: gati evict replay {quoted(out)} --policy lru,lpc,lpc-oracle --continuation DIR")


def _train_continuation(
    path: Path, out: Path, flat: bool, limit: int | None, encoder: Path | None, seed: int
) -> None:
    from gati.evict.trace.dialogues import read_dialogues
    from gati.evict.train import train_continuation

    if flat or limit is not None:
        raise EvictError("--flat and --limit are for traces; leave them out with --dialogues")
    trained = train_continuation(
        read_dialogues(path),
        out,
        encoder=encoder,
        seed=seed,
        progress=render.counter("prompts encoded"),
    )
    typer.echo(
        f"wrote {out}, trained on {trained['prompts']} prompts of {trained['dialogues']} dialogues; "
        f"Matthews' correlation on the others {trained['mcc']:.2f}"
    )
    typer.echo(f"next: gati evict synthesise {quoted(path)} --out stream.jsonl.gz")


def _read(path: Path, flat: bool, limit: int | None) -> Trace:
    from gati.evict.trace.read import read_trace

    return read_trace(path, flat=flat, limit=limit)


def _replayed(
    trace: Trace,
    sizes: str | None,
    policies: str,
    predictor: str,
    seeds: int,
    *,
    continuation: Path | None = None,
    gap_s: float = 100.0,
    cost_growth: float = 0.0,
) -> TraceReplay:
    from gati.evict.replays.replay import replay as run

    if seeds < 1:
        raise EvictError(f"--seeds is {seeds}; give at least 1")
    names = split_list(policies)
    if not names:
        raise EvictError("--policy is empty; give a list such as lru,gati")
    return run(
        trace,
        _sizes(sizes, trace),
        names,
        predictor=predictor,
        continuation=continuation,
        gap_s=gap_s,
        cost_growth=cost_growth,
        seeds=range(seeds),
        progress=render.counter("blocks replayed"),
    )


def _sizes(text: str | None, trace: Trace) -> list[int]:
    """The requested sizes, else five from a hundredth to a fifth of the distinct blocks."""
    if text is None:
        shares = (0.01, 0.02, 0.05, 0.1, 0.2)
        return sorted({max(round(share * trace.distinct), 1) for share in shares})
    sizes: list[Any] = []
    for part in split_list(text):
        try:
            sizes.append(int(part.replace("_", "")))
        except ValueError:
            raise EvictError(
                f"--size {part!r} is not a number of blocks; give a list such as 2000,5000"
            ) from None
    if not sizes:
        raise EvictError("--size is empty; give a list such as 2000,5000")
    return sizes
