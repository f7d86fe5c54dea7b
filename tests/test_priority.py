"""A process that gives way: any other preempts it, and so do its later threads."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, os, threading
from gati.priority import give_way
give_way({niceness})
found = []
thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
thread.start()
thread.join()
print(json.dumps([os.sched_getscheduler(0), *found, os.nice(0)]))
"""


def priority_after(niceness: int) -> list[int]:
    """Scheduling classes of the main thread and of a later one, and the niceness, in a process of its own."""
    command = [sys.executable, "-c", PROGRAM.format(niceness=niceness)]
    return list(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the class of idle processes")
def test_a_process_that_gives_way_is_idle_and_so_are_its_threads() -> None:
    before = os.nice(0)
    assert priority_after(max(before, 5)) == [os.SCHED_IDLE, os.SCHED_IDLE, max(before, 5)]
    assert priority_after(0) == [os.sched_getscheduler(0)] * 2 + [before]
