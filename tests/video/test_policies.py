"""Thinning of pictures, and waits before reconnecting."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gati.errors import VideoError
from gati.video.policies import Reconnect, Thinning, interval_s
from gati.video.status import Rate, SourceState

GAPS = st.lists(st.floats(0.001, 2.0), min_size=1, max_size=200)


def passed(times_s: list[float], every_s: float | None) -> list[float]:
    thinning = Thinning(every_s)
    return [time_s for time_s in times_s if thinning.lets_through(time_s)]


@given(gaps=GAPS, start_s=st.floats(0.0, 1e5))
def test_without_thinning_everything_goes_through(gaps: list[float], start_s: float) -> None:
    times_s = list(itertools.accumulate(gaps, initial=start_s))
    assert passed(times_s, None) == times_s


@given(gaps=GAPS, every_s=st.floats(0.01, 3.0))
def test_one_picture_at_most_for_each_piece_of_time(gaps: list[float], every_s: float) -> None:
    times_s = list(itertools.accumulate(gaps, initial=0.0))
    through = passed(times_s, every_s)
    assert through[0] == 0.0
    assert len(through) <= times_s[-1] / every_s + 1.11
    early = min(1e-3 / every_s, 0.1)  # times in files are rounded
    pieces = [math.floor(time_s / every_s + early) for time_s in through]
    assert len(set(pieces)) == len(pieces)
    assert set(pieces) == {math.floor(time_s / every_s + early) for time_s in times_s}, "none is left out"


@given(source_fps=st.integers(1, 120), fps=st.integers(1, 120))
def test_the_rate_does_not_drift(source_fps: int, fps: int) -> None:
    times_s = [number / source_fps for number in range(source_fps * 10)]
    assert len(passed(times_s, 1.0 / fps)) == 10 * min(source_fps, fps)


@given(first_s=st.floats(0.0, 100.0), fps=st.sampled_from([12, 15, 24, 25, 30, 50, 60]))
def test_at_the_rate_of_the_source_nothing_is_left_out_where_times_are_in_milliseconds(
    first_s: float, fps: int
) -> None:
    times_s = [round(first_s + number / fps, 3) for number in range(600)]
    assert passed(times_s, 1.0 / fps) == times_s


def test_a_gap_in_the_stream_lets_through_no_burst() -> None:
    assert passed([0.0, 0.5, 7.9, 8.0, 8.1, 9.0], 1.0) == [0.0, 7.9, 8.0, 9.0]


def test_an_interval_is_given_once() -> None:
    assert interval_s(None, None) is None
    assert interval_s(2.5, None) == 2.5
    assert interval_s(None, 4.0) == 0.25
    with pytest.raises(VideoError, match=r"both every_s=1 and fps=2 were given; give one of them"):
        interval_s(1.0, 2.0)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_an_interval_is_above_zero(value: float) -> None:
    with pytest.raises(VideoError, match="the interval every_s is .*, must be a number above 0"):
        interval_s(value, None)
    with pytest.raises(VideoError, match="the rate fps is .*, must be a number above 0"):
        interval_s(None, value)


def test_the_smallest_interval_that_can_be_asked_for_does_not_overflow() -> None:
    assert passed([0.0, 1e5], interval_s(1e-320, None)) == [0.0, 1e5]


@given(seed=st.integers(), jitter=st.floats(0.0, 1.0), first_s=st.floats(0.01, 5.0))
def test_waits_grow_up_to_the_cap_and_are_spread(seed: int, jitter: float, first_s: float) -> None:
    rule = Reconnect(first_s=first_s, factor=2.0, cap_s=20.0, jitter=jitter)
    waits = list(itertools.islice(rule.waits_s(random.Random(seed)), 15))
    for number, wait in enumerate(waits):
        most = min(20.0, first_s * 2.0**number)
        assert most * (1.0 - jitter) * 0.999 <= wait <= most * 1.001


def test_jitter_makes_two_cameras_come_back_at_different_times() -> None:
    one, other = (next(Reconnect().waits_s(random.Random(seed))) for seed in (1, 2))
    assert one != other


@pytest.mark.parametrize("wrong", [{"first_s": 0.0}, {"stall_s": -1.0}, {"factor": 0.5}, {"jitter": 1.5}])
def test_an_impossible_reconnection_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(VideoError, match=next(iter(wrong))):
        Reconnect(**wrong)  # type: ignore[arg-type]


def test_states_have_names_that_do_not_change() -> None:
    assert list(SourceState) == ["running", "paused", "reconnecting", "ended", "error"]


def test_a_rate_is_measured_over_the_last_events() -> None:
    rate = Rate()
    assert rate.per_s is None
    rate.tell(1.0)
    assert rate.per_s is None
    for number in range(1, 11):
        rate.tell(1.0 + number / 4.0)
    assert rate.per_s == pytest.approx(4.0)
    for number in range(200):
        rate.tell(10.0 + number)
    assert rate.per_s == pytest.approx(1.0), "the past is forgotten"
