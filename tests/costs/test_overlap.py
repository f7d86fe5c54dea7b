"""Costs of overlapped lookups; these tests check their form, or count operations in place of time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from gati.cores import usable_cores
from gati.costs.disturbance import Uncounted
from gati.costs.overlap import measure_overlap
from gati.engine.threads import on_threads
from tests.engine.cores import Cores
from tests.engine.networks import Cache, ready, traced_network

pytestmark = pytest.mark.usefixtures("measured_again")

TRACED = traced_network()


def test_an_overlapped_lookup_has_a_time_and_a_penalty_that_is_never_negative() -> None:
    before = usable_cores(), torch.get_num_threads()
    for cores in (1, 2):
        cost = measure_overlap(TRACED, "blocks.0", ready(Cache()), repetitions=3, cores=cores)
        assert cost.lookup_ms > 0.0
        assert cost.penalty_ms >= 0.0
    assert (usable_cores(), torch.get_num_threads()) == before


class Shared(Uncounted, TorchFunctionMode):
    """A machine on which a convolution of the calling thread takes 4 ms, divided by its threads."""

    def __init__(self) -> None:
        super().__init__()
        self.ticks = 0

    def now_ns(self) -> int:
        return self.ticks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "conv" in getattr(func, "__name__", ""):
            self.ticks += 4_000_000 // torch.get_num_threads()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("cores", [2, 3])
def test_what_the_network_loses_is_the_penalty_and_no_time_of_the_lookup(
    cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four convolutions come before it, in which the network loses most."""
    Cores.instead(4, monkeypatch)
    with on_threads(4), Shared() as machine:
        cost = measure_overlap(
            TRACED, "blocks.1", ready(Cache()), repetitions=3, cores=cores, machine=machine
        )
    alone_ms, with_fewer_cores_ms = 4.0 / 4, 4.0 / (4 - cores)
    assert cost.penalty_ms == pytest.approx(4 * (with_fewer_cores_ms - alone_ms), abs=1e-5)
    assert cost.lookup_ms <= with_fewer_cores_ms + 1e-5, "at most the convolution that runs meanwhile"
