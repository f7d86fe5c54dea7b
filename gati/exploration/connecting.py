"""Connecting to a Ray cluster, with a one-line error if that fails."""

from __future__ import annotations

import logging
from typing import Any

from gati.errors import BackendError, first_line
from gati.hosts import check_listening, cluster_address

LOCAL = "local"


def connect(ray: Any, address: str) -> None:
    """Connect the module `ray` to the cluster at `address`. Raises `BackendError` if there is none."""
    address = cluster_address(address)
    settings: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address == LOCAL:
        settings["include_dashboard"] = False
    try:
        check_listening(address)  # Ray itself would try for minutes, and ignore signals
        ray.init(address=address, **settings)
    except Exception as error:  # ConnectionError, ValueError, RuntimeError and more
        where = "on this machine" if address == "auto" else f"at {address}"
        raise BackendError(
            f"no Ray cluster {where} ({first_line(error)}): start one with ray start --head, or give "
            f"--ray {LOCAL}"
        ) from error
