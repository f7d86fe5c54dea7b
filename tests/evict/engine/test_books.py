"""The index of an engine's cache while its runs are divided: what is locked, and how much was evicted."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gati.evict.engine.engine import PrefixEngine
from gati.evict.engine.pages import KeptPrefixes
from gati.evict.plugins.books import EngineBooks
from gati.evict.policy.registry import make_policy
from gati.evict.predict.conversing import hinted
from gati.evict.predict.reuse import Reuse
from tests.evict.engine.small import PAGE_TOKENS, engine, generated
from tests.evict.naive import tree_trace

CAPACITY = 30
PROMPT, ANSWER = ["p0", "p1"], [f"g{number}" for number in range(6)]


def books_of(policy: str, capacity: int = CAPACITY) -> EngineBooks:
    """With a predictor of reuse that does not fit, or with hints."""
    maker = hinted(100.0) if "lpc" in policy else lambda capacity, seed: Reuse(capacity, fits=False)
    return EngineBooks(make_policy(policy, capacity, maker))


def load(books: EngineBooks, path: list[str], *, again: bool = False) -> None:
    """Serve a request, for whose blocks there is room; `again` if it was counted before."""
    if again:
        books.resume(path, 0.0)
    else:
        books.begin(path, 0.0)
    books.stored(path)
    books.finish()


def check(books: EngineBooks) -> None:
    """A run has a lock for each of its pinned blocks, and one if the current request ends there."""
    for run in books.tree:
        pins = sum(block in books._pinned for block in run.ids)
        held = 0 if books._serving is None else sum(each is run for each in books._serving.held)
        assert run.locks == pins + held, run
        assert all(books._run_of[block] is run for block in run.ids)
    assert len(books._run_of) == books.tree.used <= books.capacity


def make_room(books: EngineBooks, path: list[int]) -> bool:
    """Evict for the missing blocks of a path; whether that was possible."""
    missing = [block for block in path if block not in books]
    count = len(books) + len(missing) - books.capacity
    spared = [block for block in path if block in books]
    return count <= 0 or books.victims(count, missing, spared) is not None


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fpb", "laru", "gati", "lpc", "laru+lpc"])
def test_locks_are_pins_whatever_is_asked_stored_pinned_and_dropped(policy: str) -> None:
    for seed in range(40):
        chance = random.Random(seed)
        rows = [
            [chance.randrange(2) if chance.random() < 0.3 else 0 for _ in range(chance.randint(1, 12))]
            for _ in range(300)
        ]
        books = books_of(policy)
        pins: list[int] = []
        for number, path in enumerate(tree_trace(rows).requests):
            kind = chance.random()
            held = [*books._run_of]
            if kind < 0.5:
                prompt = path[: chance.randint(1, len(path))]
                books.begin(prompt, float(number))
                loads = make_room(books, prompt)
                if loads:
                    books.stored(prompt)
                books.finish()
                if loads and make_room(books, path):
                    books.resume(path, float(number))
                    books.stored(path)
                    books.finish()
            elif kind < 0.7 and held and len(pins) < 8:
                pins.append(chance.choice(held))
                books.pin(pins[-1])
            elif kind < 0.95 and pins:
                books.unpin(pins.pop(chance.randrange(len(pins))))
            elif unpinned := [block for block in held if block not in pins]:
                books.forget(chance.choice(unpinned))
            check(books)


def divided_twice(policy: str) -> EngineBooks:
    """Books with an answer as one run, which conversations that are no longer cached left in two places."""
    books = books_of(policy, 12)
    for path in (PROMPT + ANSWER[:2] + ["x"], PROMPT + ANSWER[:4] + ["y"], PROMPT + ANSWER):
        load(books, path)
    books.forget(PROMPT[0])  # what follows it becomes strays
    assert books.victims(len(books)) is not None and len(books) == 0
    load(books, PROMPT)
    load(books, PROMPT + ANSWER, again=True)
    return books


@pytest.mark.parametrize("policy", ["fpb", "laru", "gati"])
def test_a_run_that_one_request_divides_twice_keeps_its_locks(policy: str) -> None:
    books = divided_twice(policy)
    for block in ANSWER:
        books.pin(block)
    load(books, [*PROMPT, *ANSWER, "z"])
    assert [len(run.ids) for run in books.tree if run.ids[0] in ANSWER] == [2, 2, 1, 1]
    check(books)
    for block in ANSWER:
        books.unpin(block)
    check(books)
    victims = books.victims(9)
    assert victims is not None and set(victims) == {*PROMPT, *ANSWER, "z"}


@pytest.mark.slow
def test_a_conversation_goes_on_after_its_answer_was_divided_twice() -> None:
    """The second upper part has a new slot, which the policy must know before the first part is settled."""
    running = engine(200, KeptPrefixes("gati"))
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    answer = generated(running, prompt, 6 * PAGE_TOKENS + 1).generated
    other = [token + 1 if token < 11 else 0 for token in answer]
    for ends in (2, 4):  # two more conversations begin with a part of the answer
        at = ends * PAGE_TOKENS
        generated(running, [*prompt, *answer[:at], *other[at : at + PAGE_TOKENS], 0])
    generated(running, [*prompt, *answer, 0])
    running.allow(0)  # nothing is cached, but the history knows where conversations parted
    running.allow(200)
    assert generated(running, prompt, 6 * PAGE_TOKENS + 1).generated == answer
    others = 0
    while slots_of(running) < 62:  # its arrays have 64, and the next request takes three
        generated(running, [11, others // 11, others % 11, 9, 0])
        others += 1
    assert slots_of(running) == 62
    going_on = [*prompt, *answer, 3, 3, 3, 3, 3]
    assert generated(running, going_on).hit_tokens == 8 * PAGE_TOKENS
    check(running._pages._books)
    assert generated(running, going_on).hit_tokens == 9 * PAGE_TOKENS


def slots_of(running: PrefixEngine) -> int:
    return len(running._pages._books.policy._runs)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_what_engines_evict_is_told_with_the_answers_they_stored(tmp_path: Path) -> None:
    running = engine(12, KeptPrefixes("lru", service=str(tmp_path)))
    link = running._pages._books.link
    assert link is not None
    told = []
    for first in range(10):
        generated(running, [first, 1, 2, 3, 0], 5 * PAGE_TOKENS)
        told.append(link._told()["evicted"])
    assert told == sorted(told)
    assert told[-1] == running.figures()["pages_evicted"] > 30
    running.close()


def test_what_was_taken_back_was_not_evicted() -> None:
    books = EngineBooks(make_policy("lru", 4, None, flat=True))
    books.begin([1, 2, 3, 4], 0.0)
    books.stored([1, 2, 3, 4])
    books.finish()
    victims = books.victims(3)
    assert victims is not None and books.evicted == 3
    books.take_back(victims[1:])
    assert books.evicted == 1
