"""LARU within hashed sets, vectorised over batches, with and without the guard.

Each set is a separate cache with the phases of `gati.evict.policy.predicting.Laru`: a batch with which
more than k different ids would have been requested of the set in a phase begins a new one; an id that was
evicted by prediction and is requested in the same phase is caught, LRU's choice makes room for it, and the
part of LRU's queue that predictions may choose from is halved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gati.evict.embed.replacing import Competing, EvictionLimits, RequestedRows, RowPolicy
from gati.evict.embed.returns import RowReturns
from gati.evict.embed.sets import WAYS, RowSets, by_home, hashed, ranks
from gati.evict.embed.tiers import Ids
from gati.evict.policy.guard import EXCESS_SHARE, slack

_SHADOWED = 4  # maximum number of sets that the guard watches


class _PhaseStep(NamedTuple):
    """What a batch changes in the phases of all sets, [sets]."""

    over: NDArray[np.bool_]  # whether a new phase begins
    begin: int  # ids requested before it
    requested: Ids
    share: NDArray[np.float64]
    safe: Ids  # predictions caught


class LaruRows(RowPolicy):
    """LARU within each set."""

    name: ClassVar[str] = "laru"

    def __init__(self, sets: RowSets, returns: RowReturns) -> None:
        super().__init__(sets)
        self._returns = returns
        self._cells = np.zeros(len(sets.ids), dtype=np.int16)  # by slot
        self._used_at = np.zeros(len(sets.ids))
        self._by_slot = (sets.recency, self._cells, self._used_at)
        self._now = 0.0
        self._share = np.ones(sets.sets)  # lambda
        self._requested = np.zeros(sets.sets, dtype=np.int64)  # |D|
        self._phase_began = np.zeros(sets.sets, dtype=np.int64)
        self._evicted = np.full((sets.sets, WAYS), -1, dtype=np.int64)  # E
        self._evicted_count = np.zeros(sets.sets, dtype=np.int64)
        self._evicted_tags = np.zeros((sets.sets, 256), dtype=np.bool_)  # those of E: detects most others
        self._phases = self._caught = 0

    def observe(self, batch: RequestedRows) -> RequestedRows:
        """Have the predictor see it."""
        self._now = float(batch.end)
        return replace(batch, cells=self._returns.observe(batch))

    def limits(self, batch: RequestedRows, slots: Ids) -> tuple[EvictionLimits, Callable[[], None]]:
        """Begin phases, and count caught predictions."""
        step = self._step(batch, slots)
        return EvictionLimits(step.safe, self._windows(step.share)), partial(self._record, step)

    def _step(self, batch: RequestedRows, slots: Ids) -> _PhaseStep:
        homes, sets = batch.places.homes, self.sets
        caught = self._evicted_in_this_phase(batch, slots)
        known = sets.recency.take(slots) >= self._phase_began.take(homes)  # where there are slots
        known &= slots >= 0
        known |= caught
        requested = self._requested + np.bincount(homes[~known], minlength=sets.sets)
        over = requested > sets.room
        requested = np.where(over, np.bincount(homes, minlength=sets.sets), requested)
        safe = np.bincount(homes[caught & ~over[homes]], minlength=sets.sets)
        share = np.where(over, 1.0, self._share) * 0.5 ** np.minimum(safe, 64)
        return _PhaseStep(over, batch.begin, requested, share, safe)

    def _record(self, step: _PhaseStep) -> None:
        over = step.over
        self._requested, self._share = step.requested, step.share
        self._phase_began[over] = step.begin
        self._evicted[over], self._evicted_count[over], self._evicted_tags[over] = -1, 0, False
        self._phases += int(np.count_nonzero(over))
        self._caught += int(step.safe.sum())

    def windows(self) -> Ids:
        """The share of LRU's queue that predictions may choose from."""
        return self._windows(self._share)

    def _windows(self, share: NDArray[np.float64]) -> Ids:
        return np.maximum((share * self.sets.room).astype(np.int64), 1)

    def touch(self, batch: RequestedRows, which: Ids, slots: Ids) -> None:
        """Keep the cells of what is cached."""
        assert batch.cells is not None
        self._cells[slots] = batch.cells[which]
        self._used_at[slots] = self._now

    def later(self, competing: Competing, batch: RequestedRows | None) -> NDArray[np.float32]:
        """What the predictor says."""
        chosen = competing.sets
        cells = np.zeros((len(chosen), competing.width), dtype=np.int16)
        cells[:, :WAYS] = self._cells.reshape(-1, WAYS).take(chosen, axis=0)
        if batch is not None and batch.cells is not None:
            cells.reshape(-1)[competing.at] = batch.cells[competing.fetched]
        ages = self._now - self._used_at.reshape(-1, WAYS).take(chosen, axis=0)
        return self._returns.later(cells, ages)

    def evicted(self, ids: Ids, homes: Ids) -> None:
        """Remember them until their sets' phases end, which for sets asked for more than they hold is now."""
        matters = (self._requested <= self.sets.room)[homes]
        ids, homes = ids[matters], homes[matters]
        order = by_home(homes, self.sets.sets)
        ids, homes = ids[order], homes[order]
        ways = self._evicted_count[homes] + ranks(homes, self.sets.sets)
        fits = ways < WAYS  # always, unless the room of the set changed within the phase
        self._evicted[homes[fits], ways[fits]] = ids[fits]
        self._evicted_tags[homes[fits], hashed(ids[fits], self.sets.sets).tags] = True
        self._evicted_count += np.bincount(homes[fits], minlength=self.sets.sets)

    def forget(self, ids: Ids | None = None) -> None:
        """Clear evicted ids, since rows dropped on demand are not predictions."""
        if ids is not None:
            self._evicted[np.isin(self._evicted, ids)] = -1
            return
        self._evicted[:], self._evicted_count[:], self._evicted_tags[:] = -1, 0, False

    def figures(self) -> Mapping[str, Any]:
        """Phases of all sets, caught predictions, fits of the predictor, and its memory in bytes."""
        return {
            "phases": self._phases,
            "caught": self._caught,
            "refits": self._returns.fits,
            "predictor_bytes": self._returns.remembered_bytes,
        }

    def _evicted_in_this_phase(self, batch: RequestedRows, slots: Ids) -> NDArray[np.bool_]:
        homes = batch.places.homes
        found = np.zeros(len(slots), dtype=np.bool_)
        alike = self._evicted_tags.reshape(-1).take(homes * 256 + batch.places.tags)
        which = np.flatnonzero(alike & (slots < 0))
        if len(which):
            most = int(self._evicted_count.max())
            evicted = self._evicted[homes[which], :most]
            found[which] = (evicted == batch.ids[which, None]).any(axis=1)
        return found


class _GuardState(NamedTuple):
    """What the guard has seen."""

    shadow: _ShadowRows
    excess: int = 0  # X
    seen: int = 0  # n
    alarms: int = 0
    following: bool = True


class GuardedRows(LaruRows):
    """`gati`: LARU, with LRU as a fallback if it missed more than LRU would have.

    A shadow LRU keeps the ids of up to 4 sets, chosen by hash as all sets are. X is the number of
    rows of these sets that were fetched beyond the shadow's misses. If X reaches A + B, all sets follow LRU
    until X <= A. A = eps n for n distinct ids requested of the sets; B is as in `gati.evict.policy.guard`.
    The bound there holds with up to 4 sets, else for the watched sets.

    While X <= 0, no predictions are caught: a policy that keeps what returns most often evicts rows that
    return now and then, and saves more than they cost. Phases begin when X > 0.
    """

    name: ClassVar[str] = "gati"

    def __init__(self, sets: RowSets, returns: RowReturns) -> None:
        super().__init__(sets, returns)
        self._watched = min(sets.sets, _SHADOWED)
        self._guard = _GuardState(_ShadowRows(sets.room[: self._watched]))
        self._end_phases()

    def limits(self, batch: RequestedRows, slots: Ids) -> tuple[EvictionLimits, Callable[[], None]]:
        """Compare with the shadow, then choose LARU's or LRU's plan."""
        watched = np.flatnonzero(batch.places.homes < self._watched)
        shadow = copy(self._guard.shadow)
        held = shadow.serve(batch.ids[watched], batch.places.homes[watched], batch.recency[watched])
        excess = self._guard.excess + held - int(np.count_nonzero(slots[watched] >= 0))
        guard = self._judged(
            self._guard._replace(shadow=shadow, excess=excess, seen=self._guard.seen + len(watched))
        )
        none = np.zeros_like(self.sets.room)
        if excess <= 0:
            return EvictionLimits(none, np.maximum(self.sets.room, 1)), partial(self._record_free, guard)
        step = self._step(batch, slots)
        windows = self._windows(step.share)
        limits = EvictionLimits(step.safe, windows) if guard.following else EvictionLimits(none, none + 1)
        return limits, partial(self._record_all, step, guard)

    def _record_free(self, guard: _GuardState) -> None:
        if self._guard.excess > 0:
            self._end_phases()
        self._guard = guard

    def _end_phases(self) -> None:
        """As if every set had been asked for more than it can hold: nothing is caught until phases begin."""
        self._requested[:], self._share[:] = WAYS + 1, 1.0

    def _record_all(self, step: _PhaseStep, guard: _GuardState) -> None:
        self._record(step)
        self._guard = guard

    def shrink(self) -> Ids:
        """The shadow shrinks, too, and stays small if the sets grow again before the next batch."""
        self._guard.shadow.allow(self.sets.room[: self._watched])
        return super().shrink()

    def windows(self) -> Ids:
        """LARU's, or LRU's."""
        return super().windows() if self._guard.following else RowPolicy.windows(self)

    def forget(self, ids: Ids | None = None) -> None:
        """The shadow forgets, too; otherwise it would gain from every dropped row."""
        super().forget(ids)
        self._guard.shadow.forget(ids)

    def figures(self) -> Mapping[str, Any]:
        """The counts of LARU and of the guard."""
        state = self._guard
        guard = {
            "excess": state.excess,
            "allowance": EXCESS_SHARE * state.seen,
            "alarms": state.alarms,
            "following": state.following,
        }
        return {**super().figures(), "guard": guard}

    def _judged(self, guard: _GuardState) -> _GuardState:
        """Switch between predictions and LRU if X requires it."""
        allowed = EXCESS_SHARE * guard.seen
        room = int(self.sets.room[: self._watched].sum())
        if guard.following and guard.excess >= allowed + slack(room):
            return guard._replace(following=False, alarms=guard.alarms + 1)
        if not guard.following and guard.excess <= allowed:
            return guard._replace(following=True)
        return guard


class _ShadowRows:
    """The contents of LRU in a few sets: the last used ids of each set.

    Its arrays are replaced, never changed, so that a copy of it may serve a batch in advance.
    """

    def __init__(self, room: Ids) -> None:
        self._ids = self._homes = self._recency = np.zeros(0, dtype=np.int64)  # by set, the latest first
        self._room = room.copy()

    def allow(self, room: Ids) -> None:
        """Hold at most `room` [sets] ids in each set."""
        self._room = room.copy()
        self._keep(self._ids, self._homes, self._recency)

    def serve(self, ids: Ids, homes: Ids, recency: Ids) -> int:
        """Serve sorted ids [n] of a batch; return how many of them were held."""
        at = np.minimum(np.searchsorted(ids, self._ids), len(ids) - 1)
        others = ids[at] != self._ids if len(ids) else np.ones(len(self._ids), dtype=np.bool_)
        held = len(others) - int(np.count_nonzero(others))
        self._keep(
            np.concatenate((self._ids[others], ids)),
            np.concatenate((self._homes[others], homes)),
            np.concatenate((self._recency[others], recency)),
        )
        return held

    def forget(self, ids: Ids | None) -> None:
        """Drop these ids, or all."""
        if ids is None:
            self._ids = self._homes = self._recency = np.zeros(0, dtype=np.int64)
            return
        stays = ~np.isin(self._ids, ids)
        self._ids, self._homes, self._recency = self._ids[stays], self._homes[stays], self._recency[stays]

    def _keep(self, ids: Ids, homes: Ids, recency: Ids) -> None:
        """Keep as many of each set as there is room for, those of the latest recency."""
        order = np.lexsort((-recency, homes))
        homes = homes[order]
        stays = ranks(homes, len(self._room)) < self._room[homes]
        order, self._homes = order[stays], homes[stays]
        self._ids, self._recency = ids[order], recency[order]
