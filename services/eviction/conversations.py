"""Requests to `POST /v1/continue`: one conversation, or many."""

from __future__ import annotations

from collections.abc import Mapping
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

    The caller limits the memory of parsing; here, the number of messages limits the time of a request.

    **Raises:** `TooLargeError`, before any message is read, if there are too many; `RequestError` for other
    JSON, `DataError` for a conversation without a prompt, `TraceError` for an invalid message.
    """
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(document, dict) or len(document) != 1:
        raise RequestError('send {"messages": [...]} or {"conversations": [{"messages": [...]}, ...]}')
    if "messages" in document:
        return AskedConversations(_newest({"messages": document["messages"]}), False)
    if "conversations" not in document:
        raise RequestError(f"unknown field {str(*document)[:40]!r}; send messages or conversations")
    return AskedConversations(_newest(_conversations(document["conversations"])), True)


def _conversations(rows: Any) -> dict[str, Any]:
    """The messages of each conversation, by what errors call it."""
    if not isinstance(rows, list):
        raise RequestError("conversations must be a list")
    if len(rows) > MOST_CONVERSATIONS:
        raise TooLargeError(f"{len(rows)} conversations; send at most {MOST_CONVERSATIONS} per request")
    found = {}
    for number, row in enumerate(rows):
        where = f"conversation {number}"
        if not isinstance(row, dict) or row.keys() != {"messages"}:
            raise RequestError(f'{where} must be {{"messages": [...]}}')
        found[where] = row["messages"]
    return found


def _newest(conversations: Mapping[str, Any]) -> list[Prompts]:
    count = 0
    for where, messages in conversations.items():
        if not isinstance(messages, list):
            raise RequestError(f"{where}: messages must be a list")
        count += len(messages)
    if count > MOST_MESSAGES:
        raise TooLargeError(f"{count} messages; send at most {MOST_MESSAGES} per request")
    found = []
    for where, messages in conversations.items():
        prompts = newest_prompts([utterance_of(each, where) for each in messages])
        if prompts is None:
            raise DataError(f"{where} has no message of a user; the prediction needs one")
        found.append(prompts)
    return found
