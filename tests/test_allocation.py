"""Freed memory stays with the process, or goes back to the system, as it is wanted."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gati.allocation import freed_memory_kept

_REUSE = """
import resource
import torch
from gati.allocation import freed_memory_kept

def faults(count):  # pages that the system had to clear while so many blocks of 48 MiB were filled and freed
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        torch.empty(48 << 20, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults(2)
usual = faults(10)
with freed_memory_kept():
    faults(10)  # until the free blocks have found their places
    kept = faults(10)
print(usual, kept, faults(10))
"""

_GROW = """
import io, re, sys
from pathlib import Path
from gati.allocation import return_freed_memory

def resident_mib(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

if sys.argv[1] == "returned":
    return_freed_memory()
for freed_mib in (1, 4, 12, 24, 31):
    bytes(freed_mib * 2**20)
Path("/proc/self/clear_refs").write_text("5")
before = resident_mib("VmRSS")
body, part = io.BytesIO(), bytes(2**16)
for _ in range(2**10):
    body.write(part)
most = resident_mib("VmHWM")
del body
print(most - before, resident_mib("VmRSS") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc")
def test_a_block_that_was_freed_is_used_again_without_clearing_it() -> None:
    """In a process of its own: other tests may leave a free block that is large enough."""
    usual, kept, after = map(int, _output_of(_REUSE).split())
    assert kept < usual / 5
    assert after > 5 * kept


def test_it_ends_on_errors_too() -> None:
    with pytest.raises(ValueError, match="ours"), freed_memory_kept():
        raise ValueError("ours")


def _output_of(*script: str) -> str:
    done = subprocess.run([sys.executable, "-c", *script], capture_output=True, text=True, check=True)
    return done.stdout


def _rises_mib(how: str) -> tuple[float, float]:
    """By how much memory rises for a body of 64 MiB at most, and once it is gone."""
    most, after = map(float, _output_of(_GROW, how).split())
    return most, after


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc")
def test_a_body_that_grows_takes_its_size_once_and_leaves_nothing() -> None:
    most, after = _rises_mib("returned")
    assert most < 64 * 1.25
    assert after < 4
    assert _rises_mib("as it is")[0] > 90  # else this test shows nothing
