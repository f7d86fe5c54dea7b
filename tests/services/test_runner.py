"""Engines that take turns in one thread each run on their own number of torch's threads."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from services.inference.runner import open_runner
from services.pausing import Takes


class Engine:
    """Answers with the number of threads that it runs on."""

    compiled = False
    replays = False

    def __init__(self, *, overlapped: bool = False, device: str = "cpu") -> None:
        self.overlapped = overlapped
        self.traced = SimpleNamespace(device=torch.device(device))

    def segments(self, *, early: bool) -> list[Any]:
        return []

    def examples(self) -> list[Tensor]:
        return []

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


def opened(threads: int, *, workers: int | None = 1, overlapped: bool = False, device: str = "cpu") -> Any:
    torch.set_num_threads(threads)
    engine: Any = Engine(overlapped=overlapped, device=device)
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


@pytest.mark.parametrize(
    ("given", "takes"),
    [
        ({"workers": 1}, Takes(3, 3)),
        ({"workers": None, "overlapped": True}, Takes(3, 3)),
        ({"workers": None}, Takes(1, 3)),
        ({"workers": 2}, Takes(1, 2)),
        ({"workers": None, "device": "cuda"}, Takes(1, 3)),
    ],
)
def test_a_runner_says_how_many_cores_its_requests_take(given: dict[str, Any], takes: Takes) -> None:
    """On a GPU, where one worker answers many requests, they counted as one."""
    runner = opened(3, **given)
    assert runner.takes == takes
    runner.close()
