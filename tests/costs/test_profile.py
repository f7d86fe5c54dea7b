"""Latencies come from measurement; these tests check their form, never their size."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from gati.costs.disturbance import Uncounted
from gati.costs.lengths import of_base
from gati.costs.profile import (
    InTurns,
    measure_in_turns,
    measure_profile,
)
from gati.errors import BackendError, CutError
from tests.engine.networks import BLOCKS, Cache, ready, traced_network

pytestmark = pytest.mark.usefixtures("measured_again")

TRACED = traced_network()


class Quiet(Uncounted):
    """A machine on which everything takes as long every time."""

    def __init__(self) -> None:
        self.ticks = 0

    def now_ns(self) -> int:
        self.ticks += 1_000_000
        return self.ticks


class Busy(Uncounted):
    """A machine on which one thing in ten takes thirty times as long, for other work comes between."""

    def __init__(self) -> None:
        self.random, self.ticks = random.Random(0), 0

    def now_ns(self) -> int:
        self.ticks += 1_000_000 * (30 if self.random.random() < 0.1 else 1)
        return self.ticks


def test_blocks_that_do_the_same_have_the_same_share_on_a_busy_machine_which_is_told() -> None:
    profile = measure_profile(TRACED, repetitions=15, machine=Busy())
    first, second, third = (block.latency_ms for block in profile.blocks)
    assert second == pytest.approx(third)
    assert second == pytest.approx(first)  # each takes a tick nine times out of ten
    assert profile.disturbance.startswith("the measurement stayed disturbed")


def test_the_profile_names_every_block_in_forward_order_with_growing_times() -> None:
    profile = measure_profile(TRACED, repetitions=5)
    assert [block.name for block in profile.blocks] == list(BLOCKS)
    assert [block.index for block in profile.blocks] == [0, 1, 2]
    assert {block.kind for block in profile.blocks} == {"Block"}
    assert {block.output_shape for block in profile.blocks} == {(8, 6, 6)}
    assert all(earlier.reach_ms <= later.reach_ms for earlier, later in pairwise(profile.blocks))
    assert profile.blocks[0].reach_ms > 0.0
    assert profile.blocks[-1].reach_ms <= profile.base_ms
    assert sum(block.latency_ms for block in profile.blocks) == pytest.approx(profile.blocks[-1].reach_ms)
    assert (profile.backend, profile.device) == ("torch", "cpu")
    assert profile.threads == torch.get_num_threads()


def test_a_profile_of_some_blocks_leaves_out_the_others() -> None:
    profile = measure_profile(TRACED, ["blocks.1"], repetitions=3)
    assert [block.name for block in profile.blocks] == ["blocks.1"]


def test_a_lookup_is_timed_at_least_fifteen_times_with_the_base_model_in_between() -> None:
    calls: list[int] = []
    turns = measure_in_turns(
        ready(Cache()), torch.randn(1, 8, 6, 6), lambda: calls.append(1), machine=Quiet()
    )
    assert turns.lookup_ms > 0.0 and turns.base_ms > 0.0
    assert len(calls) == 15


class Slow(Quiet):
    """A machine on which each look at the clock takes a fifth of a second."""

    def now_ns(self) -> int:
        self.ticks += 200_000_000
        return self.ticks


def test_a_slow_network_is_timed_less_often() -> None:
    calls: list[int] = []
    cache, hidden, machine = ready(Cache()), torch.randn(1, 8, 6, 6), Slow()
    turns = measure_in_turns(cache, hidden, lambda: calls.append(1), machine=machine)
    assert len(calls) == 3 and machine.ticks < 4e9
    assert turns.lookup_ms == turns.base_ms == 200.0
    machine = Slow()
    profile = measure_profile(TRACED, repetitions=40, machine=machine)
    assert profile.base_ms == pytest.approx(200.0) and machine.ticks < 15e9


class Slowed(Quiet):
    """A machine on which everything takes `times` as long."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def now_ns(self) -> int:
        return self.times * super().now_ns()


def test_a_machine_that_slowed_down_after_the_base_model_was_timed_makes_no_lookup_slower() -> None:
    """A copy of the network was left out as too slow: it was timed while another program ran."""
    cache, hidden = ready(Cache()), torch.randn(1, 8, 6, 6)
    found = [measure_in_turns(cache, hidden, int, machine=Slowed(times)) for times in (1, 3)]
    assert found[1].lookup_ms == 3.0 * found[0].lookup_ms
    assert of_base(2.0, [(1.0, found[0])]) == of_base(2.0, [(1.0, found[1])]) == 2.0


def test_the_share_of_a_lookup_is_the_mean_over_the_lengths_of_inputs() -> None:
    short, long = InTurns(lookup_ms=1.0, base_ms=4.0), InTurns(lookup_ms=3.0, base_ms=12.0)
    assert of_base(16.0, [(0.5, short), (0.5, long)]) == pytest.approx(4.0)
    assert of_base(12.0, [(1.0, long)]) == pytest.approx(3.0)


def test_unknown_blocks_and_backends_are_refused() -> None:
    with pytest.raises(CutError, match="no block 'nowhere'"):
        measure_profile(TRACED, ["nowhere"])
    with pytest.raises(BackendError, match="unknown backend 'abacus'"):
        measure_profile(TRACED, backend="abacus")
