"""What is fitted from access logs, which of it is published, and how an engine takes it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from gati.errors import EvictError, StorageError
from gati.evict import PrefixCache, bound
from gati.evict.learn.fitting import VersionFitter
from gati.evict.learn.folder import MODEL, versions_of
from gati.evict.learn.following import fetch_model
from gati.evict.learn.reading import AccessRecord
from gati.evict.learn.trial import VersionTrial
from gati.evict.policy.shadow import ShadowLru
from gati.evict.predict import reuse
from gati.evict.predict.hazard import HazardModel
from gati.evict.predict.reuse import Reuse, ReuseSettings
from gati.evict.predict.samples import Labels
from gati.versions.repository import ModelRepository
from tests.evict.learn.streams import CAPACITY, hot_and_cold, records
from tests.evict.naive import build
from tests.waiting import until

EARLY = ReuseSettings(first_fit=600, longest_step=600, window=4000, rounds=10)


def fitted(folder: Path, requests: int, settings: ReuseSettings = EARLY) -> VersionFitter:
    fitter = VersionFitter(folder, settings, trial_capacities=4.0)
    for record in records(requests):
        fitter.take(record)
    return fitter


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a service that has published its first version."""
    made: Path = tmp_path_factory.mktemp("service")
    assert fitted(made, 900).version == 1
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> HazardModel:
    return fetch_model(ModelRepository(versions_of(folder)), 1)


class Reversed:
    """What returns is said never to, and the other way round."""

    trees = None  # so nothing is looked up

    def __init__(self, model: HazardModel) -> None:
        self._model = model
        self.edges, self.bins, self.booster = model.edges, model.bins, model.booster

    def hazards(self, features: Any) -> Any:
        return 1.0 - self._model.hazards(features)


def test_a_first_version_is_published_once_it_misses_less_than_lru(folder: Path) -> None:
    version = ModelRepository(versions_of(folder)).version(MODEL, 1)
    trial = version.lineage.measurements
    assert trial["verdict"] == "won" and trial["against"] == 0
    assert trial["excess"] < -0.2 * trial["requested"]
    assert trial["requested"] >= 4 * CAPACITY
    assert version.lineage.window is not None and version.lineage.window.count >= 600


def test_the_same_again_changes_nothing(model: HazardModel) -> None:
    trial = VersionTrial(model, model, length_capacities=4.0)
    for record in records(200):
        trial.take("a", CAPACITY, record.ids, record.time_s)
    assert (trial.verdict, trial.excess) == ("lost", 0)


def test_a_trial_is_lost_as_soon_as_the_guard_would_step_in(model: HazardModel) -> None:
    """Long before its length is over."""
    trial = VersionTrial(cast(HazardModel, Reversed(model)), model, length_capacities=1e6)
    for record in records(2000):
        if trial.verdict is None:
            trial.take("a", CAPACITY, record.ids, record.time_s)
    excess, requested = trial.excess, trial.requested
    assert trial.verdict == "lost" and requested < 800
    assert excess >= 0.001 * requested + CAPACITY / 16


@pytest.mark.parametrize(
    "gone",
    [
        pytest.param([("one", 6400, [[0]])], id="one that was never full"),
        pytest.param([("one", 640, [[*range(640)], [10**9]])], id="one that was full"),
        pytest.param([(f"run {number}", CAPACITY, [[0]]) for number in range(20)], id="one that restarted"),
    ],
)
def test_a_trial_does_not_wait_for_engines_that_are_gone(
    model: HazardModel, gone: list[tuple[str, int, list[list[int]]]]
) -> None:
    alone, trial = (VersionTrial(model, None, length_capacities=4.0) for _ in range(2))
    for name, capacity, requests in gone:
        for ids in requests:
            trial.take(name, capacity, ids, 0.0)
    for record in records(500):
        for each in (alone, trial):
            if each.verdict is None:
                each.take("here", CAPACITY, record.ids, 1000.0 + record.time_s)
    assert alone.verdict == trial.verdict == "won"
    assert abs(trial.requested - alone.requested) <= 4  # a request has so many blocks


def test_a_trial_waits_for_all_engines_that_make_requests(model: HazardModel) -> None:
    trial = VersionTrial(model, None, length_capacities=4.0)
    for record in records(500):
        for engine in ("one", "other"):
            if trial.verdict is None:
                trial.take(engine, CAPACITY, record.ids, record.time_s)
    assert trial.verdict == "won" and trial.requested >= 4 * 2 * CAPACITY


def test_a_trial_waits_while_no_engine_is_left(model: HazardModel) -> None:
    trial = VersionTrial(model, None, length_capacities=4.0)
    assert trial.verdict is None
    for record in records(30):
        trial.take("gone", CAPACITY, record.ids, record.time_s)
    assert trial.requested > 0
    trial.forget("gone")
    assert trial.verdict is None
    for record in records(500):
        if trial.verdict is None:
            trial.take("here", CAPACITY, record.ids, 1000.0 + record.time_s)
    assert trial.verdict == "won"


def test_caches_of_engines_that_are_forgotten_are_dropped(model: HazardModel, tmp_path: Path) -> None:
    fitter = VersionFitter(tmp_path, EARLY)
    trial = fitter._trial = VersionTrial(model, None, length_capacities=4.0)
    for number in range(40):
        for record in records(1, first=number, engine=f"engine {number}"):
            fitter.take(record)
    assert trial._caches.keys() == fitter._histories.keys() and len(trial._caches) == 32


def test_a_candidate_that_is_worse_leaves_the_active_version(
    folder: Path, model: HazardModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reuse, "fit_hazards", lambda *_, **__: Reversed(model))
    fitter = fitted(folder, 1500)
    status = fitter.status()
    assert status["fits"] >= 1 and status["lost_trials"] == status["fits"] and status["adopted"] == 0
    assert fitter.version == ModelRepository(versions_of(folder)).active(MODEL) == 1


def test_a_restart_goes_on_with_what_was_published(folder: Path) -> None:
    again = VersionFitter(folder, EARLY)
    assert again.version == 1
    assert again.status()["version"] == 1


def test_a_full_disk_loses_nothing_that_was_fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> int:
        raise StorageError("disk full while writing it")

    with monkeypatch.context() as patched:
        patched.setattr(ModelRepository, "publish", full)
        fitter = fitted(tmp_path, 900)
        assert fitter.version is None and fitter.status()["waits_for_disk"]
        with pytest.raises(StorageError):
            fitter.publish_waiting()
    fitter.publish_waiting()
    assert fitter.version == 1 and not fitter.status()["waits_for_disk"]
    assert VersionFitter(tmp_path, EARLY).version == 1


def test_a_damaged_version_is_told_and_learned_again(tmp_path: Path) -> None:
    assert fitted(tmp_path, 900).version == 1
    (found,) = versions_of(tmp_path).glob("reuse/versions/00000001/files/hazards.txt")
    found.write_bytes(found.read_bytes()[:100])
    again = fitted(tmp_path, 900)
    assert again.version is not None and again.version > 1


def test_blocks_that_are_no_tree_are_counted_and_passed_over(tmp_path: Path) -> None:
    fitter = VersionFitter(tmp_path, EARLY)
    good = list(records(3))
    for record in (*good, good[0]._replace(ids=[1, 0]), *good):
        fitter.take(record)
    assert (fitter.status()["records"], fitter.status()["no_tree"]) == (7, 1)
    chance = random.Random(0)  # of an engine that names blocks without those before: reading failed
    for number in range(200):
        ids = chance.sample(range(30), chance.randint(1, 7))
        fitter.take(AccessRecord("wrong", float(number), ids, 0, 1, {}))
    assert fitter.status()["records"] == 207 and fitter.status()["no_tree"] > 100


def test_one_request_from_the_future_costs_itself_alone(tmp_path: Path) -> None:
    """All later gaps were 0, and what is trusted was measured by them, until the log had been rewritten."""
    fitter = VersionFitter(tmp_path, EARLY)
    wild = AccessRecord("wild", 1e12, [1], 0, CAPACITY, {})
    for record in (*records(30, first=1), wild, *records(30, first=31)):
        fitter.take(record)
    gaps = fitter._samples.labels(60.0).gaps_s
    assert set(gaps[~np.isnan(gaps)]) == {20.0}


def test_samples_age_by_the_clock_of_their_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine on a machine whose clock is ahead stopped the time of the others."""
    seen: list[Labels] = []
    monkeypatch.setattr(ReuseSettings, "fit", lambda self, labels, seed: seen.append(labels))
    fitter = VersionFitter(tmp_path, ReuseSettings(first_fit=120, window=110))
    for number, here in enumerate(records(60, first=1)):
        fitter.take(here)
        if number < 5:
            fitter.take(here._replace(engine="ahead", time_s=here.time_s + 500.0))
    labels = seen[0]
    assert len(labels.watched_s) == 110
    assert set(labels.gaps_s[~np.isnan(labels.gaps_s)]) == {20.0}
    assert labels.watched_s.min() >= 0.0 and 50.0 <= labels.watched_s.max() < 60.0


def test_engines_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    fitter = VersionFitter(tmp_path, EARLY)
    for number in range(50):
        for record in records(1, first=number, engine=f"engine {number}"):
            fitter.take(record._replace(figures={"evicted": 2}))
    assert (fitter.status()["engines"], fitter.status()["evicted"]) == (32, 64)


def replayed(predictor: Reuse, requests: list[list[int]], begin: int) -> Callable[[], None]:
    """Observe requests one after the other; slot i is the run of request i."""
    places = iter(range(begin, begin + len(requests)))
    rows = iter(requests)

    def one() -> None:
        place = next(places)
        ids = next(rows)
        ends = predictor.observe(ids, place, float(place))
        predictor.assign(place, len(ends) - 1)
        if place % 5 == 0 and place:
            predictor.copy(place - 1, place)

    return one


@pytest.mark.parametrize("between", [0, 1, 7])
@pytest.mark.parametrize("begin", [0, 3, 60, 100])
def test_an_offered_model_predicts_as_if_it_had_been_there_from_the_start(
    model: HazardModel, begin: int, between: int
) -> None:
    """Also where requests come while it is being prepared, and the tables grow meanwhile."""
    requests = list(hot_and_cold(begin + between + 5))
    late, always = Reuse(CAPACITY, fits=False), Reuse(CAPACITY, fits=False, model=model)
    serve, known = replayed(late, requests, 0), replayed(always, requests, 0)
    for _ in range(begin):
        serve()

    class Slow:
        edges, ends, bins, booster = model.edges, model.ends, model.bins, model.booster
        trees = None  # so nothing is looked up
        asked = 0

        def hazards(self, features: Any) -> Any:
            self.asked += 1
            found = model.hazards(features)
            for _ in range(between if self.asked == 1 else 0):
                serve()
            return found

    late.offer(cast(HazardModel, Slow()))
    assert late.model is None
    for _ in range(5):
        serve()
    for _ in requests:
        known()
    assert late.figures() == {"models_taken": 1}
    np.testing.assert_array_equal(late.scores(len(requests)), always.scores(len(requests)))


def test_an_engine_takes_the_version_and_hits(folder: Path) -> None:
    time_s = iter(range(10**9))
    cache = PrefixCache(CAPACITY, service=folder, clock=lambda: float(next(time_s)))
    until(lambda: cache.figures()["version"] == 1)
    hits = []
    for ids in hot_and_cold(600):
        match = cache.match(ids)
        cache.insert(match)
        cache.release(match)
        hits.append(match.hits)
    cache.close()
    assert sum(hits[300:]) > 0.3 * 4 * 300  # LRU: none
    assert cache.figures()["models_taken"] == 1


def test_the_guard_bounds_what_any_version_may_cost(folder: Path, model: HazardModel) -> None:
    """Versions change at random times, most of them are reversed: the bound of `gati` holds all the same."""
    chance = random.Random(0)
    predictor = Reuse(CAPACITY, fits=False)
    cache = build("gati", CAPACITY, lambda capacity, seed: predictor)
    shadow, excess, requested = ShadowLru(CAPACITY), 0, 0
    for number in range(1500):
        ids = [9] if chance.random() < 0.05 else next(hot_and_cold(1, first=chance.randrange(60)))
        if chance.random() < 0.02:
            predictor.offer(model if chance.random() < 0.3 else cast(HazardModel, Reversed(model)))
        requested += len(ids)
        excess += len(shadow.access(ids)) - cache.access(ids, float(number)).hits
        assert excess <= bound(requested, CAPACITY, 4)
    assert predictor.figures()["models_taken"] > 10


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EvictError, match="or a service, not both"):
        PrefixCache(8, predictor="oracle-ish", service=tmp_path)
    with pytest.raises(EvictError, match="leave out service"):
        PrefixCache(8, "blindoracle+lru", service=tmp_path)
