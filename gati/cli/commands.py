"""The command line: one function per verb, each a thin wrapper over the library function of the same name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
from typer.core import TyperGroup

import gati
from gati.cli import adapt, compare, doctor, evict, explore, options, pipelines, query, render, serve, stream
from gati.errors import CompositionError, StorageError

_FORMAT_OF = {".onnx": "onnx", ".pt2": "pt2"}
_Command = TypeVar("_Command", bound=Callable[..., None])


class PipeError(Exception):
    """A pipe or socket broke while a verb ran."""

    def __init__(self, broken: BrokenPipeError) -> None:
        super().__init__(str(broken))
        self.broken = broken


class _Verbs(TyperGroup):
    """All verbs. Typer ends quietly whatever pipe or socket breaks, so it must not see which one did."""

    def invoke(self, ctx: Any) -> Any:
        """Run a verb. Raises PipeError in place of BrokenPipeError."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise PipeError(error) from error


app = typer.Typer(
    name="gati",
    cls=_Verbs,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


@app.callback(invoke_without_command=True)
def _gati(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks. GATI_DEBUG=1 does the same.")
    ] = False,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    """Add learned caches to a trained network, so that easy inputs leave it early.

    Start with [bold]gati demo[/bold]. For your own network: [bold]explore[/bold] trains and measures
    caches, [bold]compose[/bold] selects them, [bold]evaluate[/bold] measures the gain.
    """
    if debug:
        os.environ["GATI_DEBUG"] = "1"
    if version:
        typer.echo(f"gati {gati.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _verb(*examples: str) -> Callable[[_Command], _Command]:
    """Register a command, with examples below its help."""
    return app.command(epilog=options.examples_below(*examples))


@_verb("gati blocks torchvision:resnet18", "gati blocks gati.zoo:resnet56 --blocks 'layer3.*'")
def blocks(
    model: options.Model,
    checkpoint: options.Checkpoint = None,
    pattern: Annotated[
        str | None, typer.Option("--blocks", metavar="PATTERN", help="Only matching blocks.")
    ] = None,
    size: Annotated[
        str | None, typer.Option(metavar="HEIGHTxWIDTH", help="Input size, if the model has none.")
    ] = None,
) -> None:
    """List the blocks that a cache can follow: name, output shape, share of the latency."""
    render.blocks(gati.blocks(model, checkpoint, pattern=pattern, size=options.size_of(size)))


_verb(
    "gati doctor torchvision:resnet18 --checkpoint mine.pt --data val/",
    "gati doctor timm:vit_tiny_patch16_224",
    "gati doctor models.py:build --data val.npz --train-data train.npz --json doctor.json",
)(doctor.doctor)
_verb(
    "gati explore torchvision:resnet18 --checkpoint mine.pt --data val/ --out runs/mine",
    "gati explore models.py:build --data val.npz --train-data train.npz --out runs/mine --budget 10m",
    "gati explore classifier/ --data queries.csv --tokenizer tokenizer.json --out runs/mine",
    "gati explore --more 1h runs/mine",
    "gati explore models.py:build --data val.npz --out runs/mine --ray --ray-cores 4",
    "gati explore torchvision:resnet50 --checkpoint large.pt --data val/ --out runs/both "
    "--companion torchvision:resnet18 --companion-checkpoint small.pt",
)(explore.explore)


@_verb(
    "gati compose runs/mine --accuracy 0.97",
    "gati compose runs/mine --memory 8MiB --name small",
    "gati compose runs/mine --certify-data more.npz",
    "gati compose runs/mine --pareto",
    "gati compose runs/mine --latency 2ms",
)
def compose(
    context: typer.Context,
    directory: options.LibraryDir,
    accuracy: Annotated[
        float,
        typer.Option(
            help="Required share of answers equal to the full network's. With --pareto, the placement shown "
            "is the one that is fastest at this share."
        ),
    ] = 0.99,
    confidence: Annotated[
        float, typer.Option(help="Confidence of the certificate; 0 skips certification.")
    ] = 0.95,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory limit for all caches, such as 256MiB.")
    ] = None,
    objective: Annotated[
        Literal["relaxed", "full", "exact"],
        typer.Option(
            help="exact: chosen input by input, then certified. relaxed, full: the published formulations, "
            "which use averages and deploy their choice, certified or not."
        ),
    ] = "exact",
    solver: Annotated[
        Literal["auto", "gurobi", "highs"],
        typer.Option(
            help="Integer-programming solver; auto is Gurobi if its licence allows, else HiGHS. Large exact "
            "problems are searched without one."
        ),
    ] = "auto",
    placement: Annotated[
        Literal["auto", "inline", "overlapped"],
        typer.Option(
            help="inline: the next segment waits for each lookup; overlapped: lookups have their own cores."
        ),
    ] = "auto",
    backend: Annotated[
        str,
        typer.Option(
            help="Engine of the network: torch, onnxruntime, openvino, openvino-bf16, openvino-int8, "
            "onnxruntime-int8-lookups, openvino-int8-lookups, cuda-graph, torch-compile; auto compares those "
            "that run here."
        ),
    ] = "auto",
    slowdown: options.Slowdown = None,
    name: Annotated[str, typer.Option(help="Name of the composition; a library keeps several.")] = "default",
    per_class: Annotated[
        bool, typer.Option("--per-class", help="Certify agreement in every class, not only overall.")
    ] = False,
    certify_data: options.CertifyData = None,
    threads: options.ComposeThreads = None,
    latency: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Maximise agreement at this mean latency instead."),
    ] = None,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="Show the trade-off, from careful to fast; compose nothing.")
    ] = False,
) -> None:
    """Choose caches and thresholds that minimise the mean latency."""
    from gati.composition.plans import Settings
    from gati.units import parse_bytes, parse_duration

    settings = Settings(
        accuracy=accuracy,
        confidence=confidence or None,
        memory_limit_bytes=None if memory is None else parse_bytes(memory),
        objective=objective,
        solver=solver,
        placement=placement,
        backend=backend,
        name=name,
        slowdown="auto" if slowdown is None else slowdown,
        per_class=per_class,
        threads=options.threads_of(threads),
    )
    if pareto or latency is not None:
        _refuse_with_trade_off(context, pareto=pareto, within_latency=latency is not None)
    if pareto:
        render.frontier(gati.pareto(directory, settings), directory)
        return
    if latency is not None:
        chosen = gati.compose_within_latency(directory, 1e3 * parse_duration(latency), settings)
    else:
        chosen = gati.compose(
            directory,
            accuracy=settings.accuracy,
            confidence=settings.confidence,
            memory_bytes=settings.memory_limit_bytes,
            objective=objective,
            solver=solver,
            placement=placement,
            backend=backend,
            name=name,
            slowdown=settings.slowdown,
            per_class=per_class,
            certify_data=certify_data,
            threads=settings.threads,
            progress=render.counter("lookups measured"),
        )
    render.composition(chosen, directory, gati.explain(chosen, directory))
    if threads is not None and chosen.measured_on is not None:
        print(f"threads: {chosen.measured_on.threads}, for which all latencies were measured")
    if chosen.lookup_cores > 1:
        print(f"lookups: on {chosen.lookup_cores} cores of their own, as they were measured")


_FOR_ACCURACY = ("--certify-data", "--objective", "--solver")


def _refuse_with_trade_off(context: typer.Context, *, pareto: bool, within_latency: bool) -> None:
    """Check for options that have no effect with --pareto or --latency. Raises CompositionError."""
    if pareto and within_latency:
        raise CompositionError("--pareto shows the trade-off, --latency composes at one latency: give one")
    given = options.given(context)
    if ignored := [each for each in _FOR_ACCURACY if each in given]:
        raise CompositionError(
            f"{' and '.join(ignored)} requires --accuracy; it works with neither --pareto nor --latency"
        )
    if within_latency and "--accuracy" in given:
        raise CompositionError(
            "--latency finds the highest agreement at that latency: leave out --accuracy, or --latency"
        )
    if pareto and "--name" in given:
        raise CompositionError("--pareto composes nothing: leave out --name")


@_verb("gati evaluate runs/mine --data test.npz --json evaluation.json")
def evaluate(
    directory: options.LibraryDir,
    data: Annotated[str, typer.Option(metavar="TEST", help="Inputs that explore has not seen.")],
    json_file: options.JsonFile = None,
    composition: options.CompositionName = "default",
    limit: options.Limit = None,
    device: options.LibraryDevice = None,
    per_class: Annotated[
        bool, typer.Option("--per-class", help="Also show agreement and hit rate of every class.")
    ] = False,
    class_names: options.ClassNamesFile = None,
    label_map: options.LabelMapFile = None,
) -> None:
    """Measure gain, agreement and latency on inputs that explore has not seen.

    The network alone and Gati take turns in one process, 64 requests each.
    """
    from gati.composition.composition import Composition
    from gati.exploration.library import Library
    from gati.files import atomic_write_text

    options.threads_as_measured(directory, composition)
    evaluation = gati.evaluate(
        directory,
        data,
        composition=composition,
        limit=limit,
        device=device,
        class_names=class_names,
        label_map=label_map,
        progress=render.counter("evaluated"),
    )
    render.evaluation(evaluation)
    render.promise(Composition.of(Library(directory), composition))
    if per_class:
        render.classes(evaluation)
    if json_file is not None:
        atomic_write_text(json_file, evaluation.to_json())


_verb("gati certify runs/mine --data more.npz", "gati certify runs/mine --data more.npz --write")(
    compare.certify
)
_verb("gati bench runs/mine --data test.npz --limit 500 --repetitions 5")(compare.bench)
_verb("gati report runs/mine", "gati report runs/mine --out mine.html")(compare.report)
app.add_typer(pipelines.pipeline)
app.add_typer(evict.evict)
app.add_typer(adapt.adapt)
_verb(
    "gati serve runs/mine",
    "gati serve examples/pipeline/pipeline.toml --port 0",
    "gati serve serve.toml --replicas 2 --ray",
)(serve.serve)
_verb("gati query cifar10 cat.png --slo 80ms", "gati query intents 'where is my card?'")(query.query)
_verb("gati stream runs/mine --source camera:0 --adapt --page")(stream.stream)
_verb("gati replay runs/mine --source road.mp4 --interval 10s --interval 60s")(stream.replay)


@_verb("gati predict runs/mine cat.jpg dog.png", "gati predict runs/mine 'where is my card?'")
def predict(
    directory: options.LibraryDir,
    images: Annotated[list[str], typer.Argument(metavar="IMAGE|RECORDING|TEXT")],
    composition: options.CompositionName = "default",
    device: options.LibraryDevice = None,
) -> None:
    """Classify image files, recordings or texts, and show at which block each answer was found."""
    options.threads_as_measured(directory, composition)
    render.predictions(images, gati.predict(directory, images, composition=composition, device=device))


@_verb("gati export runs/mine --out model.onnx", "gati export runs/mine --format triton --out models/mine")
def export(
    context: typer.Context,
    directory: options.LibraryDir,
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="Output file, - for standard output; for Triton, the model folder."
        ),
    ],
    composition: options.CompositionName = "default",
    format: Annotated[Literal["onnx", "pt2", "triton"], typer.Option(help="pt2: torch.export.")] = "onnx",
    raw_input: Annotated[
        bool, typer.Option("--raw-input", help="Include preprocessing: the input is uint8.")
    ] = False,
    length: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="For a network that reads text: accept only up to N tokens, which is faster."
        ),
    ] = None,
) -> None:
    """Write the whole early-exit network as one file that runs without Gati, one input at a time.

    Its answers equal those of Gati's engine. ONNX Runtime and OpenVINO run it unchanged.
    """
    if format != "triton":
        out = options.file_of(context, "--out", out)
    elif options.to_standard_output(out):
        raise StorageError("--format triton writes a folder, which has no place on standard output: name it")
    if (named := _FORMAT_OF.get(out.suffix, format)) != format:
        raise StorageError(f"--out {out} is called as a {named} file: give --format {named}, or another name")
    written = gati.export(
        directory, out, composition=composition, format=format, raw_input=raw_input, length=length
    )
    render.exported(written)


@_verb("gati demo")
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Output folder.")] = Path("demo"),
) -> None:
    """Run everything on handwritten digits: train a network, explore, compose, evaluate."""
    gati.demo(out)
