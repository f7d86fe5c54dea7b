"""Request streams from dialogues: the times of prompts, and the prefix blocks of each request.

The protocol of "learned prefix caching" (LPC): users reply after exponential pauses, and conversations begin
at equal intervals, with a limit on the number of concurrent ones.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gati.errors import EvictError
from gati.evict.trace.dialogues import Dialogue, prompts_of
from gati.evict.trace.records import Talk, Trace, make_trace

_TOKEN = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class StreamSettings:
    """Settings of a stream. Raises EvictError for values out of range."""

    active: int = 200  # maximum number of concurrent conversations
    gap_s: float = 100.0  # mean pause between a response's end and the next prompt
    duration_s: float = 1200.0
    block_tokens: int = 16  # a token is a word or a punctuation mark
    tokens_per_s: float = 50.0  # speed of responses
    seed: int = 0

    def __post_init__(self) -> None:
        for what, value, unit in (
            ("active", self.active, ""),
            ("the mean gap", self.gap_s, " s"),
            ("the duration", self.duration_s, " s"),
            ("the block size", self.block_tokens, " tokens"),
            ("the speed of responses", self.tokens_per_s, " tokens per second"),
        ):
            if not 0 < value < float("inf"):
                raise EvictError(f"{what} is {value:g}{unit}; it must be above zero and finite")


@dataclass(frozen=True)
class TimedRequest:
    """A prompt with the conversation before it: full blocks from the root down, and its time."""

    time_s: float
    blocks: list[int]
    input_tokens: int
    output_tokens: int
    talk: Talk


@dataclass
class _Conversation:
    """An active dialogue."""

    number: int
    dialogue: Dialogue
    requests: list[TimedRequest]  # without times yet
    at: int = 0


class _Blocks:
    """Numbers for full blocks of tokens; each identifies all tokens up to the end of its block."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._numbers: dict[tuple[int, tuple[str, ...]], int] = {}

    def of(self, tokens: Sequence[str]) -> list[int]:
        found = []
        above = -1
        for begin in range(0, len(tokens) - self._size + 1, self._size):
            key = (above, tuple(tokens[begin : begin + self._size]))
            above = self._numbers.setdefault(key, len(self._numbers))
            found.append(above)
        return found


def synthesise(dialogues: Sequence[Dialogue], settings: StreamSettings | None = None) -> list[TimedRequest]:
    """A stream of requests, in the order of their times, which begin at 0.

    Each prompt is a request with all messages up to it. The next one follows after the response has been
    decoded and an exponential pause of mean `gap_s` is over. The maximum number of conversations is active
    from the first request on. Requests that fill no block are left out. Dialogues come in random order, each
    once; if there are too few, they are repeated under new numbers.

    Raises EvictError if no dialogue has a message of a user.
    """
    settings = settings or StreamSettings()
    chance = random.Random(settings.seed)
    usable = [each for each in dialogues if any(message.user for message in each.messages)]
    if not usable:
        raise EvictError(f"none of {len(dialogues)} dialogues has a message of a user")
    lasts_s = settings.gap_s * sum(_prompts(each) for each in usable) / len(usable)
    stream = _stream(usable, settings, chance, lasts_s / settings.active)
    warm_s = 2.0 * lasts_s  # until conversations of all ages are active
    found = []
    for request in stream:
        if request.time_s >= warm_s + settings.duration_s:
            break
        if request.time_s >= warm_s and request.blocks:
            found.append(replace(request, time_s=request.time_s - warm_s))
    if not found:
        raise EvictError(
            "the stream has no request that fills a block: let it last longer, or make blocks smaller"
        )
    return found


def trace_of(requests: Sequence[TimedRequest], *, name: str = "dialogues") -> Trace:
    """The stream as a trace to replay."""
    return make_trace(
        [request.blocks for request in requests],
        [request.time_s for request in requests],
        name=name,
        talks=[request.talk for request in requests],
    )


def trace_text(requests: Sequence[TimedRequest]) -> str:
    """The stream as JSON lines in Mooncake's format, with the prompts; times in ms."""
    rows = []
    for request in requests:
        row = {
            "timestamp": int(request.time_s * 1000.0),
            "input_length": request.input_tokens,
            "output_length": request.output_tokens,
            "hash_ids": request.blocks,
            **request.talk.to_row(),
        }
        rows.append(json.dumps(row) + "\n")
    return "".join(rows)


def _stream(
    dialogues: Sequence[Dialogue], settings: StreamSettings, chance: random.Random, every_s: float
) -> Iterator[TimedRequest]:
    """Endless requests. At the limit of active conversations, the next begins when one ends."""
    blocks = _Blocks(settings.block_tokens)
    order = _forever(dialogues, chance)
    numbers = itertools.count()
    due: list[tuple[float, int, _Conversation]] = []  # number: no two are equal
    starts_s = 0.0
    while True:
        if len(due) < settings.active and (not due or starts_s <= due[0][0]):
            number = next(numbers)
            dialogue = next(order)
            begun = _Conversation(number, dialogue, _requests(dialogue, number, blocks))
            heapq.heappush(due, (starts_s, number, begun))
            starts_s += every_s
            continue
        now_s, number, conversation = heapq.heappop(due)
        request = conversation.requests[conversation.at]
        yield replace(request, time_s=now_s)
        conversation.at += 1
        if conversation.at < len(conversation.requests):
            response_s = request.output_tokens / settings.tokens_per_s
            pause_s = chance.expovariate(1.0 / settings.gap_s)
            heapq.heappush(due, (now_s + response_s + pause_s, number, conversation))
        else:
            starts_s = max(starts_s, now_s) if len(due) == settings.active - 1 else starts_s


def _forever(dialogues: Sequence[Dialogue], chance: random.Random) -> Iterator[Dialogue]:
    while True:
        yield from chance.sample(dialogues, len(dialogues))


def _requests(dialogue: Dialogue, number: int, blocks: _Blocks) -> list[TimedRequest]:
    prompts = prompts_of(dialogue.messages)
    tokens: list[str] = []
    found: list[TimedRequest] = []
    for message in dialogue.messages:
        words = _TOKEN.findall(message.text)
        tokens += ["<user>" if message.user else "<assistant>", *words]
        if message.user:
            said = prompts[len(found)]
            talk = Talk(number, said, goes_on=said.turn < len(prompts))
            found.append(TimedRequest(0.0, blocks.of(tokens), len(tokens), 0, talk))
        elif found:
            last = found[-1]
            found[-1] = replace(last, output_tokens=last.output_tokens + len(words))
    return found


def _prompts(dialogue: Dialogue) -> int:
    return sum(message.user for message in dialogue.messages)
