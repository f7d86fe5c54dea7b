"""The cores that this process may use, and how much of their time: containers and units have quotas."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

MOST_THREADS = 1024  # of a process; with far more, torch ends it

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_QUOTA_FILES = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))  # of control groups v2 and v1
_NUMBER = r"\s*\+?0*[1-9]\d*\s*"
_NUMBERS = re.compile(f"{_NUMBER}(,{_NUMBER})*")  # the first one counts, the others are of nested loops


def usable_cores() -> set[int]:
    """The cores that the calling thread may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def core_count() -> int:
    """How many cores the calling thread may use, or fewer if a quota allows less time."""
    return within_quota(len(usable_cores()))


def threads_are_given() -> bool:
    """Whether OMP_NUM_THREADS names a number for the whole process; OpenMP ignores any other value."""
    return _NUMBERS.fullmatch(os.environ.get("OMP_NUM_THREADS", "")) is not None


def within_quota(count: int) -> int:
    """`count`, or fewer if the quota of this process is the time of fewer cores.

    Quotas are those of a container, and of a systemd unit. They are rounded to the nearest number, at least
    1: threads that together have less time than they need all stop, up to a tenth of a second at a time.
    """
    return max(1, min((count, *(int(cores + 0.5) for cores in _quotas()))))


def _quotas() -> Iterator[float]:
    """The quotas in cores of this process's control groups, and of those around them."""
    for mounted, own in _own_groups():
        folder = mounted / own
        for group in (folder, *folder.parents):
            if group.is_relative_to(mounted):
                yield from _quota_of(group)


def _own_groups() -> Iterator[tuple[Path, str]]:
    """Where control groups that limit time are mounted, and the path of this process's group below it.

    A container may show its own group as the root, though the path is that of the whole machine.
    """
    try:
        lines = _OWN_GROUPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = ["0::/", "1:cpu:/"]  # not known: the roots remain
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        if not controllers:  # v2
            yield _GROUPS, path.lstrip("/")
        elif "cpu" in controllers.split(","):
            for name in {"cpu", controllers}:  # the folder may list controllers in another order
                yield _GROUPS / name, path.lstrip("/")


def _quota_of(group: Path) -> Iterator[float]:
    for names in _QUOTA_FILES:
        try:
            text = " ".join((group / name).read_text(encoding="ascii") for name in names)
            time_us, period_us = map(int, text.split())
        except (OSError, ValueError):  # there is no quota, or it is not known
            continue
        if time_us > 0 and period_us > 0:  # -1 means no quota
            yield time_us / period_us
