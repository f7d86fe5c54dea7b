"""What starts and watches the process of a service: this machine (`services.supervisor`) or a cluster."""

from __future__ import annotations

from typing import Protocol

from services.inference.settings import InferenceSettings


class Hosted(Protocol):
    """A process of a service: started, restarted when it dies, and stopped.

    `served` is set by the caller of the process once it has answered.
    """

    served: bool

    @property
    def restarts(self) -> int:
        """Number of restarts."""
        ...

    @property
    def cause(self) -> str:
        """Why there is no process."""
        ...

    @property
    def hopeless(self) -> str | None:
        """The error that no restart can mend, if any."""
        ...

    @property
    def running(self) -> bool:
        """Whether there is a process."""
        ...

    def start(self) -> None:
        """Start the process, and keep it running until `stop`. Does nothing if it is kept running already."""
        ...

    async def address(self) -> str:
        """The address of the process, once it listens. Raises `UnavailableError`, or `ConfigError`."""
        ...

    def kill(self, why: str) -> None:
        """Kill a process that hangs; another is started."""
        ...

    def retire(self) -> None:
        """Start no other process; the running one continues until `stop`."""
        ...

    async def stop(self, timeout_s: float) -> None:
        """Let the process drain for that long, then end it. It may be started again."""
        ...


class Hosting(Protocol):
    """Where the services of all models run. Callers need `secret`; None: no secret."""

    secret: bytes | None

    def threads(self, replicas: int) -> int:
        """The threads of a replica if the configuration names no number."""
        ...

    def host(self, settings: InferenceSettings) -> Hosted:
        """The process of an inference service, not started yet."""
        ...
