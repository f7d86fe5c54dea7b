"""`gati certify`: a composition counted anew, on inputs that nothing was chosen on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from gati.cli import render, run
from gati.composition.binomial import agreement_lower_bound, rate_upper_bound
from gati.composition.certificate import NewInputs
from gati.composition.composition import Composition
from gati.composition.ledger import Ledger
from gati.composition.load import Served, load, open_served
from gati.composition.walk import certify as walk
from gati.errors import CompositionError, DataError, LibraryError, ModelError, StorageError
from gati.evaluation.bench import bench
from gati.evaluation.certify import certify
from gati.evaluation.evaluate import evaluate
from gati.exploration.fresh import fresh_inputs, note_of_seen
from gati.exploration.library import InputRecord, Library
from gati.model.data import load_data
from tests.engine.served import PREPROCESSING, exit_at, images, rewrite

pytestmark = pytest.mark.slow


@pytest.fixture
def more(directory: Path, tmp_path: Path) -> tuple[Path, int]:
    """New images, labelled as the base model answers, and how many Gati answers otherwise."""
    pictures = images(150)
    answers, base = answered(directory, pictures)
    np.savez(tmp_path / "more.npz", images=pictures, labels=base)
    return tmp_path / "more.npz", int((answers != base).sum())


def answered(directory: Path, pictures: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The classes that Gati and the base model answer."""
    with load(directory) as engine:
        x = engine.preprocessing(pictures)
        return tuple(np.array([each.class_index for each in ask(x)]) for ask in (engine, engine.base))


def losses_of(directory: Path, data: Path) -> int:
    """How many inputs of a file Gati answers otherwise than the base model."""
    answers, base = answered(directory, np.load(data)["images"])
    return int((answers != base).sum())


def composition_of(directory: Path) -> Composition:
    return Composition.load(Library(directory).composition_path())


def test_it_counts_what_the_engine_answers(directory: Path, more: tuple[Path, int]) -> None:
    data, losses = more
    assert 0 < losses < 150
    found = certify(directory, data)
    assert (found.certificate.losses, found.certificate.inputs) == (losses, 150)
    assert found.agreement_lower_bound == agreement_lower_bound(losses, 150, found.certificate.level)
    assert found.certificate.level == pytest.approx(0.75 * 0.05)
    assert found.certificate.deployed is None  # nobody trained these caches
    assert f"{losses} of 150 inputs were answered differently" in found.certificate.sentence()
    assert found.accuracy_drop is not None
    assert (found.accuracy_drop.became_wrong, found.accuracy_drop.became_right) == (losses, 0)
    assert found.accuracy_drop.upper_bound == rate_upper_bound(losses, 150, 0.75 * 0.05)
    assert found.hit_rate == 1.0
    json.dumps(found.to_json(), allow_nan=False)


def test_the_reference_is_the_network_of_the_user_not_the_engines(
    directory: Path, more: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In reduced precision they differ, and what the engine answers without any hit may be wrong."""

    class Otherwise(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.module(x)
            return scores.roll(1, 1)

    def opened(*arguments: Any, **options: Any) -> Served:
        served = open_served(*arguments, **options)
        return replace(served, model=replace(served.model, module=Otherwise(served.module)))

    rewrite(directory, exits=(exit_at(0, 1e30),))  # all inputs run to the end
    monkeypatch.setattr(sys.modules[certify.__module__], "open_served", opened)
    found = certify(directory, more[0])
    assert (found.certificate.losses, found.certificate.inputs, found.hit_rate) == (150, 150, 0.0)


def test_what_the_data_certifies_is_certified(directory: Path, more: tuple[Path, int]) -> None:
    bound = certify(directory, more[0], confidence=0.9).agreement_lower_bound
    assert certify(directory, more[0], accuracy=bound - 1e-6, confidence=0.9).certificate.deployed == 0
    assert certify(directory, more[0], accuracy=bound + 1e-6, confidence=0.9).certificate.deployed is None


def test_what_is_not_certified_is_not_rounded_to_the_target() -> None:
    sentence = walk([(1, 472)], 0.99, 0.05).sentence()
    assert sentence.startswith("Agreement of 99 % is not certified")
    assert sentence.endswith("certifies 98.99 %.")


def test_only_write_changes_the_composition_and_keeps_the_old_certificate(
    directory: Path, more: tuple[Path, int]
) -> None:
    oldest, old = (walk([(losses, 1000)], 0.97, 0.05) for losses in (1, 3))
    rewrite(directory, certificate=replace(old, previous=oldest))
    before = composition_of(directory)
    certify(directory, more[0])
    assert composition_of(directory) == before
    certify(directory, more[0], accuracy=0.01, write=True)
    after = composition_of(directory)
    assert [replace(each, cache_sha256=None) for each in after.exits] == list(before.exits)
    assert after.accuracy_target == 0.01
    assert after.note == ""
    assert after.certificate is not None
    assert after.certificate.certified
    assert after.certificate.previous == old
    certify(directory, more[0], accuracy=0.97, write=True)
    assert "is not certified" in composition_of(directory).note


def test_write_binds_an_old_composition_to_the_caches_that_were_counted(
    directory: Path, more: tuple[Path, int]
) -> None:
    """Compositions of older versions lack the digests of their caches, so any caches would be loaded."""
    library = Library(directory)
    assert {each.cache_sha256 for each in composition_of(directory).exits} == {None}
    certify(directory, more[0], write=True)
    exits = composition_of(directory).exits
    assert [each.cache_sha256 for each in exits] == [library.cache_sha256(each.trial_id) for each in exits]
    certify(directory, more[0], write=True)  # the same caches: loaded and counted as before
    first, second = (library.cache_path(each.trial_id) for each in exits)
    first.write_bytes(second.read_bytes())
    with pytest.raises(CompositionError, match="is not the cache that this composition was made with"):
        certify(directory, more[0], write=True)


def test_a_library_that_was_explored_anew_meanwhile_gets_no_certificate(
    directory: Path, more: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was counted is about the caches that were there before."""
    module, before = sys.modules[certify.__module__], composition_of(directory)
    answers = vars(module)["_answers"]

    def explored_anew(*arguments: Any) -> Any:
        library = Library(directory)
        library.write_manifest(replace(library.manifest, seed=1))
        return answers(*arguments)

    monkeypatch.setattr(module, "_answers", explored_anew)
    with pytest.raises(LibraryError, match="explore has begun to replace .* run this command again once"):
        certify(directory, more[0], accuracy=0.01, write=True)
    assert composition_of(directory) == before


def test_a_composition_that_was_replaced_meanwhile_stays_as_it_is(
    directory: Path, more: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was counted is about the exits that were there before."""
    module = sys.modules[certify.__module__]
    answers = vars(module)["_answers"]

    def composed_anew(*arguments: Any) -> Any:
        rewrite(directory, exits=(exit_at(0, 0.5),))
        return answers(*arguments)

    monkeypatch.setattr(module, "_answers", composed_anew)
    with pytest.raises(CompositionError, match="has replaced composition 'default' meanwhile: run this"):
        certify(directory, more[0], accuracy=0.01, write=True)
    assert composition_of(directory).exits == (exit_at(0, 0.5),)
    (attempt,) = Ledger(directory).attempts
    (result,) = attempt.results
    assert not result.written and result.certificate["certified"]


def test_the_certificate_of_a_copied_file_is_written_into_the_copy(
    directory: Path, more: tuple[Path, int]
) -> None:
    path = Library(directory).composition_path()
    copy = path.with_name("copy.json")
    copy.write_bytes(path.read_bytes())
    rewrite(directory, exits=(exit_at(0, 0.5),))
    before = path.read_bytes()
    certify(directory, more[0], composition="copy", accuracy=0.01, write=True)
    assert path.read_bytes() == before
    written = Composition.load(copy)
    assert written.name == "copy" and written.certificate is not None


def test_data_on_which_compositions_were_compared_covers_only_those_chosen_before(
    directory: Path, more: tuple[Path, int]
) -> None:
    """The best of those that `evaluate` compared on some data has been chosen by it."""
    library, chosen = Library(directory), composition_of(directory)
    looser = tuple(replace(each, threshold=each.threshold / 2) for each in chosen.exits)
    replace(chosen, name="loose", exits=looser).save(library.composition_path("loose"))
    evaluate(directory, more[0])
    assert certify(directory, more[0]).attempt.compositions == 1
    for name in ("default", "loose"):
        evaluate(directory, more[0], composition=name)
    found = certify(directory, more[0], composition="loose")
    assert found.attempt.compositions == 2
    assert "This data has been used for 2 compositions: the confidence covers those that" in found.sentence()


def test_an_evaluation_that_cannot_be_entered_is_still_shown(
    directory: Path, more: tuple[Path, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise StorageError("disk full")

    monkeypatch.setattr(Ledger, "look", full)
    assert evaluate(directory, more[0]).n == 150
    assert "certificates will not say that this data was looked at: disk full" in caplog.text


@pytest.mark.parametrize(
    ("losses_before", "comparison"),
    [(0, "significantly more"), (1000, "significantly less"), (None, "no certificate")],
)
def test_it_says_how_the_counts_compare(
    directory: Path, more: tuple[Path, int], losses_before: int | None, comparison: str
) -> None:
    if losses_before is not None:
        rewrite(directory, certificate=walk([(losses_before, 1000)], 0.97, 0.05))
    assert comparison in certify(directory, more[0]).comparison


def test_counts_of_inputs_that_were_all_used_before_are_not_compared(
    directory: Path, more: tuple[Path, int]
) -> None:
    """Then the certificate counts those answered differently, and no others."""
    counted = replace(walk([(5, 5)], 0.97, 0.05), new_inputs=NewInputs(0, 0))
    rewrite(directory, certificate=counted)
    comparison = certify(directory, more[0]).comparison
    assert comparison == "The earlier certificate counts no new inputs, so there is nothing to compare with."


def test_the_same_rate_is_no_surprise(directory: Path, more: tuple[Path, int]) -> None:
    rewrite(directory, certificate=walk([(more[1], 150)], 0.97, 0.05))
    assert "the difference is within chance" in certify(directory, more[0]).comparison


def test_every_class_is_certified_or_the_worst_is_named(directory: Path, more: tuple[Path, int]) -> None:
    found = certify(directory, more[0], per_class=True)
    assert len(found.certificate.by_class) == 4
    assert sum(each.inputs for each in found.certificate.by_class) == 150
    assert "in every class" in found.certificate.sentence()
    assert any(name in found.certificate.sentence() for name in ("'north'", "'east'", "'south'", "'west'"))


def test_bad_requests_are_refused_in_one_line(directory: Path, more: tuple[Path, int]) -> None:
    library = Library(directory)
    with load(directory) as engine:
        data = load_data(more[0], engine.preprocessing)
    order = np.random.default_rng((library.manifest.seed, 0)).permutation(len(data))
    # A library of before inputs had identities; explore measured on two thirds of VAL, or on all of it.
    for cut in (0, len(data) // 3):
        measured_on = data.subset(np.sort(order[cut:]))
        used = {"held_out": f"{data.name} {measured_on.fingerprint}", "train": "other abc"}
        library.write_manifest(replace(library.manifest, data=used))
        with pytest.raises(DataError, match="this composition was made from more.npz"):
            certify(directory, more[0])
    rewrite(directory, exits=())
    with pytest.raises(CompositionError, match="'default' has no caches, so there is nothing to certify"):
        certify(directory, more[0])


def remember(directory: Path, seen: Path) -> None:
    """As explore would leave it after training on these inputs, or choosing on them."""
    identities = load_data(seen, PREPROCESSING).identities
    nothing = np.zeros(0, dtype=np.int64)
    new = np.zeros(0, dtype=np.bool_)
    record = InputRecord(
        nothing, np.zeros(0, np.uint64), nothing, np.unique(identities), new, np.array([True])
    )
    Library(directory).write_input_record(record)


@pytest.mark.parametrize(
    "disguise",
    [
        lambda images, labels: {"images": images[::-1], "labels": labels[::-1]},
        lambda images, labels: {"images": images},
        lambda images, labels: {"images": images[20:90], "labels": labels[20:90]},
        lambda images, labels: {"images": images, "labels": (labels + 1) % 4},
        lambda images, labels: {"images": np.concatenate([images, images[:60]])},
    ],
    ids=["reordered", "without labels", "a part", "other labels", "some twice"],
)
def test_what_explore_has_seen_certifies_nothing_in_any_disguise(
    directory: Path, more: tuple[Path, int], tmp_path: Path, disguise: Any
) -> None:
    remember(directory, more[0])
    with np.load(more[0]) as arrays:
        np.savez(tmp_path / "again.npz", **disguise(arrays["images"], arrays["labels"]))
    with pytest.raises(DataError, match="this composition was made from again.npz"):
        certify(directory, tmp_path / "again.npz")


def test_every_class_is_another_test_of_the_same_inputs(directory: Path, more: tuple[Path, int]) -> None:
    found = [certify(directory, more[0], per_class=each).attempt.number for each in (False, True, False)]
    assert found == [1, 2, 1]


def test_pictures_that_explore_has_seen_are_not_new_as_preprocessed_tensors(
    directory: Path, more: tuple[Path, int]
) -> None:
    remember(directory, more[0])
    library, tensors = Library(directory), TensorDataset(PREPROCESSING(images(150)))
    unlike = "gati explore has seen pictures, and TensorDataset holds preprocessed tensors, which cannot be"
    with pytest.raises(DataError, match=f"{unlike}.*give pictures: a folder, an .npz with `images`, or a"):
        certify(directory, tensors)
    assert Ledger(directory).attempts == ()
    assert note_of_seen(library, load_data(tensors, PREPROCESSING)).startswith(unlike)
    record = library.input_record()
    assert record is not None
    library.write_input_record(record._replace(pictures=np.array([False])))
    with pytest.raises(
        DataError, match="seen preprocessed tensors, and more.npz holds pictures, which cannot"
    ):
        certify(directory, more[0])
    library.write_input_record(record._replace(pictures=np.array([False, True])))
    assert certify(directory, tensors).note == (
        "gati explore has seen both pictures and preprocessed tensors: these may not be new"
    )
    library.write_input_record(record._replace(pictures=np.array([], dtype=np.bool_)))
    assert certify(directory, tensors).note.startswith("explored by an older Gati, which did not record")


def test_inputs_that_explore_has_seen_count_only_against_the_caches_and_it_says_so(
    directory: Path, more: tuple[Path, int], tmp_path: Path
) -> None:
    """Where few inputs are common, explore has seen them all: left out, they would never count."""
    new = images(230)[150:]
    np.savez(tmp_path / "new.npz", images=new)
    np.savez(tmp_path / "both.npz", images=np.concatenate([images(150), new]))
    remember(directory, more[0])
    alone, both = (certify(directory, tmp_path / f"{name}.npz") for name in ("new", "both"))
    assert alone.note == ""
    assert both.note.startswith("gati explore has already seen 150 of 230 inputs: they count only if their")
    assert both.hit_rate == alone.hit_rate
    assert (alone.attempt.number, both.attempt.number) == (1, 2), "what it has seen may count, too"
    fresh = fresh_inputs(Library(directory), load_data(tmp_path / "both.npz", PREPROCESSING))
    known = load_data(tmp_path / "new.npz", PREPROCESSING).identities
    assert sorted(fresh.identities.tolist()) == sorted(known.tolist()), "of which later attempts count none"
    lost = more[1]  # of those that it has seen
    assert alone.certificate.inputs == 80 and lost > 0
    assert both.certificate.inputs == 80 + lost
    assert both.certificate.losses == alone.certificate.losses + lost


def test_inputs_that_explore_has_seen_do_not_make_new_ones_look_harder(
    directory: Path, more: tuple[Path, int], tmp_path: Path
) -> None:
    """They are counted if they are lost only, which is no share of anything."""
    alone, both = images(230)[150:], images(230)
    np.savez(tmp_path / "new.npz", images=alone)
    np.savez(tmp_path / "both.npz", images=both)
    lost = losses_of(directory, tmp_path / "new.npz")
    rewrite(directory, certificate=walk([(10 * lost, 800)], 0.97, 0.05))
    remember(directory, more[0])
    found = certify(directory, tmp_path / "both.npz", write=True)
    assert f"now ({lost} of 80): the difference is within chance" in found.comparison
    assert "counted only where answers differ" in found.sentence()
    again = certify(directory, tmp_path / "both.npz")
    assert f"in the earlier certificate ({lost} of 80)" in again.comparison


def test_a_library_without_a_record_is_used_and_says_what_is_unknown(
    directory: Path, more: tuple[Path, int]
) -> None:
    found = certify(directory, more[0])
    assert found.note.startswith("explored by an older Gati") and found.note.endswith("may not be new")
    assert found.to_json()["note"] == found.note


@pytest.mark.parametrize("per_class", [False, True])
def test_a_copy_counts_only_where_it_is_answered_differently(
    directory: Path, more: tuple[Path, int], tmp_path: Path, per_class: bool
) -> None:
    data, losses = more
    with np.load(data) as arrays:
        four = {name: np.tile(array, (4, *[1] * (array.ndim - 1))) for name, array in arrays.items()}
    np.savez(tmp_path / "four.npz", **four)
    once = certify(directory, data, per_class=per_class)
    Ledger(directory).path.unlink()  # else these inputs are known
    copied = certify(directory, tmp_path / "four.npz", per_class=per_class)
    assert (once.certificate.losses, once.certificate.inputs) == (losses, 150)
    assert (copied.certificate.losses, copied.certificate.inputs) == (4 * losses, 150 + 3 * losses)
    assert copied.agreement_lower_bound <= once.agreement_lower_bound
    assert per_class or copied.agreement_lower_bound < once.agreement_lower_bound
    assert copied.hit_rate == once.hit_rate
    assert "450 inputs are copies of others" in copied.note
    assert copied.accuracy_drop is not None and copied.accuracy_drop.became_wrong == 4 * losses


@pytest.mark.parametrize("verb", [certify, evaluate, bench])
def test_a_network_that_returns_nan_agrees_with_nothing(
    directory: Path, more: tuple[Path, int], monkeypatch: pytest.MonkeyPatch, verb: Callable[..., object]
) -> None:
    """The class of such outputs is that of the first NaN, and Gati's is the same."""

    def damaged(*arguments: Any, **options: Any) -> Served:
        served = open_served(*arguments, **options)
        with torch.no_grad():
            list(served.module.parameters())[-1].fill_(float("nan"))
        return served

    rewrite(directory, exits=(exit_at(0, 1e30),))  # all inputs run to the end
    monkeypatch.setattr(sys.modules[verb.__module__], "open_served", damaged)
    with pytest.raises(ModelError, match=r"the network returns NaN or infinity for \d+ of \d+ inputs"):
        verb(directory, more[0])


def test_an_exit_that_never_hits_certifies_whatever_the_number_of_inputs_can(
    directory: Path, more: tuple[Path, int]
) -> None:
    rewrite(directory, exits=(exit_at(0, 1e30),))
    found = certify(directory, more[0])
    assert (found.certificate.losses, found.hit_rate) == (0, 0.0)
    assert found.certificate.deployed == 0  # 150 inputs without loss: 98.02 %


# One delta for all attempts -------------------------------------------------------------------------------


def pictures(tmp_path: Path, seed: int, count: int = 60) -> Path:
    shape = (count, 6, 6, 1)
    path = tmp_path / f"seed{seed}.npz"
    np.savez(path, images=np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))
    return path


def test_attempts_share_delta_and_are_all_kept(directory: Path, tmp_path: Path) -> None:
    found = [
        certify(directory, pictures(tmp_path, seed), accuracy=0.01, write=seed == 1) for seed in range(3)
    ]
    assert [each.attempt.number for each in found] == [1, 2, 3]
    levels = [each.certificate.level for each in found]
    assert levels == pytest.approx([0.05 * share for share in (3 / 4, 1 / 8, 1 / 24)])
    assert "3rd attempt in this library, which errs with probability at most 0.21 %" in found[2].sentence()
    assert "attempt" not in found[0].sentence()
    kept = Ledger(directory).attempts
    assert [entry.results[0].written for entry in kept] == [False, True, False]
    assert [entry.results[0].certificate["losses"] for entry in kept] == [
        each.certificate.losses for each in found
    ]


def test_the_same_data_is_the_same_attempt_whatever_accuracy_is_asked_of_it(
    directory: Path, tmp_path: Path
) -> None:
    data = pictures(tmp_path, 0)
    first = certify(directory, data)
    again = certify(directory, data, accuracy=0.01, write=True)
    assert (first.attempt, first.certificate.level) == (again.attempt, again.certificate.level)
    assert first.agreement_lower_bound == again.agreement_lower_bound
    assert certify(directory, data, confidence=0.9).attempt.number == 2
    assert certify(directory, data, per_class=True).attempt.number == 3
    assert certify(directory, data, accuracy=0.5).attempt.number == 1
    np.savez(tmp_path / "reordered.npz", images=np.load(data)["images"][::-1])
    assert certify(directory, tmp_path / "reordered.npz").attempt == first.attempt


def test_data_that_another_composition_was_certified_on_is_told(directory: Path, tmp_path: Path) -> None:
    data = pictures(tmp_path, 0)
    certify(directory, data)
    rewrite(directory, exits=(exit_at(0, 1e30),))
    found = certify(directory, data)
    assert (found.attempt.number, found.attempt.compositions) == (2, 2)
    assert "This data has been used for 2 compositions" in found.sentence()


def test_other_caches_of_the_same_names_are_another_composition(directory: Path, tmp_path: Path) -> None:
    """As compositions of older versions load them, which lack the digests of their caches."""
    data = pictures(tmp_path, 0)
    certify(directory, data)
    library = Library(directory)
    first, second = (library.cache_path(each.trial_id) for each in composition_of(directory).exits)
    first.write_bytes(second.read_bytes())
    found = certify(directory, data)
    assert (found.attempt.number, found.attempt.compositions) == (2, 2)


def test_inputs_of_earlier_attempts_count_only_against_the_caches_and_it_says_so(
    directory: Path, tmp_path: Path
) -> None:
    remember(directory, pictures(tmp_path, 9))
    rewrite(directory, exits=(exit_at(0, 0.32),))  # about half of them leave early
    first = certify(directory, pictures(tmp_path, 0))
    assert first.note == ""
    kinds = [np.load(pictures(tmp_path, seed))["images"] for seed in (0, 1)]
    np.savez(tmp_path / "more.npz", images=np.concatenate([kinds[0][:50], kinds[1]]))
    np.savez(tmp_path / "part.npz", images=kinds[0][10:])
    found = certify(directory, tmp_path / "more.npz")
    np.savez(tmp_path / "new.npz", images=kinds[1])
    np.savez(tmp_path / "old.npz", images=kinds[0][:50])
    lost = losses_of(directory, tmp_path / "old.npz")
    assert (found.attempt.number, found.certificate.inputs) == (2, 60 + lost) and 0 < lost < 50
    assert found.certificate.losses == losses_of(directory, tmp_path / "new.npz") + lost
    assert found.note.startswith("earlier attempts have counted 50 of 110 inputs as part of other data: they")
    assert certify(directory, tmp_path / "more.npz").certificate == found.certificate
    with pytest.raises(DataError, match="earlier attempts have counted all of these inputs"):
        certify(directory, tmp_path / "part.npz")
    assert len(Ledger(directory).attempts) == 2


def test_every_class_stays_promised(directory: Path, tmp_path: Path) -> None:
    rewrite(directory, per_class=True, confidence=0.95, exits=(exit_at(0, 1e30),))
    data = pictures(tmp_path, 0, 400)
    assert len(certify(directory, data).certificate.by_class) == 4
    with pytest.raises(CompositionError, match="in every class, which an overall certificate would drop"):
        certify(directory, data, per_class=False, write=True)
    certify(directory, data, accuracy=0.5, write=True)
    written = composition_of(directory)
    assert written.per_class and written.certificate is not None
    assert len(written.certificate.by_class) == 4
    rewrite(directory, per_class=False)
    certify(directory, data, per_class=True, accuracy=0.5, write=True)
    assert composition_of(directory).per_class, "no later certificate may drop it"


def test_a_composition_that_fails_serves_on_and_says_that_nothing_is_proven(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = certify(directory, pictures(tmp_path, 0), write=True)
    written = composition_of(directory)
    assert written.exits and not written.certified
    assert written.note == written.warning
    assert written.note.startswith("NOT CERTIFIED: nothing proves that at least 97 % of answers")
    render.recertification(found, "default", written=True)
    assert "NOT CERTIFIED: composition 'default' stays, marked as not certified" in capsys.readouterr().out
    assert run(["evaluate", str(directory), "--data", str(pictures(tmp_path, 1))]) == 0
    assert "note: NOT CERTIFIED: nothing proves" in capsys.readouterr().out
