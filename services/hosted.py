"""Interfaces for starting and supervising service processes, on this machine or on a cluster.

`services.supervisor` and `services.ray_hosts` implement them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from services.inference.settings import InferenceSettings


class Hosted(Protocol):
    """The process of one service: it is started, restarted when it dies, and stopped.

    Its client sets `served` once the process has answered.
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
        """The error that a restart cannot fix, if any."""
        ...

    @property
    def running(self) -> bool:
        """Whether a process is running."""
        ...

    def start(self) -> None:
        """Start the process, and keep it running until `stop`. Does nothing if it is kept running already."""
        ...

    async def address(self) -> str:
        """The address of the process, once it listens. Raises `UnavailableError`, or `ConfigError`."""
        ...

    def kill(self, why: str) -> None:
        """Kill a process that hangs; another one is started."""
        ...

    def retire(self) -> None:
        """Start no other process; the running one continues until `stop`."""
        ...

    async def stop(self, timeout_s: float) -> None:
        """Let the process drain for that long, then end it. `start` may be called again."""
        ...


class Hosting(Protocol):
    """Where the services of all models run. Their clients need `secret`; None if there is none.

    `pausing` is the memory by which requests pause retraining (see `services.pausing`); None where none can.
    """

    secret: bytes | None
    pausing: Path | None

    def threads(self, replicas: int) -> int:
        """The number of threads of each of `replicas` replicas if the configuration does not set it."""
        ...

    def host(self, settings: InferenceSettings) -> Hosted:
        """The process of an inference service, not started yet."""
        ...
