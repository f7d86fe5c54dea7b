"""Recall: similarity, trust in memory, and its promise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from gati.adaptation.memory import FEATURES, FURTHER, NEAREST, LastShown, Memory, evidence_of, sketch
from gati.adaptation.recall import Recall
from gati.adaptation.recall_checked import CheckedDistances
from gati.adaptation.recall_ladder import Intent, RecallLadder
from gati.adaptation.recall_records import Looked
from gati.adaptation.recall_settings import MOST, RecallSetting, Risk
from gati.engine.exits import BASE, Prediction
from gati.guard.auditor import RECALL
from gati.guard.ladder import Judgement
from gati.guard.proof import Spending

pytestmark = pytest.mark.slow

AGREEMENT = 0.95
CLASSES = 4
NOTHING = Looked("", np.empty(0, dtype=np.float32), None, confident=False, known=False, intents=())


def answer(class_index: int, sure: float = 0.9) -> Prediction:
    probabilities = torch.full((CLASSES,), (1.0 - sure) / (CLASSES - 1))
    probabilities[class_index] = sure
    return Prediction(class_index, probabilities, BASE, "v1")


# Memory -------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.integers(NEAREST, 300), st.integers(0, 2**32 - 1))
def test_the_most_similar_of_what_is_remembered_answers(count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    rows = random.normal(size=(count, 12)).astype(np.float32)
    classes = random.integers(CLASSES, size=count)
    memory = Memory(12)
    for row, class_index in zip(rows, classes.tolist(), strict=True):
        memory.add(row, answer(class_index))
    asked = random.normal(size=12).astype(np.float32)
    seen = memory.recall(asked)
    kept = slice(max(0, count - len(memory)), None)
    distance = np.sqrt(((rows[kept] - asked) ** 2).mean(axis=1))
    order = np.argsort(distance)[:NEAREST]
    assert seen is not None and seen.answer.class_index == classes[kept][order[0]]
    np.testing.assert_allclose(np.exp(seen.features[:NEAREST]) - 0.01, distance[order], atol=1e-3)
    alike = np.where(classes[kept][order] == classes[kept][order[0]], 1.0, -1.0)
    assert np.array_equal(np.sign(seen.features[NEAREST : 2 * NEAREST]), alike)
    assert len(seen.features) == FEATURES


def test_too_little_is_remembered_to_say_anything() -> None:
    memory = Memory(3)
    for number in range(NEAREST - 1):
        memory.add(np.full(3, number, dtype=np.float32), answer(0))
    assert memory.recall(np.zeros(3, dtype=np.float32)) is None


@pytest.mark.parametrize(
    "shape", [(1, 3, 32, 32), (1, 1, 5, 7), (1, 3, 224, 224), (1, 700), (1, 2, 9), (1, 3)]
)
def test_a_sketch_is_small_and_the_same_each_time(shape: tuple[int, ...]) -> None:
    x = torch.rand(shape)
    assert np.array_equal(sketch(x), sketch(x.clone()))
    assert sketch(x).ndim == 1 and len(sketch(x)) <= max(shape[1] * 64 if len(shape) == 4 else 192, 1)
    assert not np.array_equal(sketch(x), sketch(x + 1.0))


@pytest.mark.parametrize("count", [3, 128, 200])
def test_what_is_remembered_is_kept_oldest_first(count: int) -> None:
    memory = Memory(1)
    for number in range(count):
        memory.add(np.full(1, number, dtype=np.float32), answer(number % CLASSES), scene=number)
    sketches, answers, scenes = memory.contents()
    wanted = list(range(count))[-128:]
    assert sketches[:, 0].tolist() == wanted == scenes.tolist() and memory.newest_scene == count - 1
    assert [each.class_index for each in answers] == [number % CLASSES for number in wanted]


def test_an_input_with_gradients_is_sketched() -> None:
    x = torch.rand(1, 3, 16, 16)
    np.testing.assert_array_equal(sketch(x.clone().requires_grad_()), sketch(x))


def test_evidence_grows_with_the_lead_of_the_first_class() -> None:
    leads = [evidence_of(answer(1, sure)) for sure in (0.3, 0.5, 0.9, 0.999, 1.0)]
    assert leads == sorted(leads) and math.isfinite(leads[-1]) and leads[0] > 0.0


def test_a_place_shows_again_what_it_showed_just_before_and_only_that() -> None:
    last, one, other = LastShown(), *(np.full(3, each, dtype=np.float32) for each in (0.1, 0.2))
    shown = []
    for each in (one, one, one, other, one, one):
        shown.append(last.again("gate", each.copy()))
        last.again("road", other)
    assert shown == [False, True, True, False, False, True]


def test_of_more_places_than_are_kept_what_the_latest_ones_showed_is_known() -> None:
    last, one = LastShown(limit=2), np.zeros(3, dtype=np.float32)
    assert [last.again(each, one) for each in "abcab"] == [False] * 5
    assert [last.again(each, one) for each in "bab"] == [True] * 3


def test_copies_are_known_also_where_nothing_is_remembered_of_their_place() -> None:
    """Of 65 frozen cameras, or until something was learned, each copy was further evidence."""
    recall = Run(places=1).recall
    for count in range(3):
        for place in ("gate", "road"):
            looked = recall.look(torch.zeros(1, 3, 4, 4), place)
            assert looked is not None and looked.repeated == (count > 0)
            recall.learn(looked, answer(0), drawn=True)


# Risk ---------------------------------------------------------------------------------------------------


def test_the_regression_is_the_one_that_scikit_learn_fits() -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    random = np.random.default_rng(0)
    features = random.normal(size=(400, 6)) * [1, 2, 3, 1, 5, 0.1] + 3.0
    wrong = random.random(400) < 1.0 / (1.0 + np.exp(-(features[:, 0] - features[:, 4] / 5.0)))
    far = np.concatenate((features[:, :2].max(0) + np.log(2.0), features[:, 2:].min(0)))
    rows, labels = np.vstack((features, far, far)), np.append(wrong, [True, True])
    scaler = StandardScaler().fit(rows)
    oracle = LogisticRegression(C=1.0, tol=1e-8).fit(scaler.transform(rows), labels)
    expected = oracle.predict_proba(scaler.transform(features))[:, 1]
    np.testing.assert_allclose(Risk(features, wrong, 2)(features), expected, atol=2e-3)


@pytest.mark.parametrize("wrong", [False, True])
def test_labels_of_one_kind_are_no_trouble(wrong: bool) -> None:
    features = np.random.default_rng(1).normal(size=(80, FEATURES))
    risk = Risk(features, np.full(80, wrong), FURTHER)
    found = risk(features)
    assert np.isfinite(found).all() and (found.mean() > 0.5) == wrong
    far = features.max(0) + 3.0
    far[FURTHER:] = features[:, FURTHER:].min(0) - 3.0
    assert risk(far) >= found.max()  # nothing like it was ever seen


# Recall -------------------------------------------------------------------------------------------------


class Place:
    """Inputs that show one of a few things each, for some time, with noise; and what the base model says."""

    def __init__(self, seed: int, *, things: int = 6, noise: float = 0.02, stays: float = 0.98) -> None:
        self._random = np.random.default_rng(seed)
        self._things = self._random.random((things, 3, 8, 8)).astype(np.float32)
        self._noise, self._stays = noise, stays
        self._now = 0
        self.classes = np.arange(things) % CLASSES
        self.flips = 0.0  # how often the base model says anything

    def __iter__(self) -> Iterator[tuple[Tensor, Prediction]]:
        while True:
            if self._random.random() > self._stays:
                self._now = int(self._random.integers(len(self._things)))
            noise = self._random.normal(0.0, self._noise, self._things[0].shape).astype(np.float32)
            said = int(self.classes[self._now])
            if self._random.random() < self.flips:
                said = int(self._random.integers(CLASSES))
            yield torch.from_numpy(self._things[self._now] + noise)[None], answer(said)


class Run:
    """Requests through recall as an adaptation makes them, with a network that never answers early.

    `alone` False: as if caches were looked up.
    """

    def __init__(self, *, drawn: float = 0.25, seed: int = 0, alone: bool = True, places: int = 64) -> None:
        self.alone = alone
        self.changes: list[tuple[bool, int, int]] = []
        self.spending = Spending(0.05)
        self.recall = Recall(
            AGREEMENT,
            self.spending.next,
            10_000.0,
            leave=at_once,
            on_change=self._changed,
            places=places,
        )
        self._drawn, self._random = drawn, np.random.default_rng(seed)
        self.hit: list[bool] = []
        self.new: list[bool] = []
        self.agreed: list[bool] = []

    def _changed(self, judged: Judgement, level: int, alone: bool) -> None:
        if alone == self.alone:
            self.changes.append((judged.kind == "released", judged.audits, judged.losses))

    @property
    def ladder(self) -> RecallLadder:
        """The one that says what is answered here."""
        return self.recall._ladders[0 if self.alone else 1]

    def __call__(self, place: Place, requests: int, name: str = "gate") -> NDArray[np.bool_]:
        """Answer so many requests and return which were answered from memory."""
        for _, (x, base) in zip(range(requests), place, strict=False):
            looked = self.recall.look(x, name, alone=self.alone)
            assert looked is not None
            hit = looked.confident
            assert not hit or self.recall.serves
            agreed = not (hit and looked.wrong(base))
            drawn = bool(self._random.random() < self._drawn)
            if drawn or not hit:
                self.recall.learn(looked, base, drawn=drawn)
            self.hit.append(hit)
            self.new.append(looked.new_scene)
            self.agreed.append(agreed)
        return np.array(self.hit[-requests:])


def at_once(job: Callable[[], None]) -> bool:
    job()
    return True


def test_it_answers_what_it_has_seen_soon_and_nearly_always() -> None:
    run, place = Run(drawn=0.5), Place(1)
    run(place, 800)
    assert run.changes and run.changes[0][0] and run.changes[0][2] <= 1  # proven on what it did not answer
    assert run(place, 600).mean() > 0.8
    assert np.mean(run.agreed) >= AGREEMENT


@pytest.mark.parametrize("frozen", [True, False])
def test_the_copies_of_one_picture_prove_nothing(frozen: bool) -> None:
    """Memory that was right about one picture answered all that the camera showed once it went on."""
    place, run = Place(1, stays=1.0, noise=0.0 if frozen else 0.02), Run(drawn=1.0)
    run(place, 400)
    assert run.recall.serves != frozen
    proof = run.ladder.proof
    assert not frozen or (proof is not None and proof.audits <= 2)
    place._noise = 0.02
    run(place, 200)
    assert run.recall.serves


def test_of_what_is_pure_chance_it_answers_nothing() -> None:
    place = Place(2)
    place.flips = 1.0
    run = Run(drawn=1.0)
    assert run(place, 1500).mean() < 0.02


@pytest.mark.parametrize("flips", [0.02, 0.1, 0.3])
def test_the_promise_holds_however_restless_the_base_model_is(flips: float) -> None:
    """Over streams of 2,000 requests each; a share of what no cache can know is part of all of them."""
    agreements = []
    for seed in range(3):
        place, run = Place(seed, noise=0.05), Run(seed=seed)
        place.flips = flips
        run(place, 2000)
        agreements.append(np.mean(run.agreed))
    assert min(agreements) >= AGREEMENT and np.mean(agreements) >= (1.0 + AGREEMENT) / 2.0 - 0.01


def test_when_the_base_model_is_replaced_it_stops_or_learns_the_new_answers() -> None:
    place, run = Place(3, stays=0.9), Run()
    run(place, 1500)
    place.classes = (place.classes + 1) % CLASSES
    run(place, 200)
    run(place, 3500)
    wrong = np.flatnonzero(~np.array(run.agreed))
    assert (wrong > 1500).any()  # it had no way to know at once
    assert np.mean(run.agreed[1800:]) >= AGREEMENT
    assert np.mean(run.hit[-1000:]) > 0.5  # and goes on


def test_a_broken_promise_stops_the_setting_until_it_is_proven_again() -> None:
    """Losses everywhere at once, before memory can learn that it is wrong."""
    place, run = Place(4, stays=0.9), Run(drawn=1.0)
    gates = [f"gate {number}" for number in range(10)]
    for gate in gates:
        run(place, 200, gate)
    before = run.ladder.level
    losses = 0
    for (x, _), gate in zip(place, gates * 2, strict=False):
        looked = run.recall.look(x, gate, alone=True)
        assert looked is not None and looked.seen is not None
        losses += looked.confident
        run.recall.learn(looked, answer((looked.seen.answer.class_index + 1) % CLASSES), drawn=True)
        if not run.changes[-1][0]:
            break
    assert losses < 10 and run.ladder.level < before
    run(place, 2000)
    assert run.recall.serves and run.changes[-1][0]


def test_audits_that_the_base_model_fails_stop_what_answers() -> None:
    """It may fail for what is hard: without these, memory was judged by the rest."""
    place, run = Place(1), Run(drawn=0.5)
    run(place, 800)
    assert run.recall.serves
    answered = []
    for _, (x, _) in zip(range(200), place, strict=False):
        looked = run.recall.look(x, "gate", alone=True)
        assert looked is not None
        answered.append(looked.confident)
        run.recall.lost(looked, drawn=True)
    assert any(answered[:20]) and sum(answered[20:]) < 0.1 * len(answered)


def test_after_a_wrong_answer_the_base_model_answers_the_next_inputs_of_that_place() -> None:
    place, run = Place(1, stays=1.0), Run(drawn=1.0)
    for gate in ("gate", "other"):
        run(place, 800, gate)
    x, base = next(iter(place))
    looked = run.recall.look(x, "gate", alone=True)
    assert looked is not None and looked.confident
    run.recall.learn(looked, answer((base.class_index + 1) % CLASSES), drawn=True)
    assert run(place, 10, "gate")[:4].sum() == 0 and run(place, 10, "other").all()
    assert run(place, 40, "gate")[-10:].any()


class Turning(Place):
    """A scene of one class, in which now and then something passes the camera; then the camera turns."""

    turned = False

    def __iter__(self) -> Iterator[tuple[Tensor, Prediction]]:
        shown, elsewhere = self._random.random((2, 3, 8, 8)).astype(np.float32)
        while True:
            scene, said = (elsewhere, 1) if self.turned else (shown, 0)
            passes = self._random.random() < 0.002
            other = self._random.random(scene.shape).astype(np.float32) if passes else scene
            noise = self._random.normal(0.0, self._noise, scene.shape).astype(np.float32)
            yield torch.from_numpy(other + noise)[None], answer(said)


def test_a_scene_of_one_class_teaches_nothing_about_another() -> None:
    """No answer was ever wrong there, however far away the input; but few were as far as the new scene."""
    losses = 0
    for seed in range(5):
        place, run = Turning(seed), Run(seed=seed)
        run(place, 1200)
        assert np.mean(run.hit[-300:]) > 0.9
        place.turned = True
        run(place, 300)
        losses += int((~np.array(run.agreed[1200:])).sum())
        assert np.mean(run.hit[-100:]) > 0.9  # and soon answers there, too
    assert losses <= 2  # 10 if the regression alone decides


@pytest.mark.parametrize("seed", range(6))
def test_a_new_scene_is_told_of_its_place_for_the_next_requests(seed: int) -> None:
    """Also where what passed the camera began that scene before."""
    place, run = Turning(seed), Run(seed=seed)
    shown: Any = iter(place)
    run(shown, 1200)
    other: Any = iter(Turning(1))
    run(other, 100, "other")
    place.turned = True
    told = []
    for _ in range(25):
        run(shown, 1)
        told.append(run.new[-1])
        run(other, 1, "other")
        assert not run.new[-1]
    assert told == sorted(told, reverse=True) and 18 <= sum(told) <= 21


@pytest.mark.parametrize("seed", range(3))
def test_a_place_that_comes_later_begins_with_a_new_scene(seed: int) -> None:
    """What was checked elsewhere says as little about another camera as about a camera that turned."""
    run = Run(seed=seed)
    first, second, shown = (cast(Any, iter(Turning(number))) for number in range(3))
    for _ in range(40):  # places that begin together prove together
        run(first, 30, "first")
        run(second, 30, "second")
    assert np.mean(run.new) < 0.02, "only what passes a camera"
    assert np.mean(run.hit[-100:]) > 0.9
    told = []
    for _ in range(30):
        run(shown, 1, "later")
        told.append(run.new[-1])
    assert told == sorted(told, reverse=True) and told[0] and 19 <= sum(told) <= 22


def test_where_places_are_soon_forgotten_a_new_one_is_nothing_special() -> None:
    """As where a place is a user: else the base model would answer nearly all requests."""
    run, place = Run(drawn=1.0, places=3), Place(3)
    for number in range(30):
        run(place, 50, f"user {number}")
    run(place, 1, "user 30")
    assert run.recall.forgotten and not run.new[-1]


def test_an_input_is_answered_only_if_others_as_far_away_were_right() -> None:
    checked = CheckedDistances([float(at) for at in range(100)], [False] * 100)
    assert (
        checked.covers(0.5) and checked.covers(98.0) and not checked.covers(98.5) and not checked.covers(1e9)
    )
    for _ in range(6):
        checked.add(98.0, wrong=True)
    assert not checked.covers(95.0) and checked.covers(50.0)
    for _ in range(20):
        checked.add(98.0, wrong=False)
    assert checked.covers(97.0)
    assert not CheckedDistances().covers(0.0)


def test_what_is_far_beyond_all_that_was_checked_begins_another_scene() -> None:
    checked = CheckedDistances([at / 100 for at in range(100)], [False] * 100)
    assert not checked.is_jump(1.2) and checked.is_jump(1.5)
    assert not CheckedDistances([0.0] * 10, [False] * 10).is_jump(9.0)  # too few to say what is usual
    few = CheckedDistances([at / 100 for at in range(100)], [False] * 100, [False] * 90 + [True] * 10)
    assert few.is_jump(1.5) and not few.is_jump(1.2) and few.covers(0.95)


def test_places_are_apart() -> None:
    run, one, other = Run(drawn=1.0), Place(5), Place(5)
    other.classes = (other.classes + 1) % CLASSES  # the same pictures, other answers
    for _ in range(20):
        run(one, 50, "one")
        run(other, 50, "other")
    assert np.mean(run.hit[-400:]) > 0.7 and np.mean(run.agreed) >= AGREEMENT


def test_numbers_that_are_none_are_not_remembered() -> None:
    run = Run()
    assert run.recall.look(torch.full((1, 3, 8, 8), math.nan), "gate") is None


def test_whole_numbers_such_as_tokens_are_not_compared() -> None:
    """No request of a text was answered whose place was named."""
    run = Run()
    assert run.recall.look(torch.ones(1, 2, 16, dtype=torch.int64), "desk") is None


@pytest.mark.parametrize("odd", ["huge inputs", "answers that are no numbers"])
def test_what_one_place_shows_does_not_end_the_memory_of_others(odd: str) -> None:
    """One input of 1e25 made all weights of the regression NaN, and so did one answer."""
    run, place = Run(drawn=1.0), Place(5)
    run(place, 400, "gate")
    assert run.hit[-1]
    nothing = answer(0)._replace(probabilities=torch.full((CLASSES,), math.nan))
    for x, _ in islice(place, 15):
        looked = run.recall.look(x * 1e25 if odd == "huge inputs" else x, "other")
        assert (looked is None) == (odd == "huge inputs")
        if looked is not None:
            run.recall.learn(looked, nothing, drawn=True)
    run(place, 200, "gate")
    assert np.mean(run.hit[-150:]) > 0.7


def test_a_fit_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[int] = []

    def fails(job: Any) -> bool:
        with monkeypatch.context() as patched:
            patched.setattr("gati.adaptation.recall.Risk", None)
            with pytest.raises(TypeError):
                job()
        failed.append(len(failed))
        return True

    recall = Recall(AGREEMENT, Spending(0.05).next, 1e4, leave=fails, on_change=lambda *_: None)
    for x, base in islice(Place(5), 200):
        looked = recall.look(x, "gate")
        assert looked is not None
        recall.learn(looked, base, drawn=True)
    assert len(failed) > 3


def test_a_fit_that_nobody_takes_is_offered_again() -> None:
    offered: list[Any] = []

    def refuse(job: Callable[[], None]) -> bool:
        offered.append(job)
        return False

    recall = Recall(AGREEMENT, Spending(0.05).next, 1e4, leave=refuse, on_change=lambda *_: None)
    for _, (x, base) in zip(range(100), Place(6), strict=False):
        looked = recall.look(x, "gate")
        assert looked is not None and not looked.confident
        recall.learn(looked, base, drawn=True)
    assert len(offered) > 1 and RECALL == "recall"


# What is proven is what serves -----------------------------------------------------------------------------


def test_nothing_is_proven_by_audits_of_what_it_would_not_answer() -> None:
    """Coin flips: it was "proven" in all of 4 runs, on audits none of which it would have answered."""
    for seed in range(3):
        place, run = Place(seed), Run(drawn=1.0, seed=seed)
        place.flips = 1.0
        run(place, 1200)
        assert not run.recall.serves and not run.changes


def test_a_looser_setting_answers_only_after_a_proof_of_its_own() -> None:
    run, place = Run(drawn=1.0), Place(7)
    released = []
    for _ in range(60):
        run(place, 25)
        ladder = run.ladder
        assert all(proof.passed for proof in ladder._ladder._proofs[: ladder.level])
        for setting, most in zip(ladder._settings, MOST, strict=True):
            assert setting._allowed <= most, "what serves is never looser than what was proven"
        released.append(ladder.level)
    assert released[0] == 0 and released[-1] > 0 and released == sorted(released)


def test_a_setting_begins_as_loose_as_it_will_ever_be() -> None:
    """It was proven at a sixth of what it then rose to."""
    for most in MOST:
        setting = RecallSetting(most, AGREEMENT)
        assert setting.allowed == most
        for _ in range(50):
            setting.audited(would_answer=True, wrong=False)
        assert setting.allowed == most


def test_at_the_lower_limit_nothing_is_answered() -> None:
    setting = RecallSetting(0.6, AGREEMENT)
    setting.expect(np.geomspace(1e-9, 0.4, 300))
    assert setting.threshold > 0.0
    for _ in range(6):
        setting.audited(would_answer=True, wrong=True)
    assert setting.threshold == 0.0
    for _ in range(200):
        setting.audited(would_answer=False, wrong=False)
    assert setting.threshold > 0.0


def test_it_learns_alike_before_and_after_it_may_answer() -> None:
    """What any setting would answer is learned only where it was drawn: later nothing else will be known."""
    run, place = Run(drawn=1.0), Place(8)
    run(place, 600)
    x, base = next((x, base) for x, base in place if (run.recall.look(x, "gate") or NOTHING).known)
    looked = run.recall.look(x, "gate")
    assert looked is not None and looked.known
    before = len(run.recall._memories._of["gate"]), run.recall._labelled._taken
    run.recall.learn(looked, base, drawn=False)
    assert (len(run.recall._memories._of["gate"]), run.recall._labelled._taken) == before
    run.recall.learn(looked, base, drawn=True)
    assert run.recall._labelled._taken == before[1] + 1


def test_requests_drawn_for_a_proof_alone_count_for_it_and_for_no_guard() -> None:
    """Audits of guards are drawn from all requests at one rate, and these are not."""
    run = Run()
    for _, (x, base) in zip(range(800), Place(1), strict=False):
        looked = run.recall.look(x, "gate", alone=True)
        assert looked is not None
        run.recall.learn(looked, base, drawn=False, tried=True)
    assert run.recall.serves
    assert {
        guard["audits"] for each in run.recall.state()["ladders"] for guard in each["ladder"]["guards"]
    } == {0}


def test_audits_of_before_an_alarm_say_nothing_about_what_comes_after() -> None:
    run, place = Run(drawn=1.0), Place(9)
    run(place, 1200)
    waiting: list[tuple[Looked, Prediction]] = []
    for x, base in place:
        looked = run.recall.look(x, "gate", alone=True)
        assert looked is not None
        if looked.confident and all(all(each.would_answer) for each in looked.intents):
            waiting.append((looked, base))
        if len(waiting) == 400:
            break
    while run.recall.serves:
        run.recall.learn(waiting[0][0], answer((waiting[0][1].class_index + 1) % CLASSES), drawn=True)
    for looked, base in waiting:
        run.recall.learn(looked, base, drawn=True)
    for ladder in run.recall._ladders:
        assert ladder.level == 0 and ladder.proof is not None and ladder.proof.audits == 0
    assert run.spending.used == 4


# Alone, and next to caches ---------------------------------------------------------------------------------


def audits_to_a_release(
    ladder: RecallLadder, random: np.random.Generator, *, known: float, wrong: float
) -> float:
    """Audits until the strictest setting is released; infinite where that takes 600 or more.

    `known`: the share of requests that it answers; `wrong`: the share of all requests that it gets wrong.
    """
    for count in range(1, 600):
        judged = ladder.judge(0.0 if random.random() < known else 1.0)
        lost = judged.would_answer[0] and random.random() < wrong / known
        ladder.audited(judged, wrong=bool(lost), steers=False)
        if ladder.level:
            return count
    return math.inf


def ladder_of(*, alone: bool) -> RecallLadder:
    ladder = RecallLadder(AGREEMENT, lambda: 0.05, alone=alone)
    ladder.expect(np.full(100, 1e-6))
    return ladder


def test_a_setting_that_is_withdrawn_as_it_was_in_alarm_begins_to_steer_anew() -> None:
    ladder = ladder_of(alone=False)
    ladder._ladder.grant(3)
    would = tuple(at == 1 for at in range(len(MOST)))
    while not ladder._ladder.in_alarm(2):
        intent = Intent(would, confident=False, known=True, epoch=0, meant=True, takes=False)
        assert ladder.audited(intent, wrong=True, steers=True) is None
    assert ladder.state()["allowed"][1] < MOST[1]
    assert ladder.restrict(2) and ladder.level == 1
    assert ladder.state()["allowed"][1] == MOST[1]


def test_audits_under_way_count_for_no_proof_that_begins_apart_from_another_process() -> None:
    ladder = ladder_of(alone=False)
    under_way = ladder.judge(0.0)
    ladder.prove_apart()
    for _ in range(2):
        ladder.audited(under_way, wrong=False, steers=True)
    assert ladder.proof is not None and ladder.proof.audits == 0
    ladder.audited(ladder.judge(0.0), wrong=False, steers=True)
    assert ladder.proof.audits == 1


@pytest.mark.parametrize("known", [0.1, 0.5, 0.9])
def test_alone_it_is_released_wrongly_no_more_often_than_delta_allows(known: float) -> None:
    """Of all requests as many are wrong as must not be; of the answers far more may be."""
    random = np.random.default_rng(0)
    wrong = min(1.0 - AGREEMENT, known)
    released = [
        math.isfinite(audits_to_a_release(ladder_of(alone=True), random, known=known, wrong=wrong))
        for _ in range(200)
    ]
    assert np.mean(released) <= 0.05 + 2.0 * math.sqrt(0.05 * 0.95 / 200)


def test_alone_fewer_requests_prove_it_but_half_of_the_audits_are_of_answers() -> None:
    random = np.random.default_rng(1)
    count = {
        (alone, known): audits_to_a_release(ladder_of(alone=alone), random, known=known, wrong=0.0)
        for alone in (True, False)
        for known in (1.0, 0.5, 0.2)
    }
    required = ladder_of(alone=True).proof
    assert required is not None
    assert count[True, 1.0] == count[False, 1.0] == required.required
    assert count[True, 0.5] < 0.7 * count[False, 0.5]
    assert (
        count[True, 0.2] > 0.5 * required.required / 0.2 * 0.6
    )  # answers are rare: what it leaves proves little


@pytest.mark.parametrize("alone", [True, False])
def test_looser_settings_are_not_proven_before_the_strictest_answers(alone: bool) -> None:
    """What memory learns then is not what it learns while it answers."""
    ladder = ladder_of(alone=alone)
    audits_to_a_release(ladder, np.random.default_rng(0), known=1.0, wrong=0.0)
    assert ladder.level == 1 and ladder.proof is not None and ladder.proof.audits == 0


def test_what_it_takes_from_caches_is_what_the_setting_that_answers_would() -> None:
    """Or without one the strictest: what is left is judged as the requests that caches will get."""
    ladder = ladder_of(alone=False)
    ladder.expect(np.geomspace(1e-9, 0.4, 300))
    strictest, second, _ = (setting.threshold for setting in ladder._settings)
    between = (strictest + second) / 2.0
    taken = {}
    for level in range(3):
        ladder._ladder.grant(level)
        taken[level] = ladder.judge(strictest / 2.0).takes, ladder.judge(between).takes
    assert taken == {0: (True, False), 1: (True, False), 2: (True, True)}


def test_its_guard_waits_for_as_many_audits_to_a_false_alarm_as_it_is_asked_to() -> None:
    losses = []
    for audits in (100.0, 1e9):
        ladder = RecallLadder(AGREEMENT, lambda: 0.05, audits, alone=False)
        ladder._ladder.grant(1)
        intent = Intent((True,) * len(MOST), confident=True, known=True, epoch=0, meant=True, takes=True)
        count = 0
        while ladder.level:
            ladder.audited(intent, wrong=True, steers=True)
            count += 1
        losses.append(count)
    assert losses[0] < losses[1]


def test_requests_that_memory_must_not_answer_are_no_part_of_its_share() -> None:
    ladder = ladder_of(alone=False)
    ladder._ladder.grant(1)
    for _ in range(100):
        ladder.judge(0.0)
    before = ladder.share
    for _ in range(100):
        ladder.judge(1.0, asked=False)
    assert ladder.share == before > 0.5


def test_what_it_leaves_proves_nothing_by_itself() -> None:
    ladder = ladder_of(alone=True)
    for _ in range(2000):
        ladder.audited(ladder.judge(1.0), wrong=True, steers=True)
    assert ladder.level == 0 and ladder.proof is not None and ladder.proof.audits == 0


def test_its_guard_counts_all_requests() -> None:
    """A tenth of its answers is wrong, a fiftieth of all requests: memory alone keeps the promise."""
    levels = {}
    for alone in (True, False):
        random, ladder = np.random.default_rng(2), ladder_of(alone=alone)
        audits_to_a_release(ladder, random, known=0.2, wrong=0.0)
        assert ladder.level >= 1
        for _ in range(3000):
            judged = ladder.judge(0.0 if random.random() < 0.2 else 1.0)
            found = ladder.audited(judged, wrong=bool(random.random() < 0.1), steers=True)
            if found is not None and found.kind == "withdrawn":
                break
        levels[alone] = found is not None and found.kind == "withdrawn"
    assert levels == {True: False, False: True}


def test_next_to_caches_it_answers_by_the_ladder_of_its_own_answers() -> None:
    run, place = Run(drawn=1.0), Place(10)
    run(place, 400)
    alone, shared = run.recall._ladders
    assert alone.level >= shared.level
    while shared.level:
        shared._ladder.prove_anew()
    x, _ = next(
        (x, base) for x, base in place if (run.recall.look(x, "gate", alone=True) or NOTHING).confident
    )
    looked = run.recall.look(x, "gate")
    assert looked is not None and not looked.confident and run.recall.serves
    for _ in range(500):
        run.recall.look(x, "gate", alone=True)
    assert run.recall.more_alone(after_memory=True) > 0.9
    assert run.recall.more_alone(after_memory=False) > 0.9 and run.recall.next_to_caches == (None, 0)


def test_requests_without_a_place_are_among_those_that_memory_leaves() -> None:
    """A few cameras that name one must not decide for all others that lookups are not worth it."""
    run, place = Run(drawn=1.0), Place(10)
    run(place, 600)
    before = run.recall.more_alone(after_memory=False)
    assert before > 0.5
    x, _ = next(iter(place))
    for _ in range(300):
        assert run.recall.look(x, None) is None
    assert run.recall.more_alone(after_memory=False) < 0.1 * before
