"""Views of a stream: in a terminal and on a page while it runs, and a summary afterwards."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TextIO

from gati.cli.tables import console
from gati.cli.words import counted
from gati.errors import GatiError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from gati.adaptation.adaptation import Adaptation
    from gati.adaptation.replay import Period, Replayed
    from gati.adaptation.settings import Audit, Change, ChangeKind, Status
    from gati.adaptation.streaming import Streamed, Tally
    from gati.video import Result, Sink, SourceState, WebhookSink
    from services.live import LiveState
    from services.live.state import EventKind, SourceWord

_LINE_EVERY_S = 1.0
_CHANGES = 6
_SERVE_AGAIN = ("returned", "activated", "reused")
_ON_THE_PAGE: dict[ChangeKind, EventKind] = {
    "alarm": "alarm",
    "tightened": "setting",
    "loosened": "setting",
    "returned": "recovered",
    "recalling": "memory",
    "resting": "resting",
    "retraining": "retraining",
    "kept": "kept",
    "activated": "version",
    "reused": "version",
    "failed": "failed",
    "resumed": "version",
    "skipped": "kept",
    "probation": "trial",
}


def open_view(*, results_on_stdout: bool = False) -> TerminalView | LineView:
    """A view that repaints in a terminal, else one that prints lines."""
    stream = sys.stderr if results_on_stdout else sys.stdout
    return TerminalView(stream) if stream.isatty() else LineView(stream)


class LineView:
    """Prints one line per second, and each change."""

    def __init__(self, stream: TextIO, every_s: float = _LINE_EVERY_S) -> None:
        self._stream, self._every_s, self._last_s = stream, every_s, float("-inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def show(self, streamed: Streamed) -> None:
        """Print the results of a picture, and the counts, at most once per interval."""
        now_s = time.monotonic()
        if now_s - self._last_s < self._every_s or not streamed.results:
            return
        self._last_s = now_s
        labels = ", ".join(f"{_label(result)} @ {result.exit}" for result in streamed.results)
        self._print(f"{streamed.frame.time_s:8.1f} s  {labels}  {_counts(streamed.tally, streamed.status)}")

    def change(self, change: Change) -> None:
        """Print what happened to the caches."""
        self._print(_sentence(change))

    def note(self, line: str) -> None:
        """Print what happened to the source."""
        self._print(line)

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class TerminalView:
    """Repaints a line of counts, a table of the last answers, and the last changes."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._changes: deque[str] = deque(maxlen=_CHANGES)
        self._last: Streamed | None = None
        console = Console(file=stream, highlight=False, markup=False)
        # only what is painted is made: a table for each picture would take time from the stream
        self._live = Live(get_renderable=self._painted, console=console, refresh_per_second=8)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, streamed: Streamed) -> None:
        """Show the results of one picture."""
        self._last = streamed

    def change(self, change: Change) -> None:
        """Show the change."""
        self._changes.append(_sentence(change))

    def note(self, line: str) -> None:
        """Show what happened to the source."""
        self._changes.append(line)

    def _painted(self) -> RenderableType:
        from rich.console import Group

        last, changes = self._last, tuple(self._changes)
        if last is None:
            return Group(*changes)
        header = f"{last.frame.source}  {last.frame.time_s:.1f} s"
        # the table last: of what is longer than the terminal, the end is left out
        return Group(header, _counts(last.tally, last.status), *changes, _answers(last.results))


def _answers(results: Sequence[Result]) -> Table:
    from rich.table import Table

    table = Table(box=None)
    for name in ("region", "label", "probability", "exit", "latency"):
        table.add_column(name, justify="left" if name in ("region", "label", "exit") else "right")
    for result in results:
        place = "whole picture" if result.region is None else str(result.region)
        probability, latency = f"{result.probability:.0%}", f"{result.latency_ms:.2f} ms"
        table.add_row(place, _label(result), probability, result.exit, latency)
    return table


def _label(result: Result) -> str:
    return str(result.class_index) if result.class_name is None else result.class_name


def _counts(tally: Tally, status: Status) -> str:
    hit_rate = f"{status.hits / status.requests:.0%}" if status.requests else "-"
    gain = "" if tally.gain is None else f" ({tally.gain:.1f}x)"
    recalled = f" ({status.recalled / status.requests:.0%} from memory)" if status.recalled else ""
    word = "on probation" if status.state == "probation" else status.state
    state = "" if status.state == "serving" else f", caches {word}"
    state += ", lookups paused" if status.resting else ""
    proof = f", proof of {status.proof}" if status.proof else ""
    busy = ", retraining" if status.retraining else ""
    return (
        f"hits {hit_rate}{recalled}, {tally.latency_ms:.2f} ms{gain}, version {status.version}{state}{busy}, "
        f"{status.losses} of {status.audits} audits disagree{proof}"
    )


def _sentence(change: Change) -> str:
    return f"{change.kind} at {change.time_s:.1f} s (version {change.version}): {change.message}".rstrip(": ")


def summary(tally: Tally, status: Status, source: Any) -> None:
    """Print the summary of a stream."""
    statistics, base_ms = source.statistics, tally.mean_base_latency_ms
    ended = (
        f"source {source.state}: {statistics.dropped} dropped, {statistics.corrupt} corrupt, "
        f"{counted(statistics.reconnects, 'reconnection')}" + (f" ({source.reason})" if source.reason else "")
    )
    if tally.requests == 0:
        print(f"the source sent no pictures\n{ended}", file=sys.stderr)
        return
    lines = [
        f"{counted(tally.pictures, 'picture')}, {counted(tally.requests, 'answer')}, "
        f"{tally.hits / tally.requests:.1%} left early"
        + (f", {status.recalled / status.requests:.1%} from memory" if status.recalled else ""),
        f"mean latency {tally.latency_ms:.3f} ms"
        + (f" against {base_ms:.3f} ms" if base_ms else "")
        + (f", gain {tally.gain:.2f}x" if tally.gain is not None else ""),
        f"{status.losses} of {status.audits} audits disagreed; version {status.version}, {status.state}",
        ended,
    ]
    print("\n".join(lines), file=sys.stderr)


def posted(webhook: WebhookSink) -> None:
    """Print how many results a closed webhook has sent, and why others were not."""
    found = webhook.statistics
    lost = found.failed + found.dropped + found.waiting  # no answer came to what waits even now
    why = f", {lost} failed or dropped ({found.last_error or 'they waited too long'})" if lost else ""
    print(f"webhook: {counted(found.sent, 'result')} sent{why}", file=sys.stderr)


def replayed(report: Replayed) -> None:
    """Print a row for each version of a replay, then totals and changes."""
    table = _periods("version", "from")
    for period in report.periods:
        table.add_row(str(period.version), f"{period.from_s:.1f} s", *_cells(period))
    for name, total in (("all", report.total), ("after", report.after)):
        if total is not None:
            table.add_row(name, f"{total.from_s:.1f} s", *_cells(total))
    console().print(table)
    for change in report.changes:
        print(_sentence(change))


def swept(reports: Sequence[Replayed]) -> None:
    """Print a row for each replay of a sweep."""
    table = _periods("sampling", "interval", "window", last=("versions", "alarms"))
    for report in reports:
        chosen, kinds = report.settings, [change.kind for change in report.changes]
        table.add_row(
            f"{chosen.sampling:.0%}",
            f"{chosen.interval_s:g} s",
            f"{chosen.window_s:g} s",
            *_cells(report.total),
            str(kinds.count("activated") + kinds.count("reused")),
            str(kinds.count("alarm")),
        )
    console().print(table)


def _periods(*first: str, last: Sequence[str] = ()) -> Table:
    from rich.table import Table

    table = Table(box=None)
    measured = ("requests", "hits", "recalled", "agreement", "worst 200", "mean", "base", "gain")
    for name in (*first, *measured, *last):
        table.add_column(name, justify="right")
    return table


def _cells(period: Period) -> tuple[str, ...]:
    return (
        str(period.requests),
        f"{period.hit_rate:.1%}",
        f"{period.recall_rate:.1%}",
        f"{period.agreement:.2%}",
        f"{period.worst_agreement:.2%}",
        f"{period.latency_ms:.3f} ms",
        f"{period.base_latency_ms:.3f} ms",
        f"{period.gain:.2f}x",
    )


class Page(NamedTuple):
    """Callbacks for changes, audits, the source's state with its reason, the status, and exits in order."""

    change: Callable[[Change], None]
    audit: Callable[[Audit], None]
    source: Callable[[SourceWord, str], None]
    status: Callable[[Status], None]
    exits: Callable[[Sequence[str]], None]


def open_page(stack: ExitStack, name: str, port: int | None, sinks: list[Sink]) -> Page:
    """Serve a live page on `port`; without one, return callbacks that do nothing."""
    if port is None:
        return Page(*[lambda *_: None] * 5)
    if missing := [each for each in ("fastapi", "uvicorn") if find_spec(each) is None]:
        raise GatiError(f"a page needs {', '.join(missing)}; install them with pip install 'gati[serve]'")
    from services import live

    state = live.LiveState(_title(name))
    running = live.serve_page(state, port)
    stack.callback(running.close)
    sinks.append(live.LiveSink(state))
    print(f"page at {running.url}", file=sys.stderr)
    audits = _PageAudits(state)

    def on_change(change: Change) -> None:
        kind = "memory" if "of" in change.details else _ON_THE_PAGE[change.kind]  # of memory, not of caches
        text = f"{change.kind}: {change.message}"
        state.event(kind, text, change.time_s, ends_alarm=change.kind in _SERVE_AGAIN)

    def on_status(status: Status) -> None:
        audits.serves(status.version)
        state.promise(status.promise)
        state.rests(status.resting)
        if (trial := status.on_trial) is None:
            state.proof(None)
        else:
            state.proof(str(trial.version), trial.audits, trial.losses, trial.needed, waits=trial.waits)

    return Page(on_change, audits.heard, state.source, on_status, state.exits)


class StreamShown:
    """Where a stream is shown while it runs: in the terminal, and on a page."""

    def __init__(self, view: TerminalView | LineView, page: Page) -> None:
        self.view, self.page = view, page
        self.began_s = time.time()
        self._version: int | None = None

    def change(self, change: Change) -> None:
        """Show a change of versions."""
        since_began = replace(change, time_s=max(0.0, change.time_s - self.began_s))
        self.view.change(since_began)
        self.page.change(since_began)

    def answered(self, streamed: Streamed, adaptation: Adaptation) -> None:
        """Show a picture's answers."""
        self.view.show(streamed)
        self.page.status(streamed.status)
        if streamed.status.version != self._version:
            self._version = streamed.status.version
            self.page.exits([each.block for each in adaptation.served.engine.exits])


def source_shown(view: TerminalView | LineView, page: Page) -> Callable[[SourceState, str], None]:
    """A listener for `Source.listen`: the page shows every state, the view a loss and its end."""
    lost = False

    def heard(state: SourceState, reason: str) -> None:
        nonlocal lost
        page.source(state.value, reason)
        was_lost, lost = lost, state.value == "reconnecting"
        if lost == was_lost or state.value not in ("reconnecting", "running"):
            return
        clock = time.strftime("%H:%M:%S")
        with suppress(OSError):  # the source must not stop because no one reads what is printed
            view.note(
                f"source lost at {clock}, reconnecting: {reason}" if lost else f"source back at {clock}"
            )

    return heard


def _title(source: str) -> str:
    """The title of a source: the name of a file, else the source's address."""
    return source if "://" in source or not Path(source).exists() else Path(source).name


class _PageAudits:
    """Counts audits of answers for a page: those of the version that serves."""

    def __init__(self, state: LiveState) -> None:
        self._state = state
        self._lock = threading.Lock()  # audits come from the threads that make them
        self._version: int | None = None
        self._audits = self._losses = 0

    def serves(self, version: int) -> None:
        """Begin to count anew if this version did not serve before."""
        if version == self._version:
            return
        with self._lock:
            if self._version is not None:
                self._audits = self._losses = 0
                self._state.no_audits()
            self._version = version

    def heard(self, audit: Audit) -> None:
        """Count an audit, and report the counts to the page."""
        with self._lock:
            # of the shadow, the status has the proof; those of another version come late
            if audit.shadow or self._version not in (None, audit.version):
                return
            self._version = audit.version
            self._audits += 1
            self._losses += not audit.agreed
            self._state.audit(audit.agreed, self._audits, self._losses)
