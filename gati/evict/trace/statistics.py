"""Statistics of a trace."""

from __future__ import annotations

from typing import Any

import numpy as np

from gati.evict.trace.future import next_uses
from gati.evict.trace.records import Trace


def statistics(trace: Trace) -> dict[str, Any]:
    """Numbers that show how much a cache can gain, as JSON values.

    `most_hits` is the share of blocks that were requested before, an upper bound of any cache's hit rate;
    `shared_blocks` is the share of blocks that over half of all requests contain, which any cache hits.
    """
    after = next_uses(trace)
    request = np.repeat(np.arange(len(trace)), trace.lengths)
    again = np.isfinite(after)
    gaps = trace.time_s[after[again].astype(np.int64)] - trace.time_s[request[again]]
    lengths = trace.lengths
    return {
        **trace.summary(),
        "blocks_a_request": _spread(lengths),
        "most_hits": 1.0 - trace.distinct / len(trace.blocks),
        "shared_blocks": float(trace.shared.sum() / len(trace.blocks)),
        "seconds_to_next_use": _spread(gaps) if len(gaps) else None,
    }


def _spread(values: np.ndarray) -> dict[str, float]:
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return {"p50": float(p50), "p90": float(p90), "p99": float(p99), "most": float(values.max())}
