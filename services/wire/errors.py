"""Errors on the wire: converts a GatiError to a ServiceError and back."""

from __future__ import annotations

from typing import Any

from gati.errors import (
    CancelledError,
    CompositionError,
    DeadlineError,
    GatiError,
    NotFoundError,
    OverloadError,
    RequestError,
    ServingError,
    UnavailableError,
)
from services.wire.gen.ttypes import ErrorCode, ServiceError

_CLASSES: dict[int, type[GatiError]] = {
    ErrorCode.INVALID_ARGUMENT: RequestError,
    ErrorCode.NOT_FOUND: NotFoundError,
    ErrorCode.FAILED_PRECONDITION: CompositionError,
    ErrorCode.RESOURCE_EXHAUSTED: OverloadError,
    ErrorCode.UNAVAILABLE: UnavailableError,
    ErrorCode.DEADLINE_EXCEEDED: DeadlineError,
    ErrorCode.CANCELLED: CancelledError,
}


def to_wire(error: GatiError) -> Any:
    """The `ServiceError` for an error."""
    retry_after_s = getattr(error, "retry_after_s", None)
    return ServiceError(
        code=ErrorCode._NAMES_TO_VALUES[error.thrift_code],
        message=str(error),
        retry_after_ms=None if retry_after_s is None else max(1, round(1e3 * retry_after_s)),
    )


def from_wire(error: Any) -> GatiError:
    """The error for a `ServiceError`; `UnavailableError` for internal errors and unknown codes."""
    kind = _CLASSES.get(error.code, UnavailableError)
    retry_after_s = None if error.retry_after_ms is None else error.retry_after_ms / 1e3
    if issubclass(kind, ServingError):
        return kind(error.message, retry_after_s=retry_after_s)
    return kind(error.message)
