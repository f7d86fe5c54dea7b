"""Progress of training: a live display, or plain lines without a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Protocol, TextIO


class Progress(Protocol):
    """Receives the progress of `explore`.

    A stage has `total` steps, of which earlier runs did `done`. After `most_s` seconds, if given, it ends
    with fewer; a total of None means that this time ends it, with as many steps as are done by then.
    """

    def stage(self, name: str, total: int | None, done: int = 0, most_s: float | None = None) -> None:
        """Begin a stage; the previous one has ended."""

    def advance(self, steps: int, detail: str = "") -> None:
        """Report `steps` more finished steps; `detail` is the latest loss or hit rate."""

    def note(self, text: str) -> None:
        """Print a line that stays on the screen. It may come from another thread, and before `__enter__`."""

    def __enter__(self) -> Progress: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class SilentProgress:
    """Reports nothing; the default of library calls."""

    def stage(self, name: str, total: int | None, done: int = 0, most_s: float | None = None) -> None:
        """Begin a stage, silently."""

    def advance(self, steps: int, detail: str = "") -> None:
        """Advance, silently."""

    def note(self, text: str) -> None:
        """Ignore the note."""

    def __enter__(self) -> SilentProgress:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class _Stage:
    """The steps of a stage, and how long it still takes."""

    def __init__(self, name: str, total: int | None, done: int, most_s: float | None) -> None:
        self.name, self.total, self.done, self._start = name, total, done, done
        self._began = time.monotonic()
        self._end = None if most_s is None else self._began + most_s

    def left_s(self, now: float) -> float | None:
        """Seconds, by the steps done until now; None before the first one."""
        if self.done == self._start:
            return None
        estimates = [] if self._end is None else [self._end - now]
        if self.total is not None:
            estimates.append((now - self._began) / (self.done - self._start) * (self.total - self.done))
        return max(0.0, min(estimates, default=0.0))

    def share(self, now: float) -> float:
        """How much of it is done, by its steps, or by its time if that ends it."""
        if self.total is not None:
            return self.done / max(1, self.total)
        left_s = self.left_s(now)
        return 0.0 if left_s is None else 1.0 - left_s / max(left_s + now - self._began, 1e-9)

    def __str__(self) -> str:
        return f"{self.done} steps" if self.total is None else f"{self.done}/{self.total}"


class PlainProgress(SilentProgress):
    """Prints at most one line every `interval_s` seconds, for logs and pipes."""

    def __init__(self, stream: TextIO | None = None, interval_s: float = 10.0) -> None:
        self.stream = stream or sys.stderr
        self.interval_s = interval_s
        self._stage = _Stage("", 0, 0, None)
        self._spoke = 0.0

    def stage(self, name: str, total: int | None, done: int = 0, most_s: float | None = None) -> None:
        """Begin a stage on a new line."""
        self._stage = _Stage(name, total, done, most_s)
        self._spoke = time.monotonic()
        self.note(name)

    def advance(self, steps: int, detail: str = "") -> None:
        """Print steps, detail and time left if the interval has passed."""
        self._stage.done += steps
        now = time.monotonic()
        left_s = self._stage.left_s(now)
        if now - self._spoke < self.interval_s or left_s is None:
            return
        self._spoke = now
        self.note(f"{self._stage.name}: {self._stage}  {detail}  {left_s:.0f} s left")

    def note(self, text: str) -> None:
        """Print a line immediately."""
        print(text, file=self.stream, flush=True)


class LiveProgress(SilentProgress):
    """A progress bar that redraws itself, with the loss or hit rate."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self._bars = Bars(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[steps]}"),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=Console(stderr=True),
        )
        self._task: TaskID | None = None
        self._stage = _Stage("", 0, 0, None)

    def stage(self, name: str, total: int | None, done: int = 0, most_s: float | None = None) -> None:
        """Begin a new bar; earlier bars stay as they are."""
        if self._task is not None:
            self._bars.update(self._task, left="")
            self._bars.stop_task(self._task)  # time may have ended it before its last step
        self._stage = _Stage(name, total, done, most_s)
        self._task = self._bars.add_task(name, total=1.0, steps=str(self._stage), detail="", left="")
        self._bars.update(self._task, completed=self._stage.share(time.monotonic()))

    def advance(self, steps: int, detail: str = "") -> None:
        """Move the bar and replace the detail."""
        if self._task is not None:
            self._stage.done += steps
            now = time.monotonic()
            left_s, share = self._stage.left_s(now), self._stage.share(now)
            left = "" if left_s is None else f"{timedelta(seconds=round(left_s))} left"
            if detail:
                self._bars.update(self._task, detail=detail)
            self._bars.update(self._task, completed=share, steps=str(self._stage), left=left)

    def note(self, text: str) -> None:
        """Print above the bars."""
        self._bars.console.print(text, highlight=False, markup=False)

    def __enter__(self) -> LiveProgress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()


@contextmanager
def told_if_long(progress: Progress, text: str, after_s: float = 1.0) -> Iterator[None]:
    """Print `text` if what happens inside the context takes longer than `after_s` seconds."""
    timer = threading.Timer(after_s, progress.note, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # a note that has begun ends before others follow


def open_progress() -> Progress:
    """A live display on a terminal, plain lines elsewhere."""
    return LiveProgress() if sys.stderr.isatty() else PlainProgress()
