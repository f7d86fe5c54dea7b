"""Measurements that noise made too small are raised to what arithmetic allows; others stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from gati.costs.graph import GraphCosts
from gati.costs.least import Arithmetic, at_least
from gati.model.segments import trace
from gati.types import BlockProfile, Profile
from tests.engine.networks import BLOCKS, Cache, ready, traced_network

TRACED = traced_network()


class Heavy(Cache):
    """A convolution before the rest, as large as a block's."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(self.convolution(hidden))


def caches() -> Mapping[str, tuple[str, nn.Module]]:
    return {"light": (BLOCKS[0], ready(Cache())), "heavy": (BLOCKS[1], ready(Heavy()))}


def profile(reach_ms: tuple[float, ...], base_ms: float) -> Profile:
    own_ms = [there - before for before, there in pairwise((0.0, *reach_ms))]
    blocks = tuple(
        BlockProfile(index, name, "Block", (8, 6, 6), own, there)
        for index, (name, own, there) in enumerate(zip(BLOCKS, own_ms, reach_ms, strict=True))
    )
    return Profile("onnxruntime", "cpu", 1, base_ms, blocks)


KNOWN = profile((2.0, 4.0, 6.0), 8.0)


def test_nothing_is_free_where_all_differences_were_noise() -> None:
    measured = GraphCosts(profile((0.0, 0.0, 0.0), 1.0), 0.0, {"light": 0.0, "heavy": 0.0})
    bounded = at_least(measured, KNOWN, TRACED, caches())
    assert [each.reach_ms for each in bounded.profile.blocks] == pytest.approx([0.125, 0.25, 0.375])
    assert [each.latency_ms for each in bounded.profile.blocks] == pytest.approx([0.125] * 3)
    share = Arithmetic(TRACED).share(caches()["heavy"][1], BLOCKS[1])
    assert 0.2 < share < 0.4  # one of three blocks and a stem
    assert bounded.lookup_ms["heavy"] > 0.5 * share
    assert 0.0 < bounded.lookup_ms["light"] < 0.1 * bounded.lookup_ms["heavy"]
    assert bounded.profile.base_ms == 1.0


def test_what_was_measured_above_it_stays() -> None:
    measured = GraphCosts(profile((0.3, 0.5, 0.9), 1.0), 0.02, {"light": 0.1, "heavy": 0.4})
    bounded = at_least(measured, KNOWN, TRACED, caches())
    assert bounded.lookup_ms == measured.lookup_ms
    reached = [each.reach_ms for each in bounded.profile.blocks]
    assert reached == [0.3, 0.5, 0.9]


def test_the_way_never_gets_shorter() -> None:
    """One block measured too long: those after it lie no nearer."""
    measured = GraphCosts(profile((0.4, 0.4, 0.4), 1.0), 0.0, {"light": 0.0, "heavy": 0.0})
    first, *others = measured.profile.blocks
    blocks = (first, *(replace(each, reach_ms=0.0) for each in others))
    crossed = replace(measured, profile=replace(measured.profile, blocks=blocks))
    reached = [each.reach_ms for each in at_least(crossed, KNOWN, TRACED, caches()).profile.blocks]
    assert reached == pytest.approx([0.4, 0.4, 0.4])


def test_counting_changes_neither_network_nor_cache() -> None:
    lookup = ready(Heavy())
    before = {name: value.clone() for name, value in lookup.state_dict().items()}
    Arithmetic(TRACED).share(lookup, BLOCKS[0])
    assert all(torch.equal(before[name], value) for name, value in lookup.state_dict().items())


class Recurrent(nn.Module):
    """Two recurrent layers, then a linear one."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(6, 5, 2, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.recurrent(x)[0][:, -1])
        return result


def test_recurrent_layers_are_counted() -> None:
    """Else lookups would seem to cost a multiple of the network, and none would be composed."""
    traced = trace(ready(Recurrent()), torch.randn(2, 7, 6), ["recurrent"])
    assert Arithmetic(traced).base == 2 * (7 * (4 * 5 * (6 + 5) + 4 * 5 * (5 + 5)) + 5 * 3)
