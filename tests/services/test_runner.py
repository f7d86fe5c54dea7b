"""Engines that take turns in one thread each run on their own number of torch's threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from services.inference.runner import open_runner


class Engine:
    """Answers with the number of threads that it runs on."""

    def __init__(self, *, overlapped: bool = False) -> None:
        self.overlapped = overlapped

    def __call__(self, x: Tensor) -> list[int]:
        return [torch.get_num_threads()]

    base = __call__

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def same_number() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def opened(threads: int, *, workers: int | None = 1, overlapped: bool = False) -> Any:
    torch.set_num_threads(threads)
    engine: Any = Engine(overlapped=overlapped)
    return open_runner(engine, workers=workers)


def test_engines_that_take_turns_keep_their_numbers_of_threads() -> None:
    """All ran on the number of the first one."""
    runners = [opened(threads) for threads in (3, 1, 2)]
    found = [each.submit(torch.zeros(1)).result() for each in runners * 2]
    assert found == [3, 1, 2] * 2
    for each in runners:
        each.close()


def test_an_engine_with_a_thread_of_its_own_keeps_its_number() -> None:
    """It took the number that any other thread had set last."""
    runner = opened(3, workers=None, overlapped=True)
    torch.set_num_threads(1)
    assert runner.submit(torch.zeros(1)).result() == 3
    runner.close()
