"""Who trains, chooses and is counted where some inputs are copies, and what that does to the certificate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from scipy.stats import binom
from torch.utils.data import TensorDataset

from gati.composition.accuracy import accuracy_drop
from gati.composition.copies import counted
from gati.errors import DataError
from gati.exploration.library import CERTIFY, SELECT, Library
from gati.exploration.splits import Inputs, inputs_to_select_on, part_to_train_on, split_inputs
from gati.model.data import Data, load_data
from gati.model.identity import CopyCounts
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
def test_copies_are_in_one_part_but_where_one_certifies(tmp_path: Path, seed: int) -> None:
    repeats = np.random.default_rng(seed).integers(1, 9, 300)
    images = np.random.default_rng(seed).permutation(np.repeat(pictures(300), repeats, axis=0))
    held = data_of(tmp_path, images)
    inputs = split_inputs(held, None, seed)
    parts = parts_of(inputs, held)
    assert not parts["train"] & parts["select"]
    assert len(set.union(*parts.values())) == 300
    certify, record = inputs.split == CERTIFY, inputs.record
    assert certify.sum() == len(parts["certify"]), "each certify input is there once"
    assert len(inputs.train) + (~certify).sum() + record.copies[certify].sum() == len(held)
    used = parts["train"] | parts["select"]
    assert record.new[certify].tolist() == [each not in used for each in record.identities[certify].tolist()]
    assert f"{len(held) - 300} of {len(held)} inputs of --data are copies" in inputs.notes[0]


@pytest.mark.parametrize("third", [False, True])
def test_common_inputs_are_as_common_in_what_certifies(tmp_path: Path, third: bool) -> None:
    """Where all copies of an input are in one part, this is hardly ever the one that certifies."""
    held = data_of(tmp_path, np.concatenate([np.repeat(pictures(1), 40, axis=0), pictures(960, 1)]))
    more = None if third else data_of(tmp_path, pictures(100, 2), "more")
    counts = []
    for seed in range(30):
        inputs = split_inputs(held, more, seed)
        certify = inputs.split == CERTIFY
        common = certify & (inputs.record.identities == held.identities[0])
        counts.append(inputs.record.copies[common].sum())
        share = inputs.record.copies[certify].sum() / len(held)
    assert abs(np.mean(counts) - 40 * share) < 4 * np.sqrt(40 * share * (1 - share) / 30)


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


def test_as_few_as_are_said_to_be_enough_are(tmp_path: Path) -> None:
    more = data_of(tmp_path, pictures(8, 1), "more")
    assert len(split_inputs(data_of(tmp_path, pictures(60)), more, 0).held_out) == 60
    with pytest.raises(DataError, match="has 59 inputs; only 59 are left .* give enough for at least 60"):
        split_inputs(data_of(tmp_path, pictures(59)), more, 0)


def test_a_split_is_told_from_every_other_one(tmp_path: Path) -> None:
    """A run that resumes with another one would certify on what it was trained or selected on."""
    more, others = (data_of(tmp_path, pictures(50, seed), f"more{seed}") for seed in (1, 2))
    held = data_of(tmp_path, np.concatenate([pictures(200), pictures(40)]))
    inputs = split_inputs(held, more, 0)
    changed = (
        replace(inputs, split=1 - inputs.split),
        replace(inputs, train=others),
        replace(inputs, record=inputs.record._replace(new=np.ones_like(inputs.record.new))),
        replace(inputs, record=inputs.record._replace(rows=inputs.record.rows + 1)),
    )
    hashes = [each.split_hash() for each in (inputs, split_inputs(held, more, 0), *changed)]
    assert hashes[0] == hashes[1] and len(set(hashes)) == 1 + len(changed)


def test_what_is_in_both_is_not_trained_on(tmp_path: Path) -> None:
    held = data_of(tmp_path, pictures(200))
    more = data_of(tmp_path, np.concatenate([pictures(80)[::-1], pictures(120, 1)]), "more")
    inputs = split_inputs(held, more, 0)
    assert inputs.notes == ("left out 80 of 200 inputs of --train-data: they are also in --data",)
    assert len(inputs.train) == 120 and not np.isin(inputs.train.identities, held.identities).any()
    assert len(inputs.record.seen) == 320


def test_pictures_are_not_compared_with_preprocessed_tensors(tmp_path: Path) -> None:
    held = data_of(tmp_path, pictures(200))
    tensors = load_data(TensorDataset(GREY(pictures(120, 1))), GREY)
    mixed, alone = split_inputs(held, tensors, 0), split_inputs(held, None, 0)
    assert mixed.notes[0].startswith("one of --data and --train-data holds pictures and the other preprocess")
    assert (mixed.record.pictures.tolist(), alone.record.pictures.tolist()) == ([False, True], [True])
    Library(tmp_path).write_input_record(alone.record)
    kept = Library(tmp_path).input_record()
    assert kept is not None and kept.pictures.tolist() == [True]
    older = load_file(tmp_path / "inputs.safetensors")
    del older["pictures"]  # as an older Gati left it
    save_file(older, tmp_path / "inputs.safetensors")
    kept = Library(tmp_path).input_record()
    assert kept is not None and len(kept.pictures) == 0 and np.array_equal(kept.seen, alone.record.seen)


@pytest.mark.parametrize("rows", [slice(None, None, -1), slice(0, 40)], ids=["reordered", "a part"])
def test_training_data_with_nothing_of_its_own_is_refused(tmp_path: Path, rows: slice) -> None:
    held = data_of(tmp_path, pictures(200))
    message = "^(--train-data and --data are the same 200|all 40 inputs of --train-data are also in --data)"
    with pytest.raises(DataError, match=message):
        split_inputs(held, data_of(tmp_path, pictures(200)[rows], "more"), 0)


def oversampled(seed: int) -> np.ndarray:
    """Easy inputs (dark), and as many hard ones (light), each of them ten times."""
    random = np.random.default_rng(seed)
    easy, hard = (random.integers(low, low + 128, (600, 3, 3, 1), dtype=np.uint8) for low in (0, 128))
    return np.concatenate([easy, np.repeat(hard, 10, axis=0)])


@pytest.mark.parametrize("third", [False, True])
def test_data_that_was_oversampled_is_warned_of_and_certifies_nothing_false_once_it_is_unique(
    tmp_path: Path, third: bool
) -> None:
    """Caches know what trained or selected them, and err on 40 % of hard inputs: 0.8 agree, not 0.9."""
    more = None if third else data_of(tmp_path, pictures(60, 1), "more")
    passed = {False: 0, True: 0}
    for draw in range(20):
        images = oversampled(draw)
        held = data_of(tmp_path, images)
        for unique in passed:
            inputs = split_inputs(held, more, draw, unique=unique)
            warned = [note for note in inputs.notes if "explore with --unique" in note]
            assert len(warned) == (not unique)
            certify, record = inputs.split == CERTIFY, inputs.record
            hard = images[record.rows[certify]].min(axis=(1, 2, 3)) >= 128
            new = record.new[certify]
            lost = hard & new & (np.random.default_rng(draw).random(len(hard)) < 0.4)
            rows = counted(lost, record.copies[certify], new.astype(np.int64))
            passed[unique] += binom.cdf(lost[rows].sum(), len(rows), 0.1) <= 0.05
    assert passed[False] > 4, "why it is warned of"
    assert passed[True] == 0


@pytest.mark.parametrize("third", [False, True])
def test_unique_keeps_each_input_once_as_if_the_copies_had_never_been(tmp_path: Path, third: bool) -> None:
    random = np.random.default_rng(0)
    images = np.repeat(pictures(200), random.integers(1, 9, 200), axis=0)[::-1]
    _, first = np.unique(images.reshape(len(images), -1), axis=0, return_index=True)
    once = images[np.sort(first)]
    more = None if third else data_of(tmp_path, pictures(50, 1), "more")
    held, held_once = data_of(tmp_path, images), data_of(tmp_path, once, "once")
    inputs, alone = split_inputs(held, more, 3, unique=True), split_inputs(held_once, more, 3)
    assert parts_of(inputs, held) == parts_of(alone, held_once)
    assert np.array_equal(held.identities[inputs.record.rows], alone.record.identities)
    assert set(inputs.record.copies.tolist()) == {1} and inputs.record.new.all()
    assert inputs.notes == (f"{len(images) - 200} of {len(images)} inputs of --data are copies of others: "
                            "each input is kept once",)  # fmt: skip


@pytest.mark.parametrize("unique", [False, True])
def test_what_trains_is_found_again_by_the_seed(tmp_path: Path, unique: bool) -> None:
    held = data_of(tmp_path, np.concatenate([pictures(300), pictures(80)]))
    inputs = split_inputs(held, None, 5, unique=unique)
    assert part_to_train_on(held, 5, unique=unique).fingerprint == inputs.train.fingerprint


def test_it_says_how_much_evidence_copies_leave(tmp_path: Path) -> None:
    few = split_inputs(data_of(tmp_path, np.concatenate([pictures(900), pictures(20)])), None, 0)
    assert f"920 inputs of --data are copies of others: {few.evidence} inputs are evidence" in few.notes[0]
    assert len(few.notes) == 1, "few copies do no harm"
    many = split_inputs(data_of(tmp_path, np.repeat(pictures(1000), 2, axis=0)), None, 0)
    assert many.evidence < 300 and "explore with --unique" in many.notes[1]


def test_inputs_that_all_have_copies_that_train_or_select_are_refused(tmp_path: Path) -> None:
    held = data_of(tmp_path, np.repeat(pictures(100), 40, axis=0))
    with pytest.raises(DataError, match=r"every input of val.npz to certify on has a copy .* \(--unique\)$"):
        split_inputs(held, None, 0)
    assert split_inputs(held, None, 0, unique=True).evidence == 34


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
        each = record.copies[certify]
        rows = (
            counted(lost, each, record.new[certify] + 0) if count else np.repeat(np.arange(len(lost)), each)
        )
        passed += binom.cdf(lost[rows].sum(), len(rows), alpha) <= 0.05
    return passed / draws


@pytest.mark.parametrize("copies", [1, 4])
def test_copies_do_not_certify_what_is_false(tmp_path: Path, copies: int) -> None:
    """Each of the inputs several times: at most 5 % of draws plus two standard errors."""
    assert false_certificates(tmp_path, copies, accuracy=0.97, count=True) <= 0.05 + 2 * 0.0049


def test_counting_every_copy_would(tmp_path: Path) -> None:
    assert false_certificates(tmp_path, 4, accuracy=0.97, count=False) > 0.15


@pytest.mark.parametrize("common", [1, 6, 30])
def test_common_inputs_that_are_answered_differently_are_not_certified(tmp_path: Path, common: int) -> None:
    """Independent draws of which more than 3 % are of a few inputs, always lost: copies are evidence."""
    random = np.random.default_rng(0)
    different = data_of(tmp_path, np.concatenate([pictures(common, 5), pictures(3000, 6)]))
    assert len(different.identities) == common + 3000  # read once
    more = data_of(tmp_path, pictures(60, 1), "more")
    passed, draws = 0, 300
    for draw in range(draws):
        is_common = random.random(1500) < 0.032
        which = np.where(is_common, random.integers(common, size=1500), common + np.arange(1500))
        inputs = split_inputs(different.subset(which), more if draw % 2 else None, draw)
        certify, record = inputs.split == CERTIFY, inputs.record
        lost = is_common[record.rows[certify]]
        rows = counted(lost, record.copies[certify], record.new[certify].astype(np.int64))
        passed += binom.cdf(lost[rows].sum(), len(rows), 0.03) <= 0.05
    assert passed / draws <= 0.05 + 2 * 0.0126


def test_copies_that_became_wrong_all_count_against_accuracy() -> None:
    base, label, answer = np.zeros(100, int), np.zeros(100, int), np.zeros(100, int)
    answer[0] = 1
    copies = CopyCounts(np.array([5, *[3] * 99]), np.ones(100, dtype=np.int64))
    drop = accuracy_drop(answer, base, label, 0.05, copies=copies)
    assert (drop.became_wrong, drop.n) == (5, 104)
    assert drop.upper_bound > accuracy_drop(answer, base, label, 0.05).upper_bound
