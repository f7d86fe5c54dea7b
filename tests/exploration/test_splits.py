"""Who trains, chooses and is counted where some inputs are copies, and what that does to the certificate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom

from gati.composition.accuracy import accuracy_drop
from gati.composition.copies import counted
from gati.errors import DataError
from gati.exploration.library import CERTIFY, SELECT
from gati.exploration.splits import Inputs, inputs_to_select_on, split_inputs
from gati.model.data import Data, load_data
from gati.model.preprocess import Preprocessing

GREY = Preprocessing((0.0,), (1.0,), channels=1)


def pictures(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3, 3, 1), dtype=np.uint8)


def data_of(folder: Path, images: np.ndarray, name: str = "val") -> Data:
    np.savez(folder / f"{name}.npz", images=images, labels=np.arange(len(images)) % 5)
    return load_data(folder / f"{name}.npz", GREY)


def parts_of(inputs: Inputs, held: Data) -> dict[str, set[int]]:
    """The different inputs of each part."""
    identity = held.identities[inputs.record.rows]
    return {
        "train": set(inputs.train.identities.tolist()),
        "select": set(identity[inputs.split == SELECT].tolist()),
        "certify": set(identity[inputs.split == CERTIFY].tolist()),
    }


@pytest.mark.parametrize("seed", range(3))
def test_all_copies_of_an_input_are_in_the_same_part(tmp_path: Path, seed: int) -> None:
    repeats = np.random.default_rng(seed).integers(1, 9, 300)
    images = np.random.default_rng(seed).permutation(np.repeat(pictures(300), repeats, axis=0))
    held = data_of(tmp_path, images)
    inputs = split_inputs(held, None, seed)
    parts = parts_of(inputs, held)
    assert sum(map(len, parts.values())) == len(set.union(*parts.values())) == 300
    assert all(len(part) > 60 for part in parts.values())
    certify = inputs.split == CERTIFY
    assert certify.sum() == len(parts["certify"]), "each certify input is there once"
    assert len(inputs.train) + (~certify).sum() + inputs.record.copies[certify].sum() == len(held)
    assert f"{len(held) - 300} of {len(held)} inputs of --data are copies" in inputs.notes[0]


@pytest.mark.parametrize("third", [False, True])
def test_without_copies_the_split_is_what_it_always_was(tmp_path: Path, third: bool) -> None:
    held = data_of(tmp_path, pictures(200))
    inputs = split_inputs(held, None if third else data_of(tmp_path, pictures(50, 1), "more"), 7)
    order = np.random.default_rng((7, 0)).permutation(200)
    cut = 66 if third else 0
    select = order[cut : cut + (200 - cut) // 2]
    assert inputs.record.rows.tolist() == sorted(order[cut:].tolist())
    assert inputs.record.rows[inputs.split == SELECT].tolist() == sorted(select.tolist())
    assert len(inputs.train) == (66 if third else 50) and inputs.notes == ()
    assert set(inputs.record.copies.tolist()) == {1}


def test_the_more_there_are_the_larger_the_part_that_certifies() -> None:
    counts = [60, 61, 400, 799, 800, 801, 1000, 1200, 1201, 3000, 10_000, 100_001]
    select = [inputs_to_select_on(count) for count in counts]
    assert select == [30, 30, 200, 399, 400, 400, 400, 400, 400, 1000, 3333, 33_333]
    every = [inputs_to_select_on(count) for count in range(60, 5000)]
    steps = np.diff(every)
    assert set(steps.tolist()) <= {0, 1}, "one input more never makes either part smaller"


@pytest.mark.parametrize("third", [False, True])
def test_many_are_split_by_the_seed_alone(tmp_path: Path, third: bool) -> None:
    held = data_of(tmp_path, pictures(1500))
    more = None if third else data_of(tmp_path, pictures(50, 1), "more")
    inputs = split_inputs(held, more, 7)
    order = np.random.default_rng((7, 0)).permutation(1500)
    cut = 500 if third else 0
    rows = inputs.record.rows[inputs.split == SELECT]
    assert rows.tolist() == sorted(order[cut : cut + (400 if third else 500)].tolist())
    assert len(inputs.held_out) == 1500 - cut
    again = split_inputs(data_of(tmp_path, pictures(1500), "again"), more, 7)
    assert np.array_equal(again.split, inputs.split)


def test_what_is_in_both_is_not_trained_on(tmp_path: Path) -> None:
    held = data_of(tmp_path, pictures(200))
    more = data_of(tmp_path, np.concatenate([pictures(80)[::-1], pictures(120, 1)]), "more")
    inputs = split_inputs(held, more, 0)
    assert inputs.notes == ("left out 80 of 200 inputs of --train-data: they are also in --data",)
    assert len(inputs.train) == 120 and not np.isin(inputs.train.identities, held.identities).any()
    assert len(inputs.record.seen) == 320


@pytest.mark.parametrize("rows", [slice(None, None, -1), slice(0, 40)], ids=["reordered", "a part"])
def test_training_data_with_nothing_of_its_own_is_refused(tmp_path: Path, rows: slice) -> None:
    held = data_of(tmp_path, pictures(200))
    message = "^(--train-data and --data are the same 200|all 40 inputs of --train-data are also in --data)"
    with pytest.raises(DataError, match=message):
        split_inputs(held, data_of(tmp_path, pictures(200)[rows], "more"), 0)


def test_many_copies_of_few_inputs_are_few_inputs(tmp_path: Path) -> None:
    held = data_of(tmp_path, np.tile(pictures(50), (20, 1, 1, 1)))
    with pytest.raises(DataError, match="has 1000 inputs, 50 of them different; only"):
        split_inputs(held, None, 0)


def false_certificates(tmp_path: Path, copies: int, accuracy: float, count: bool) -> float:
    """Share of draws in which a composition as bad as not allowed is certified on the certify split."""
    different = 3000 // copies
    held = data_of(tmp_path, np.repeat(pictures(different), copies, axis=0))
    random = np.random.default_rng(0)
    more = data_of(tmp_path, pictures(100, 1), "more")
    inputs = split_inputs(held, more, 0)
    certify = inputs.split == CERTIFY
    record = inputs.record
    alpha, passed, draws = 1.0 - accuracy, 0, 2000
    for _ in range(draws):
        answered_otherwise = random.uniform(size=different) < alpha  # copies are answered alike
        lost = answered_otherwise[record.rows[certify] // copies]
        rows = counted(lost, record.copies[certify]) if count else np.repeat(np.arange(len(lost)), copies)
        passed += binom.cdf(lost[rows].sum(), len(rows), alpha) <= 0.05
    return passed / draws


@pytest.mark.parametrize("copies", [1, 4])
def test_copies_do_not_certify_what_is_false(tmp_path: Path, copies: int) -> None:
    """Each of the inputs several times: at most 5 % of draws plus two standard errors."""
    assert false_certificates(tmp_path, copies, accuracy=0.97, count=True) <= 0.05 + 2 * 0.0049


def test_counting_every_copy_would(tmp_path: Path) -> None:
    assert false_certificates(tmp_path, 4, accuracy=0.97, count=False) > 0.15


def test_a_common_input_that_is_answered_differently_is_not_counted_once() -> None:
    """Independent draws in which an input is common: copies are evidence, dropping them would be wrong."""
    random = np.random.default_rng(0)
    common, passed, draws = 0.03, 0, 500  # one input makes up 3 % of what is served, and it is always lost
    for _ in range(draws):
        often = int(random.binomial(1500, common))
        copies = np.array([often, *[1] * (1500 - often)])
        lost = np.arange(len(copies)) == 0
        rows = counted(lost, copies)
        passed += binom.cdf(lost[rows].sum(), len(rows), 0.03) <= 0.05
        assert binom.cdf(1, len(copies), 0.03) < 1e-9, "counted once, it would pass every time"
    assert passed / draws <= 0.05 + 2 * 0.0098


def test_copies_that_became_wrong_all_count_against_accuracy() -> None:
    base, label, answer = np.zeros(100, int), np.zeros(100, int), np.zeros(100, int)
    answer[0] = 1
    copies = np.array([5, *[3] * 99])
    drop = accuracy_drop(answer, base, label, 0.05, copies=copies)
    assert (drop.became_wrong, drop.n) == (5, 104)
    assert drop.upper_bound > accuracy_drop(answer, base, label, 0.05).upper_bound
