"""The conversion process that `apart` starts: requests on standard input, answers on standard output."""

from __future__ import annotations

import os
import pickle
import select
import signal
from contextlib import suppress
from typing import Any

import torch

from gati.engine.graph.apart import IDLE_S, read_message, write_message
from gati.engine.graph.convert import convert_here
from gati.errors import ModelError
from gati.priority import give_way

_NICENESS = 10  # where there is no class of idle processes


def main() -> None:
    """Convert requests until none arrives for `IDLE_S` or the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    torch.set_num_threads(1)
    give_way(_NICENESS)
    with open(0, "rb", buffering=0) as requests, os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # printed text must not mix with the answers
        with suppress(EOFError, BrokenPipeError):
            while select.select([requests], [], [], IDLE_S)[0]:
                write_message(answers, pickle.dumps(_answer(read_message(requests))))


def _answer(request: bytes) -> tuple[str, Any]:
    try:
        module, example, name = pickle.loads(request)
        return "converted", convert_here(module, example, name).SerializeToString()
    except ModelError as error:
        return "refused", str(error)
    except Exception as error:  # for example, classes that this process cannot import
        return "failed", f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
