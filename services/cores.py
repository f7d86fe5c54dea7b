"""How many cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: TIME PERIOD in microseconds, or max PERIOD


def core_count() -> int:
    """The number of cores that this process may run on, or fewer if a container's quota allows less time."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        time_us, period_us = map(int, _QUOTA.read_text(encoding="ascii").split())
    except (OSError, ValueError):  # there is no quota, or it is not known
        return usable
    return max(1, min(usable, math.ceil(time_us / period_us)))
