"""Every error that Gati raises on purpose.

The tree is the contract: each class carries the exit status of the command line, the HTTP status
of the REST front end and the code of the Thrift services, so no layer maps errors by hand.
A message is one line: what was wrong, the value found, what is allowed, what to do next.

    GatiError
    ├── ModelError            the network cannot be loaded, run, or used as it is
    │   ├── CheckpointError   weights that do not fit or cannot be read safely
    │   ├── BlockError        no such block, or none found
    │   └── CutError          the network cannot be cut at a block
    ├── DataError             inputs of the wrong kind, shape, dtype or number
    │   └── TraceError        a trace of requests that cannot be read, or does not fit its kind
    ├── VariantError          unknown or unusable predictor or selector
    ├── LibraryError          a cache library that is missing, in use, newer, or of another checkpoint
    ├── CompositionError      no composition under the given limits, or none by that name
    ├── SolverError           a solver's answer is wrong, or no solver has that name
    │   └── UnsolvedError     a solver is missing, unlicensed or gave up
    ├── PipelineError         an invalid pipeline, without measurements, or used out of order
    ├── BackendError          unknown or unavailable backend, placement or device
    ├── EvictError            an unknown or unsuitable eviction policy, predictor or cache size
    ├── AdaptError            invalid settings of a guard or an adaptation
    ├── RepositoryError       versions of a model that are damaged or cannot be switched to
    │   └── UnknownVersionError   no such version
    ├── VideoError            a video, camera, stream or region that cannot be read or used
    ├── StorageError          disk full, not writable
    └── ServingError          a service refuses a request
        ├── ConfigError       invalid or contradictory settings of a service
        ├── RequestError      malformed: violates the protocol
        ├── TooLargeError     larger than the service accepts
        ├── NotFoundError     no such model, version, pipeline
        ├── NotAllowedError   the key is missing, wrong, or lacks the right
        ├── ForbiddenError    the origin or the host name is not permitted
        ├── MediaTypeError    an unsupported content type
        ├── OverloadError     too many requests are waiting; has a time for a retry
        ├── UnavailableError  not loaded yet, draining, or gone; may have a time for a retry
        ├── DeadlineError     the time remaining has passed
        └── CancelledError    the client has disconnected
"""

from __future__ import annotations


class GatiError(Exception):
    """Base of all errors with a message meant for the user."""

    exit_status: int = 2
    http_status: int = 400
    thrift_code: str = "INVALID_ARGUMENT"


class ModelError(GatiError):
    """The network cannot be loaded, run, or used as it is."""


class CheckpointError(ModelError):
    """Weights that do not fit the network, or that cannot be read without unpickling."""


class BlockError(ModelError):
    """No block was found, or a named block does not exist."""


class CutError(ModelError):
    """The network cannot be cut into segments at the requested block."""


class DataError(GatiError):
    """Inputs of the wrong kind, shape, dtype or number."""

    http_status = 422


class TraceError(DataError):
    """A trace of requests that cannot be read, or that is not a prefix tree although it should be."""


class EvictError(GatiError):
    """An eviction policy, predictor or cache size that is unknown or unsuitable."""


class VariantError(GatiError):
    """An unknown or unusable predictor architecture or selector."""


class LibraryError(GatiError):
    """A cache library that is missing, belongs to another checkpoint, is newer, or is in use."""

    http_status = 404
    thrift_code = "NOT_FOUND"


class CompositionError(GatiError):
    """No composition exists under the given limits, or none with the given name."""

    http_status = 409
    thrift_code = "FAILED_PRECONDITION"


class SolverError(GatiError):
    """No solver has that name, or its answer breaks a limit."""

    http_status = 503
    thrift_code = "UNAVAILABLE"


class UnsolvedError(SolverError):
    """A solver is missing, refuses the problem's size, or stopped without a solution."""


class BackendError(GatiError):
    """An unknown or unavailable backend, placement or device."""


class AdaptError(GatiError):
    """Invalid settings of a guard or an adaptation."""


class RepositoryError(GatiError):
    """Versions of a model that are damaged, or cannot be activated at the moment."""

    http_status = 409
    thrift_code = "FAILED_PRECONDITION"


class UnknownVersionError(RepositoryError):
    """No such version of the model, or it is not complete."""

    http_status = 404
    thrift_code = "NOT_FOUND"


class PipelineError(GatiError):
    """A pipeline file that is invalid or lacks measurements, or a query planned out of order."""


class VideoError(GatiError):
    """A video, camera, stream, region of a picture or sink of results that cannot be read or used."""

    http_status = 422


class StorageError(GatiError):
    """The disk is full or the path is not writable."""

    http_status = 507
    thrift_code = "RESOURCE_EXHAUSTED"


class ServingError(GatiError):
    """A service refuses a request. `retry_after_s` is the delay before a retry, if a retry makes sense."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ConfigError(ServingError):
    """Invalid or contradictory settings of a service."""


class RequestError(ServingError):
    """A request that violates the protocol."""


class TooLargeError(ServingError):
    """A request larger than the service accepts, compressed or decompressed."""

    http_status = 413


class NotFoundError(ServingError):
    """No model, version, pipeline or endpoint of that name."""

    http_status = 404
    thrift_code = "NOT_FOUND"


class NotAllowedError(ServingError):
    """The key that the service requires is missing, wrong, or lacks the right."""

    http_status = 401
    thrift_code = "FAILED_PRECONDITION"


class ForbiddenError(ServingError):
    """Refused because of the request's origin or host name."""

    http_status = 403
    thrift_code = "FAILED_PRECONDITION"


class MediaTypeError(ServingError):
    """A content type that an endpoint does not accept."""

    http_status = 415


class OverloadError(ServingError):
    """The request would miss its latency SLO in the queue, or the queue is full."""

    http_status = 429
    thrift_code = "RESOURCE_EXHAUSTED"


class UnavailableError(ServingError):
    """The service is not loaded yet, is draining, or has gone."""

    http_status = 503
    thrift_code = "UNAVAILABLE"


class DeadlineError(ServingError):
    """The client's deadline has passed."""

    http_status = 504
    thrift_code = "DEADLINE_EXCEEDED"


class CancelledError(ServingError):
    """The client has disconnected, so no answer is needed."""

    http_status = 499
    thrift_code = "CANCELLED"


def first_line(error: BaseException) -> str:
    """The message of an exception in one line; its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def one_line(error: BaseException) -> str:
    """An exception in one line, as `Type: message`."""
    name, line = type(error).__name__, first_line(error)
    return line if line == name else f"{name}: {line}"
