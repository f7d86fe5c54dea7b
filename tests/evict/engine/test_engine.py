"""The engine: what it generates never depends on what is kept, and pages are never lost."""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections.abc import Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gati import evict
from gati.errors import EvictError, ModelError, OverloadError, RequestError, UnavailableError
from gati.evict.engine import turns
from gati.evict.engine.access import AccessFile, PrefixAccess
from gati.evict.engine.decoder import Decoder, DecoderSettings
from gati.evict.engine.engine import PrefixEngine, PrefixEngineLimits, pool_for
from gati.evict.engine.generation import Ending, GenerationRequest, NextToken, Sampling
from gati.evict.engine.pages import KeptPrefixes, PrefixPages, prefix_names
from tests.evict.engine.small import (
    DECODER,
    PAGE_BYTES,
    PAGE_TOKENS,
    SETTINGS,
    engine,
    generated,
    plain_logits,
    request,
)
from tests.full_disk import full_at
from tests.waiting import LONG_S, returns, until

pytestmark = pytest.mark.slow

POLICIES = sorted(
    name for name, policy in evict.POLICIES.items() if not (policy.flat_only or policy.foresees)
)
NOTHING_KEPT = KeptPrefixes("lru", reuse=False)
SINGLE = Decoder.random(SETTINGS, seed=1)

prompts = st.builds(
    lambda head, length, tail: ([head] * length + tail)[:40],
    st.integers(0, 1),
    st.integers(0, 30),
    st.lists(st.integers(0, 2), min_size=1, max_size=10),
)


def test_the_network_is_what_plain_arithmetic_says() -> None:
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    expected = plain_logits(DECODER, tokens)
    for chunk in (1, 3, 64):
        generation = generated(engine(chunk_tokens=chunk), tokens, 1)
        torch.testing.assert_close(generation.logits[0], expected[-1])


def test_generating_is_feeding_back_the_likeliest_token() -> None:
    tokens = [7, 7, 2]
    generation = generated(engine(), tokens, 9)
    for number, logits in enumerate(generation.logits):
        expected = plain_logits(DECODER, tokens + generation.generated[:number])[-1]
        torch.testing.assert_close(logits, expected)
        assert generation.generated[number] == int(expected.argmax())
    assert generation.ending is Ending.LENGTH


def serve_all(
    policy: str, asked: list[tuple[list[int], int, int]], cancelled: Set[int] = frozenset(), chunk: int = 16
) -> Mapping[str, Any]:
    """Serve requests that come while others run, and compare each with what it is by itself.

    They compete for fourteen pages; `asked` are a prompt, how many tokens follow, and steps until the next.
    """
    running = engine(14, KeptPrefixes(policy), chunk_tokens=chunk, most_running=3)
    generations = []
    for number, (prompt, most_tokens, steps) in enumerate(asked):
        generations.append(running.submit(request(prompt, most_tokens)))
        for _ in range(steps):
            running.step()
        if number in cancelled:
            running.cancel(generations[number])
    running.run_until_idle()
    for number, (generation, (prompt, most_tokens, _)) in enumerate(zip(generations, asked, strict=True)):
        tokens, logits = by_itself(tuple(prompt))
        if generation.ending is Ending.CANCELLED:
            assert number in cancelled
        else:
            assert generation.generated == tokens[:most_tokens]
        for own, other in zip(generation.logits, logits, strict=False):
            torch.testing.assert_close(own, other, rtol=0.0, atol=1e-10)
    figures = running.figures()
    assert figures["pages"]["used"] == figures["running"] == figures["waiting"] == 0
    running.close()
    assert running.pages == 0
    return figures


@cache
def by_itself(prompt: tuple[int, ...]) -> tuple[list[int], list[torch.Tensor]]:
    """Six tokens and their logits, where nothing was kept of other requests."""
    generation = generated(engine(14, NOTHING_KEPT), prompt, 6)
    return generation.generated, generation.logits


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_changes_what_is_generated(policy: str) -> None:
    asked = [
        ([head] * length + [2, 2], 4, 2) for head, length in zip([0, 1] * 7, [25, 18, 11] * 5, strict=False)
    ]
    figures = serve_all(policy, asked)
    assert figures["pages_evicted"] > 0 and figures["pages_hit"] > 0


@given(
    policy=st.sampled_from(POLICIES),
    asked=st.lists(st.tuples(prompts, st.integers(1, 6), st.integers(0, 4)), min_size=2, max_size=6),
    cancelled=st.sets(st.integers(0, 5), max_size=2),
    chunk=st.sampled_from((3, 16)),
)
@settings(max_examples=15, deadline=None)
def test_kept_prefixes_change_nothing(
    policy: str, asked: list[tuple[list[int], int, int]], cancelled: set[int], chunk: int
) -> None:
    serve_all(policy, asked, cancelled, chunk)


@given(asked=st.lists(prompts, min_size=3, max_size=6))
@settings(max_examples=10, deadline=None)
def test_in_single_precision_logits_agree_to_four_places(asked: list[list[int]]) -> None:
    running = engine(14, decoder=SINGLE, chunk_tokens=7)
    alone = engine(14, NOTHING_KEPT, decoder=SINGLE)
    for prompt in asked:
        own, other = generated(running, prompt), generated(alone, prompt)
        torch.testing.assert_close(own.logits[0], other.logits[0], rtol=0.0, atol=1e-4)


def test_a_prefix_that_is_there_is_not_computed_again() -> None:
    running = engine()
    prompt = [1, 2, 3] * 8
    first = generated(running, prompt)
    computed = running.figures()["computed_tokens"]
    second = generated(running, [*prompt[:-1], 9, 9])
    assert (first.hit_tokens, second.hit_tokens) == (0, 20)  # five whole pages before the last token
    assert computed == 24
    assert running.figures()["computed_tokens"] - computed == 25 - 20


def test_a_conversation_that_goes_on_finds_what_was_generated() -> None:
    running = engine()
    prompt = [5, 6, 7, 8, 9]
    said = generated(running, prompt, 8)
    again = generated(running, [*prompt, *said.generated, 1, 2], 1)
    assert again.hit_tokens == 12  # of the last token generated no keys were computed


def test_requests_at_one_time_compute_a_common_prefix_once() -> None:
    running = engine(chunk_tokens=64)
    prompt = list(range(12)) * 2
    both = [running.submit(request([*prompt, last], 2)) for last in (1, 2)]
    running.run_until_idle()
    assert running.figures()["computed_tokens"] == 25 + 1 + 2  # the second has one token of its own
    for generation in both:
        assert generation.generated == generated(engine(), generation.request.prompt, 2).generated


def test_pages_in_use_stay_and_others_wait_for_them() -> None:
    running = engine(6)
    first = running.submit(request([1] * 16, 8))  # six pages
    running.step()
    second = running.submit(request([2] * 4, 4))
    running.step()
    assert second.table is None and first.ending is None
    assert running.figures()["pages"] == {"held": 6, "used": 6, "cached": 0}
    running.run_until_idle()
    assert first.ending is second.ending is Ending.LENGTH


@pytest.mark.parametrize("steps", [0, 1, 2, 6])
def test_a_cancelled_request_leaves_no_page_in_use(steps: int) -> None:
    running = engine(chunk_tokens=8)
    told: list[NextToken] = []
    generation = running.submit(request([3] * 20, 10), told.append)
    for _ in range(steps):
        running.step()
    running.cancel(generation)
    assert not running.step()
    assert generation.ending is Ending.CANCELLED and told[-1] == NextToken(None, Ending.CANCELLED)
    pages = running.figures()["pages"]
    assert pages["used"] == 0
    kept = (0, 2, 4, 5)[(0, 1, 2, 6).index(steps)]  # what was computed of the prompt, in whole pages
    assert pages["cached"] >= kept
    found = generated(running, [3] * 20, 10)
    assert found.hit_tokens == 4 * min(kept, 4)
    assert found.generated == generated(engine(), [3] * 20, 10).generated


def test_cancelling_what_another_request_waits_for_leaves_it_to_that_one() -> None:
    running = engine(chunk_tokens=4)
    first, second = (running.submit(request([*[4] * 20, last], 3)) for last in (1, 2))
    running.step()
    running.cancel(first)
    running.run_until_idle()
    assert second.generated == generated(engine(), [*[4] * 20, 2], 3).generated


@pytest.mark.parametrize("policy", POLICIES)
def test_pages_whose_prefix_was_never_computed_are_found_again_and_not_lost(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "PATIENCE", 0.0)  # the order of arrival
    running = engine(24, KeptPrefixes(policy), chunk_tokens=1)
    prompt = [5, 6, 7, 8, 9]
    conversation = [*prompt, *generated(engine(), prompt, 12).generated, 1, 2]
    talking = running.submit(request(prompt, 12))
    for _ in prompt:
        running.step()  # from now on, it needs none of the step's share of prompts
    others = [running.submit(request(tokens)) for tokens in ([1] * 40, conversation[:9])]
    while talking.ending is None:
        running.step()
    for other in others:  # the last was to compute the page after the prompt, and the first kept it waiting
        running.cancel(other)
    running.step()
    again = generated(running, conversation)
    torch.testing.assert_close(again.logits[0], plain_logits(DECODER, conversation)[-1])
    computed = running.figures()["computed_tokens"]
    assert generated(running, conversation).hit_tokens == 16
    assert running.figures()["computed_tokens"] == computed + 3
    assert generated(running, [2] * 90, 6).ending is Ending.LENGTH  # with all 24 pages


@pytest.mark.parametrize("policy", POLICIES)
def test_pages_that_a_request_finds_stay_while_room_is_made_for_its_others(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found are pages that lost the page before them, and then got it back."""
    monkeypatch.setattr(turns, "PATIENCE", 0.0)  # the order of arrival
    running = engine(16, KeptPrefixes(policy), chunk_tokens=8)
    prompt = [5, 6, 7, 8, 9, 1, 2, 3, 4]
    talking = running.submit(request(prompt, 20))
    while len(talking.generated) < 18:
        running.step()
    beginning = [*prompt, *talking.generated[:4]]
    running.submit(request([1] * 28))  # keeps the next one waiting
    gone = running.submit(request(beginning))
    while talking.ending is None:
        running.step()
    running.cancel(gone)  # it was to compute the page before those that were just kept
    running.run_until_idle()
    generated(running, beginning)
    assert running.figures()["policy"]["strays"] == 4
    whole = [*prompt, *talking.generated]
    again = generated(running, whole, 33)
    assert again.hit_tokens == 28
    torch.testing.assert_close(again.logits[0], plain_logits(DECODER, whole)[-1])


def test_a_request_longer_than_the_budget_is_refused() -> None:
    running = engine(4)
    with pytest.raises(RequestError, match="need 5 pages of keys and values, but the whole budget has 4"):
        running.submit(request([1] * 10, 8))
    running.submit(request([1] * 10, 7))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (GenerationRequest((), 1), "prompt is empty"),
        (GenerationRequest((1,), 0), "max_tokens is 0"),
        (GenerationRequest((13,), 1), "not between 0 and 12"),
        (GenerationRequest((-1,), 1), "not between 0 and 12"),
        (GenerationRequest((1,), 1, goes_on=1.5), "give a probability from 0 to 1"),
        (GenerationRequest((1,), 97), "exceed the network's length of 96 tokens"),
    ],
)
def test_requests_that_make_no_sense_are_refused(wrong: GenerationRequest, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        engine().submit(wrong)


def test_no_more_wait_than_may() -> None:
    running = engine(most_waiting=2, most_running=1)
    for _ in range(2):
        running.submit(request([1, 2]))
    with pytest.raises(OverloadError, match="2 requests are waiting"):
        running.submit(request([1, 2]))
    running.run_until_idle()
    running.submit(request([1, 2]))


def test_a_closed_engine_ends_its_requests_and_takes_no_more() -> None:
    running = engine()
    told: list[NextToken] = []
    generation = running.submit(request([1, 2], 5), told.append)
    running.step()
    running.close(UnavailableError("it is over"))
    assert str(generation.error) == "it is over" and told[-1].ending is Ending.FAILED
    assert running.pages == 0
    with pytest.raises(UnavailableError, match="closed"):
        running.submit(request([1, 2]))


def test_a_budget_that_shrinks_takes_pages_from_the_latest_and_loses_nothing() -> None:
    pool = evict.PagePool(PAGE_BYTES, 12 * PAGE_BYTES)
    running = PrefixEngine(DECODER, pool, KeptPrefixes("gati"), page_tokens=PAGE_TOKENS)
    asked = [[1] * 9, [2] * 9, [1] * 5]
    generations = [running.submit(request(prompt, 8)) for prompt in asked]
    for _ in range(3):
        running.step()
    pool.resize(5 * PAGE_BYTES)
    assert running.pages == pool.used_pages == 5
    assert running.figures()["restarted"] == 2
    running.run_until_idle()
    pool.resize(12 * PAGE_BYTES)
    for generation, prompt in zip(generations, asked, strict=True):
        assert generation.generated == generated(engine(), prompt, 8).generated
    assert generated(running, [1] * 30, 8).generated == generated(engine(), [1] * 30, 8).generated


def test_a_waiting_request_that_no_longer_fits_is_told_so() -> None:
    pool = evict.PagePool(PAGE_BYTES, 8 * PAGE_BYTES)
    running = PrefixEngine(DECODER, pool, KeptPrefixes("lru"), page_tokens=PAGE_TOKENS)
    generation = running.submit(request([1] * 20, 8))
    pool.resize(3 * PAGE_BYTES)
    running.run_until_idle()
    assert generation.ending is Ending.FAILED
    assert "the whole budget has 3" in str(generation.error)


def test_a_pool_is_shared_with_embedding_rows() -> None:
    pool = evict.PagePool(PAGE_BYTES, 40 * PAGE_BYTES)
    running = PrefixEngine(DECODER, pool, KeptPrefixes("lru"), page_tokens=PAGE_TOKENS)
    before = generated(running, [1, 2, 3, 4, 5] * 3, 6)
    rows = evict.EmbeddingCache(evict.MemoryTier(torch.randn(2000, 16)), pool=pool)
    assert running.pages == rows.pages == 20
    assert generated(running, [1, 2, 3, 4, 5] * 3, 6).generated == before.generated


@pytest.mark.parametrize("temperature", [5e-324, 1e-308])
def test_the_lowest_temperatures_choose_the_most_likely_token(temperature: float) -> None:
    """Logits divided by them are infinite: the last token of the vocabulary was drawn each time."""
    asked = [
        GenerationRequest((1, 2, 3), 12, sampling, ends_early=False)
        for sampling in (Sampling(), Sampling(temperature, 5))
    ]
    running = engine()
    greedy, cold = (running.submit(each) for each in asked)
    running.run_until_idle()
    assert cold.generated == greedy.generated


class Unread(tuple[int, ...]):
    """A prompt that must not be gone through."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("the prompt was read")


def test_a_prompt_that_is_too_long_is_not_read() -> None:
    """A server's event loop waited 0.15 s for one of four million tokens, and then refused it."""
    running = engine(pages=4)
    for length, words in ((97, "exceed the network's length"), (60, "whole budget has 4")):
        with pytest.raises(RequestError, match=words):
            running.submit(GenerationRequest(Unread([1] * length), 1))


def test_sampling_follows_its_seed_and_its_temperature() -> None:
    def drawn(temperature: float, seed: int) -> list[int]:
        asked = GenerationRequest((1, 2, 3), 30, Sampling(temperature, seed), ends_early=False)
        running = engine()
        generation = running.submit(asked)
        running.run_until_idle()
        return generation.generated

    assert drawn(1.0, 1) == drawn(1.0, 1) != drawn(1.0, 2)
    assert drawn(1e-4, 1) == drawn(0.0, 2)
    with pytest.raises(RequestError, match="temperature is 2.1"):
        Sampling(2.1)


def test_draws_are_as_frequent_as_the_network_says() -> None:
    running = engine(most_waiting=2000)
    asked = [GenerationRequest((1, 2, 3, 4, 5), 1, Sampling(1.5, seed)) for seed in range(400)]
    drawn = [running.submit(each) for each in asked]
    running.run_until_idle()
    chances = torch.softmax(plain_logits(DECODER, [1, 2, 3, 4, 5])[-1] / 1.5, dim=0)
    counts = torch.bincount(torch.tensor([each.generated[0] for each in drawn]), minlength=13)
    worst = ((counts / 400 - chances).abs() / (chances * (1 - chances) / 400).sqrt()).max()
    assert worst < 4.0  # seeds are fixed: this passes always or never


def test_a_text_ends_where_the_network_ends_it() -> None:
    asked = [GenerationRequest((1, seed % 12), 40, Sampling(1.0, seed)) for seed in range(12)]
    running = engine()
    ended = [running.submit(each) for each in asked]
    running.run_until_idle()
    stopped = [each for each in ended if each.ending is Ending.STOP]
    assert stopped and all(each.generated[-1] == 12 and 12 not in each.generated[:-1] for each in stopped)


def test_accesses_are_a_trace_that_replay_reads(tmp_path: Path) -> None:
    log = tmp_path / "accesses.jsonl"
    pool = pool_for(DECODER, 64 * PAGE_BYTES, PAGE_TOKENS)
    running = PrefixEngine(DECODER, pool, KeptPrefixes("lru"), page_tokens=PAGE_TOKENS, sink=AccessFile(log))
    for tail in (1, 2, 2):
        generated(running, [0, 1, 2, 3] * 3 + [tail] * 5, 2)
    generated(running, [1, 2])  # no page of it is kept
    running.close()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["hits"] for line in lines] == [0, 3, 4]
    assert {(line["input_length"], line["output_length"]) for line in lines} == {(17, 2)}
    assert {line["capacity_blocks"] for line in lines} == {64}
    trace = evict.read_trace(log)
    assert (len(trace), trace.distinct) == (3, 5)
    outcome = evict.replay(trace, [5], ["lru"]).outcomes[0]
    assert outcome.hits == 7


def access(number: int) -> PrefixAccess:
    return PrefixAccess(1000 * number, 32, 1, [bytes([number]) * 32], 0, 10)


def stamps(path: Path) -> list[float]:
    """The times of a trace's requests, all of which can be read."""
    return [float(each) for each in evict.read_trace(path).time_s]


def test_a_line_of_an_access_log_that_is_written_in_part_is_taken_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk takes a part of it without an error. The trace could not be read any more."""
    path = tmp_path / "accesses.jsonl"
    sink = AccessFile(path)
    sink.accessed(access(1))
    with full_at(path.stat().st_size + 30):
        sink.accessed(access(2))
    sink.accessed(access(3))
    sink.close()
    assert stamps(path) == [1.0]
    assert [record.message for record in caplog.records] == ["writing the access log failed; it ends here"]
    again = AccessFile(path)
    again.accessed(access(4))
    again.close()
    assert stamps(path) == [1.0, 4.0]


def test_an_access_log_stays_a_trace_when_the_clock_is_set_back(tmp_path: Path) -> None:
    """Time that goes back made the whole log unreadable."""
    log = AccessFile(tmp_path / "accesses.jsonl")
    for number in (2, 1, 3):
        log.accessed(access(number))
    log.close()
    again = AccessFile(tmp_path / "accesses.jsonl")
    long = [(number << 20).to_bytes(8, "little") for number in range(10_000)]
    again.accessed(replace(access(1), names=long))
    again.close()
    last = AccessFile(tmp_path / "accesses.jsonl")
    last.accessed(access(2))
    last.close()
    assert stamps(tmp_path / "accesses.jsonl") == [2.0, 2.0, 3.0, 3.0, 3.0]


def test_an_access_log_begins_after_the_last_line_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "accesses.jsonl"
    path.write_text('{"timestamp": 1000, "hash_ids": [1]}')  # another program wrote no end of the line
    sink = AccessFile(path)
    sink.accessed(access(2))
    sink.close()
    assert stamps(path) == [1.0, 2.0]


@pytest.mark.parametrize("made", [False, True], ids=["moved away", "and made anew"])
def test_an_access_log_follows_its_name(tmp_path: Path, made: bool) -> None:
    """As logrotate moves a file away; it was written on."""
    path, old = tmp_path / "accesses.jsonl", tmp_path / "accesses.1.jsonl"
    sink = AccessFile(path)
    sink.accessed(access(1))
    path.rename(old)
    if made:
        path.touch()
    for number in (2, 3):
        sink.accessed(access(number))
    sink.close()
    assert (stamps(old), stamps(path)) == ([1.0], [2.0, 3.0])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's disk that is always full")
def test_an_access_log_that_cannot_be_written_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    pool = pool_for(DECODER, 64 * PAGE_BYTES, PAGE_TOKENS)
    sink = AccessFile(Path("/dev/full"))
    running = PrefixEngine(DECODER, pool, KeptPrefixes("lru"), page_tokens=PAGE_TOKENS, sink=sink)
    for _ in range(2):
        assert generated(running, [1] * 9).ending is Ending.LENGTH
    running.close()
    assert [record.message for record in caplog.records] == ["writing the access log failed; it ends here"]


@pytest.mark.parametrize("policy", ["lru", "lpc", "laru+lpc"])
def test_a_service_gets_the_accesses_of_policies_that_cannot_use_its_predictors(
    policy: str, tmp_path: Path
) -> None:
    kept = KeptPrefixes(policy, service=str(tmp_path / "served"))
    assert kept.only_logs
    running = engine(kept=kept)
    for _ in range(2):
        generated(running, [1, 2, 3] * 4)

    def logged() -> list[int]:
        lines = [line for path in tmp_path.rglob("*.jsonl") for line in path.read_text().splitlines()]
        return [json.loads(line)["hits"] for line in lines if "hits" in line]

    until(lambda: logged() == [0, 2])


def test_a_service_gets_no_answer_to_a_prompt_shorter_than_a_page(tmp_path: Path) -> None:
    """It was logged as a request that missed all pages of its answer."""
    running = engine(kept=KeptPrefixes("lru", service=str(tmp_path)))
    answer = generated(running, [1, 2], 3 * PAGE_TOKENS).generated
    going_on = [1, 2, *answer, 3]
    assert generated(running, going_on).hit_tokens == 3 * PAGE_TOKENS
    running.close()

    def logged() -> list[tuple[int, int]]:
        lines = [line for path in tmp_path.rglob("*.jsonl") for line in path.read_text().splitlines()]
        return [(len(row["hash_ids"]), row["hits"]) for row in map(json.loads, lines)]

    until(lambda: logged() == [(3, 3)])
    assert running.figures()["pages_requested"] == 3


def test_policies_that_predict_reuse_use_the_predictors_of_a_service() -> None:
    assert not KeptPrefixes("gati", service="served").only_logs
    assert not KeptPrefixes("lru").only_logs


def test_figures_do_not_wait_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    running = engine()
    computing, may_end = threading.Event(), threading.Event()
    compute = running.decoder.forward

    def slow(*arguments: Any) -> torch.Tensor:
        computing.set()
        assert may_end.wait(LONG_S)
        return compute(*arguments)

    monkeypatch.setattr(running.decoder, "forward", slow)
    running.submit(request([1] * 9, 2))
    with ThreadPoolExecutor() as threads:
        stepping = threads.submit(running.step)
        try:
            assert computing.wait(LONG_S)
            found = returns(running.figures)
        finally:
            may_end.set()
        assert stepping.result(LONG_S)
    assert (found["running"], found["steps"], found["pages"]["used"]) == (1, 0, 3)
    assert running.figures()["steps"] == 1


@pytest.mark.parametrize("running", [1, 4])
@pytest.mark.parametrize("pages", [64, 120])
def test_the_guard_counts_what_an_engine_with_lru_would_hit(pages: int, running: int) -> None:
    """In conversations whose answers stay cached, with pages in use, and a budget below the pool's limit."""

    def hits(policy: str) -> tuple[int, Mapping[str, Any]]:
        pool = pool_for(SINGLE, 160 * PAGE_BYTES, PAGE_TOKENS)
        pool.resize(pages * PAGE_BYTES)
        limits = PrefixEngineLimits(most_running=running)
        kept, seconds = KeptPrefixes(policy, cost_growth=0.0), itertools.count(0.0)
        engine = PrefixEngine(
            SINGLE, pool, kept, limits, page_tokens=PAGE_TOKENS, clock=lambda: next(seconds)
        )
        random = np.random.default_rng(0)
        conversations: list[list[int]] = [[] for _ in range(24)]
        for _ in range(160 // running):
            said = []
            for at in {int(random.random() ** 2 * 24) for _ in range(running)}:
                if len(conversations[at]) > 80:
                    conversations[at] = []
                conversations[at] += random.integers(0, 12, 4).tolist()
                goes_on = float(random.random()) if at % 2 else 0.9
                asked = replace(request(conversations[at], 6), goes_on=goes_on)
                said.append((conversations[at], engine.submit(asked)))
            engine.run_until_idle()
            for conversation, generation in said:
                conversation += generation.generated
        figures = engine.figures()
        assert figures["pages_evicted"] > 50
        return figures["pages_hit"], figures["policy"]

    ours, counts = hits("laru+lpc")  # which predicts from the first request on
    lost = hits("lru")[0] - ours
    if running == 1:
        assert counts["guard"]["excess"] == lost != 0
    else:
        assert abs(counts["guard"]["excess"] - lost) <= 3  # locked pages change LRU's order


def test_how_likely_a_conversation_goes_on_decides_under_lpc() -> None:
    def found(policy: str) -> int:
        running = engine(6, KeptPrefixes(policy, gap_s=1e9))
        asked = ([1] * 9, np.float64(0.9)), ([2] * 9, np.float32(0.1)), ([3] * 9, 0.5)
        for prompt, goes_on in asked:  # as models of continuation return them
            running.submit(GenerationRequest(tuple(prompt), 1, goes_on=goes_on))
            running.run_until_idle()
        return generated(running, [1] * 9).hit_tokens

    assert (found("lpc"), found("lru")) == (8, 4)


def test_it_decides_about_answers_to_prompts_shorter_than_a_page_too() -> None:
    def found(policy: str) -> int:
        running = engine(5, KeptPrefixes(policy, gap_s=1e9))
        said = {}
        for prompt, goes_on in ((1, 0.9), (2, 0.1), (3, 0.5)):
            asked = replace(request([prompt], 2 * PAGE_TOKENS), goes_on=goes_on)
            generation = running.submit(asked)
            running.run_until_idle()
            said[prompt] = [prompt, *generation.generated]
        return generated(running, said[1]).hit_tokens

    assert found("lpc") == 2 * PAGE_TOKENS > found("lru")


def test_names_depend_on_every_token_before() -> None:
    one, other = prefix_names([1, 2, 3, 4, 5, 6], 2), prefix_names([9, 2, 3, 4, 5], 2)
    assert len(one) == 3 and len(other) == 2
    assert not set(one) & set(other)
    assert prefix_names([1, 2, 3, 4, 7], 2) == one[:2]
    assert prefix_names([258], 1) != prefix_names([2], 1)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"policy": "best"}, "unknown policy 'best'"),
        ({"policy": "lmarker"}, "independent blocks"),
        ({"policy": "opt"}, "not a policy but an upper bound"),
        ({"policy": "opt-leaf"}, "in advance"),
        ({"policy": "lpc-oracle"}, "in advance"),
        ({"predictor": "guess"}, "unknown predictor 'guess'"),
        ({"policy": "lpc", "gap_s": 0.0}, "the mean gap is 0 s"),
        ({"cost_growth": -0.5}, "cost_growth is -0.5; give a number from 0"),
        (
            {"predictor": "learned", "service": "served"},
            r"give either a predictor \(learned\) or a service, not both",
        ),
        (
            {"policy": "lpc", "predictor": "learned", "service": "served"},
            "give either a predictor",
        ),
    ],
)
def test_unknown_policies_are_told(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(EvictError, match=words):
        engine(kept=KeptPrefixes(**wrong))


def test_what_a_token_costs_grows_as_the_network_computes() -> None:
    """Multiply-adds of one layer: its matrices, and for each earlier token a dot product and a sum."""
    matrices = sum(weight.numel() for weight in DECODER.model.layers[0].parameters() if weight.ndim == 2)
    assert pytest.approx(2 * SETTINGS.width / matrices) == SETTINGS.cost_growth


def test_pages_are_weighed_by_their_cost_unless_told_otherwise() -> None:
    """A long prompt, then short ones until room is needed: its last pages take the longest to compute."""

    def kept(cost_growth: float | None) -> int:
        running = engine(16, KeptPrefixes("gati", cost_growth=cost_growth))
        predictor = running._pages._books.predictor
        long = [1] * (12 * PAGE_TOKENS + 1)
        generated(running, long)
        predictor.scores = lambda count: np.full(count, 10.0)  # all return equally late
        for token in range(2, 8):
            generated(running, [token] * (PAGE_TOKENS + 1))
        return generated(running, long).hit_tokens // PAGE_TOKENS

    assert kept(0.0) < 12
    assert kept(0.1) == kept(None) == 12


def test_sizes_that_do_not_fit_are_told() -> None:
    with pytest.raises(EvictError, match="is less than one page"):
        pool_for(DECODER, 100)
    with pytest.raises(EvictError, match="page_tokens is 0; give at least 1"):
        pool_for(DECODER, 10_000, 0)
    with pytest.raises(EvictError, match="the pool's pages have 4096"):
        PrefixPages(evict.PagePool(4096, 8192), SETTINGS, NOTHING_KEPT, page_tokens=64, dtype=torch.float64)
    with pytest.raises(EvictError, match="at least 1"):
        PrefixEngineLimits(chunk_tokens=0)
    for sizes, words in (
        ({"width": 30, "heads": 4}, "does not divide into 4 heads of even width"),
        ({"key_heads": 3}, "not a multiple of key_heads, 3"),
        ({"layers": 0}, "at least 1"),
    ):
        with pytest.raises(ModelError, match=words):
            DecoderSettings(**sizes)


def test_weights_are_drawn_by_seed() -> None:
    same, other = (Decoder.random(SETTINGS, seed).state_dict() for seed in (1, 2))
    for name, weight in SINGLE.state_dict().items():
        assert torch.equal(weight, same[name])
        assert weight.ndim == 1 or not torch.equal(weight, other[name])
        assert math.isfinite(float(weight.sum()))
