"""The verbs about streams: `gati stream` and `gati replay`; `gati.cli` registers them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gati.cli import stream_options as given
from gati.cli.options import (
    CompositionName,
    JsonFile,
    LibraryDir,
    refuse_folder,
    split_list,
    threads_as_measured,
    to_standard_output,
)
from gati.errors import AdaptError, GatiError
from gati.units import parse_duration
from gati.variants import SCENE

if TYPE_CHECKING:
    from gati.adaptation.adaptation import Adaptation
    from gati.adaptation.settings import AdaptSettings
    from gati.cli.live import StreamShown
    from gati.video import Region, Sink, Source

_RECORDS_S = 3600.0  # how long samples are stored at least


def stream(
    context: typer.Context,
    directory: LibraryDir,
    source: given.Source,
    region: given.Regions = None,
    every: given.Every = None,
    fps: given.Fps = None,
    authority: given.Authority = None,
    adapt: Annotated[bool, typer.Option("--adapt", help="Retrain the caches on the stream.")] = False,
    page: Annotated[bool, typer.Option("--page", help="Also show a live page in the browser.")] = False,
    page_port: Annotated[int | None, typer.Option(help="Port of the page; a free one unless given.")] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write results, one per line; - prints them.")
    ] = None,
    webhook: Annotated[str | None, typer.Option(metavar="URL", help="Post each result to this URL.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="VIDEO", help="Write a video annotated with the answers.")
    ] = None,
    audits: Annotated[
        float, typer.Option(help="Time for audits, as a share of the base model's time for all requests.")
    ] = 0.05,
    sampling: Annotated[float, typer.Option(help="Share of requests kept to retrain on.")] = 0.2,
    interval: Annotated[str, typer.Option(metavar="TIME", help="Between retrainings.")] = "10m",
    window: Annotated[str, typer.Option(metavar="TIME", help="How long samples are kept.")] = "1h",
    window_inputs: given.WindowInputs = None,
    held_share: given.HeldShare = 0.25,
    blocks: given.Blocks = None,
    variants: given.Variants = SCENE,
    accuracy: given.Accuracy = None,
    margin: given.Margin = 0.0,
    recall: given.Recall = True,
    state: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for versions, samples and proofs; DIR/adapt unless given."),
    ] = None,
    composition: CompositionName = "default",
    threads: given.Threads = None,
    seed: given.Seed = 0,
) -> None:
    """Classify a video, camera or network stream; with --adapt, learn from what it shows.

    Ctrl-C ends it with a summary. Versions, samples and proofs are kept for the next run.
    Caches answer only once proven: by the composition's certificate, or by audits of the stream.
    """
    from gati.adaptation.pictures import origin_of
    from gati.adaptation.settings import AdaptSettings
    from gati.cli import live
    from gati.video import open_source, parse_region

    settings = AdaptSettings(
        sampling=sampling,
        interval_s=parse_duration(interval),
        window_s=parse_duration(window),
        window_inputs=window_inputs,
        held_share=held_share,
        blocks=_names(blocks),
        variants=split_list(variants),
        audit_budget=audits,
        accuracy=accuracy,
        margin=margin,
        recall=recall,
        places=given.places(region),
        enabled=adapt,
        seed=seed,
    )
    if page_port is not None and not page:
        raise AdaptError("--page-port requires --page; add it, or leave out --page-port")
    if not adapt:
        given.refuse_ignored(context, (*given.OF_LEARNING, "--seed"), "without --adapt")
    kept = state or directory / "adapt"
    if json_file is not None and to_standard_output(json_file):
        json_file = "-"
    elif json_file is not None:
        refuse_folder("--json", Path(json_file))
    if threads is None:
        threads_as_measured(directory, composition)
    chosen = [parse_region(each) for each in region or ()]
    pictures = open_source(
        source, every_s=None if every is None else parse_duration(every), fps=fps, authority=authority
    )
    with ExitStack() as stack, ExitStack() as outputs:
        # closed first: a process that is told to end may be killed while it waits for a retraining
        sinks = _sinks(outputs, json_file, webhook, out)
        shown = live.StreamShown(
            live.open_view(results_on_stdout=json_file == "-"),
            live.open_page(stack, pictures.name, (page_port or 0) if page else None, sinks),
        )
        adaptation = _open(
            stack, directory, kept, settings, shown, origin_of(source, chosen), composition, threads
        )
        _follow(adaptation, pictures, chosen, sinks, shown)


def _open(
    stack: ExitStack,
    directory: Path,
    state: Path,
    settings: AdaptSettings,
    shown: StreamShown,
    origin: str,
    composition: str,
    threads: int | None,
) -> Adaptation:
    """Open the library for a stream, with the state of earlier runs in the folder `state`."""
    from gati.adaptation.adaptation import Adaptation
    from services.scratch import Scratch

    _hold(stack, state / "stream.lock", learns=settings.enabled)
    scratch = Scratch("stream")  # removed by the next run if this one is killed
    stack.callback(scratch.close)
    kept = _kept(stack, directory, state, settings) if settings.enabled else {}
    return stack.enter_context(
        Adaptation.open(
            directory,
            settings,
            standing=state / f"standing-{composition}.json",
            folder=scratch.path,
            origin=origin,
            composition=composition,
            threads=threads,
            on_change=shown.change,
            on_audit=shown.page.audit,
            **kept,
        )
    )


def _follow(
    adaptation: Adaptation, source: Source, regions: Sequence[Region], sinks: list[Sink], shown: StreamShown
) -> None:
    """Classify the pictures of a source until it ends, or Ctrl-C or SIGTERM; then show a summary."""
    from gati.adaptation.streaming import Tally, classify
    from gati.cli import live

    tally = Tally()
    source.listen(live.source_shown(shown.view, shown.page))
    try:
        with shown.view, source, _interrupted():
            for streamed in classify(
                adaptation, source, regions=regions, sinks=sinks, began_s=shown.began_s, tally=tally
            ):
                shown.answered(streamed, adaptation)
    except KeyboardInterrupt:  # the way to end an endless stream
        typer.echo("ended by Ctrl-C or SIGTERM", err=True)
    except GatiError:
        if tally.requests:  # of days, perhaps, before the disk was full
            live.summary(tally, adaptation.status, source)
        raise
    finally:
        if adaptation.status.retraining:
            typer.echo("waiting for a retraining to finish; the next run will use its version", err=True)
    live.summary(tally, adaptation.status, source)


@contextmanager
def _interrupted() -> Iterator[None]:
    """Let SIGTERM, and a terminal that is closed, end the stream like Ctrl-C.

    Videos get their index, and what was learned is kept.
    """
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {each: signal.getsignal(each) for each in ending if signal.getsignal(each) != signal.SIG_IGN}

    def interrupt(*_: object) -> None:
        if signal.SIGHUP in before:
            # a shell sends another one, a login that ends both: outputs are still to be closed
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        raise KeyboardInterrupt

    for each in before:
        signal.signal(each, interrupt)
    try:
        yield
    finally:
        for each, handler in before.items():
            if signal.getsignal(each) is interrupt:
                signal.signal(each, handler)


def _sinks(stack: ExitStack, json_file: str | None, webhook: str | None, out: Path | None) -> list[Sink]:
    from gati.cli import live
    from gati.video import AnnotatedVideoSink, JsonLinesSink, WebhookSink

    sinks: list[Sink] = []
    if json_file is not None:
        sinks.append(stack.enter_context(JsonLinesSink(json_file)))
    if webhook is not None:
        posts = WebhookSink(webhook)
        stack.callback(live.posted, posts)  # after it has sent what waits
        sinks.append(stack.enter_context(posts))
    if out is not None:
        sinks.append(stack.enter_context(AnnotatedVideoSink(out)))
    return sinks


def _hold(stack: ExitStack, path: Path, *, learns: bool) -> None:
    """Lock the state, so that two streams do not mix their proofs, memory, samples and versions.

    Raises AdaptError if another stream holds the lock, or the file system has no locks and this one `learns`.
    """
    from services.locks import KEPT, hold

    lock = hold(path)
    if lock == KEPT:
        raise AdaptError(
            f"another gati stream keeps its state in {path.parent}; give this one another folder with --state"
        )
    if not isinstance(lock, str):
        stack.enter_context(lock)
    elif os.access(path, os.W_OK):  # otherwise nothing can be written there, and the log says so
        if learns:
            raise AdaptError(f"{lock}; give a folder on a local disk with --state")
        typer.echo(f"note: {lock}; run no other gati stream with this folder (--state)", err=True)


def _kept(stack: ExitStack, directory: Path, state: Path, settings: AdaptSettings) -> dict[str, Any]:
    """Where versions and samples are stored across restarts, and the samples of earlier runs."""
    from gati.adaptation.adaptation import WINDOW_INPUTS
    from gati.adaptation.settings import model_name
    from gati.samples.store import RecordStore
    from gati.samples.writer import BackgroundWriter
    from gati.versions.repository import ModelRepository

    model = model_name(directory)
    try:
        state.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AdaptError(
            f"cannot keep versions and samples in {state} ({error.strerror or error}); "
            "give a folder that can be written with --state"
        ) from error
    url = f"sqlite:///{(state / 'records.db').resolve()}"
    store = stack.enter_context(RecordStore.open(url, max_age_s=max(_RECORDS_S, settings.window_s)))
    since_s = time.time() - settings.window_s
    history = store.window(model, since_s, settings.window_inputs or WINDOW_INPUTS, kind="input")
    writer = stack.enter_context(BackgroundWriter(store))
    return {
        "model": model,
        "repository": ModelRepository(state / "versions"),
        "writer": writer,
        "history": history,
    }


def _names(text: str | None) -> tuple[str, ...] | None:
    """Names separated by commas; None if there are none."""
    return split_list(text or "") or None


def replay(
    context: typer.Context,
    directory: LibraryDir,
    source: given.Recording,
    region: given.Regions = None,
    every: given.Every = None,
    fps: given.Fps = None,
    authority: given.Authority = None,
    sampling: Annotated[
        list[float] | None, typer.Option(help="Share of requests kept to retrain on; several are compared.")
    ] = None,
    interval: Annotated[
        list[str] | None, typer.Option(metavar="TIME", help="Between retrainings; several are compared.")
    ] = None,
    window: Annotated[
        list[str] | None,
        typer.Option(metavar="TIME", help="How long samples are kept; several are compared."),
    ] = None,
    window_inputs: given.WindowInputs = None,
    held_share: given.HeldShare = 0.25,
    blocks: given.Blocks = None,
    variants: given.Variants = SCENE,
    adapt: Annotated[bool, typer.Option("--adapt/--no-adapt", help="Retrain, or only watch.")] = True,
    json_file: JsonFile = None,
    audits: Annotated[float, typer.Option(help="Time for audits, as a share of the base model's.")] = 0.05,
    accuracy: given.Accuracy = None,
    margin: given.Margin = 0.0,
    recall: given.Recall = True,
    delay: Annotated[float, typer.Option(metavar="SECONDS", help="Time until a new version serves.")] = 0.0,
    composition: CompositionName = "default",
    threads: given.Threads = None,
    seed: given.Seed = 0,
) -> None:
    """Answer a recorded stream as fast as possible, and compare every answer with the base model's.

    The same settings give the same answers, unless memory runs short in a retraining. Several values of
    --sampling, --interval or --window produce a table with one row per combination.
    """
    from gati.adaptation.replay import record, sweep
    from gati.adaptation.replay import replay as run
    from gati.adaptation.settings import AdaptSettings
    from gati.cli import live
    from gati.composition.load import open_served
    from gati.files import atomic_write_text
    from gati.video import parse_region

    if not adapt:
        given.refuse_ignored(context, given.OF_LEARNING, "with --no-adapt")
    settings = sweep(
        AdaptSettings(
            audit_budget=audits,
            accuracy=accuracy,
            margin=margin,
            recall=recall,
            places=given.places(region),
            delay_s=delay,
            window_inputs=window_inputs,
            held_share=held_share,
            blocks=_names(blocks),
            variants=split_list(variants),
            enabled=adapt,
            seed=seed,
        ),
        sampling=sampling or (),
        interval_s=[parse_duration(each) for each in interval or ()],
        window_s=[parse_duration(each) for each in window or ()],
    )
    if threads is None:
        threads_as_measured(directory, composition)
    served = open_served(directory, composition=composition, threads=threads)
    recording = record(
        served,
        source,
        regions=[parse_region(each) for each in region or ()],
        every_s=None if every is None else parse_duration(every),
        fps=fps,
        authority=authority,
    )
    reports = [run(served, recording, each) for each in settings]
    if len(reports) == 1:
        live.replayed(reports[0])
    else:
        live.swept(reports)
    if json_file is not None:
        atomic_write_text(json_file, _json([report.to_json() for report in reports]))


def _json(documents: list[dict[str, Any]]) -> str:
    import json

    content = documents[0] if len(documents) == 1 else documents
    return json.dumps(content, indent=1, allow_nan=False) + "\n"
