"""Little work goes before much, but not for ever."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gati.evict.engine.decoder import Decoder, DecoderSettings
from gati.evict.engine.engine import PrefixEngine, PrefixEngineLimits, pool_for
from gati.evict.engine.generation import Generation, GenerationRequest
from gati.evict.engine.turns import PATIENCE, WaitingLine, work_of


def arrived(at_s: float) -> Generation:
    return Generation(GenerationRequest(prompt=(1,), most_tokens=1), at_s)


def test_without_a_measured_step_requests_keep_the_order_of_their_arrival() -> None:
    line = WaitingLine()
    asked = [arrived(float(at)) for at in range(4)]
    for work, generation in zip((9.0, 1.0, 5.0, 0.0), asked, strict=True):
        line.enter(generation, work)
    assert list(line) == asked and len(line) == 4


@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 1e4)), min_size=2, max_size=20))
def test_a_request_is_overtaken_only_by_what_arrives_within_its_patience(
    asked: list[tuple[float, float]],
) -> None:
    line, unit_s = WaitingLine(), 1e-3
    line.took(2.0, 2.0 / unit_s)
    work = {}
    for at_s, each in sorted(asked):
        generation = arrived(at_s)
        work[generation] = each
        line.enter(generation, each)
    left = list(line)
    assert sorted(each.arrived_s for each in left) == sorted(at_s for at_s, _ in asked)
    for at, late in enumerate(left):
        for before in left[:at]:
            assert before.arrived_s <= late.arrived_s + PATIENCE * unit_s * work[late] + 1e-9
            if work[before] > work[late]:  # more work goes first only if it came so much earlier
                extra_s = PATIENCE * unit_s * (work[before] - work[late])
                assert late.arrived_s - before.arrived_s >= extra_s - 1e-9


def test_who_was_admitted_before_goes_before_all_others() -> None:
    line = WaitingLine()
    first, second, new = arrived(1.0), arrived(2.0), arrived(0.0)
    line.enter(new, 1.0)
    line.enter_again(second)
    line.enter_again(first)
    assert list(line) == [first, second, new] and first.turn_s == -math.inf
    assert line.leave(second) and not line.leave(second)
    assert line.first is first


@pytest.mark.parametrize("growth", [0.0, 0.01])
def test_work_is_the_sum_of_its_tokens(growth: float) -> None:
    tokens = sum(1.0 + growth * (at + 0.5) for at in range(20, 50))
    assert work_of(20, 50, growth) == pytest.approx(tokens)


def test_a_short_prompt_does_not_wait_for_all_long_ones_before_it() -> None:
    decoder = Decoder.random(DecoderSettings(layers=1, width=32, heads=4, inner_width=48), seed=0)
    limits = PrefixEngineLimits(most_running=2, chunk_tokens=16)
    now_s = [0.0]
    engine = PrefixEngine(decoder, pool_for(decoder, 2**22), limits=limits, clock=lambda: now_s[0])

    def step() -> None:
        now_s[0] += 0.1
        engine.step()
        now_s[0] += 0.1

    def submit(tokens: int) -> Generation:
        return engine.submit(GenerationRequest(prompt=tuple([tokens % 250] * tokens), most_tokens=1))

    engine._waiting.took(1.0, 16.0)
    long = [submit(300 + each) for each in range(4)]
    step()
    short = submit(20)
    while short.first_token_s is None:
        step()
    assert sum(each.first_token_s is not None for each in long) < 3
    engine.run_until_idle()
    assert all(each.first_token_s is not None for each in long)
