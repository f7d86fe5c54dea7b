"""What is trained for how long, and what is not trained at all."""

from __future__ import annotations

import pytest

from gati.explore.schedule import plan_training, potential, select_for_main_round, too_slow
from gati.types import BlockProfile, Trial, TrialId


def _trial(block: int, variant: str, parameters: int = 1000, lookup_ms: float = 0.1) -> Trial:
    name = TrialId(f"{block} {variant}")
    return Trial(name, block, f"block{block}", variant, "trained", parameters=parameters, lookup_ms=lookup_ms)


LAYERS = {"fc(512)": 2, "grid(256)": 2, "pyramid(64)": 5}


def test_a_lookup_slower_than_the_rest_of_the_network_is_skipped_with_both_numbers() -> None:
    block = BlockProfile(3, "layer1.3", "BasicBlock", (16, 8, 8), latency_ms=0.2, reach_ms=4.0)
    assert too_slow(0.9, block, base_ms=5.0) == ""
    assert too_slow(1.5, block, base_ms=5.0) == "a lookup takes 1.5 ms, the rest of the network 1 ms"


def test_an_early_cache_saves_more_than_a_late_one_with_the_same_hit_rate() -> None:
    early, late, last = (_trial(block, "grid(256)") for block in (2, 7, 9))
    assert potential(0.5, early, 10, 5.0) > potential(0.5, late, 10, 5.0) > 0
    assert potential(1.0, last, 10, 5.0) == 0


def test_a_slow_lookup_takes_from_what_a_hit_saves_in_whole_tenths() -> None:
    quick, slow = _trial(2, "grid(256)", lookup_ms=0.1), _trial(2, "fc(512)", lookup_ms=2.0)
    assert potential(1.0, quick, 10, 5.0) == pytest.approx(1 - 0.3 - 0.1)
    assert potential(1.0, slow, 10, 5.0) == pytest.approx(1 - 0.3 - 0.4)
    noisy = _trial(2, "grid(256)", lookup_ms=0.2)
    assert potential(1.0, noisy, 10, 5.0) == potential(1.0, quick, 10, 5.0)


def test_the_main_round_trains_every_deep_variant_and_the_best_shallow_one() -> None:
    screened = [_trial(2, variant) for variant in LAYERS]
    rates = {TrialId("2 fc(512)"): 0.3, TrialId("2 grid(256)"): 0.4, TrialId("2 pyramid(64)"): 0.0}
    assert select_for_main_round(screened, rates, LAYERS, 6, 5.0, limit=4) == ["2 pyramid(64)", "2 grid(256)"]


def test_of_equal_shallow_variants_the_smaller_one_is_kept() -> None:
    screened = [_trial(0, "fc(512)", 9000), _trial(0, "grid(256)", 500)]
    rates = {trial.trial_id: 0.5 for trial in screened}
    assert select_for_main_round(screened, rates, LAYERS, 4, 5.0, limit=4) == ["0 grid(256)"]


def test_blocks_with_nothing_to_save_are_left_out_and_the_others_spread_along_the_network() -> None:
    screened = [_trial(block, "grid(256)") for block in range(20)]
    rates = {trial.trial_id: 0.0 if trial.block_index < 4 else 0.5 for trial in screened}
    chosen = select_for_main_round(screened, rates, LAYERS, 20, 5.0, limit=5)
    blocks = [int(name.split()[0]) for name in chosen]
    assert len(blocks) == 5
    assert blocks[0] == 4
    assert 19 not in blocks, "a cache at the last block saves nothing"
    assert max(later - earlier for earlier, later in zip(blocks, blocks[1:], strict=False)) <= 4


def test_nothing_screened_means_nothing_chosen() -> None:
    assert select_for_main_round([], {}, {}, 10, 5.0, limit=3) == []


def test_small_data_is_walked_more_often_so_that_predictors_still_learn() -> None:
    small, large = plan_training(900, epochs=2), plan_training(50_000, epochs=2)
    assert small.main_steps * small.batch_size > 10 * 900
    assert large.main_steps == 2 * (50_000 // large.batch_size)
    assert small.screening_steps < small.main_steps
