"""What one step computes: the next token of every request that generates, and a chunk of new prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gati.evict.engine.decoder import Stretch, TokenBatch
from gati.evict.engine.generation import Generation
from gati.evict.engine.pages import PageTable, PrefixPages
from gati.evict.engine.turns import work_of


@dataclass(frozen=True)
class PlannedStep:
    """A batch, and which request each row of its logits belongs to."""

    batch: TokenBatch
    samples: list[Generation]

    def work(self, growth: float) -> float:
        """How much is computed, as `gati.evict.engine.turns.work_of` has it."""
        found = ((each.before, each.before + each.stop - each.start) for each in self.batch.stretches)
        return sum(work_of(start, stop, growth) for start, stop in found)


@dataclass(frozen=True)
class _Share:
    """Tokens `start` to `stop` of a request are computed in a step."""

    generation: Generation
    table: PageTable
    start: int
    stop: int


def plan_step(running: Sequence[Generation], pages: PrefixPages, chunk_tokens: int) -> PlannedStep | None:
    """Choose tokens for a step, and count them as computed; None if there is nothing to do.

    Requests whose prompts are computed get one token each. The others share `chunk_tokens` tokens, by their
    turns. A page that an earlier request of the same step computes counts as computed for a later one: every
    layer writes all keys and values before it reads any.
    """
    shares = []
    left = chunk_tokens
    for generation in sorted(running, key=lambda each: each.turn_s):
        table = generation.table
        if table is None:
            continue
        last = len(generation.tokens) - 1  # always computed, for its successor
        generation.computed = start = min(pages.known(table, generation.computed), last)
        count = last + 1 - start
        if count > 1 or not generation.generated:
            count = min(count, left)
            left -= count
        if count:
            generation.computed = start + count
            pages.computed(table, generation.computed)
            shares.append(_Share(generation, table, start, start + count))
    return _planned(shares, pages.page_tokens) if shares else None


def _planned(shares: Sequence[_Share], page_tokens: int) -> PlannedStep:
    tokens: list[int] = []
    stretches, wanted, samples, positions, page = [], [], [], [], []
    for share in shares:
        at = torch.arange(share.start, share.stop)
        positions.append(at)
        page.append(share.table.pages[at // page_tokens])
        used = share.table.pages[: -(-share.stop // page_tokens)]
        stretches.append(Stretch(len(tokens), len(tokens) + share.stop - share.start, share.start, used))
        tokens += share.generation.tokens[share.start : share.stop]
        if share.stop == len(share.generation.tokens):
            wanted.append(len(tokens) - 1)
            samples.append(share.generation)
    where = torch.cat(positions)
    batch = TokenBatch(
        tokens=torch.tensor(tokens),
        positions=where,
        page=torch.cat(page),
        place=where % page_tokens,
        stretches=stretches,
        wanted=torch.tensor(wanted, dtype=torch.int64),
    )
    return PlannedStep(batch, samples)
