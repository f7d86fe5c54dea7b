"""Engines in a process that is forked: they answer or say why not, and never wait for what is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import LONG_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork"),
]

PROGRAM = """
import os, torch
from gati.engine.concurrent import ConcurrentEngine
from gati.engine.engine import Engine
from gati.errors import BackendError
from tests.engine.networks import traced_network
from tests.engine.test_graph_backends import exits, requests

torch.set_num_threads(2)
engine, x = Engine(traced_network(), exits(0.45)), requests(1)
expected = engine(x)[0].class_index

def ask(answer):
    try:
        return answer().class_index == expected
    except BackendError as error:
        return error

with ConcurrentEngine(engine) as shared:
    if (child := os.fork()) == 0:
        print(ask(lambda: engine(x)[0]), flush=True)
        torch.set_num_threads(1)
        print(ask(lambda: engine(x)[0]), flush=True)
        print(ask(lambda: shared(x)), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    print(ask(lambda: shared(x)))
"""

ENDING = """
import os, torch
from gati.engine.engine import Engine
from tests.engine.networks import exits, traced_network

os.sched_getaffinity, os.sched_setaffinity = lambda _: {0, 1, 2, 3}, lambda *_: None
torch.set_num_threads(4)
closed, gone = (Engine(traced_network(), exits((0.5,) * 3, "overlapped")) for _ in range(2))
closed.open()
gone.open()
if (child := os.fork()) == 0:
    torch.set_num_threads(1)
    closed.close()
    del gone
    with Engine(traced_network(), exits((0.5,) * 3, "overlapped")):
        print(torch.get_num_threads(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(torch.get_num_threads())
closed.close()
del gone
print(torch.get_num_threads())
"""


CLOSING = """
import os, threading, torch
from gati.engine.concurrent import ConcurrentEngine
from gati.engine.engine import Engine
from tests.engine.networks import traced_network

torch.set_num_threads(1)
shared = ConcurrentEngine(Engine(traced_network())).start()
held, forked = threading.Event(), threading.Event()

def hold():
    with shared._work.changed:
        held.set()
        forked.wait()

holder = threading.Thread(target=hold)
holder.start()
held.wait()
if (child := os.fork()) == 0:
    shared.close()
    del shared
    print("closed", flush=True)
    os._exit(0)
forked.set()
os.waitpid(child, 0)
shared.close()
print("closed")
"""


def printed(program: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        cwd=Path(__file__).parent.parent.parent,
        check=True,
    )
    return done.stdout.splitlines()


def test_an_engine_that_ends_in_a_forked_process_leaves_it_its_number_of_threads() -> None:
    """With more than one, torch would wait there for the threads of the other process for ever."""
    assert printed(ENDING) == ["1", "3", "4"]


def test_an_engine_of_another_process_is_closed_there_whatever_its_threads_did() -> None:
    """One of them had the lock when the process was forked, and nothing gives it back there."""
    assert printed(CLOSING) == ["closed", "closed"]


def test_an_engine_of_another_process_answers_or_says_why_not() -> None:
    *told, own = printed(PROGRAM)
    forked, on_one_thread, shared = told
    assert (
        forked.startswith("this engine was made in another process") and "torch.set_num_threads(1)" in forked
    )
    assert on_one_thread == own == "True"
    assert shared.startswith("this engine was started in another process")
