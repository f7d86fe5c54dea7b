"""Connecting to a Ray cluster, with a one-line error if that fails."""

from __future__ import annotations

import logging
import socket
from typing import Any

from gati.errors import BackendError, first_line

LOCAL = "local"
_CONNECT_S = 10.0


def connect(ray: Any, address: str) -> None:
    """Connect the module `ray` to the cluster at `address`. Raises `BackendError` if there is none."""
    settings: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address == LOCAL:
        settings["include_dashboard"] = False
    try:
        _check_reachable(address)
        ray.init(address=address, **settings)
    except Exception as error:  # ConnectionError, ValueError, RuntimeError and more
        where = "on this machine" if address == "auto" else f"at {address}"
        raise BackendError(
            f"no Ray cluster {where} ({first_line(error)}): start one with ray start --head, or give "
            f"--ray {LOCAL}"
        ) from error


def _check_reachable(address: str) -> None:
    """Raise `OSError` if nothing listens at `address`: Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
