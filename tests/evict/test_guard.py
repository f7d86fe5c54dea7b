"""The guard's promise on hostile input, and that these tests would notice if it were not kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pytest

from gati.evict.plugins.books import EngineBooks
from gati.evict.policy.duels import Duels, GainsAndLosses
from gati.evict.policy.guard import Gati, bound, slack
from gati.evict.policy.registry import POLICIES, make_policy
from gati.evict.policy.shadow import ShadowLru
from gati.evict.predict.named import predictor_named
from gati.evict.predict.oracle import Oracle
from gati.evict.replays.replay import replay
from gati.evict.trace.future import next_uses
from gati.evict.trace.records import Trace
from tests.evict.naive import NaiveTree, Scripted, build, flat_trace, naive_next_use, tree_trace

pytestmark = pytest.mark.slow


def hostile_instance(seed: int, *, requests: int = 150) -> tuple[Trace, int, Callable[[int, int], float]]:
    """A random trace whose popular blocks move, a capacity, and predictions that are mostly wrong."""
    chance = random.Random(seed)
    capacity = chance.choice((2, 4, 8, 16, 24))
    if seed % 3 == 0:
        spread = chance.choice((0.5, 1.0, 1.6)) * capacity
        trace = flat_trace(
            [int(chance.expovariate(1.0 / spread)) + number // 100 for number in range(requests)]
        )
    else:
        width, deepest = chance.randint(2, 4), chance.randint(2, 8)
        rows = [[chance.randrange(width) for _ in range(chance.randint(1, deepest))] for _ in range(requests)]
        trace = tree_trace(rows)
    truth: dict[tuple[int, int], float] = {}
    following: dict[int, float] = {}
    for number in range(len(trace) - 1, -1, -1):
        for block in trace.requests[number]:
            truth[number, block] = following.get(block, 1e9)
        following.update(dict.fromkeys(trace.requests[number], float(number)))
    wrong = chance.choice((1.0, 0.7, 0.3))

    def said(number: int, block: int) -> float:
        due = truth[number, block]
        return -due if (hash((seed, number, block)) % 1000) / 1000 < wrong else due

    return trace, capacity, said


def most_excess(trace: Trace, capacity: int, said: Callable[[int, int], float]) -> float:
    """The largest X - bound over all prefixes, against a naive LRU: never above 0, as promised."""
    cache = build("gati", capacity, lambda capacity, seed: Scripted(said), flat=trace.kind == "flat")
    naive = NaiveTree(capacity)
    longest = int(trace.lengths.max())
    excess = requested = 0
    worst = -float("inf")
    for number, row in enumerate(trace.requests):
        lru, _ = naive.access(row, number, lambda leaves, block: naive.lru(leaves))
        excess += lru - cache.access(row, float(number)).hits
        requested += len(row)
        worst = max(worst, excess - bound(requested, capacity, longest))
    return worst


def test_the_bound_is_the_one_of_the_documentation() -> None:
    """0.001 n + min(k/16, 384) + k + the longest request, in blocks as dear as that one's last."""
    assert bound(0, 1_600, 30) == 100 + 1_600 + 30
    assert bound(1_000_000, 100_000, 250) == 1_000 + 384 + 100_000 + 250
    assert bound(5_000, 1_600, 31, 0.1) == pytest.approx(5 + (1.0 + 0.1 * 30) * (100 + 1_600 + 31))


@pytest.mark.parametrize("seed", range(60))
def test_the_bound_holds_on_hostile_instances(seed: int) -> None:
    assert most_excess(*hostile_instance(seed)) <= 0.0


def test_the_bound_holds_on_hundreds_of_hostile_instances() -> None:
    broken = [seed for seed in range(400) if most_excess(*hostile_instance(seed, requests=60)) > 0.0]
    assert not broken


def loop_that_lru_likes(rounds: int = 400) -> tuple[Trace, int, Callable[[int, int], float]]:
    """Blocks that come twice in a row, with predictions that throw them out in between."""
    chance = random.Random(5)
    items: list[int] = []
    for number in range(rounds):
        items += [chance.randrange(12), chance.randrange(12), 100 + number]
    trace = flat_trace(items)
    fresh = {block for block in range(trace.distinct) if trace.blocks.tolist().count(block) == 1}
    return trace, 13, lambda number, block: 0.0 if block in fresh else 1e6


class Deaf(Gati):
    """A mutation: the shadow sees nothing."""

    def _judge(self) -> None:
        self._behind = 0.0


class Stubborn(Gati):
    """A mutation: caught predictions do not narrow the choice, and the guard never steps in."""

    def _judge(self) -> None:
        self._share = 1.0


@pytest.mark.parametrize("mutation", [Deaf, Stubborn])
def test_without_the_guard_the_bound_breaks(mutation: type[Gati], monkeypatch: pytest.MonkeyPatch) -> None:
    instance = loop_that_lru_likes(1500)
    assert most_excess(*instance) <= 0.0
    monkeypatch.setitem(POLICIES, "gati", mutation)
    monkeypatch.setattr(mutation, "evict", lambda self, count, missing: follow_only(self, count))
    assert most_excess(*instance) > 0.0


def follow_only(policy: Gati, count: int) -> list[int]:
    removed: list[int] = []
    policy._take(count, policy._predicted(), removed)
    return removed


class Watched(Gati):
    """Notes how often too much depends on predictions of which one was wrong, and what is evicted then."""

    held_back = 0
    thrown_out = 0

    def evict(self, count: int, missing: list[int]) -> list[int]:
        before = self._exposed()
        if before:
            losing = self._excess > 0.001 * self._seen
            most = 0.001 * self._seen + min(self.capacity / 16, 384)
            if losing or self._duels.behind or (self._contradicted and self._beginning()):
                most = min(most, 0.005 * self._seen)
                assert self._excess + len(self._only) + self._asked > most
            else:
                assert self._excess + len(self._only) / 3 >= min(most, 0.006 * self._seen)
        removed = super().evict(count, missing)
        if before and self._following:
            Watched.held_back += 1
            Watched.thrown_out += len(self._shadow.held.intersection(removed))
        return removed


def test_where_much_depends_on_predictions_that_were_wrong_lru_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(POLICIES, "gati", Watched)
    monkeypatch.setattr(Watched, "held_back", 0)
    monkeypatch.setattr(Watched, "thrown_out", 0)
    for seed in range(20):
        most_excess(*hostile_instance(seed))
    assert Watched.held_back > 10
    assert Watched.thrown_out == 0, "what LRU evicts the shadow does not hold"


def decided(won: int, lost: int) -> Duels:
    """Duels of which predictions won and lost so many, in turns."""
    duels = Duels(10_000)
    for number in range(max(won, lost)):
        for count, returning in ((won, 0), (lost, 1)):
            if number < count:
                pair = (4 * number + 2 * returning, 4 * number + 2 * returning + 1)
                duels.add(*pair)  # LRU's choice, and the predicted one
                duels.requested([pair[returning]])
    return duels


def test_duels_say_how_far_predictions_may_be_trusted() -> None:
    verdicts = {
        (won, lost): (duels.ahead, duels.leading, duels.won)
        for won, lost in [(9, 0), (12, 0), (30, 0), (50, 0), (90, 90), (70, 30), (150, 3), (3, 150)]
        if (duels := decided(won, lost))
    }
    assert verdicts == {
        (9, 0): (False, False, False),
        (12, 0): (True, False, False),
        (30, 0): (True, False, False),
        (50, 0): (True, True, False),
        (90, 90): (False, False, False),
        (70, 30): (True, False, False),
        (150, 3): (True, True, True),
        (3, 150): (False, False, False),
    }


def test_outcomes_say_whether_predictions_pay() -> None:
    outcomes = GainsAndLosses(1000)
    assert outcomes.few and outcomes.gaining and not outcomes.paying
    outcomes.add(100, gained=30, lost=10)
    assert not outcomes.few and outcomes.gaining and outcomes.paying
    outcomes.add(100, gained=0, lost=15)
    assert not outcomes.few and outcomes.gaining and not outcomes.paying
    outcomes.add(100, gained=0, lost=15)
    assert not outcomes.few and not outcomes.gaining and not outcomes.paying
    outcomes.add(2000, gained=0, lost=0)
    assert outcomes.few


def test_predictions_that_win_their_duels_and_pay_are_not_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "gati", Watched)
    monkeypatch.setattr(Watched, "held_back", 0)
    monkeypatch.setattr(Duels, "leading", True)
    monkeypatch.setattr(GainsAndLosses, "paying", True)
    without_holding_back(monkeypatch)
    assert all(most_excess(*hostile_instance(seed)) <= 0.0 for seed in range(20))
    assert Watched.held_back == 0


def guarded(trace: Trace, capacity: int, said: Callable[[int, int], float]) -> Mapping[str, float]:
    """The guard's figures after a flat trace."""
    cache = build("gati", capacity, lambda capacity, seed: Scripted(said), flat=True)
    for number, row in enumerate(trace.requests):
        cache.access(row, float(number))
    figures: Mapping[str, float] = cache.policy.figures()["guard"]
    return figures


def test_predictions_that_keep_blocks_in_vain_are_held_back_although_they_win_their_duels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A third of the blocks that never return are said to return at once, and fill the cache."""
    chance = random.Random(11)
    items: list[int] = []
    fresh = 10_000
    for _ in range(30_000):
        fresh += 1
        items += [int(chance.paretovariate(0.9)), fresh] if chance.random() < 0.5 else [chance.randrange(900)]
    trace = flat_trace(items)
    truth = np.minimum(next_uses(trace), 1e9).tolist()  # by request, each of one block

    def said(number: int, block: int) -> float:
        return 0.0 if truth[number] == 1e9 and chance.random() < 0.33 else truth[number]

    excess = guarded(trace, 600, said)["excess"]
    monkeypatch.setattr(GainsAndLosses, "few", True)
    monkeypatch.setattr(GainsAndLosses, "paying", True)
    by_duels_alone = guarded(trace, 600, said)["excess"]
    assert excess < by_duels_alone - 0.01 * len(trace)


def lost_to_laru(trace: Trace, capacity: int) -> int:
    """Hits that the guard costs where predictions are exact."""
    lost = 0
    laru, gati = (
        build(name, capacity, lambda capacity, seed: Oracle(trace), flat=trace.kind == "flat")
        for name in ("laru", "gati")
    )
    for number, row in enumerate(trace.requests):
        lost += laru.access(row, float(number)).hits - gati.access(row, float(number)).hits
    return lost


def test_exact_predictions_are_never_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    passing = flat_trace([*range(32), *range(100, 132), *range(32)])  # LRU keeps what never returns
    assert lost_to_laru(passing, 32) == 0
    for seed in range(30):
        chance = random.Random(seed)
        flat = flat_trace([int(chance.expovariate(0.15)) for _ in range(80)])
        rows = [[chance.randrange(3) for _ in range(chance.randint(1, 7))] for _ in range(60)]
        assert lost_to_laru(flat, chance.randint(1, 6)) == 0
        assert lost_to_laru(tree_trace(rows), chance.randint(1, 12)) == 0
    monkeypatch.setattr(Gati, "_was_wrong", lambda self, ids: True)
    assert lost_to_laru(passing, 32) > 5


@pytest.fixture
def gullible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Duels that always say that predictions are better, so that they are tried as often as there is room."""
    for verdict in ("won", "leading", "ahead"):
        monkeypatch.setattr(Duels, verdict, True)
    for verdict in ("paying", "gaining"):
        monkeypatch.setattr(GainsAndLosses, verdict, True)


@pytest.mark.parametrize("seed", range(40))
def test_the_bound_holds_however_often_predictions_are_tried_again(seed: int, gullible: None) -> None:
    assert most_excess(*hostile_instance(seed)) <= 0.0


def test_the_bound_holds_on_hundreds_of_hostile_instances_that_are_tried_again(gullible: None) -> None:
    broken = [seed for seed in range(400) if most_excess(*hostile_instance(seed, requests=60)) > 0.0]
    assert not broken


class Careless(Gati):
    """A mutation: trials go on whatever they cost."""

    def _room(self) -> bool:
        return True


def test_trials_without_limits_break_the_bound(gullible: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gati, "_exposed", lambda self: False)  # which would contain them
    instance = loop_that_lru_likes(1500)
    assert most_excess(*instance) <= 0.0
    monkeypatch.setitem(POLICIES, "gati", Careless)
    assert most_excess(*instance) > 0.0


def served(instance: tuple[Trace, int, Callable[[int, int], float]]) -> Iterator[Gati]:
    """The policy after each request of a flat trace."""
    trace, capacity, said = instance
    cache = build("gati", capacity, lambda capacity, seed: Scripted(said), flat=True)
    assert isinstance(cache.policy, Gati)
    for number, row in enumerate(trace.requests):
        cache.access(row, float(number))
        yield cache.policy


def test_after_an_alarm_lru_decides_until_the_excess_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    without_holding_back(monkeypatch)
    followed, waited, returned = True, 0, 0
    for policy in served(loop_that_lru_likes(1500)):
        assert policy.figures()["guard"]["trials"] == 0
        if policy.following and not followed:
            returned += 1
            assert policy.excess <= policy.figures()["guard"]["allowance"]
        waited += not policy.following
        followed = policy.following
    assert waited > 100 and returned > 0


def test_a_trial_ends_when_it_has_cost_its_share(gullible: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gati, "_exposed", lambda self: False)
    tried = began = 0
    trace, capacity, said = loop_that_lru_likes(1500)
    for policy in served((trace, capacity, said)):
        figures = policy.figures()["guard"]
        if figures["trials"] > tried:
            tried, began = figures["trials"], policy.excess
        elif policy._limit is not None:
            assert policy.excess < began + slack(capacity) / 4
    assert tried > 3


@pytest.mark.parametrize("seed", range(30))
def test_what_only_the_shadow_holds_is_counted(seed: int) -> None:
    trace, capacity, said = hostile_instance(seed)
    cache = build("gati", capacity, lambda capacity, seed: Scripted(said), flat=trace.kind == "flat")
    policy = cache.policy
    assert isinstance(policy, Gati)
    for number, row in enumerate(trace.requests):
        cache.access(row, float(number))
        ours = {block for run in cache.tree for block in run.ids}
        assert set(policy._only) == policy._shadow.held - ours
        assert policy._shadow.held == {block for run in policy._shadow._tree for block in run.ids}


def without_holding_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the beginning nor lost duels limit predictions: only what they cost does."""
    monkeypatch.setattr(Gati, "_beginning", lambda self: False)
    monkeypatch.setattr(Duels, "behind", False)


@pytest.mark.parametrize("holds_back", [True, False])
def test_predictions_that_have_become_good_are_followed_again(
    monkeypatch: pytest.MonkeyPatch, holds_back: bool
) -> None:
    """Wrong at first, right from then on: held back meanwhile, or else tried again after an alarm."""
    if not holds_back:
        monkeypatch.setattr(Gati, "_exposed", lambda self: False)
    chance = random.Random(3)
    items: list[int] = []
    for number in range(6000):
        items.append(chance.randrange(48) if number % 2 else 1000 + number % 160)
    trace = flat_trace(items)
    truth = np.minimum(next_uses(trace), 1e9).tolist()

    def said(number: int, block: int) -> float:
        return -truth[number] if number < 2000 else truth[number]

    cache = build("gati", 64, lambda capacity, seed: Scripted(said), flat=True)
    lru = build("lru", 64, None, flat=True)
    late = [0, 0]
    for number, row in enumerate(trace.requests):
        for place, each in enumerate((cache, lru)):
            hits = each.access(row, float(number)).hits
            late[place] += hits if number >= 3000 else 0
    assert late[0] > 1.2 * late[1]
    figures = cache.policy.figures()["guard"]
    assert holds_back or (figures["alarms"] >= 1 and figures["trials"] >= 1)
    assert isinstance(cache.policy, Gati)
    assert figures["excess"] <= figures["allowance"] and cache.policy._limit is None, "no trial any more"


@pytest.mark.parametrize("seed", range(20))
def test_the_shadow_is_lru(seed: int) -> None:
    trace, capacity, _ = hostile_instance(seed)
    shadow, naive = ShadowLru(capacity, flat=trace.kind == "flat"), NaiveTree(capacity)
    for number, row in enumerate(trace.requests):
        hits, _ = naive.access(row, number, lambda leaves, block: naive.lru(leaves))
        assert len(shadow.access(row[:capacity])) == hits


@pytest.mark.parametrize("holds_back", [True, False])
def test_inverted_predictions_make_the_guard_step_in_and_it_says_so(
    monkeypatch: pytest.MonkeyPatch, holds_back: bool
) -> None:
    """An alarm, unless it held them back before they cost that much."""
    if not holds_back:
        without_holding_back(monkeypatch)
    trace, capacity, said = loop_that_lru_likes(1500)
    figures = guarded(trace, capacity, said)
    if holds_back:
        assert figures["alarms"] == 0 and figures["excess"] <= 0.005 * len(trace.requests)
    else:
        assert figures["alarms"] >= 1 and figures["share_learned"] < 1.0
    assert naive_next_use(trace, 0, 0) > 0.0


def visits(requests: int, seed: int) -> Trace:
    """Items of many short visits that take turns: most are seen once, others are popular, as in a shop."""
    chance = random.Random(seed)
    popular = [int(2_000 * chance.random() ** 3) for _ in range(requests)]
    return flat_trace(
        [item if chance.random() < 0.5 else 2_000 + number for number, item in enumerate(popular)]
    )


@pytest.mark.parametrize("predictor", ["noise:1", "noise:0.5"])
@pytest.mark.parametrize("size", [100, 300, 1000])
def test_wrong_predictions_cost_less_than_half_a_point_on_short_traces(predictor: str, size: int) -> None:
    """Where the allowance for long traces, a sixteenth of the cache, would be more than half a point."""
    for seed in range(3):
        trace = visits(5_000, seed)
        lru, gati = replay(trace, [size], ["lru", "gati"], predictor=predictor).outcomes
        assert gati.hit_rate > lru.hit_rate - 0.005


@pytest.mark.parametrize("predictor", ["noise:1", "noise:0.7"])
def test_wrong_predictions_cost_at_most_half_a_point_or_three_blocks_after_any_request(
    predictor: str,
) -> None:
    for seed in range(4):
        trace = visits(2_000, seed)
        maker = predictor_named(predictor, trace, flat=True)
        cache = build("gati", 300, maker, flat=True, seed=seed)
        policy = cache.policy
        assert isinstance(policy, Gati)
        for number, row in enumerate(trace.requests):
            cache.access(row, float(number))
            assert policy.excess <= max(0.005 * (number + 1), 3.0)


@pytest.mark.parametrize("seed", range(60))
def test_at_the_beginning_misses_after_the_first_wrong_prediction_are_bounded(seed: int) -> None:
    """By half a point, or by what X + D was then."""
    trace, capacity, said = hostile_instance(seed)
    capacity = 4 * capacity  # so that more requests count as the beginning
    cache = build("gati", capacity, lambda capacity, seed: Scripted(said), flat=trace.kind == "flat")
    policy = cache.policy
    assert isinstance(policy, Gati)
    at_stake: float | None = None
    for number, row in enumerate(trace.requests):
        before = policy.excess + len(policy._only)
        known = policy._contradicted
        cache.access(row, float(number))
        if policy._seen >= 4 * capacity:
            return
        if policy._contradicted and not known:
            at_stake = before
        if at_stake is not None:
            assert policy.excess + len(policy._only) <= max(0.005 * policy._seen, at_stake)


def test_predictions_are_tested_before_anything_is_evicted() -> None:
    items = [0, 1, 2, 3, 1, 4, 0]
    trace = flat_trace(items)
    for exact in (True, False):

        def said(number: int, block: int, exact: bool = exact) -> float:
            due = min(naive_next_use(trace, number, block), 1e9)
            return due if exact else -due

        cache = build("gati", 5, lambda capacity, seed, said=said: Scripted(said), flat=True)
        assert isinstance(cache.policy, Gati)
        for number, row in enumerate(trace.requests):
            assert not cache.access(row, float(number)).evicted
            assert cache.policy._contradicted is (not exact and number >= 4)


def test_exact_predictions_are_never_found_wrong() -> None:
    for seed in range(30):
        chance = random.Random(seed)
        rows = [[chance.randrange(3) for _ in range(chance.randint(1, 7))] for _ in range(60)]
        for trace in (flat_trace([int(chance.expovariate(0.15)) for _ in range(80)]), tree_trace(rows)):
            capacity = chance.randint(7, 12)
            cache = build(
                "gati",
                capacity,
                lambda capacity, seed, trace=trace: Oracle(trace),
                flat=trace.kind == "flat",
            )
            assert isinstance(cache.policy, Gati)
            for number, row in enumerate(trace.requests):
                cache.access(row, float(number))
            assert not cache.policy._contradicted


def test_what_exact_predictions_gain_false_ones_may_lose_on_a_short_trace() -> None:
    """The example of `docs/eviction.md`: up to request 2 k, nothing tells the two traces apart."""
    size = 20
    old, new = list(range(size)), list(range(size, 2 * size))
    returns = flat_trace([*old, *new, *old])
    others = flat_trace([*old, *new, *new])
    truth = {
        (number, block): min(naive_next_use(returns, number, block), 1e9)
        for number, block in enumerate(returns.blocks.tolist())
    }

    def hits(name: str, trace: Trace) -> int:
        cache = build(
            name,
            size,
            lambda capacity, seed: Scripted(lambda number, block: truth.get((number, block), 1e9)),
            flat=True,
        )
        return sum(cache.access(row, float(number)).hits for number, row in enumerate(trace.requests))

    assert hits("gati", returns) == hits("fpb", returns) == size - 1
    assert hits("lru", returns) == 0
    assert hits("lru", others) == size
    assert hits("gati", others) == 1


@pytest.mark.parametrize("flat", [False, True])
def test_what_the_engine_drops_on_its_own_is_no_mistake_of_predictions(flat: bool) -> None:
    """A cancelled request's blocks were never computed: LRU would not have them, either."""
    shadow = ShadowLru(100, flat=flat)
    ids = list(range(20))
    shadow.access(ids)
    shadow.forget([15, 16, 17, 18, 19] if not flat else [3, 15])
    expected = ids[:15] if not flat else [each for each in ids if each not in (3, 15)]
    assert shadow.access(ids) == expected
    assert shadow.access(ids) == ids, "they are stored again"
    shadow.forget(ids)
    shadow.access(list(range(100, 200)))  # evicts them
    assert shadow.access(ids) == []


def test_the_shadow_stores_what_a_request_goes_on_with() -> None:
    """As LRU would store generated blocks: else their next hits by LRU would not count."""
    books = EngineBooks(make_policy("gati", 4, lambda capacity, seed: Scripted(lambda number, block: 1.0)))
    policy = books.policy
    assert isinstance(policy, Gati)
    books.begin([1, 2], 0.0)
    books.stored([1, 2])
    books.resume([1, 2, 3, 4], 1.0)
    books.stored([3, 4])
    books.finish()
    assert policy._shadow.held == {1, 2, 3, 4}
    assert books.begin([1, 2, 3, 4], 2.0) == 4 and policy.excess == 0
