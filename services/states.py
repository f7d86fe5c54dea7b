"""States of an inference service that other processes act on."""

from __future__ import annotations

__all__ = ["STUCK"]

STUCK = "stuck"  # an input has been worked on for longer than anything takes: the process has to go
