"""A trace: the blocks of each request, in order, and its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gati.errors import TraceError
from gati.evict.trace.dialogues import Prompts
from gati.evict.trace.numbering import BlockNumbering, Ints, first_places

Kind = Literal["tree", "flat"]


@dataclass(frozen=True)
class Talk:
    """The conversation that a request belongs to, what its user wrote, and whether another prompt follows."""

    conversation: int
    prompts: Prompts
    goes_on: bool | None = None  # None if unknown

    def to_row(self) -> dict[str, Any]:
        """Keys of a line of a trace."""
        row: dict[str, Any] = {
            "conversation": self.conversation,
            "turn": self.prompts.turn,
            "prompts": list(self.prompts.texts),
        }
        return row if self.goes_on is None else {**row, "goes_on": self.goes_on}


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in order. Blocks are numbered 0..distinct-1 in the order in which they first occur.

    `blocks` [n] holds the blocks of all requests one after the other, those of request i from `starts[i]` to
    `starts[i + 1]`; `time_s` [requests] is when each came. In a `tree` a request is a path from the root, in
    a `flat` trace a batch of different blocks.
    """

    kind: Kind
    blocks: Ints = field(repr=False)
    starts: Ints = field(repr=False)
    time_s: NDArray[np.float64] = field(repr=False)
    name: str = "trace"
    sha256: str = ""
    talks: tuple[Talk, ...] | None = field(default=None, repr=False)  # of each request, where known

    def __len__(self) -> int:
        return len(self.starts) - 1

    @cached_property
    def distinct(self) -> int:
        """Number of distinct blocks: a cache of this size never evicts."""
        return int(self.blocks.max()) + 1 if len(self.blocks) else 0

    @cached_property
    def lengths(self) -> Ints:
        """Number of blocks of each request, [requests]."""
        return np.diff(self.starts)

    @cached_property
    def requests(self) -> list[list[int]]:
        """The blocks of each request as lists, which are faster to walk than arrays."""
        every, bounds = self.blocks.tolist(), self.starts.tolist()
        return [every[begin:end] for begin, end in zip(bounds[:-1], bounds[1:], strict=True)]

    @cached_property
    def shared(self) -> Ints:
        """Number of blocks of each request that over half of all requests contain, [requests]."""
        counts = np.bincount(self.blocks, minlength=self.distinct)
        common = np.concatenate(([0], np.cumsum(2 * counts[self.blocks] > len(self))))
        return np.asarray(common[self.starts[1:]] - common[self.starts[:-1]], dtype=np.int64)

    def summary(self) -> dict[str, Any]:
        """Identity and size of the trace, as JSON values."""
        return {
            "name": self.name,
            "kind": self.kind,
            "sha256": self.sha256,
            "requests": len(self),
            "blocks": len(self.blocks),
            "distinct": self.distinct,
            "seconds": float(self.time_s[-1] - self.time_s[0]) if len(self) else 0.0,
        }

    def head(self, requests: int) -> Trace:
        """The first `requests` requests, as a new trace."""
        end = int(self.starts[min(requests, len(self))])
        return Trace(
            self.kind,
            self.blocks[:end],
            self.starts[: requests + 1],
            self.time_s[:requests],
            self.name,
            self.sha256,
            None if self.talks is None else self.talks[:requests],
        )


def make_trace(
    requests: Sequence[Sequence[int | str]],
    time_s: Sequence[float] | None = None,
    *,
    kind: Kind = "tree",
    name: str = "trace",
    talks: Sequence[Talk] | None = None,
) -> Trace:
    """Make a trace of requests with identifiers of any kind; without times, requests arrive one per second.

    In a flat trace, a block that a request names twice counts once. `talks` are the requests' conversations.
    Raises TraceError if the requests do not fit `kind`, or if time decreases.
    """
    numbering = BlockNumbering(flat=kind == "flat")
    for request in requests:
        numbering.add(request)
    return numbered_trace(numbering, time_s, name=name, talks=talks)


def numbered_trace(
    numbering: BlockNumbering,
    time_s: Sequence[float] | NDArray[np.float64] | None = None,
    *,
    name: str,
    sha256: str = "",
    lines: Sequence[int] | None = None,
    talks: Sequence[Talk] | None = None,
) -> Trace:
    """As `make_trace`, of requests that were added to `numbering`.

    `lines` are their line numbers in a file, for messages.
    """
    count = len(numbering)
    where = range(1, count + 1) if lines is None else lines
    if not count:
        raise TraceError(f"{name} has no requests")
    times = np.arange(count, dtype=np.float64) if time_s is None else np.asarray(time_s, np.float64)
    _check_times(times, where)
    blocks, starts, names = numbering.finish()
    if len(blocks) == 0:
        raise TraceError(f"all requests of {name} are empty")
    spoken = None if talks is None else tuple(talks)
    kind: Kind = "flat" if numbering.flat else "tree"
    trace = Trace(kind, blocks, starts, times, name, sha256, spoken)
    if kind == "tree":
        _check_tree(trace, names, where)
    return trace


def _check_times(times: NDArray[np.float64], lines: Sequence[int]) -> None:
    if not np.isfinite(times).all():
        at = int(np.flatnonzero(~np.isfinite(times))[0])
        raise TraceError(f"line {lines[at]}: the time is {times[at]}; times must be numbers")
    back = np.flatnonzero(np.diff(times) < 0.0)
    if len(back):
        at = int(back[0])
        raise TraceError(
            f"line {lines[at + 1]}: time goes back from {times[at]:.15g} to {times[at + 1]:.15g} s; sort the "
            "requests"
        )


def _check_tree(trace: Trace, names: Sequence[int | str] | Ints, lines: Sequence[int]) -> None:
    """Check that every block follows the same block wherever it occurs. Raises TraceError."""
    blocks = trace.blocks
    before = np.concatenate(([-1], blocks[:-1]))
    firsts = trace.starts[:-1][trace.lengths > 0]
    before[firsts] = -1
    first_at = first_places(blocks)
    parent = before[first_at]
    wrong = np.flatnonzero(parent[blocks] != before)
    if len(wrong) == 0:
        return
    at = int(wrong[0])
    block, earlier = int(blocks[at]), int(first_at[blocks[at]])

    def follows(place: int) -> str:
        line = lines[int(np.searchsorted(trace.starts, place, side="right")) - 1]
        above = int(before[place])
        return f"{'nothing' if above < 0 else names[above]} in line {line}"

    raise TraceError(
        f"the blocks do not form a prefix tree: {names[block]} follows {follows(earlier)}, {follows(at)}; "
        "identifiers must depend on all earlier blocks; for independent blocks, use --flat"
    )
