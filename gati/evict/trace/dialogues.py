"""Dialogues: messages in order, read from JSON lines, and split into two disjoint halves."""

from __future__ import annotations

import hashlib
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gati.errors import TraceError
from gati.evict.trace.files import content_of, json_object, lines_of, text_of

EARLIER = 4  # number of earlier prompts that are used

_MESSAGES = ("turns", "messages", "conversation", "conversations", "conversation_a")
_ROLES = ("role", "from")
_TEXTS = ("content", "value", "text")
_USERS = ("u", "user", "human")
_CALLS = ("tool_calls", "function_call")
_WANTED = "a file of dialogues, one per line, as JSON"


@dataclass(frozen=True)
class Utterance:
    """One message."""

    user: bool
    text: str


@dataclass(frozen=True)
class Dialogue:
    """Messages of a user and an assistant, in order."""

    name: str
    messages: tuple[Utterance, ...]


@dataclass(frozen=True)
class Prompts:
    """The information at a user's message: the last prompts, the new one last, and its number."""

    texts: tuple[str, ...]
    turn: int  # 1 for the first prompt


def prompts_of(messages: Iterable[Utterance]) -> list[Prompts]:
    """The prompts as each message of the user arrives, with up to four earlier ones; no responses."""
    said = [message.text for message in messages if message.user]
    return [Prompts(tuple(said[max(turn - 1 - EARLIER, 0) : turn]), turn) for turn in range(1, len(said) + 1)]


def newest_prompts(messages: Iterable[Utterance]) -> Prompts | None:
    """The last entry of `prompts_of`, None without a message of a user."""
    said = [message.text for message in messages if message.user]
    return Prompts(tuple(said[-1 - EARLIER :]), len(said)) if said else None


def halves(dialogues: Sequence[Dialogue], *, seed: int = 0) -> tuple[list[Dialogue], list[Dialogue]]:
    """Split into a training and a held-out half; only the dialogue's name and the seed decide."""
    sides: tuple[list[Dialogue], list[Dialogue]] = ([], [])
    for dialogue in dialogues:
        digest = hashlib.blake2b(f"{seed}/{dialogue.name}".encode(), digest_size=1).digest()
        sides[digest[0] & 1].append(dialogue)
    return sides


def read_dialogues(path: str | Path) -> list[Dialogue]:
    """Read dialogues, one per line: JSON with `messages`, `turns`, `conversation` or `conversations`.

    A message is `{"role": "user", "content": ...}`, `{"from": "human", "value": ...}` (ShareGPT) or a pair
    `["U", ...]` (Schema-Guided Dialogue). The file may be gzipped, whatever its name. If a dialogue has no
    `id`, its line number is its name.

    Raises TraceError, with the line number, for content that cannot be read.
    """
    path = Path(path)
    text = text_of(path, content_of(path, _WANTED), _WANTED)
    found = [
        _dialogue(line, f"{path} line {number}", str(number))
        for number, line in enumerate(lines_of(text), start=1)
        if line.strip()
    ]
    if not found:
        raise TraceError(f"{path} has no dialogues")
    return found


def _dialogue(line: str, where: str, name: str) -> Dialogue:
    record = json_object(line, where)
    key = next((key for key in _MESSAGES if isinstance(record.get(key), list)), None)
    if key is None:
        raise TraceError(
            f"{where} has no dialogue: none of {', '.join(_MESSAGES)} is a list among "
            f"{', '.join(map(str, record)) or 'no keys'}"
        )
    messages = tuple(utterance_of(each, f"{where}: {key}") for each in record[key])
    return Dialogue(str(record.get("id", record.get("conversation_id", name))), messages)


def utterance_of(said: Any, where: str) -> Utterance:
    """A message of a dialogue, in one of the forms of `read_dialogues`; `where` begins error messages.

    Content may be a list of parts, as `[{"type": "text", "text": ...}]`; parts that are not text are skipped.
    An assistant that calls tools may have null or no content, which is read as an empty text. Raises
    TraceError for anything else.
    """
    role: Any = None
    text: Any = None
    if type(said) is dict and type(said.get("role")) is type(said.get("content")) is str:  # most are
        return Utterance(said["role"].lower() in _USERS, said["content"])
    if isinstance(said, Mapping):
        role = next((said[key] for key in _ROLES if key in said), None)
        text = next((said[key] for key in _TEXTS if key in said), None)
        if text is None and _may_be_silent(said, role):
            text = ""
    elif isinstance(said, list) and len(said) == 2:
        role, text = said
    if isinstance(text, list):
        parts = [part.get("text") for part in text if isinstance(part, Mapping)]
        text = " ".join(part for part in parts if isinstance(part, str))
    if not isinstance(role, str) or not isinstance(text, str):
        raise TraceError(
            f'{where} holds {reprlib.repr(said)[:60]}; a message is {{"role": "user", "content": "..."}}, '
            '{"from": "human", "value": "..."} or ["U", "..."]'
        )
    return Utterance(role.lower() in _USERS, text)


def _may_be_silent(said: Mapping[str, Any], role: Any) -> bool:
    """Whether a message needs no text: it is not of a user, and its content is null, or it has calls."""
    if not isinstance(role, str) or role.lower() in _USERS:
        return False
    return any(key in said for key in (*_TEXTS, *_CALLS))
