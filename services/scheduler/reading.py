"""Reads inference requests: memory is charged first, and long requests are parsed outside the event loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.requests import Request

from services.collecting import uncollected
from services.config import ServeConfig
from services.scheduler.bodies import read_body, unless_gone
from services.scheduler.budget import Charge, check_json
from services.scheduler.protocol import HEADER_LENGTH, InferenceRequest, parse_request, split
from services.scheduler.scheduler import Scheduler

_COPIES = 1  # copies of a binary tensor between the body and the socket of a service
_JSON_COPIES = 3  # the body, the parser's copy, and at least as much for the parsed values
_LEAST_JSON = 0.125  # share of the memory for JSON that even a large binary tensor after it leaves
_LONG_BYTES = 64 * 1024  # longer bodies are parsed outside the event loop


async def read_inference(
    request: Request, scheduler: Scheduler, charge: Charge, info: Any = None
) -> InferenceRequest:
    """Read a request of the Open Inference Protocol; `info` is the model's `ModelInfo`, None if unknown.

    Raises `GatiError` if the request is refused.
    """
    largest_bytes = largest_body(request, scheduler.config)
    with scheduler.receiving(charge.owner):
        body = await read_body(request, largest_bytes, charge, scheduler.pool)
    return await parse_inference(request, body, scheduler, charge, info)


def largest_body(request: Request, config: ServeConfig) -> int:
    """Return the largest allowed body in bytes; smaller for JSON alone, because copies of it are held."""
    if HEADER_LENGTH in request.headers:
        return config.largest_body_bytes
    return min(config.largest_body_bytes, config.largest_json_bytes // _JSON_COPIES)


async def parse_inference(
    request: Request, body: bytes, scheduler: Scheduler, charge: Charge, info: Any = None
) -> InferenceRequest:
    """As `read_inference`, for a body that has been read."""
    header_length = request.headers.get(HEADER_LENGTH)
    read = partial(_read, body, header_length, scheduler.config.largest_json_bytes, charge, info)
    if len(body) < _LONG_BYTES:
        return read()
    return await unless_gone(request, scheduler.pool.run(_long, read, owner=charge.owner))


def _long(read: Callable[[], InferenceRequest]) -> InferenceRequest:
    with uncollected():
        return read()


def _read(
    body: bytes, header_length: str | None, largest_json_bytes: int, charge: Charge, info: Any
) -> InferenceRequest:
    text, rest = split(body, header_length)
    # Separating JSON from a binary tensor makes another copy.
    copies = _JSON_COPIES if rest else _JSON_COPIES - 1
    # A large binary tensor leaves little memory for JSON, which then only describes the tensor.
    largest_bytes = max(largest_json_bytes - len(rest), int(_LEAST_JSON * largest_json_bytes))
    charge.add(check_json(text, largest_bytes, copies * len(text)) + _COPIES * len(rest))
    if info is None:
        return parse_request(text, rest)
    return parse_request(text, rest, info.inputs or (), info.largest_batch)
