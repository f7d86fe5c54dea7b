"""The learned predictor: what it knows, when it knows it, and that it never looks ahead."""

from __future__ import annotations

import json
import random
import sys
import threading
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.errors import EvictError
from gati.evict import PrefixCache
from gati.evict.predict import reuse
from gati.evict.predict.base import grown
from gati.evict.predict.hazard import HazardModel, ages, seconds_a_hit
from gati.evict.predict.history import FEATURES, Observer, RequestHistory
from gati.evict.predict.named import predictor_named
from gati.evict.predict.reuse import Reuse, ReuseSettings
from gati.evict.predict.samples import Labels, ReuseSamples, by_bin
from gati.evict.predict.stored import load_model, save_model
from gati.evict.replays.replay import replay
from gati.evict.trace.records import Kind, Trace, make_trace
from gati.evict.train import train, train_continuation
from tests.evict.naive import build, tree_trace
from tests.evict.strategies import long_trees
from tests.waiting import LONG_S

QUICK = ReuseSettings(first_fit=150, growth=1.5, rounds=20)


def conversations(requests: int, seed: int) -> Trace:
    """Conversations that go on where they have an even number, and single questions, which never return."""
    chance = random.Random(seed)
    rows: list[list[str]] = []
    times: list[float] = []
    active: list[tuple[float, list[str]]] = []
    now = 0.0
    for number in range(requests):
        now += chance.expovariate(1.0)
        due = [each for each in active if each[0] <= now]
        if due:
            active.remove(due[0])
            path = due[0][1]
        else:
            path = [f"system/{number % 2}"]
        talks = path[0] == "system/0"
        path = path + [f"{path[-1]}/{number}.{block}" for block in range(chance.randint(2, 5))]
        rows.append(path)
        times.append(now)
        if talks and len(path) < 25:
            active.append((now + 10.0 + chance.expovariate(0.1), path))
    return make_trace(rows, times)


@pytest.mark.slow
def test_it_learns_which_blocks_return_and_beats_lru() -> None:
    trace = conversations(1500, 0)
    rates = {}
    for name in ("lru", "fpb", "gati"):
        cache = build(name, 150, lambda capacity, seed: Reuse(capacity, settings=QUICK))
        hits = [cache.access(ids, float(trace.time_s[at])).hits for at, ids in enumerate(trace.requests)]
        rates[name] = sum(hits[500:]) / int(trace.lengths[500:].sum())
    assert rates["fpb"] > 1.1 * rates["lru"]
    assert rates["gati"] > 1.1 * rates["lru"]


@pytest.mark.slow
@pytest.mark.parametrize("cut", [200, 400])
def test_what_comes_later_changes_nothing_before(cut: int) -> None:
    """Two traces that part at a request are served alike until then: models, refits and all."""
    one, other = conversations(500, 0), conversations(500, 9)
    rows = [[f"a{block}" for block in row] for row in one.requests]
    tail = [[f"b{block}" for block in row] for row in other.requests[cut:]]
    times = one.time_s.tolist()
    twin = make_trace(rows[:cut] + tail, times)
    served = []
    for trace in (one, twin):
        cache = build("gati", 60, lambda capacity, seed: Reuse(capacity, settings=QUICK))
        served.append([cache.access(ids, times[at]) for at, ids in enumerate(trace.requests[:cut])])
        figures = cache.predictor.figures() if cache.predictor is not None else {}
        assert figures["refits"] >= 1
    assert served[0] == served[1]


class Anew(Reuse):
    """Looks every age up anew for each score."""

    def scores(self, count: int) -> np.ndarray:
        kept = super().scores(count)
        if self._model is None:
            return kept
        age = self._now_s - self._seen_s[:count]
        at = np.minimum(np.searchsorted(self._model.edges, age, side="right") - 1, self._model.bins - 1)
        found = self._tables[np.arange(count), at] + 1e-6 * age
        runs = [run.slot for run in self.tree]
        assert np.array_equal(kept[runs], found[runs])
        self.compared += len(runs)
        return kept


def test_scores_are_looked_up_again_when_a_block_has_become_older() -> None:
    trace = conversations(500, 0)
    made = Anew(60, settings=QUICK)
    made.compared = 0
    cache = build("fpb", 60, lambda capacity, seed: made)
    made.tree = cache.tree
    for at, ids in enumerate(trace.requests):
        cache.access(ids, float(trace.time_s[at]))
    assert made.figures()["refits"] >= 1 and made.compared > 1000


class Watching(Observer):
    """Checks that labels are only of samples that were taken before, and each at most once."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.returns: dict[int, float] = {}
        self.lost: set[int] = set()

    def taken(self, rows: np.ndarray, now_s: float) -> range:
        self.rows += list(rows)
        return range(len(self.rows) - len(rows), len(self.rows))

    def copied(self, sample: int) -> int:
        self.rows.append(self.rows[sample])
        return len(self.rows) - 1

    def returned(self, sample: int, now_s: float) -> None:
        assert sample < len(self.rows) and sample not in self.returns and sample not in self.lost
        self.returns[sample] = now_s

    def forgotten(self, sample: int, now_s: float) -> None:
        assert sample not in self.returns and sample not in self.lost
        self.lost.add(sample)


@given(long_trees, st.integers(3, 40))
@settings(max_examples=40, deadline=None)
def test_a_history_sees_every_return_once_and_covers_each_path(trace: Trace, capacity: int) -> None:
    watching = Watching()
    history = RequestHistory(capacity, watching)
    for number, ids in enumerate(trace.requests):
        ends, rows = history.access(ids, number, float(number))
        assert ends[-1] == len(ids) and sorted(set(ends)) == ends
        assert all(len(row) == len(FEATURES) and np.isfinite(row).all() for row in rows)
        starts = [0, *ends[:-1]]
        assert [row[FEATURES.index("blocks")] for row in rows] == [
            end - begin for begin, end in zip(starts, ends, strict=True)
        ]


def labels(gaps: list[float], watched: list[float]) -> Labels:
    count = len(gaps)
    return Labels(np.zeros((count, 2), np.float32), np.array(gaps), np.array(watched), np.ones(count))


def test_a_sample_counts_in_the_bins_it_lived_through() -> None:
    edges = np.array([0.0, 10.0, 20.0, 40.0])
    rows = by_bin(labels([15.0, np.nan, np.nan, 99.0], [50.0, 25.0, 50.0, 99.0]), edges)
    found = list(
        zip(rows.sample.tolist(), rows.number.tolist(), rows.returned.tolist(), rows.weights, strict=True)
    )
    assert found == [
        (0, 0, False, 1.0),
        (0, 1, True, 1.0),
        (1, 0, False, 1.0),
        (1, 1, False, 1.0),
        (1, 2, False, 0.25),  # watched for 5 of 20 s
        (2, 0, False, 1.0),
        (2, 1, False, 1.0),
        (2, 2, False, 1.0),
        (3, 0, False, 1.0),
        (3, 1, False, 1.0),
        (3, 2, False, 1.0),
    ]


def test_watching_for_a_short_time_does_not_make_returns_look_certain() -> None:
    """Of blocks that return at a constant rate, half are watched for a part of the last bin only."""
    chance = np.random.default_rng(0)
    count, rate = 40_000, 0.01
    gaps, watched = chance.exponential(1 / rate, count), chance.uniform(0.0, 200.0, count)
    edges = np.array([0.0, 50.0, 100.0, 200.0])
    rows = by_bin(labels(np.where(gaps <= watched, gaps, np.nan).tolist(), watched.tolist()), edges)
    for number in range(2):
        of = rows.number == number
        share = rows.weights[of & rows.returned].sum() / rows.weights[of].sum()
        assert share == pytest.approx(1 - np.exp(-rate * 50.0), rel=0.12)


def test_seconds_a_hit_are_the_best_of_all_times_to_wait() -> None:
    edges = np.array([0.0, 1.0, 3.0, 7.0, 10.0])
    hazards = np.random.default_rng(0).uniform(0.0, 0.9, (20, 4))
    found = seconds_a_hit(hazards, edges)
    for row, hazard in zip(found, hazards, strict=True):
        for first in range(4):
            best, alive, hits, spent = 0.0, 1.0, 0.0, 0.0
            for last in range(first, 4):
                back = alive * hazard[last]
                hits, spent = hits + back, spent + (edges[last + 1] - edges[last]) * (alive - back / 2)
                alive -= back
                best = max(best, hits / spent)
            assert row[first] == pytest.approx(1 / best)


@given(st.integers(1, 9), st.integers(1, 6), st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_seconds_a_hit_do_not_depend_on_how_they_are_computed(bins: int, count: int, seed: int) -> None:
    """Bit for bit, certain returns included: or else equal predictions would be settled otherwise."""
    chance = np.random.default_rng(seed)
    edges = np.append(0.0, np.cumsum(chance.uniform(0.1, 50.0, bins)))
    hazards = chance.uniform(0.0, 1.0, (count, bins))
    hazards[chance.random(hazards.shape) < 0.2] = 1.0
    hazards[chance.random(hazards.shape) < 0.2] = 0.0
    for found, hazard in zip(seconds_a_hit(hazards, edges), hazards, strict=True):
        alive, spent = [1.0], [0.0]
        for at, each in enumerate(hazard.tolist()):
            alive.append(alive[-1] * (1.0 - each))
            spent.append(spent[-1] + (edges[at + 1] - edges[at]) * 0.5 * (alive[-2] + alive[-1]))
        for first in range(bins):
            worth = [
                (alive[first] - alive[last]) / (spent[last] - spent[first])
                for last in range(first + 1, bins + 1)
                if spent[last] > spent[first]
            ]
            assert found[first] == 1.0 / max([*worth, 1e-12])


@given(st.lists(st.floats(0.0, 1e5), max_size=80), st.integers(2, 12))
@settings(max_examples=100, deadline=None)
def test_ages_rise_from_zero_to_beyond_every_gap(gaps: list[float], bins: int) -> None:
    edges = ages(np.array(gaps), bins)
    if edges is None:
        assert len(gaps) < 2 * bins or max(gaps) == 0.0
        return
    assert edges[0] == 0.0 and (np.diff(edges) > 0.0).all()
    assert edges[-1] > max(gaps) and len(edges) <= bins + 1


def taken_one(samples: ReuseSamples, at_s: float) -> int:
    (number,) = samples.taken(np.full((1, len(FEATURES)), at_s, dtype=np.float32), at_s)
    return number


@given(st.lists(st.integers(1, 9), max_size=12))
@settings(max_examples=60, deadline=None)
def test_samples_taken_together_are_as_if_taken_one_by_one(counts: list[int]) -> None:
    together, apart = ReuseSamples(5), ReuseSamples(5)
    for now, count in enumerate(counts):
        rows = np.random.default_rng(now).random((count, len(FEATURES)), dtype=np.float32)
        numbers = together.taken(rows, float(now))
        assert list(numbers) == [next(iter(apart.taken(row[None], float(now)))) for row in rows]
        for each in (together, apart):
            each.copied(numbers[0])
            each.returned(numbers[-1], now + 0.5)
        for one, other in zip(together.labels(now + 1.0), apart.labels(now + 1.0), strict=True):
            assert np.array_equal(one, other, equal_nan=True)


def test_samples_forget_the_oldest_and_say_nothing_of_it() -> None:
    samples = ReuseSamples(3)
    first, *_ = (taken_one(samples, float(number)) for number in range(5))
    samples.returned(first, 9.0)
    assert samples.copied(first) == -1
    samples.returned(4, 9.0)
    found = samples.labels(10.0)
    assert sorted(found.gaps_s[~np.isnan(found.gaps_s)].tolist()) == [5.0]
    assert sorted(found.watched_s.tolist()) == [6.0, 7.0, 8.0]


def test_without_returns_there_is_no_model_and_it_is_lru() -> None:
    trace = tree_trace([[number] for number in range(900)])
    cache = build("fpb", 50, lambda capacity, seed: Reuse(capacity, settings=QUICK))
    lru = build("lru", 50, None)
    for number, ids in enumerate(trace.requests):
        assert cache.access(ids, float(number)) == lru.access(ids, float(number))
    assert cache.predictor is not None and cache.predictor.figures()["refits"] == 0


def test_a_refit_that_fails_is_counted_and_the_model_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trace = conversations(600, 0)
    cache = PrefixCache(60, predictor="reuse", clock=lambda: now_s)
    predictor = cast(Reuse, cache._cache.predictor)
    predictor._settings, predictor._due = QUICK, QUICK.first_fit
    models = []
    for at, ids in enumerate(trace.requests):
        now_s = float(trace.time_s[at])
        if at == 300:
            predictor.wait()
            cache.match(trace.requests[0])
            monkeypatch.setattr(reuse, "fit_hazards", failing)
            models.append(predictor.model)
        match = cache.match(ids)
        cache.insert(match)
        cache.release(match)
        predictor.wait()  # whatever the thread's speed, there is a second attempt
    figures = cache.figures()
    assert figures["refits"] >= 1 and figures["failed_refits"] >= 2
    assert models == [predictor.model] and predictor.model is not None
    said = [record.getMessage() for record in caplog.records]
    assert said == ["predictions stay as they are, because a refit failed: no memory is left"]
    with pytest.raises(MemoryError):  # who asks for it learns of it
        predictor.refit()


def test_no_request_waits_for_a_fit_and_the_next_one_uses_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an engine a thread fits; what it finds is what a fit in the request finds."""
    trace = conversations(600, 0)
    may_end, given = threading.Event(), list[Any]()

    def slow(labels: Any, **options: Any) -> Any:
        assert may_end.wait(LONG_S)
        given.append((labels, options))
        return fit_hazards(labels, **options)

    fit_hazards = reuse.fit_hazards
    monkeypatch.setattr(reuse, "fit_hazards", slow)
    cache = build("gati", 60, lambda capacity, seed: Reuse(capacity, settings=QUICK, apart=True))
    predictor = cast(Reuse, cache.predictor)
    for number, ids in enumerate(trace.requests):
        cache.access(ids, float(trace.time_s[number]))
    assert not given and predictor.model is None and predictor.figures()["refits"] == 0
    may_end.set()
    predictor.wait()
    assert predictor.figures()["refits"] == 1 and predictor.model is None
    last_s = float(trace.time_s[-1])
    cache.access(trace.requests[-1], last_s + 1.0)
    (labels, options) = given[0]
    again = fit_hazards(labels, **options)
    assert predictor.model is not None and again is not None
    np.testing.assert_array_equal(predictor.model.hazards(labels.features), again.hazards(labels.features))
    predictor.wait()


def failing(*_: Any, **__: Any) -> None:
    raise MemoryError("no memory is left")


def test_what_fitting_needs_is_checked_when_a_cache_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for seed in (-1, 2**32):
        with pytest.raises(EvictError, match=f"^seed is {seed}; give a number from 0 to 4294967295$"):
            PrefixCache(8, seed=seed)
        with pytest.raises(EvictError, match=f"^seed is {seed}; give a number"):
            train(conversations(20, 1), tmp_path / "model", seed=seed)
        with pytest.raises(EvictError, match=f"^seed is {seed}; give a number"):
            train_continuation([], tmp_path / "model", seed=seed)
        with pytest.raises(EvictError, match=f"^seed is {seed}; give a number"):
            replay(conversations(20, 1), [5], ["fpb"], predictor="noise:0.5", seeds=[0, seed])
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    with pytest.raises(EvictError, match="the predictor reuse needs LightGBM: pip install"):
        PrefixCache(8)
    PrefixCache(8, "lru")


@pytest.mark.slow
def test_a_trained_predictor_starts_where_another_ended(tmp_path: Path) -> None:
    told = train(conversations(800, 1), tmp_path / "model", seed=3)
    assert told["requests"] == 800
    unseen = conversations(600, 2)
    result = replay(unseen, [150], ["lru", "fpb"], predictor=str(tmp_path / "model"))
    cold = replay(unseen, [150], ["fpb"])
    assert result.outcomes[1].hit_rate > result.outcomes[0].hit_rate
    assert result.outcomes[1].hit_rate > cold.outcomes[0].hit_rate


@pytest.mark.parametrize("kind", ["flat", "tree"])
def test_training_uses_the_whole_trace(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(0)
    if kind == "flat":
        trace = make_trace([chance.sample(range(600), 50) for _ in range(60)], kind=kind)
    else:  # paths that part often have short runs
        trace = tree_trace(
            [[chance.randrange(2) if chance.random() < 0.5 else 0 for _ in range(16)] for _ in range(900)]
        )
    found: list[tuple[int, int]] = []
    labels = ReuseSamples.labels

    def noted(samples: ReuseSamples, now_s: float) -> Labels:
        taken = labels(samples, now_s)
        found.append((len(taken.features), samples.taken_in_all))
        return taken

    monkeypatch.setattr(ReuseSamples, "labels", noted)
    train(trace, tmp_path)
    ((kept, taken),) = found
    assert kept == taken
    assert kind == "tree" or taken == len(trace.blocks)


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    train(conversations(300, 1), folder)
    model = load_model(folder)
    path = folder / "predictor.json"
    good = json.loads(path.read_text())
    for change, message in (
        ({"format": 99}, r"predictor\.json has format 99, this Gati reads up to 1: .* upgrade gati"),
        ({"features": ["age"]}, r"was trained on other features \(\w+\): run gati evict train again"),
        ({"edges_s": [3.0, 1.0]}, r"has no usable predictor"),
        ({"edges_s": "no"}, r"json: field 'edges_s' is 'no', expected a list, .* run gati evict train again"),
    ):
        path.write_text(json.dumps(good | change))
        with pytest.raises(EvictError, match=message):
            load_model(folder)
    save_model(model, folder, {})
    (folder / "hazards.txt").write_text("tree")
    with pytest.raises(EvictError, match="has no usable predictor"):
        load_model(folder)
    path.write_text(json.dumps({name: value for name, value in good.items() if name != "sha256"}))
    with pytest.raises(EvictError, match="has no usable predictor"):
        load_model(folder)
    (folder / "hazards.txt").unlink()
    with pytest.raises(EvictError, match=r"has no hazards\.txt: run gati evict train again"):
        predictor_named(str(folder))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param(
            "lightgbm", "unknown predictor 'lightgbm'; choose one of reuse, oracle, noise:SHARE", id="unknown"
        ),
        pytest.param("noise:2", "'2' must be a number from 0 to 1, as in noise:0.3", id="too much noise"),
        pytest.param("noise:x", "'x' must be a number from 0 to 1", id="no number"),
        pytest.param("lognormal:nan", "'nan' must be a number from 0", id="nan"),
        pytest.param("oracle:1", "unknown predictor 'oracle:1'", id="an oracle takes none"),
    ],
)
def test_predictors_that_make_no_sense_are_refused(name: str, message: str) -> None:
    with pytest.raises(EvictError, match=message):
        predictor_named(name, tree_trace([[1]]))


def test_an_oracle_without_a_trace_is_refused() -> None:
    with pytest.raises(EvictError, match="needs a whole trace in advance; use reuse"):
        predictor_named("oracle")


def test_arrays_grow_and_keep_what_they_hold() -> None:
    array = grown(np.arange(4), 5)
    assert len(array) == 8 and array[:4].tolist() == [0, 1, 2, 3]
    assert grown(array, 8) is array


class RowSums:
    """Stands for a booster of trees that only LightGBM knows: says the sum of each row."""

    def dump_model(self) -> dict[str, str]:
        return {"objective": "another"}

    def predict(self, rows: np.ndarray, num_threads: int) -> np.ndarray:
        return rows.sum(axis=1)


def test_hazards_ask_for_every_bin_of_every_row() -> None:
    features = np.arange(6, dtype=np.float32).reshape(2, 3)
    found = HazardModel(np.array([0.0, 1.0, 2.0, 4.0]), RowSums()).hazards(features)
    assert found.tolist() == [[3.0, 4.0, 5.0], [12.0, 13.0, 14.0]]


def test_scores_are_the_table_at_the_present_age_and_older_runs_win_ties() -> None:
    model = HazardModel(np.array([0.0, 1.0, 2.0, 4.0]), RowSums())
    reuse = Reuse(8, model=model, flat=True, fits=False)
    for block in range(4):
        reuse.observe([block], block, 0.5 * block)
        reuse.assign(block, 0)
    reuse.observe([9], 4, 2.0)
    ages_s = np.array([2.0, 1.5, 1.0, 0.5])
    tables = reuse._tables[np.arange(4), [2, 1, 1, 0]]
    assert reuse.scores(4).tolist() == (tables + 1e-6 * ages_s).tolist()
    assert reuse.scores(4).tolist() == reuse.scores(4).tolist()  # asking changes nothing


def test_a_model_that_is_half_replaced_is_refused(tmp_path: Path) -> None:
    """The booster is written first: with the features and bins of the former model, it would be another."""
    former, new = tmp_path / "former", tmp_path / "new"
    train(conversations(300, 1), former)
    train(conversations(400, 2), new)
    booster = (former / "hazards.txt").read_bytes()
    (former / "hazards.txt").write_bytes((new / "hazards.txt").read_bytes())
    with pytest.raises(EvictError, match=r"hazards\.txt is of another model: it is being replaced, or that"):
        load_model(former)
    (former / "predictor.json").write_bytes((new / "predictor.json").read_bytes())
    load_model(former)
    (former / "hazards.txt").write_bytes(booster)
    older = json.loads((former / "predictor.json").read_text())
    del older["sha256"]  # as older versions of Gati wrote it
    (former / "predictor.json").write_text(json.dumps(older))
    load_model(former)
