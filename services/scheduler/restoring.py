"""Loads versions again on a replica: those that the others have, or it had before its process restarted."""

from __future__ import annotations

import logging
from collections.abc import Callable

from gati.errors import (
    CompositionError,
    DeadlineError,
    NotFoundError,
    OverloadError,
    RequestError,
    UnavailableError,
)
from services.scheduler.kept import KeptVersions, is_loaded
from services.wire.client import WireClient
from services.wire.gen.ttypes import VersionSource

_log = logging.getLogger("gati.scheduler")

LOAD_TIMEOUT_S = 600.0
CONTROL_TIMEOUT_S = 10.0


async def load_again(
    client: WireClient, kept: KeptVersions, replica: int, wanted: Callable[[], bool]
) -> None:
    """Load the kept versions on the replica of that number, and activate the one that answered.

    A version that cannot be loaded any more is forgotten, and so is one at which the process crashed or hung
    too often while it was `wanted`. One that is refused again and again, usually because the disk is full, is
    left out for now.

    Raises `UnavailableError`, `DeadlineError` and `OverloadError`; then try again.
    """
    found = await client.call("describe", timeout_s=CONTROL_TIMEOUT_S)
    there = {each.version: each for each in found.versions}
    answering, left_out = kept.began(found.versions), set[str]()
    for version, composition in kept.in_turn():
        loaded = is_loaded(there.get(version), version, composition)
        try:
            if not loaded:
                await client.call("load", VersionSource(version, composition), timeout_s=LOAD_TIMEOUT_S)
                loaded = True
            if version in answering and kept.answers(version):  # unless another was chosen since
                await client.call("activate", version, timeout_s=CONTROL_TIMEOUT_S)
        except OverloadError as error:
            if not kept.refused(version, replica):
                raise
            left_out.add(version)
            _log.error("not loaded again yet", extra={"version": version, "reason": str(error)})
        except (RequestError, NotFoundError, CompositionError) as error:
            kept.forget(version)
            _log.warning("not loaded again", extra={"version": version, "reason": str(error)})
        except (UnavailableError, DeadlineError):
            # What is loaded may be activated late, because the disk is slow; that says nothing against it.
            late = loaded and await _answers(client)
            if not late and wanted() and kept.failed(version, replica):
                extra = {"version": version}
                _log.error("not loaded again: each attempt crashed or hung the process", extra=extra)
            raise
    kept.leave_out(replica, left_out)


async def _answers(client: WireClient) -> bool:
    """Whether its process still answers: it neither crashed nor hung."""
    try:
        await client.call("health", timeout_s=CONTROL_TIMEOUT_S)
    except (UnavailableError, DeadlineError):
        return False
    return True
