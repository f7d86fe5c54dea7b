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


def test_an_engine_of_another_process_answers_or_says_why_not() -> None:
    folder = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        cwd=folder,
        check=True,
    )
    *told, own = done.stdout.splitlines()
    forked, on_one_thread, shared = told
    assert (
        forked.startswith("this engine was made in another process") and "torch.set_num_threads(1)" in forked
    )
    assert on_one_thread == own == "True"
    assert shared.startswith("this engine was started in another process")
