"""Where caches are trained, for how long, and what is not trained at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gati.exploration.pace import Pace
from gati.exploration.recipes import STUDENTS
from gati.exploration.schedule import (
    batch_size_for,
    choose_places,
    divide_time,
    heaviest,
    most_steps,
    pays_quantising,
    places_for,
    reserve,
    steps_for_epochs,
    students_for,
    too_dear,
    too_heavy,
    too_large,
    too_slow,
)
from gati.types import BlockProfile

shares = st.lists(st.floats(0.0, 1.0), min_size=0, max_size=60).map(sorted)
MIB = 2**20


def test_a_lookup_slower_than_the_rest_of_the_network_is_skipped_with_both_numbers() -> None:
    block = BlockProfile(3, "layer1.3", "BasicBlock", (16, 8, 8), latency_ms=0.2, reach_ms=4.0)
    assert too_slow(0.9, block, base_ms=5.0) == ""
    assert too_slow(1.5, block, base_ms=5.0) == "a lookup takes 1.5 ms, the rest of the network 1 ms"


def test_a_student_that_takes_most_of_the_networks_time_is_left_out() -> None:
    assert too_dear(0.69, 1.0) == ""
    assert too_dear(0.8, 1.0).startswith("a lookup takes 0.8 ms of the network's 1 ms")


@pytest.mark.parametrize(
    ("parameters", "base", "allowed"),
    [
        (MIB, 100, True),  # 4 MiB beside a tiny network
        (MIB + 1, 100, False),
        (5 * MIB, 5 * MIB, True),
        (5 * MIB + 1, 5 * MIB, False),
        (8 * MIB, 25 * MIB, True),  # 32 MiB, however large the network
        (8 * MIB + 1, 25 * MIB, False),
    ],
)
def test_no_default_variant_holds_much_more_than_the_network(
    parameters: int, base: int, allowed: bool
) -> None:
    reason = too_heavy(parameters, heaviest(base))
    assert (reason == "") == allowed
    assert allowed or "name it with --variants" in reason


def test_a_variant_that_training_would_not_fit_into_memory_is_left_out() -> None:
    assert too_large(MIB, 16 * MIB) == too_large(MIB, None) == ""
    assert too_large(2 * MIB, 16 * MIB).endswith("takes 32.0 MiB of memory, and 16.0 MiB are free")


@given(shares, st.integers(1, 10))
def test_places_lie_along_the_network_and_never_at_its_ends(reach: list[float], limit: int) -> None:
    chosen = choose_places(reach, limit)
    inside = [place for place, share in enumerate(reach) if 0.08 <= share <= 0.75]
    assert list(chosen) == sorted(set(chosen))
    assert len(chosen) == min(limit, len(inside)) or (not inside and len(chosen) == min(1, len(reach)))
    if inside:
        assert set(chosen) <= set(inside)
        assert len(inside) > limit or list(chosen) == inside
        assert chosen[0] == inside[0] or limit < len(inside)


@given(st.integers(7, 80), st.integers(2, 7))
def test_equal_blocks_are_taken_at_equal_distances(blocks: int, limit: int) -> None:
    reach = [(index + 1) / blocks for index in range(blocks)]
    chosen = choose_places(reach, limit)
    inside = [share for share in reach if 0.08 <= share <= 0.75]
    even = (inside[-1] - inside[0]) / max(1, min(limit, len(inside)) - 1)
    gaps = [reach[later] - reach[earlier] for earlier, later in zip(chosen, chosen[1:], strict=False)]
    assert all(abs(gap - even) <= 1.0 / blocks + 1e-9 for gap in gaps)


def test_time_counts_and_not_the_number_of_blocks() -> None:
    """Half of the time passes in the first two of twelve blocks: half of the places are there."""
    reach = [0.25, 0.5, *(0.5 + 0.025 * number for number in range(1, 11))]
    assert choose_places(reach, 3)[:2] == (0, 1)


def test_where_no_block_lies_in_the_range_the_nearest_is_taken() -> None:
    assert choose_places([0.01, 0.05, 0.9], 6) == (1,)
    assert choose_places([0.9, 0.95], 6) == (0,)
    assert choose_places([], 6) == ()


def test_more_time_means_more_students_and_fewer_students_more_exits() -> None:
    found = [students_for(minutes * 60.0) for minutes in (1, 25, 40, 41, 120, 121, 600)]
    assert found == [1, 1, 1, 2, 2, 3, 3]
    assert students_for(None) == 2
    assert places_for(0) > places_for(1) == places_for(3)


@given(st.floats(0, 1e5), st.floats(0, 1e5))
def test_measuring_never_takes_all_of_the_time(measuring_s: float, left_s: float) -> None:
    kept_s = reserve(measuring_s, left_s)
    assert kept_s <= measuring_s
    assert left_s - kept_s >= 0.6 * left_s
    assert kept_s == measuring_s or measuring_s > 0.3 * left_s


@given(st.floats(0, 1e5), st.integers(0, 3), st.integers(0, 30))
def test_all_training_time_is_divided_and_students_get_most(left_s: float, students: int, exits: int) -> None:
    of_students, of_exits = divide_time(left_s, students=students, exits=exits)
    assert of_students + of_exits == pytest.approx(left_s if students or exits else 0.0)
    assert (of_students == 0) == (not students or not left_s)
    assert not (students and exits) or of_students == pytest.approx(70 / 15 * of_exits)


@given(st.integers(1, 100_000), st.booleans())
def test_small_sets_are_walked_more_often(inputs: int, students: bool) -> None:
    size = batch_size_for(inputs)
    assert 8 <= size <= 128
    most = most_steps(inputs, size, students=students)
    assert most >= steps_for_epochs(9 if not students else 60, inputs, size, least=420)
    assert steps_for_epochs(2, inputs, size, least=420) >= 420


def test_large_sets_are_walked_as_often_as_was_asked() -> None:
    assert steps_for_epochs(2, 50_000, 128, least=420) == 2 * (50_000 // 128)


@pytest.mark.parametrize(
    ("left_s", "answer_s", "pays"),
    [
        pytest.param(1100.0, 0.2, True, id="as ResNet-56 without AVX-512"),
        pytest.param(1100.0, 0.01, False, id="answers take little time"),
        pytest.param(90.0, 0.2, False, id="no time for many answers"),
        pytest.param(1100.0, 6.0, False, id="so slow that quantising takes most of the time"),
        pytest.param(1100.0, 0.0, False, id="nothing to answer"),
    ],
)
def test_a_network_is_quantised_for_answers_where_these_take_long(
    left_s: float, answer_s: float, pays: bool
) -> None:
    found = pays_quantising(left_s, Pace(answer_s, 0.2), 50_000, 128, STUDENTS)
    assert found == pays
    assert not pays_quantising(left_s, Pace(0.0, 0.0), 50_000, 128, STUDENTS)
