"""Who starts and watches the process of a service: this machine (`services.supervisor`), or a cluster."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Hosted"]


class Hosted(Protocol):
    """A process that is started, restarted when it dies, and stopped for us.

    `cause` says why there is no process, `hopeless` what no restart can mend. `served` is told by who calls
    the process, once it has answered.
    """

    served: bool
    restarts: int
    cause: str
    hopeless: str | None

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
