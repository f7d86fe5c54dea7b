"""Requests to `POST /v1/continue`: one conversation, or many."""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

from gati.errors import DataError, RequestError, TooLargeError
from gati.evict.trace.dialogues import Prompts, newest_prompts, utterance_of

MOST_CONVERSATIONS = 1024  # in a request
MOST_MESSAGES = 16_384


class AskedConversations(NamedTuple):
    """The latest prompt of each conversation with earlier ones, and whether the request was a list."""

    prompts: list[Prompts]
    listed: bool


def read_asked(body: bytes) -> AskedConversations:
    """Parse `{"messages": [...]}` or `{"conversations": [{"messages": [...]}, ...]}`.

    **Raises:** `TooLargeError`, before parsing, if there may be too many messages; `RequestError` for
    other JSON, `DataError` for a conversation without a prompt, `TraceError` for an invalid message.
    """
    objects = body.count(b"{") + body.count(b"[")  # each message has at least one
    if objects > 2 * (MOST_MESSAGES + MOST_CONVERSATIONS):
        raise TooLargeError(f"more than {MOST_MESSAGES} messages; send fewer conversations per request")
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(document, dict) or len(document) != 1:
        raise RequestError('send {"messages": [...]} or {"conversations": [{"messages": [...]}, ...]}')
    if "messages" in document:
        return AskedConversations([_newest(document["messages"], "messages")], False)
    if "conversations" not in document:
        raise RequestError(f"unknown field {str(*document)[:40]!r}; send messages or conversations")
    return AskedConversations(_conversations(document["conversations"]), True)


def _conversations(rows: Any) -> list[Prompts]:
    if not isinstance(rows, list):
        raise RequestError("conversations must be a list")
    if len(rows) > MOST_CONVERSATIONS:
        raise TooLargeError(f"{len(rows)} conversations; send at most {MOST_CONVERSATIONS} per request")
    found = []
    for number, row in enumerate(rows):
        where = f"conversation {number}"
        if not isinstance(row, dict) or row.keys() != {"messages"}:
            raise RequestError(f'{where} must be {{"messages": [...]}}')
        found.append(_newest(row["messages"], where))
    return found


def _newest(messages: Any, where: str) -> Prompts:
    if not isinstance(messages, list):
        raise RequestError(f"{where}: messages must be a list")
    prompts = newest_prompts([utterance_of(each, where) for each in messages])
    if prompts is None:
        raise DataError(f"{where} has no message of a user; the prediction needs one")
    return prompts
