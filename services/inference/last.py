"""Inputs that no client waits for, in the queue of those that clients wait for."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from gati.engine.exits import Prediction
    from services.inference.queue import RequestQueue

_LAST = 10  # the lowest priority
_PATIENCE_S = 1.0


async def ask_last(queue: RequestQueue, x: Tensor, budget: float) -> Prediction:
    """Return the answer of a queue, at the lowest priority or, after a long wait, before all requests.

    So `budget`, the share of the base model's time for audits, is also what they get at least, but no more
    than one a second. There is no deadline, because it would drop slow inputs more often than others and bias
    the audits.
    """
    asked = queue.put(x, priority=_LAST, deadline_s=math.inf)
    patience_s = max(_PATIENCE_S, queue.times.expected_s(1) / budget) if budget else math.inf
    loop = asyncio.get_running_loop()
    timer = loop.call_later(patience_s, queue.promote, asked) if budget else None
    try:
        return await asyncio.shield(asked.answer)
    finally:
        if timer is not None:
            timer.cancel()
        queue.drop(asked)  # without effect on one that has its answer
