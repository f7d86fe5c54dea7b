"""How likely a conversation goes on: what the model learns, how it is stored, what policies are told."""

from __future__ import annotations

import json
import math
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.errors import EvictError
from gati.evict.predict.continuation import (
    MOST,
    ContinuationModel,
    ContinuationSettings,
    fit_continuation,
    log_odds,
    matthews,
)
from gati.evict.predict.continuation_stored import load_continuation, save_continuation
from gati.evict.predict.conversing import HintedContinuation, KnownContinuation
from gati.evict.trace.dialogues import Prompts
from gati.evict.train import samples_of, train_continuation
from tests.evict.talking import talks

SMALL = ContinuationSettings(features=2**12)


@pytest.fixture(scope="module")
def model() -> ContinuationModel:
    """Learned from three hundred dialogues."""
    return fit_continuation(*samples_of(talks(300)), SMALL)


def test_farewells_are_learned_from_the_text_and_not_from_the_count_of_prompts(
    model: ContinuationModel,
) -> None:
    prompts, goes_on = samples_of(talks(300, seed=1))
    counting = fit_continuation(*samples_of(talks(300)), ContinuationSettings(features=2**12, text=False))
    learned = matthews(model.predict(prompts) > 0.5, goes_on)
    assert learned > 0.6
    assert learned > matthews(counting.predict(prompts) > 0.5, goes_on) + 0.2


def test_texts_of_other_prompts_say_nothing(model: ContinuationModel) -> None:
    prompts, goes_on = samples_of(talks(300, seed=1))
    others = np.random.default_rng(0).permutation(len(prompts))
    mixed = [Prompts(prompts[other].texts, each.turn) for other, each in zip(others, prompts, strict=True)]
    assert abs(matthews(model.predict(mixed) > 0.5, goes_on)) < 0.15


def test_probabilities_are_shares(model: ContinuationModel) -> None:
    """Of what is predicted at p, the share p goes on: within five standard errors in each fifth."""
    prompts, goes_on = samples_of(talks(1000, seed=2))
    found = model.predict(prompts)
    for part in np.array_split(np.argsort(found), 5):
        expected = found[part].mean()
        wide = 5.0 * math.sqrt(expected * (1.0 - expected) / len(part))
        assert abs(goes_on[part].mean() - expected) < wide + 0.03


def test_one_at_a_time_is_all_at_once(model: ContinuationModel) -> None:
    prompts, _ = samples_of(talks(20, seed=3))
    alone = [float(model.predict([each])[0]) for each in prompts]
    np.testing.assert_array_equal(model.predict(prompts), alone)
    assert len(model.predict([])) == 0
    assert all(1.0 - MOST <= each <= MOST for each in alone)


def test_of_long_prompts_only_the_ends_and_of_many_only_five_are_read() -> None:
    weights = np.random.default_rng(0).normal(0.0, 1e-3, SMALL.features).astype(np.float32)
    model = ContinuationModel(weights, 0.0, SMALL)
    words = [f"w{number}" for number in range(2000)]

    def said(*texts: str, turn: int = 1) -> float:
        return float(model.predict([Prompts(texts, turn)])[0])

    whole = said(" ".join(words))
    assert said(" ".join([*words[:900], *["goodbye"] * 100, *words[1000:]])) == whole
    assert said(" ".join([*words[:-1], "goodbye"])) != whole
    many = [f"prompt {number}" for number in range(7)]
    assert said(*many, turn=7) == said(*many[2:], turn=7)
    assert said(*many[2:], turn=7) != said(*many[2:], turn=6)


words_of_talks = st.sampled_from(
    ["thanks", "bye", "table", "flight 7", "ÄÖ ß", "?!", "", " ", "\n", "x" * 700]
)
conversations = st.lists(
    st.builds(
        lambda texts, before: Prompts(tuple(texts), len(texts) + before),
        st.lists(st.lists(words_of_talks, max_size=4).map(" ".join), min_size=1, max_size=7),
        st.integers(0, 40),
    ),
    max_size=8,
)


@given(conversations, st.randoms())
@settings(max_examples=30, deadline=None)
def test_nothing_but_the_prompts_changes_a_prediction(
    model: ContinuationModel, prompts: list[Prompts], chance: random.Random
) -> None:
    """Bit for bit: neither the batch, nor its order, nor what the model has read before."""
    fresh = ContinuationModel(model.weights, model.bias, model.settings)
    found = model.predict(prompts).tolist()
    order = list(range(len(prompts)))
    chance.shuffle(order)
    mixed = fresh.predict([prompts[each] for each in order]).tolist()
    assert mixed == [found[each] for each in order]
    assert found == [float(fresh.predict([each])[0]) for each in prompts]


def test_conversations_beyond_those_read_at_once_are_predicted_like_the_others(
    model: ContinuationModel,
) -> None:
    prompts = [Prompts((f"prompt {number} of many", f"the other {number}"), 2) for number in range(2_100)]
    found = model.predict(prompts)
    np.testing.assert_array_equal(model.predict(prompts[-100:]), found[-100:])
    np.testing.assert_array_equal(model.predict(prompts[1_000:1_050]), found[1_000:1_050])


def test_a_conversation_without_a_prompt_is_named(model: ContinuationModel) -> None:
    with pytest.raises(EvictError, match="conversation 1 has no prompt"):
        model.predict([Prompts(("hello",), 1), Prompts((), 0)])


@pytest.mark.parametrize("goes_on", [True, False])
def test_one_class_alone_is_refused(goes_on: bool) -> None:
    prompts, _ = samples_of(talks(20))
    with pytest.raises(EvictError, match="needs examples of both cases"):
        fit_continuation(prompts, np.full(len(prompts), goes_on), SMALL)
    with pytest.raises(EvictError, match="of 0 prompts"):
        fit_continuation([], np.zeros(0, dtype=np.bool_), SMALL)


def test_what_is_stored_predicts_the_same(model: ContinuationModel, tmp_path: Path) -> None:
    save_continuation(model, tmp_path / "model", {"dialogues": 300})
    prompts, _ = samples_of(talks(20, seed=3))
    np.testing.assert_array_equal(
        load_continuation(tmp_path / "model").predict(prompts), model.predict(prompts)
    )


def test_a_model_that_is_half_replaced_is_refused(model: ContinuationModel, tmp_path: Path) -> None:
    """The weights are written first: with the bias of the former model, they would be another."""
    other = ContinuationModel(model.weights + 1.0, model.bias + 1.0, model.settings)
    former, new = tmp_path / "former", tmp_path / "new"
    save_continuation(model, former, {})
    save_continuation(other, new, {})
    weights, document = "continuation.safetensors", former / "continuation.json"
    (former / weights).write_bytes((new / weights).read_bytes())
    with pytest.raises(EvictError, match=r"continuation\.safetensors is of another model: it is being"):
        load_continuation(former)
    values = json.loads(document.read_text())
    del values["sha256"]  # as older versions of Gati wrote it
    document.write_text(json.dumps(values))
    load_continuation(former)
    document.write_bytes((new / "continuation.json").read_bytes())
    assert load_continuation(former).digest() == other.digest()


def test_a_model_with_another_bias_is_another(model: ContinuationModel) -> None:
    same, other = (ContinuationModel(model.weights, model.bias + more, model.settings) for more in (0.0, 0.5))
    assert same.digest() == model.digest() != other.digest()


def test_threads_predict_at_once_what_each_predicts_alone(model: ContinuationModel) -> None:
    prompts, _ = samples_of(talks(40, seed=4))
    alone = model.predict(prompts)
    parts = [slice(begin, begin + 1 + begin % 17) for begin in range(len(prompts))]
    with ThreadPoolExecutor(8) as pool:
        for part, found in zip(
            parts, pool.map(lambda part: model.predict(prompts[part]), parts), strict=True
        ):
            np.testing.assert_array_equal(found, alone[part])


def test_training_is_judged_by_the_other_half_and_repeats(tmp_path: Path) -> None:
    dialogues = talks(200)
    trained = train_continuation(dialogues, tmp_path / "a", seed=1)
    assert trained["mcc"] > 0.5 and 50 < trained["dialogues"] < 150
    assert train_continuation(dialogues[::1], tmp_path / "b", seed=1) == trained
    first, second = (load_continuation(tmp_path / name) for name in "ab")
    np.testing.assert_array_equal(first.weights, second.weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"format": 3}, "format 3, this Gati reads up to 2", id="newer"),
        pytest.param({"format": 1}, "by an older Gati, which encoded prompts differently", id="older"),
        pytest.param({"kind": "gpt"}, "kind 'gpt' is unknown; known are hash and minilm", id="kind"),
        pytest.param({"features": 7}, r"weights \(4096,\) of float32 for 7 features", id="other size"),
        pytest.param({"bias": None}, "is damaged", id="no bias"),
    ],
)
def test_models_that_are_damaged_or_newer_are_refused(
    model: ContinuationModel, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    save_continuation(model, tmp_path, {})
    path = tmp_path / "continuation.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(EvictError, match=message):
        load_continuation(tmp_path)


def test_missing_and_cut_weights_are_named(model: ContinuationModel, tmp_path: Path) -> None:
    with pytest.raises(EvictError, match="has no continuation.json: run gati evict train --dialogues"):
        load_continuation(tmp_path)
    save_continuation(model, tmp_path, {})
    weights = tmp_path / "continuation.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(EvictError, match="is damaged"):
        load_continuation(tmp_path)
    weights.unlink()
    with pytest.raises(EvictError, match="is damaged"):
        load_continuation(tmp_path)


def test_keys_order_as_decayed_probabilities_do_at_any_time() -> None:
    chance = np.random.default_rng(0)
    gap_s = 50.0
    probabilities = chance.uniform(0.002, 0.998, 40)
    times = np.sort(chance.uniform(0.0, 500.0, 40))
    source = KnownContinuation(probabilities, gap_s)
    keys = []
    for number, at in enumerate(times):
        assert source.observe([1, 2], number, float(at)) == [2]
        keys.append(source.key)
    for now in chance.uniform(500.0, 700.0, 10):
        decay = np.exp(-(now - times) / gap_s)
        decayed = probabilities * decay / (probabilities * decay + 1.0 - probabilities)
        np.testing.assert_array_equal(np.argsort(decayed), np.argsort(keys))


def test_what_is_not_known_counts_as_average_and_is_counted() -> None:
    source = KnownContinuation(np.array([0.2, np.nan, 0.8, np.nan]), 1.0)
    keys = []
    for number in range(4):
        source.observe([1], number, 0.0)
        keys.append(source.key)
    odds = log_odds(np.array([0.2, 0.8]))
    np.testing.assert_allclose(keys, [odds[0], odds[0], odds[1], 0.0], atol=1e-12)
    assert source.figures() == {"without_probability": 2}


@pytest.mark.parametrize("hint", [-0.1, 1.5, math.inf])
def test_hints_that_are_no_probability_are_refused(hint: float) -> None:
    with pytest.raises(EvictError, match="is not a probability; give a number from 0 to 1"):
        HintedContinuation().hint(hint)
    with pytest.raises(EvictError, match="the mean gap is 0 s"):
        HintedContinuation(0.0)
