"""Which of the cores that this process may run on are a replica's own."""

from __future__ import annotations

from gati.cores import usable_cores


def own_cores(replica: int, replicas: int) -> tuple[int, ...] | None:
    """The part of the cores for one of several replicas on this machine.

    None if a part would have fewer than two: a network and the lookups next to it need one each.
    """
    cores = sorted(usable_cores())
    if 2 * replicas > len(cores):
        return None
    return tuple(cores[len(cores) * replica // replicas : len(cores) * (replica + 1) // replicas])
