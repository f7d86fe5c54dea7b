"""Merges the status reports of a model's replicas into one."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any

from gati.errors import GatiError
from services.scheduler.replicas import Replica
from services.wire.gen.ttypes import ExitStatistics, Histogram

_SUMS = (
    "inputs",
    "waiting",
    "running",
    "resident_bytes",
    "audits_agreed",
    "audits_disagreed",
    "trials_agreed",
    "trials_disagreed",
    "left_out",
)


async def statistics_of(replicas: Sequence[Replica]) -> dict[int, Any]:
    """The `Statistics` of each replica that answers, by number. Raises the first `GatiError` if none does."""
    found = await asyncio.gather(*(each.statistics() for each in replicas), return_exceptions=True)
    answers: dict[int, Any] = {}
    refusals = []
    for replica, each in zip(replicas, found, strict=True):
        if isinstance(each, GatiError):
            refusals.append(each)
        elif isinstance(each, BaseException):
            raise each
        else:
            answers[replica.number] = each
    if not answers:
        raise refusals[0]
    return answers


def merged_statistics(found: Sequence[Any], versions: list[Any]) -> Any:
    """The wire's `Statistics` of all replicas: counts are summed. One is unchanged."""
    if len(found) == 1:
        return found[0]
    merged = copy(found[0])
    for name in _SUMS:
        setattr(merged, name, sum(getattr(each, name) or 0 for each in found))
    merged.refused = dict(sum((Counter(each.refused) for each in found), Counter()))
    merged.exits = _exits(found)
    merged.queue_seconds = _histogram([each.queue_seconds for each in found])
    merged.service_seconds = _histogram([each.service_seconds for each in found])
    merged.memory = _memory([each.memory for each in found if each.memory is not None])
    merged.stopped = any(each.stopped for each in found)
    merged.versions = versions
    return merged


def merged_versions(found: Iterable[Sequence[Any]]) -> list[Any]:
    """The `VersionInfo` of every version that any replica has, with audits and losses summed.

    Every other value, such as the proof and whether it is active, is that of the first replica that has the
    version. A version that the first replica does not have is neither active nor pending.
    """
    first, *others = found
    versions = {each.version: each for each in first}
    if not others:
        return list(first)
    versions = {name: copy(each) for name, each in versions.items()}
    for each in (each for other in others for each in other):
        known = versions.get(each.version)
        if known is None:
            known = versions[each.version] = copy(each)
            known.active = known.pending = False
        else:
            known.audits = (known.audits or 0) + (each.audits or 0)
            known.losses = (known.losses or 0) + (each.losses or 0)
    return list(versions.values())


def certificates_of(versions: Iterable[Any]) -> dict[str, tuple[str | None, dict[str, Any]]]:
    """The id and the content of the certificate of each version that has one."""
    return {
        each.version: (each.certificate_id, json.loads(each.certificate_json))
        for each in versions
        if each.certificate_json
    }


def _memory(found: Sequence[Any]) -> Any:
    """The memory of all replicas: counts are summed, other values are those of the first replica."""
    if not found:
        return None
    merged = copy(found[0])
    for name in ("places", "forgotten", "answers"):
        setattr(merged, name, sum(getattr(each, name) for each in found))
    return merged


def _exits(found: Sequence[Any]) -> list[Any]:
    """One row per version and exit, with counts summed, in the order of first appearance."""
    rows: dict[tuple[str, str], Any] = {}
    for row in (row for each in found for row in each.exits):
        known = rows.get((row.version, row.exit))
        if known is None:
            rows[row.version, row.exit] = ExitStatistics(row.version, row.exit, row.queries, row.hits)
        else:
            known.queries += row.queries
            known.hits += row.hits
    return list(rows.values())


def _histogram(found: Sequence[Any]) -> Any:
    counts = [sum(column) for column in zip(*(each.counts for each in found), strict=True)]
    return Histogram(found[0].upper_bounds_s, counts, sum(each.sum_s for each in found))
