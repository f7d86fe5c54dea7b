"""Messages as whole frames, as clients put them on a socket."""

from __future__ import annotations

from typing import Any

from services.wire.codec import Limits, encode_parts

__all__ = ["encode"]


def encode(name: str, kind: int, sequence: int, body: Any, limits: Limits) -> bytes:
    return b"".join(encode_parts(name, kind, sequence, body, limits))
