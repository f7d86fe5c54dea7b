"""One command from its arguments to its exit status; what goes wrong is one line on standard error."""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import FrameType
from typing import Any

import typer

from gati.cli import options, render
from gati.cli.commands import PipeError, app
from gati.errors import GatiError, StorageError

_STDOUT = 1  # its file descriptor
INTERRUPTED = 130  # what shells report for a command that Ctrl-C ended
ISSUES = "please report it with the traceback that GATI_DEBUG=1 shows"


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status; an error becomes one line on stderr."""
    with _noticed_interrupts() as came:
        try:
            words = options.with_addresses(options.with_home(arguments))
            status = tree()(args=words, prog_name="gati", standalone_mode=False)
            if sys.stdout is not None:
                sys.stdout.flush()
        except (KeyboardInterrupt, typer.Abort):
            status = INTERRUPTED
        except PipeError as error:
            return _report(error.broken, arguments)
        except Exception as error:
            return _report(error, arguments, interrupted=bool(came))
    if status == INTERRUPTED:
        return _fail(_interrupted(arguments), INTERRUPTED)
    return status if isinstance(status, int) else 0


@contextmanager
def _noticed_interrupts() -> Iterator[list[int]]:
    """Collect the interrupts that come meanwhile; each raises KeyboardInterrupt.

    Some packages swallow that while they are imported, and what is half imported fails later with any error.
    asyncio leaves this handler in its place, and what serves sets its own.
    """
    came: list[int] = []

    def notice(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.default_int_handler(number, frame)

    if (
        threading.current_thread() is not threading.main_thread()
        # ignored, as in the background of a script
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield came
        return
    signal.signal(signal.SIGINT, notice)
    try:
        yield came
    finally:
        if signal.getsignal(signal.SIGINT) is notice:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@cache
def tree() -> Any:
    """All commands, with help texts that a terminal of any width breaks where it wants.

    They refuse an option with one value that is repeated; typer takes the last value.
    """
    root = typer.main.get_command(app)
    for command in _every(root):
        command.help = _paragraphs(command.help or "")
        command.parse_args = partial(_parse_once_each, command, command.parse_args)
        for each in command.get_params(typer.Context(command, **root.context_settings)):
            if getattr(each, "is_flag", False):
                each.metavar = ""  # typer shows <bool>, as if a value followed
    return root


def _parse_once_each(
    command: Any, parse: Callable[[Any, list[str]], list[str]], context: Any, arguments: list[str]
) -> list[str]:
    """Parse the arguments of a command; an option with one value may be there once only."""
    *_, found = command.make_parser(context).parse_args(list(arguments))
    if not context.resilient_parsing and not any(each.is_eager for each in found):  # such as --help
        for each, times in Counter(found).items():
            takes_one = each.param_type_name == "option" and not (each.is_flag or each.multiple or each.count)
            if times > 1 and takes_one:
                context.fail(f"{each.opts[0]} is given {times} times; give it once")
    return parse(context, arguments)


def _every(command: Any) -> Iterator[Any]:
    yield command
    for each in getattr(command, "commands", {}).values():
        yield from _every(each)


def _paragraphs(text: str) -> str:
    """A text with one line per paragraph: typer keeps the line breaks of docstrings."""
    return "\n\n".join(" ".join(each.split()) for each in text.split("\n\n"))


def _report(error: Exception, arguments: Sequence[str], *, interrupted: bool = False) -> int:
    if BrokenPipeError in (type(error), type(error.__cause__)) and _reader_is_gone():
        # As in `gati blocks ... | head`; the interpreter must not flush again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)
        return 1
    if os.environ.get("GATI_DEBUG", "0") not in ("", "0"):
        traceback.print_exception(error)
    if isinstance(error, GatiError):
        return _fail(str(error), error.exit_status)
    if isinstance(error, _UsageError):
        message = error.format_message().rstrip(".")
        if not message:  # a group without a command has shown its help
            return 0
        return _fail(f"{message} (see {' '.join(_asked(arguments))} --help)", 2)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" while writing {error.filename}" if error.filename else ""
        return _fail(f"disk full{where}: free some space and run the command again", StorageError.exit_status)
    if interrupted and not isinstance(error, OSError):
        return _fail(_interrupted(arguments), INTERRUPTED)
    return _fail(f"unexpected {type(error).__name__}: {error}; {ISSUES}", 1)


def _reader_is_gone() -> bool:
    """Whether standard output is a pipe that is no longer read. Other pipes and sockets break, too."""
    watch = select.poll()
    watch.register(_STDOUT, select.POLLOUT)  # macOS tells nothing where nothing is asked for
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in watch.poll(0))


# typer's base class of usage errors is private, but its class name is stable.
_UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def _asked(arguments: Sequence[str]) -> list[str]:
    """The words of the command that is asked for, such as `gati evict replay`."""
    command, words = tree(), ["gati"]
    for argument in arguments:
        commands = getattr(command, "commands", {})
        if argument in commands:
            command = commands[argument]
            words.append(argument)
        elif not argument.startswith("-"):
            break
    return words


def _interrupted(arguments: Sequence[str]) -> str:
    asked = " ".join(_asked(arguments))
    if asked in ("gati explore", "gati demo"):
        return f"interrupted: run the same {asked} command again to resume"
    return "interrupted"


def _fail(message: str, status: int) -> int:
    render.error(message)
    return status
