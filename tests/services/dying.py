"""Processes that end, as with `kill -9`, at one of their changes of files: the first, the second, and so on.

`each_death` runs work in a forked process that dies at its first change, then in one that dies at its second,
until one survives. `Reaper` kills processes of a real server at each stage that is new. A change opens a file
for writing, which is empty then; or renames, makes or removes something; or has the disk keep a file, which
is cut in half then.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

CALLS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod")
MOST = 400


class Death(NamedTuple):
    """How one process ended: at which change, what the change was, and what the process had told before.

    `change` is empty for the one that survived.
    """

    step: int
    change: str
    told: list[str]


def each_death(folder: Path, act: Callable[[Callable[[str], None]], None]) -> Iterator[Death]:
    """Run `act` again and again; each time another change below `folder` is the last of its process.

    `act` gets a function that tells the parent something. The caller prepares the folder between two turns.
    """
    for step in range(1, MOST):
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            _live(step, folder, act, writing)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            lines = pipe.read().decode().splitlines()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, -signal.SIGKILL), f"step {step}: the process ended with {status}"
        change = lines.pop().removeprefix("\0") if status else ""
        yield Death(step, change, lines)
        if status == 0:
            return
    raise AssertionError(f"there are more than {MOST} changes")


def die_at(step: int, folder: Path, last_words: Callable[[str], object], turn: threading.RLock) -> None:
    """Let this process be killed right before its change number `step` below `folder`, in any thread.

    From then on no other thread gets its `turn`, which it needs to change or to tell anything.
    """
    root, seen, flush = os.path.realpath(folder), 0, os.fsync

    def count(change: str, path: object) -> bool:
        nonlocal seen
        if isinstance(path, bytes | os.PathLike):
            path = os.fsdecode(path)
        if not isinstance(path, str) or not os.path.realpath(path).startswith(root + os.sep):
            return False
        turn.acquire()
        seen += 1
        if seen < step:
            turn.release()
            return False
        last_words(f"{change} {os.path.relpath(os.path.realpath(path), root)}")
        return True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if not isinstance(flags, int) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
        elif event in CALLS:
            path = arguments[1] if event == "os.rename" else arguments[0]
        else:
            return
        if count(event, path):
            if event == "open" and arguments[2] & os.O_TRUNC and os.path.isfile(path):
                os.truncate(path, 0)  # as if it had been opened, and nothing been written
            os.kill(os.getpid(), signal.SIGKILL)

    def half(file: Any) -> None:
        path = os.path.realpath(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}")
        if count("os.fsync", path):
            if os.path.isfile(path):
                with contextlib.suppress(OSError):
                    os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        flush(file)

    os.fsync = half
    sys.addaudithook(hook)


class Reaper:
    """Processes whose PYTHONPATH begins with `folder` die once at each stage, right before it is in a file.

    A stage is a version that is published or activated in a repository, one that is fetched from it, or a new
    combination of the states of the version that serves and of the one that is on trial. Only those count
    that match the expression `stages` as a whole; its first group, if it has one, is the name of the stage.
    """

    def __init__(self, folder: Path, stages: str) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self._died = folder / "died"
        self._died.touch()
        text = f"import runpy\nrunpy.run_path({str(Path(__file__).with_name('reaping.py'))!r})"
        text += f"['reap']({str(self._died)!r}, {stages!r})\n"
        (folder / "sitecustomize.py").write_text(text, encoding="utf-8")

    @property
    def died(self) -> list[str]:
        """The stages at which processes have died."""
        return self._died.read_text(encoding="utf-8").splitlines()


def _live(step: int, folder: Path, act: Callable[[Callable[[str], None]], None], pipe: int) -> NoReturn:
    """The forked process; it ends with status 3 after an exception."""

    turn = threading.RLock()

    def tell(line: str) -> None:
        with turn:
            os.write(pipe, f"{line}\n".encode())

    status = 3
    try:
        die_at(step, folder, lambda change: tell(f"\0{change}"), turn)
        act(tell)
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)
