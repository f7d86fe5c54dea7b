"""A system with another number of cores, to test how they are shared."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from gati import cores


class Cores:
    """So many cores for each thread, until it is bound to some of them. Nothing is really bound."""

    def __init__(self, count: int) -> None:
        self.every = set(range(count))
        self.bound: dict[threading.Thread, list[set[int]]] = {}

    @classmethod
    def instead(cls, count: int, patch: pytest.MonkeyPatch) -> Cores:
        """Make the system seem to have `count` cores."""
        made = cls(count)
        patch.setattr(os, "sched_getaffinity", made._of, raising=False)
        patch.setattr(os, "sched_setaffinity", made._bind, raising=False)
        return made

    @property
    def ours(self) -> tuple[set[int], int]:
        """Cores and torch threads that are left to the calling thread."""
        return self._of(0), torch.get_num_threads()

    def _of(self, native_id: int) -> set[int]:
        return set(self.bound.get(_thread(native_id), [self.every])[-1])

    def _bind(self, native_id: int, cores: set[int]) -> None:
        self.bound.setdefault(_thread(native_id), []).append(set(cores))


def _thread(native_id: int) -> threading.Thread:
    """The thread of that number; 0 means the calling one, as for the system."""
    if not native_id:
        return threading.current_thread()
    return next(each for each in threading.enumerate() if each.native_id == native_id)


def grant(count: float, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Make it seem that the container has a quota of `count` cores; its control groups are in `folder`."""
    patch.setattr(cores, "_GROUPS", folder)
    patch.setattr(cores, "_OWN_GROUPS", folder / "cgroup")
    (folder / "cgroup").write_text("0::/\n", encoding="ascii")
    (folder / "cpu.max").write_text(f"{round(count * 100_000)} 100000\n", encoding="ascii")
