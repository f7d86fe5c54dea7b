"""Every error that Gati raises on purpose.

The tree is the contract: each class carries the exit status of the command line, the HTTP status
of the REST front end and the code of the Thrift services, so no layer maps errors by hand.
A message is one line: what was wrong, the value met, what was allowed, what to do next.

    GatiError
    ├── ModelError            the network cannot be loaded, run, or used as it is
    │   ├── CheckpointError   weights that do not fit or cannot be read safely
    │   ├── BlockError        no such block, or none found
    │   └── CutError          the network cannot be cut at a block
    ├── DataError             inputs of the wrong kind, shape, dtype or number
    │   └── TraceError        a trace of requests that cannot be read, or is not what it is said to be
    ├── VariantError          unknown or unusable predictor or selector
    ├── LibraryError          a cache library that is missing, foreign, newer or busy
    ├── CompositionError      no composition under the given limits, or none by that name
    ├── SolverError           a solver is missing, unlicensed or gave up
    ├── PipelineError         an invalid pipeline, without measurements, or used out of order
    ├── BackendError          unknown or unavailable backend, placement or device
    ├── EvictError            an unknown or unfit eviction policy, predictor or size of a cache
    ├── AdaptError            invalid settings of a guard or an adaptation
    ├── RepositoryError       versions of a model that are damaged or cannot be switched to
    │   └── UnknownVersionError   no such version
    ├── VideoError            a video, camera, stream or region that cannot be read or used
    ├── StorageError          disk full, not writable
    └── ServingError          a service refuses a request
        ├── ConfigError       settings of a service that are wrong, or contradict each other
        ├── RequestError      malformed: not what the protocol asks for
        ├── TooLargeError     larger than the service takes
        ├── NotFoundError     no such model, version, pipeline
        ├── NotAllowedError   the key is missing or wrong
        ├── ForbiddenError    not from there, or not with this key
        ├── MediaTypeError    content of a kind that is not taken
        ├── OverloadError     too much is waiting; comes with a time to try again
        ├── UnavailableError  not loaded yet, draining, or gone; may come with a time to try again
        ├── DeadlineError     the time remaining has passed
        └── CancelledError    the caller has gone
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
    """No block was found, or a block was named that does not exist."""


class CutError(ModelError):
    """The network cannot be cut into segments at the wanted block."""


class DataError(GatiError):
    """Inputs of the wrong kind, shape, dtype or number."""

    http_status = 422


class TraceError(DataError):
    """A trace of requests that cannot be read, or that is not the tree it is taken for."""


class EvictError(GatiError):
    """An eviction policy, predictor or size of a cache that is unknown or does not fit."""


class VariantError(GatiError):
    """An unknown or unusable predictor architecture or selector."""


class LibraryError(GatiError):
    """A cache library that is missing, belongs to another checkpoint, is newer, or is in use."""

    http_status = 404
    thrift_code = "NOT_FOUND"


class CompositionError(GatiError):
    """No composition exists under the given limits, or none by the given name."""

    http_status = 409
    thrift_code = "FAILED_PRECONDITION"


class SolverError(GatiError):
    """A solver is missing, refuses the problem's size, or stopped without a solution."""

    http_status = 503
    thrift_code = "UNAVAILABLE"


class BackendError(GatiError):
    """An unknown or unavailable backend, placement or device."""


class AdaptError(GatiError):
    """Invalid settings of a guard or an adaptation."""


class RepositoryError(GatiError):
    """Versions of a model that are damaged, or cannot be switched to as things are."""

    http_status = 409
    thrift_code = "FAILED_PRECONDITION"


class UnknownVersionError(RepositoryError):
    """No such version of the model, or it is not complete."""

    http_status = 404
    thrift_code = "NOT_FOUND"


class PipelineError(GatiError):
    """A pipeline file that is wrong or lacks measurements, or a query planned out of order."""


class VideoError(GatiError):
    """A video, camera, stream, region of a picture or sink of results that cannot be read or used."""

    http_status = 422


class StorageError(GatiError):
    """The disk is full or the place is not writable."""

    http_status = 507
    thrift_code = "RESOURCE_EXHAUSTED"


class ServingError(GatiError):
    """A service refuses a request. `retry_after_s` says when it would rather have it again, if ever."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ConfigError(ServingError):
    """Settings of a service that are wrong, or contradict each other."""


class RequestError(ServingError):
    """A request that is not what the protocol asks for."""


class TooLargeError(ServingError):
    """A request larger than the service takes, packed or unpacked."""

    http_status = 413


class NotFoundError(ServingError):
    """No model, version, pipeline or endpoint of that name."""

    http_status = 404
    thrift_code = "NOT_FOUND"


class NotAllowedError(ServingError):
    """The key that the service asks for is missing or wrong."""

    http_status = 401
    thrift_code = "FAILED_PRECONDITION"


class ForbiddenError(ServingError):
    """Refused whatever the request is: for where it comes from, or for what its key may not."""

    http_status = 403
    thrift_code = "FAILED_PRECONDITION"


class MediaTypeError(ServingError):
    """Content of a kind that an endpoint does not take."""

    http_status = 415


class OverloadError(ServingError):
    """So much is waiting that the latency SLO would be missed, or the queue is full."""

    http_status = 429
    thrift_code = "RESOURCE_EXHAUSTED"


class UnavailableError(ServingError):
    """The service is not loaded yet, is draining, or has gone."""

    http_status = 503
    thrift_code = "UNAVAILABLE"


class DeadlineError(ServingError):
    """The time that the caller gave has passed."""

    http_status = 504
    thrift_code = "DEADLINE_EXCEEDED"


class CancelledError(ServingError):
    """The caller has gone; the answer is not needed."""

    http_status = 499
    thrift_code = "CANCELLED"


def first_line(error: BaseException) -> str:
    """The message of an exception in one line; its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def one_line(error: BaseException) -> str:
    """An exception in one line, as `Type: what it says`."""
    name, line = type(error).__name__, first_line(error)
    return line if line == name else f"{name}: {line}"
