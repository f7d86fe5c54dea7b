"""Who starts and watches the process of a service: this machine (`services.supervisor`), or a cluster."""

from __future__ import annotations

from typing import Protocol

from services.inference.settings import InferenceSettings

__all__ = ["Hosted", "Hosting"]


class Hosted(Protocol):
    """A process that is started, restarted when it dies, and stopped for us.

    `served` is told by who calls the process, once it has answered.
    """

    served: bool

    @property
    def restarts(self) -> int:
        """How often it was restarted."""
        ...

    @property
    def cause(self) -> str:
        """Why there is no process."""
        ...

    @property
    def hopeless(self) -> str | None:
        """What no restart can mend."""
        ...

    @property
    def running(self) -> bool:
        """Whether there is a process."""
        ...

    def start(self) -> None:
        """Start the process, and keep it running until `stop`. Does nothing where it is kept already."""
        ...

    async def address(self) -> str:
        """The address of the process, once it listens. Raises `UnavailableError`, or `ConfigError`."""
        ...

    def kill(self, why: str) -> None:
        """End a process that hangs; another is started."""
        ...

    def retire(self) -> None:
        """Start no other process; the running one continues until `stop`."""
        ...

    async def stop(self, timeout_s: float) -> None:
        """Let the process drain for so long, then end it. It may be started again."""
        ...


class Hosting(Protocol):
    """Where the services of all models run. `secret` is what they ask of those who call, None for nothing."""

    secret: bytes | None

    def threads(self, replicas: int) -> int:
        """The threads of a replica for which the configuration names none."""
        ...

    def host(self, settings: InferenceSettings) -> Hosted:
        """A process of an inference service, not started yet."""
        ...
