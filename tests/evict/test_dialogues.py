"""Dialogues read from files, and the request streams made of them."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from gati.errors import EvictError, TraceError
from gati.evict import read_trace
from gati.evict.trace.dialogues import (
    Dialogue,
    Utterance,
    halves,
    newest_prompts,
    prompts_of,
    read_dialogues,
)
from gati.evict.trace.synthesise import StreamSettings, TimedRequest, synthesise, trace_of, trace_text
from tests.evict.talking import talks, write

SETTINGS = StreamSettings(active=20, gap_s=10.0, duration_s=600.0, block_tokens=4)


def by_conversation(requests: list[TimedRequest]) -> dict[int, list[TimedRequest]]:
    found: dict[int, list[TimedRequest]] = defaultdict(list)
    for request in requests:
        found[request.talk.conversation].append(request)
    return found


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
        {"id": 3, "turns": [["U", "hi"], ["S", "yes"]]},
        {"conversation": [{"role": "USER", "content": "hi"}, {"role": "assistant", "content": "yes"}]},
    ],
    ids=["messages", "ShareGPT", "SGD", "LMSYS"],
)
def test_dialogues_are_read_in_the_formats_there_are(tmp_path: Path, row: dict[str, object]) -> None:
    path = tmp_path / "talks.jsonl.gz"
    for mark in ("", "\ufeff"):  # which programs on Windows write
        path.write_bytes(gzip.compress((mark + json.dumps(row)).encode() + b"\n\n"))
        (found,) = read_dialogues(path)
        assert found.messages == (Utterance(True, "hi"), Utterance(False, "yes"))
        assert found.name == str(row.get("id", 1))


@pytest.mark.parametrize(
    "silent",
    [
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]},
        {"role": "assistant", "content": None, "function_call": {"name": "find", "arguments": "{}"}},
        {"role": "assistant", "tool_calls": [{"type": "function"}]},
        {"role": "assistant", "content": None, "refusal": "no"},
        {"from": "gpt", "value": None},
    ],
)
def test_an_assistant_that_calls_a_tool_says_nothing(tmp_path: Path, silent: dict[str, object]) -> None:
    path = tmp_path / "talks.jsonl"
    said = [{"role": "user", "content": "hi"}, silent, {"role": "tool", "content": "yes"}]
    path.write_text(json.dumps({"messages": said}))
    (found,) = read_dialogues(path)
    assert found.messages == (Utterance(True, "hi"), Utterance(False, ""), Utterance(False, "yes"))


@pytest.mark.parametrize(
    "silent",
    [
        {"role": "user", "content": None},
        {"role": "user", "tool_calls": []},
        {"role": "assistant"},
        {"role": None, "content": None},
        ["S", None],
    ],
)
def test_other_messages_have_a_text(tmp_path: Path, silent: object) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"messages": [silent]}))
    with pytest.raises(TraceError, match="messages holds"):
        read_dialogues(path)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_text_may_hold_any_separator(tmp_path: Path, end: str) -> None:
    """Of JSON, only line feeds and carriage returns end lines; others may be in strings as they are."""
    path = tmp_path / "talks.jsonl"
    text = "one\u2028two\u2029three\x85four"
    line = json.dumps({"turns": [["U", text]]}, ensure_ascii=False)
    path.write_bytes((line + end + end + line + end).encode())
    one, other = read_dialogues(path)
    assert one.messages == other.messages == (Utterance(True, text),)
    assert (one.name, other.name) == ("1", "3")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param('{"messages": []}\n{oh', "line 2 is not JSON", id="no JSON"),
        pytest.param("[1]", "line 1 is not a JSON object", id="no object"),
        pytest.param('{"words": 1}', "line 1 has no dialogue: none of", id="no messages"),
        pytest.param('{"turns": [["U"]]}', "line 1: turns holds", id="no message"),
        pytest.param('{"messages": [{"role": "user", "content": 1}]}', "messages holds", id="no text"),
        pytest.param("\n", "has no dialogues", id="empty"),
    ],
)
def test_what_holds_no_dialogues_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_dialogues(path)


def test_prompts_are_the_last_five_of_the_user() -> None:
    messages = [Utterance(number % 2 == 0, f"{number}") for number in range(14)]
    prompts = prompts_of(messages)
    assert [each.turn for each in prompts] == [1, 2, 3, 4, 5, 6, 7]
    assert prompts[0].texts == ("0",)
    assert prompts[-1].texts == ("4", "6", "8", "10", "12")


def test_halves_share_no_dialogue_and_names_alone_decide() -> None:
    dialogues = talks(400)
    first, second = halves(dialogues)
    assert sorted(each.name for each in first + second) == sorted(each.name for each in dialogues)
    assert 150 < len(first) < 250
    again, _ = halves(dialogues[::-1][:300])
    assert {each.name for each in again} <= {each.name for each in first}
    assert {each.name for each in halves(dialogues, seed=1)[0]} != {each.name for each in first}


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 30))
def test_a_stream_is_a_tree_in_order_with_no_more_conversations_than_allowed(seed: int, active: int) -> None:
    shape = StreamSettings(active=active, gap_s=10.0, duration_s=100.0, block_tokens=3, seed=seed)
    requests = synthesise(talks(30), shape)
    trace = trace_of(requests)  # raises where it is no tree or time goes back
    assert trace.time_s[0] >= 0.0
    assert trace.time_s[-1] < 100.0
    spans = [(rows[0].time_s, rows[-1].time_s) for rows in by_conversation(requests).values()]
    assert max(sum(begin <= at < end for begin, end in spans) for at in trace.time_s) <= active
    for rows in by_conversation(requests).values():
        turns = [row.talk.prompts.turn for row in rows]
        assert turns == list(range(turns[0], turns[0] + len(turns)))
        assert all(row.talk.goes_on for row in rows[:-1])


def test_each_request_holds_all_blocks_of_the_one_before() -> None:
    for rows in by_conversation(synthesise(talks(100), SETTINGS)).values():
        for former, later in zip(rows[:-1], rows[1:], strict=True):
            assert later.blocks[: len(former.blocks)] == former.blocks
            assert len(later.blocks) == later.input_tokens // 4
            answered = later.time_s - former.time_s
            assert answered > former.output_tokens / SETTINGS.tokens_per_s


def test_pauses_are_exponential_and_nearly_all_places_are_taken() -> None:
    shape = StreamSettings(active=50, gap_s=10.0, duration_s=4000.0, block_tokens=2)
    requests = synthesise(talks(500, longest=6), shape)
    pauses = [
        later.time_s - former.time_s - former.output_tokens / shape.tokens_per_s
        for rows in by_conversation(requests).values()
        for former, later in zip(rows[:-1], rows[1:], strict=True)
    ]
    assert len(pauses) > 3000
    assert stats.kstest(pauses, stats.expon(scale=10.0).cdf).pvalue > 1e-4
    spans = [(rows[0].time_s, rows[-1].time_s) for rows in by_conversation(requests).values()]
    under_way = [sum(begin <= at <= end for begin, end in spans) for at in np.arange(500.0, 3500.0, 100.0)]
    assert 0.7 * 50 < np.mean(under_way) <= 50


def test_equal_beginnings_share_blocks() -> None:
    said = "one two three four five six seven"
    dialogues = [
        Dialogue(name, (Utterance(True, said), Utterance(False, name), Utterance(True, "more")))
        for name in "ab"
    ]
    shape = StreamSettings(active=2, gap_s=1.0, duration_s=100.0, block_tokens=4)
    requests = synthesise(dialogues, shape)
    firsts = Counter(tuple(each.blocks[:2]) for each in requests)
    assert len(firsts) == 1
    assert {each.talk.goes_on for each in requests} == {True, False}


def test_a_stream_written_is_the_stream_read(tmp_path: Path) -> None:
    requests = synthesise(talks(60), SETTINGS)
    path = tmp_path / "stream.jsonl"
    path.write_text(trace_text(requests))
    found, made = read_trace(path), trace_of(requests)
    assert found.talks == made.talks and found.requests == made.requests
    np.testing.assert_allclose(found.time_s, made.time_s, atol=1e-3)
    assert found.head(5).talks == made.talks[:5] if made.talks else False


@pytest.mark.parametrize(
    ("row", "message"),
    [
        pytest.param({"prompts": []}, "prompts is", id="no prompts"),
        pytest.param({"prompts": ["hi"], "conversation": 1}, "turn is None", id="no turn"),
        pytest.param({"prompts": ["hi"], "conversation": "a", "turn": 1}, "conversation is 'a'", id="name"),
        pytest.param(
            {"prompts": ["hi"], "conversation": 1, "turn": 1, "goes_on": 1}, "goes_on is 1", id="label"
        ),
    ],
)
def test_what_a_trace_says_of_conversations_is_checked(
    tmp_path: Path, row: dict[str, object], message: str
) -> None:
    path = tmp_path / "stream.jsonl"
    path.write_text(json.dumps({"hash_ids": [1, 2], **row}))
    with pytest.raises(TraceError, match=f"line 1: {message}"):
        read_trace(path)


def test_streams_without_prompts_or_blocks_are_refused() -> None:
    with pytest.raises(EvictError, match="none of 1 dialogues has a message of a user"):
        synthesise([Dialogue("a", (Utterance(False, "hello"),))])
    with pytest.raises(EvictError, match="fills a block"):
        synthesise([Dialogue("a", (Utterance(True, "hello"),))])
    with pytest.raises(EvictError, match="the mean gap is 0 s"):
        StreamSettings(gap_s=0.0)


def test_dialogues_written_by_the_generator_are_read_again(tmp_path: Path) -> None:
    dialogues = talks(10)
    assert read_dialogues(write(tmp_path / "talks.jsonl", dialogues)) == dialogues


def test_the_newest_prompts_are_the_last_of_all() -> None:
    for dialogue in talks(30):
        for end in range(len(dialogue.messages) + 1):
            said = dialogue.messages[:end]
            assert newest_prompts(said) == (prompts_of(said) or [None])[-1]
