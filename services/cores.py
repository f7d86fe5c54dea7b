"""How many cores this process may use, and which of them are a replica's own."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")


def core_count() -> int:
    """The number of cores that this process may run on, or fewer if a quota allows less time.

    Quotas are those of a container, and of a systemd unit.
    """
    usable = len(_usable())
    return max(1, math.ceil(min((usable, *_quotas()))))


def own_cores(replica: int, replicas: int) -> tuple[int, ...] | None:
    """The part of the cores for one of several replicas on this machine.

    None if a part would have fewer than two: a network and the lookups next to it need one each.
    """
    cores = sorted(_usable())
    if 2 * replicas > len(cores):
        return None
    return tuple(cores[len(cores) * replica // replicas : len(cores) * (replica + 1) // replicas])


def _usable() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _quotas() -> list[float]:
    """The quotas in cores of this process's control group, and of those around it."""
    found, folder = [], _GROUPS
    with suppress(OSError, ValueError):  # not known
        own = _OWN_GROUP.read_text(encoding="ascii").splitlines()
        folder /= next((line for line in own if line.startswith("0::/")), "0::/").removeprefix("0::/")
    for group in (folder, *folder.parents):
        if not group.is_relative_to(_GROUPS):
            break
        try:
            time_us, period_us = map(int, (group / "cpu.max").read_text(encoding="ascii").split())
        except (OSError, ValueError):  # there is no quota, or it is not known
            continue
        found.append(time_us / period_us)
    return found
