"""Local search over exact compositions: one pass evaluates every trial with every threshold at every block.

A move sets one block to any (trial, cut) or to none; all others stay. The exits before the block determine
which inputs reach it, and those after it determine the cost of continuing. The effect of all cuts of a trial
is then one cumulative sum over the inputs in order of descending score, so all moves of all blocks together
take a few milliseconds.

Disagreements are first priced (each costs `price_ms`), which distributes them among the exits, and then
limited by a hard budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from gati.composition.instance import Bools, Chosen, Floats, Instance
from gati.composition.problem import SLACK_MS
from gati.priority import let_requests_pass

PRICES = 16
_STARTS = 3  # compositions that are improved within a budget
SHARED_LIMIT = (1, 2, 3)  # number of exits among which the slowdown limit is divided
TIGHTER = (1, 2, 4, 8)  # disagreements a tightened exit gives up for others to use
EPSILON = 1e-9
ROUNDING = 1e-6  # of sums of losses


@dataclass(frozen=True)
class Moves:
    """For every trial and cut, the whole composition's outcome if that were the exit at its block."""

    latency_ms: Floats  # [m, n] summed over inputs; infinite where not allowed
    disagreements: Floats  # [m, n]
    without_ms: Floats  # [m] the outcome with no exit at the trial's block
    without_disagreements: Floats  # [m]


class Searcher:
    """Arrays that every pass over one instance needs, and its preallocated buffers.

    Otherwise a pass would allocate ten arrays of trials x inputs, which takes longer than the arithmetic.
    """

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.loss_in_order = np.take_along_axis(instance.loss, instance.order, axis=1)
        self.exit_ms = instance.reach_ms + instance.lookup_ms
        self.must_not_cut = ~instance.may_cut
        shape = instance.order.shape
        self._flat = np.empty(shape, dtype=np.int64)
        self._hit, self._latency, self._wrong = (np.empty(shape) for _ in range(3))
        # latency in the real part, disagreements in the imaginary: one cumulative sum for both costs no more
        self._terms, self._sums = (np.empty(shape, dtype=np.complex128) for _ in range(2))

    def moves(self, chosen: Chosen) -> Moves:
        """Return the outcome of every move from `chosen`; its arrays are valid until the next call."""
        instance = self.instance
        inside, left_ms, left_wrong, paid_ms = self._before(chosen)
        onward_ms, onward_wrong = self._after(chosen)
        blocks = instance.block[[trial for trial, _ in chosen]] if chosen else np.empty(0, dtype=np.int64)
        before = np.searchsorted(blocks, instance.block, side="left")  # exits before the trial's block
        after = np.searchsorted(blocks, instance.block, side="right")

        # One row for each way the chosen exits can lie around a block.
        ways, way = np.unique(before * (len(chosen) + 1) + after, return_inverse=True)
        way_before, way_after = np.divmod(ways, len(chosen) + 1)
        reached = inside[way_before]
        go_on_ms = np.where(reached, onward_ms[way_after] + paid_ms[way_before, None], 0.0)
        go_on_wrong = np.where(reached, onward_wrong[way_after], 0.0)
        without_ms = left_ms[way_before] + go_on_ms.sum(axis=1)
        without_wrong = left_wrong[way_before] + go_on_wrong.sum(axis=1)

        np.add(instance.order, (way * instance.inputs)[:, None], out=self._flat)
        np.take(reached.astype(np.float64), self._flat, out=self._hit, mode="clip")
        np.take(go_on_ms + 1j * go_on_wrong, self._flat, out=self._terms, mode="clip")
        # for each hit, replace the cost of continuing by that of leaving
        hit_ms = self.exit_ms - instance.penalty_ms + paid_ms[before]
        np.subtract(self._hit * hit_ms[:, None], self._terms.real, out=self._terms.real)
        np.subtract(self._hit * self.loss_in_order, self._terms.imag, out=self._terms.imag)
        np.cumsum(self._terms, axis=1, out=self._sums)
        going_on_ms = without_ms[way] + instance.penalty_ms * reached.sum(axis=1)[way]
        latency, wrong = self._latency, self._wrong
        np.add(self._sums.real, going_on_ms[:, None], out=latency)
        np.add(self._sums.imag, without_wrong[way][:, None], out=wrong)
        latency[~self._fits(chosen)] = np.inf
        np.copyto(latency, np.inf, where=self.must_not_cut)
        return Moves(latency, wrong, without_ms[way], without_wrong[way])

    def _before(self, chosen: Chosen) -> tuple[Bools, Floats, Floats, Floats]:
        # after k exits: which inputs are inside, and the cost so far of inputs that left and of misses
        instance = self.instance
        inside = np.ones((len(chosen) + 1, instance.inputs), dtype=bool)
        left_ms, left_wrong, paid_ms = (np.zeros(len(chosen) + 1) for _ in range(3))
        for k, (trial, cut) in enumerate(chosen):
            leaving = inside[k] & instance.hits(trial, cut)
            inside[k + 1] = inside[k] & ~leaving
            left_ms[k + 1] = left_ms[k] + leaving.sum() * (self.exit_ms[trial] + paid_ms[k])
            left_wrong[k + 1] = left_wrong[k] + instance.loss[trial, leaving].sum()
            paid_ms[k + 1] = paid_ms[k] + instance.penalty_ms[trial]
        return inside, left_ms, left_wrong, paid_ms

    def _after(self, chosen: Chosen) -> tuple[Floats, Floats]:
        # cost of continuing for each input that has passed k exits
        instance = self.instance
        onward_ms = np.full((len(chosen) + 1, instance.inputs), instance.base_ms)
        onward_wrong = np.zeros((len(chosen) + 1, instance.inputs))
        for k in reversed(range(len(chosen))):
            trial, cut = chosen[k]
            hit = instance.hits(trial, cut)
            missed_ms = onward_ms[k + 1] + instance.penalty_ms[trial]
            onward_ms[k] = np.where(hit, self.exit_ms[trial], missed_ms)
            onward_wrong[k] = np.where(hit, instance.loss[trial], onward_wrong[k + 1])
        return onward_ms, onward_wrong

    def _fits(self, chosen: Chosen) -> Bools:
        # trials that satisfy the limits if they replace the exit at their block
        instance = self.instance
        fits = np.ones(instance.trials, dtype=bool)
        if instance.memory_limit_bytes is not None:
            used = np.zeros(instance.trials, dtype=np.int64)
            for trial, _ in chosen:
                used += np.where(instance.block == instance.block[trial], 0, instance.memory_bytes[trial])
            fits &= used + instance.memory_bytes <= instance.memory_limit_bytes
        if instance.slowdown_limit_ms is not None:
            paid = np.zeros(instance.trials)
            for trial, _ in chosen:
                paid += np.where(instance.block == instance.block[trial], 0.0, instance.penalty_ms[trial])
            fits &= paid + instance.penalty_ms <= instance.slowdown_limit_ms + SLACK_MS
        if instance.one_lookup_at_a_time:
            for trial, _ in chosen:
                after_ms = instance.reach_ms - instance.reach_ms[trial]
                fits &= (instance.block <= instance.block[trial]) | (
                    instance.lookup_ms[trial] <= after_ms + SLACK_MS
                )
                fits &= (instance.block >= instance.block[trial]) | (
                    instance.lookup_ms <= SLACK_MS - after_ms
                )
        return fits


Cost = Callable[[Floats, Floats], Floats]  # of summed latencies and disagreements, element by element


def improve_priced(searcher: Searcher, chosen: Chosen, price_ms: float) -> Chosen:
    """Return a composition that neither a move, nor dropping an exit and then a move, makes cheaper.

    The cost is latency plus `price_ms` for each disagreement, both summed over the inputs.
    """

    def cost(latency_ms: Floats, disagreements: Floats) -> Floats:
        return latency_ms + price_ms * disagreements

    return _descend(searcher, chosen, cost, tighten=False)


def improve_within(searcher: Searcher, chosen: Chosen, budget: float, *, thorough: bool = True) -> Chosen:
    """Return a composition of at most `budget` disagreements that no move makes faster.

    `chosen` must be within the budget. `thorough` also tightens one exit so that others can be loosened.
    """

    def cost(latency_ms: Floats, disagreements: Floats) -> Floats:
        return np.where(disagreements <= budget + ROUNDING, latency_ms, np.inf)

    return _descend(searcher, chosen, cost, tighten=thorough)


def improve_own(instance: Instance, chosen: Chosen, budget: float, *, only_loosen: bool = False) -> Chosen:
    """As `improve_within` with these exits alone, some of which may go; `only_loosen`: none gets stricter."""
    trials = [trial for trial, _ in chosen]
    own = instance.only(trials)  # a pass over all trials would take much longer
    for row, (_, cut) in enumerate(chosen if only_loosen else ()):
        own.may_cut[row, : cut - 1] = False
    at = tuple((row, cut) for row, (_, cut) in enumerate(chosen))
    return tuple((trials[row], cut) for row, cut in improve_within(Searcher(own), at, budget, thorough=False))


def _least(moves: Moves, cost: Cost) -> tuple[float, int, int]:
    """Return (cost, trial, cut) of the best move; cut 0 removes the exit at the trial's block."""
    costs = cost(moves.latency_ms, moves.disagreements)
    without = cost(moves.without_ms, moves.without_disagreements)
    trial, position = divmod(int(costs.argmin()), costs.shape[1])
    if without.min() <= costs[trial, position]:
        trial = int(without.argmin())
        return float(without[trial]), trial, 0
    return float(costs[trial, position]), trial, position + 1


def _descend(searcher: Searcher, chosen: Chosen, cost: Cost, *, tighten: bool) -> Chosen:
    instance = searcher.instance
    if instance.trials == 0:  # no lookup can pay off, so there are no moves
        return chosen
    outcome = instance.outcome(chosen)
    best = float(cost(np.array(outcome.mean_latency_ms * instance.inputs), np.array(outcome.disagreements)))
    while True:
        for start in _starts(instance, chosen, tighten):
            let_requests_pass()
            least, trial, cut = _least(searcher.moves(start), cost)
            if least < best - EPSILON * max(1.0, abs(best)):
                chosen, best = _apply(instance, start, trial, cut), least
                break
        else:
            return chosen


def _starts(instance: Instance, chosen: Chosen, tighten: bool) -> list[Chosen]:
    """Return `chosen` itself, then with one exit dropped, then with one exit tightened."""
    starts = [chosen]
    for k, (trial, cut) in enumerate(chosen):
        starts.append(chosen[:k] + chosen[k + 1 :])
        if tighten:
            wrong = np.flatnonzero(instance.wrong[trial, instance.order[trial, :cut]])
            for fewer in TIGHTER:
                if fewer <= len(wrong):
                    cuts = np.flatnonzero(instance.may_cut[trial, : wrong[-fewer]])
                    if len(cuts):
                        starts.append((*chosen[:k], (trial, int(cuts[-1]) + 1), *chosen[k + 1 :]))
    return starts


def _apply(instance: Instance, chosen: Chosen, trial: int, cut: int) -> Chosen:
    others = [pair for pair in chosen if instance.block[pair[0]] != instance.block[trial]]
    if cut:
        others.append((trial, cut))
    return tuple(sorted(others))  # trials are numbered in forward order


class Frontier:
    """Compositions found by pricing, from which the best one within any budget is searched."""

    def __init__(self, instance: Instance) -> None:
        self.searcher = Searcher(instance)
        self.found: set[Chosen] = {()}
        self._outcome = cache(instance.outcome)

    def within(self, budget: float, *, thorough: bool = True) -> Chosen:
        """Return the fastest composition of at most `budget` disagreements that the search finds."""
        instance = self.searcher.instance
        if not instance.trials:
            return ()
        ranked = sorted(
            (outcome.mean_latency_ms, chosen)
            for chosen in self.found
            if (outcome := self._outcome(chosen)).disagreements <= budget + ROUNDING
        )
        improved = [
            improve_within(self.searcher, chosen, budget, thorough=thorough) for _, chosen in ranked[:_STARTS]
        ]
        self.found.update(improved)
        return min(improved, key=lambda chosen: (self._outcome(chosen).mean_latency_ms, chosen))


def search_frontier(instance: Instance) -> Frontier:
    """Search with decreasing prices of a disagreement, each starting from the previous result.

    If slowdown is limited, search again among cheaper lookups only: one expensive lookup can use up the whole
    limit, and no single move leads from there to two cheap ones.
    """
    frontier, searched = Frontier(instance), -1
    limit_ms = np.inf if instance.slowdown_limit_ms is None else instance.slowdown_limit_ms
    for share in SHARED_LIMIT:
        affordable = instance.penalty_ms <= limit_ms / share + SLACK_MS
        if (count := int(affordable.sum())) != searched:  # else the same lookups as before
            searched = count
            may_cut = instance.may_cut & affordable[:, None]
            frontier.found |= _priced(replace(instance, may_cut=may_cut))
    return frontier


def _priced(instance: Instance) -> set[Chosen]:
    if not instance.may_cut.any():
        return set()
    searcher = Searcher(instance)
    # from "wrong only if it frees every input" to "wrong costs half a request"
    highest, lowest = instance.base_ms * instance.inputs, instance.base_ms / 2.0
    chosen: Chosen = ()
    found = set()
    for price_ms in np.geomspace(highest, lowest, PRICES):
        chosen = improve_priced(searcher, chosen, float(price_ms))
        found.add(chosen)
    return found
