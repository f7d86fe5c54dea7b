"""Freed memory stays with the process while it is wanted, and goes back to the system afterwards."""

from __future__ import annotations

import resource
import sys

import pytest
import torch

from gati.exploration.memory import freed_memory_kept

MEGABYTES = 48


def _faults_of_blocks(count: int) -> int:
    """Pages that the system had to clear while so many large blocks were filled and freed."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        torch.empty(MEGABYTES << 20, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc")
def test_a_block_that_was_freed_is_used_again_without_clearing_it() -> None:
    _faults_of_blocks(2)
    usual = _faults_of_blocks(10)
    with freed_memory_kept():
        _faults_of_blocks(10)  # until the free blocks have found their places
        kept = _faults_of_blocks(10)
    assert kept < usual / 5
    assert _faults_of_blocks(10) > 5 * kept


def test_it_ends_on_errors_too() -> None:
    with pytest.raises(ValueError, match="ours"), freed_memory_kept():
        raise ValueError("ours")
