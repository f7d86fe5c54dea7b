"""What an inference service says it is doing, where others act on it."""

from __future__ import annotations

__all__ = ["STUCK"]

STUCK = "stuck"  # an input has been worked on for longer than anything takes: the process has to go
