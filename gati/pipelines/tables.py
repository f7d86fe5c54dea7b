"""Values and choices of every stage on a grid of remaining times, for policy `dynamic`.

A value is an array [4, columns]: the worth of the answer (1 if right and in time, less if right and late),
the probabilities of a right answer and of any answer in time, and the expected busy time in milliseconds.
Column 0 means that the deadline has passed; then the fastest option runs. Column j means that j - 1 cells
remain. Latencies are rounded up to whole cells, and remaining times down.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gati.pipelines.distribution import Distribution
from gati.pipelines.forks import Follow
from gati.pipelines.pipeline import Behaviour, Finding, Pipeline

WORTH, RIGHT, IN_TIME, BUSY = range(4)
_NOISE = 1e-12  # rounding errors of the Fourier transform
LATENCY_PRICE = 1e-6  # smallest price of a millisecond: breaks ties

Array = npt.NDArray[np.float64]
Key = tuple[str, Finding | None]  # a stage, and the finding of the previous stage
Choices = Mapping[str, npt.NDArray[np.intp]]  # by stage: the option's index at each column


def column_of(remaining_ms: float, cell_ms: float, columns: int) -> int:
    """The column of a remaining time: 0 after the deadline, the last one beyond the end of the grid."""
    return 0 if remaining_ms < 0.0 else min(int(remaining_ms / cell_ms + 1e-9) + 1, columns - 1)


class _Moves(NamedTuple):
    """The behaviour of an option after some finding, by level of its own confidence."""

    spectra: npt.NDArray[np.complex128]  # [levels, frequencies]
    pmfs: Array  # [levels, columns]: probability of each number of cells
    shares: Array  # [levels]
    accuracies: Array  # [levels]
    mean_ms: float


class Grid:
    """A measured pipeline on a grid of remaining times: the data that all tables share."""

    def __init__(
        self,
        pipeline: Pipeline,
        follows: Mapping[str, tuple[Follow, ...]],
        cell_ms: float,
        columns: int,
        late_worth: float,
    ) -> None:
        self.pipeline = pipeline
        self.follows = follows
        self.cell_ms = cell_ms
        self.columns = columns
        self.ends = _ends(pipeline, follows)
        self.answered = np.zeros((4, columns))
        self.answered[:BUSY] = 1.0
        self.answered[:, 0] = (late_worth, 1.0, 0.0, 0.0)
        self.keys = {name: self._keys(name) for name in pipeline.stages}
        self._transitions: dict[tuple[str, int], tuple[Array, Array]] = {}
        self.moves = {
            key: [
                self._moves(option.behaviour(key[1]), option.overhead)
                for option in pipeline.stages[name].options.values()
            ]
            for name, keys in self.keys.items()
            for key in keys
        }
        self.last = {
            name: name not in self.ends and not any(follow.targets for follow in follows[name])
            for name in pipeline.stages
        }
        self.every_column = np.arange(columns)
        self._runs: dict[Key, Array] = {}

    def runs(self, key: Key) -> Array:
        """The values [options, 4, columns] of a stage without successors; the same in every table."""
        if key not in self._runs:
            late = self.answered[:, :1]
            spectrum = np.fft.rfft(self.answered - late, 2 * self.columns, axis=1)
            self._runs[key] = np.stack(
                [self.run(moves, spectrum[None], late[None]) for moves in self.moves[key]]
            )
        return self._runs[key]

    def run(self, moves: _Moves, spectra: npt.NDArray[np.complex128], late: Array) -> Array:
        """The value [4, columns] of running an option: the expected value afterwards, at the time then left.

        `spectra` [levels or 1, 4, frequencies] are those of the value afterwards minus `late`, which is the
        value afterwards in column 0, [levels or 1, 4, 1].
        """
        weights = np.repeat(moves.shares[:, None], 4, axis=1)  # [levels, 4]
        weights[:, :IN_TIME] *= moves.accuracies[:, None]
        mixed = (weights[:, :, None] * moves.spectra[:, None, :] * spectra).sum(axis=0)
        value: Array = np.fft.irfft(mixed, 2 * self.columns, axis=1)[:, : self.columns]
        value += (weights[:, :, None] * late).sum(axis=0)
        value[BUSY] += moves.mean_ms
        return value

    def transitions(self, stage: str, option: int) -> tuple[Array, Array]:
        """Matrices [start, arrival] of running an option: probabilities, and those of a right answer."""
        if (stage, option) not in self._transitions:
            moves = self.moves[stage, None][option]
            correct = moves.shares * moves.accuracies
            self._transitions[stage, option] = (
                _transitions(moves.shares @ moves.pmfs, float(moves.shares.sum())),
                _transitions(correct @ moves.pmfs, float(correct.sum())),
            )
        return self._transitions[stage, option]

    def _keys(self, name: str) -> list[Key]:
        """Findings are distinguished if a stage has one predecessor and nothing runs in parallel."""
        found: dict[Finding | None, None] = {None: None}
        if name not in self.ends and len(self.pipeline.edges_to[name]) == 1:
            for option in self.pipeline.stages[name].options.values():
                found |= dict.fromkeys(option.behaviours)
        return [(name, finding) for finding in found]

    def _moves(self, behaviour: Behaviour, overhead: Distribution | None) -> _Moves:
        pmfs = np.stack([self._pmf(latency, least=1) for latency in behaviour.latencies])
        shares = np.asarray(behaviour.shares)
        mean_ms = float(shares @ [latency.mean_ms for latency in behaviour.latencies])
        if overhead is not None:
            added = self._spectrum(self._pmf(overhead, least=0)[None])
            pmfs = np.fft.irfft(self._spectrum(pmfs) * added, 2 * self.columns, axis=1)[:, : self.columns]
            pmfs[pmfs < _NOISE] = 0.0
            mean_ms += overhead.mean_ms
        return _Moves(self._spectrum(pmfs), pmfs, shares, np.asarray(behaviour.accuracies), mean_ms)

    def _pmf(self, latency: Distribution, least: int) -> Array:
        """The probability of each number of cells, [columns]; latencies take at least `least` cells."""
        cells = np.ceil(np.asarray(latency.values_ms) / self.cell_ms - 1e-9).astype(np.int64).clip(least)
        fits = cells < self.columns  # latencies beyond the grid are late at every start
        weights = np.asarray(latency.probabilities)[fits]
        return np.bincount(cells[fits], weights, self.columns).astype(np.float64, copy=False)

    def _spectrum(self, pmfs: Array) -> npt.NDArray[np.complex128]:
        return np.fft.rfft(pmfs, 2 * self.columns, axis=1)


class ValueTable:
    """Choices and values of every stage: the best at two prices, or the values of `given` choices.

    `price` is the price of meeting the SLO, `latency_price` that of a millisecond, both in units of worth.
    """

    def __init__(
        self,
        grid: Grid,
        price: float = 0.0,
        latency_price: float = LATENCY_PRICE,
        given: Choices | None = None,
    ) -> None:
        self._grid = grid
        self._prices = np.zeros(4)
        self._prices[[WORTH, IN_TIME, BUSY]] = (1.0, price, -latency_price)
        self._given = given
        self.choices: dict[Key, npt.NDArray[np.intp]] = {}
        self.values: dict[Key, Array] = {}
        self._kernels: dict[tuple[str, str], tuple[Array, Array, Array]] = {}
        for stage in reversed(list(grid.pipeline.stages)):
            self._solve(stage)

    def _solve(self, stage: str) -> None:
        if self._grid.last[stage]:
            for key in self._grid.keys[stage]:
                self._choose(key, self._grid.runs(key))
            return
        # What follows depends on the finding of this stage, not on that of the previous one.
        after = [
            np.stack([self._after(stage, Finding(option, level)) for level in range(moves.shares.size)])
            for option, moves in zip(
                self._grid.pipeline.stages[stage].options, self._grid.moves[stage, None], strict=True
            )
        ]  # for each option: [levels, 4, columns]
        late = [value[:, :, :1] for value in after]
        spectra = [
            np.fft.rfft(value - end, 2 * self._grid.columns, axis=2)
            for value, end in zip(after, late, strict=True)
        ]
        for key in self._grid.keys[stage]:
            runs = [self._grid.run(*one) for one in zip(self._grid.moves[key], spectra, late, strict=True)]
            self._choose(key, np.stack(runs))

    def _choose(self, key: Key, options: Array) -> None:
        """Store the best of [options, 4, columns] at this table's prices, or the given choices."""
        if self._given is not None:
            best = self._given[key[0]]
        else:
            best = (self._prices @ options).argmax(axis=0)
            worth, busy = options[:, WORTH, 0], options[:, BUSY, 0].round(9)
            best[0] = np.lexsort((-worth, busy))[0]  # too late: run the fastest option, to free the machine
        self.choices[key] = best
        self.values[key] = options[best, :, self._grid.every_column].T

    def _after(self, stage: str, finding: Finding | None) -> Array:
        """The value after a stage with this finding, [4, columns]."""
        parts = [follow.share * self._follow(stage, follow, finding) for follow in self._grid.follows[stage]]
        return reduce(np.add, parts)

    def _follow(self, stage: str, follow: Follow, finding: Finding | None) -> Array:
        if len(follow.targets) == 1:
            target = follow.targets[0]
            return self.values.get((target, finding), self.values[target, None])
        if follow.join is None:  # nothing follows: the query is answered, or its branch has ended
            end = self._grid.ends.get(stage)
            return self._grid.answered if end is None else self.values[end, None]
        reached, right, busy = self._parallel(follow)
        join = self.values[follow.join, None]
        return np.stack(
            [right @ join[WORTH], right @ join[RIGHT], reached @ join[IN_TIME], reached @ join[BUSY] + busy]
        )

    def _parallel(self, follow: Follow) -> tuple[Array, Array, Array]:
        """As `_kernel`, from the start of parallel branches to their join: the last to arrive decides."""
        if follow.join is None:
            raise AssertionError("branches in parallel have a join")
        kernels = [self._kernel(target, follow.join) for target in follow.targets]
        reached = _least([kernel[0] for kernel in kernels])
        right = _least([kernel[1] for kernel in kernels])
        return reached, right, reduce(np.add, [kernel[2] for kernel in kernels])

    def _kernel(self, stage: str, join: str) -> tuple[Array, Array, Array]:
        """From a stage to a join: matrices [start column, arrival column], and busy times [columns].

        The first matrix holds probabilities. The second holds probabilities multiplied by the accuracy of the
        chosen options, because accuracy and time of arrival depend on each other.
        """
        if stage == join:
            unit = np.eye(self._grid.columns)
            return unit, unit, np.zeros(self._grid.columns)
        if (stage, join) not in self._kernels:
            self._kernels[stage, join] = self._run_kernel(stage, join)
        return self._kernels[stage, join]

    def _run_kernel(self, stage: str, join: str) -> tuple[Array, Array, Array]:
        size = self._grid.columns
        after = [np.zeros((size, size)), np.zeros((size, size)), np.zeros(size)]
        for follow in self._grid.follows[stage]:
            for total, part in zip(after, self._kernel_of(follow, join), strict=True):
                total += follow.share * part
        reached, right, busy = (np.zeros_like(array) for array in after)
        for index, moves in enumerate(self._grid.moves[stage, None]):
            rows = np.flatnonzero(self.choices[stage, None] == index)
            if rows.size:
                step, correct = self._grid.transitions(stage, index)
                reached[rows] = step[rows] @ after[0]
                right[rows] = correct[rows] @ after[1]
                busy[rows] = moves.mean_ms + step[rows] @ after[2]
        return reached, right, busy

    def _kernel_of(self, follow: Follow, join: str) -> tuple[Array, Array, Array]:
        if not follow.targets:
            return self._kernel(join, join)
        if follow.join is None:
            return self._kernel(follow.targets[0], join)
        reached, right, busy = self._parallel(follow)
        onward = self._kernel(follow.join, join)
        return reached @ onward[0], right @ onward[1], busy + reached @ onward[2]


def _least(kernels: list[Array]) -> Array:
    """The distribution of the minimum of independent arrival columns, by row: products of upper tails."""
    tails = [np.cumsum(kernel[:, ::-1], axis=1)[:, ::-1] for kernel in kernels]
    together: Array = reduce(np.multiply, tails)
    return together - np.pad(together[:, 1:], ((0, 0), (0, 1)))


def _transitions(weights: Array, total: float) -> Array:
    """Weights [start, arrival] of steps between columns; the remainder up to `total` arrives late."""
    size = weights.size
    matrix = np.zeros((size, size))
    for step in np.flatnonzero(weights):
        later = np.arange(step + 1, size)
        matrix[later, later - step] = weights[step]
    matrix[:, 0] = total - matrix.sum(axis=1)
    return matrix


def _ends(pipeline: Pipeline, follows: Mapping[str, tuple[Follow, ...]]) -> dict[str, str]:
    """The stages inside parallel branches, and the join that each leads to if its branch ends there."""
    found: dict[str, str] = {}
    for follow in (follow for several in follows.values() for follow in several):
        pending = [target for target in follow.targets if follow.join is not None]
        while pending:
            name = pending.pop()
            if name != follow.join:
                found[name] = str(
                    follow.join
                )  # forks come in topological order, so the innermost fork is written last
                pending += [edge.target for edge in pipeline.edges_from[name]]
    return found
