"""Compositions as paths through the candidates, and a bound that excludes useless joints.

A joint is a pair of consecutive nodes on a path. Node 0 is the start of a request, node c + 1 is candidate c,
and the last node is the end. Limits on disagreement, memory and slowdown are priced (Lagrangian relaxation).
The cheapest path through a joint under these prices is a lower bound on every composition that uses the
joint. A joint whose bound exceeds a composition already found cannot be part of a better one (Handler and
Zang 1980, constrained shortest paths).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gati.composition.problem import BYTES_PER_UNIT, SLACK_MS, Problem

Floats = NDArray[np.float64]
ROUNDS = 80
SAFETY = 1e-6  # solvers may violate limits by this much; joints of such compositions are kept


@dataclass(frozen=True)
class Joints:
    """Every pair of nodes as matrices [nodes, nodes]; `cost_ms` is infinite if they cannot be consecutive.

    `disagreement` is a share of the tolerated one (limit 1), `memory` is in KiB, costs are relative to no
    caches.
    """

    cost_ms: Floats
    disagreement: Floats
    memory: Floats
    memory_limit: float
    slowdown_ms: Floats
    slowdown_limit_ms: float
    order: NDArray[np.int64]  # nodes in forward order, start first, end last

    @property
    def limited(self) -> tuple[Floats, Floats, Floats]:
        """The limited quantities: disagreement, memory, slowdown."""
        return self.disagreement, self.memory, self.slowdown_ms

    @property
    def start(self) -> int:
        """The node at which every request starts."""
        return 0

    @property
    def end(self) -> int:
        """The node at which every request ends."""
        return len(self.cost_ms) - 1


def joints_of(problem: Problem) -> Joints:
    """Return which candidates may follow each other, and the cost of each such pair."""
    candidates = problem.candidates
    nodes = len(candidates) + 2
    block = np.array([-1, *(c.block_index for c in candidates), len(problem.reach_ms)])
    hits = np.array([0.0, *(c.hit_rate for c in candidates), 0.0])
    lookup = np.array([0.0, *(c.lookup_ms for c in candidates), 0.0])
    exit_ms = np.array([0.0, *(problem.reach_ms[c.block_index] + c.lookup_ms for c in candidates), 0.0])
    wrong = np.array([0.0, *(1.0 - c.accuracy for c in candidates), 0.0]) / (1.0 - problem.accuracy)
    missed_ms = np.array([0.0, *(c.penalty_ms * (1.0 - c.hit_rate) for c in candidates), 0.0])
    memory = np.array([0.0, *(c.memory_bytes / BYTES_PER_UNIT for c in candidates), 0.0])
    slowdown_ms = np.array([0.0, *(c.penalty_ms for c in candidates), 0.0])

    new = hits[None, :] - hits[:, None]  # EH of the later one
    allowed = (block[None, :] > block[:, None]) & (new > 0.0)
    if problem.one_lookup_at_a_time:
        reach = np.array([0.0, *(problem.reach_ms[c.block_index] for c in candidates), 0.0])
        allowed[1:-1, 1:-1] &= (lookup[:, None] <= reach[None, :] - reach[:, None] + SLACK_MS)[1:-1, 1:-1]
    new[:, -1] = 0.0  # an input that runs to the end costs base_ms, as without caches
    allowed[:-1, -1] = True
    cost = new * (exit_ms - problem.base_ms)[None, :] + missed_ms[None, :]
    limit, slowest_ms = problem.memory_limit_bytes, problem.slowdown_limit_ms
    return Joints(
        cost_ms=np.where(allowed, cost, np.inf),
        disagreement=new * wrong[None, :],
        memory=np.broadcast_to(memory, (nodes, nodes)),
        memory_limit=float(memory.sum()) if limit is None else limit / BYTES_PER_UNIT,
        slowdown_ms=np.broadcast_to(slowdown_ms, (nodes, nodes)),
        slowdown_limit_ms=float(slowdown_ms.sum()) if slowest_ms is None else slowest_ms,
        order=np.argsort(block, kind="stable"),
    )


def useful_joints(joints: Joints) -> list[tuple[int, int]]:
    """Return the joints (earlier, later) that a best composition may use, and at least all of one such."""
    useful = np.isfinite(joints.cost_ms)
    best_found = 0.0  # no caches
    highest_bound = -np.inf
    limited = joints.limited
    prices = np.zeros(len(limited))
    limits = np.array([1.0, joints.memory_limit, joints.slowdown_limit_ms])
    for turn in range(ROUNDS):
        priced = joints.cost_ms + sum(price * matrix for price, matrix in zip(prices, limited, strict=True))
        there, back = _cheapest(priced, joints, forward=True), _cheapest(priced, joints, forward=False)
        bound = there.total[:, None] + priced + back.total[None, :] - prices @ limits
        cost, *used = (
            there.sums[:, kind, None] + matrix + back.sums[None, :, kind]
            for kind, matrix in enumerate((joints.cost_ms, *limited))
        )
        fits = np.all([sums <= limit + 1e-12 for sums, limit in zip(used, limits, strict=True)], axis=0)
        best_found = min(best_found, float(np.where(fits, cost, np.inf).min()))
        useful &= bound <= best_found + SAFETY * (1.0 + float(prices @ limits))
        highest_bound = max(highest_bound, float(bound.min()))
        if best_found - highest_bound <= SAFETY:
            break
        excess = there.sums[joints.end, 1:] - limits
        prices = _next_prices(prices, excess, limits, best_found - float(bound.min()), turn)
    return [(int(earlier), int(later)) for earlier, later in np.argwhere(useful)]


@dataclass(frozen=True)
class _Tree:
    """The cheapest priced path from the start to each node (or from each node to the end)."""

    total: Floats  # [nodes] priced
    sums: Floats  # [nodes, 4] cost, disagreement, memory, slowdown along that path


def _cheapest(priced: Floats, joints: Joints, *, forward: bool) -> _Tree:
    kinds = [joints.cost_ms, *joints.limited]
    if not forward:
        priced, kinds = priced.T, [matrix.T for matrix in kinds]
    nodes = len(priced)
    total, sums = np.full(nodes, np.inf), np.zeros((nodes, len(kinds)))
    first, *others = joints.order if forward else joints.order[::-1]
    total[first] = 0.0
    for node in others:
        through = total + priced[:, node]
        via = int(through.argmin())
        total[node] = through[via]
        if np.isfinite(total[node]):
            sums[node] = sums[via] + [matrix[via, node] for matrix in kinds]
    return _Tree(total, sums)


def _next_prices(prices: Floats, excess: Floats, limits: Floats, missing: float, turn: int) -> Floats:
    # Polyak's step on constraints scaled to a limit of one
    scaled = excess / np.maximum(limits, 1e-12)
    scaled = np.where((prices <= 0.0) & (scaled < 0.0), 0.0, scaled)
    norm = float(scaled @ scaled)
    if norm == 0.0:
        return prices
    step = missing / norm / (1.0 + turn / 10.0)
    return np.maximum(0.0, prices + step * scaled / np.maximum(limits, 1e-12))
