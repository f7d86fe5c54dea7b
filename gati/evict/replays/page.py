"""One self-contained HTML page about policies on a trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from gati.evaluation.charts import ChartLine, lines
from gati.evaluation.pages import page_environment
from gati.evict.policy.guard import slack
from gati.evict.replays.result import PolicyOutcome, TraceReplay
from gati.version import __version__

_LIMITS = ("opt", "opt-leaf")


def page(result: TraceReplay, *, predictor: str, noise: Sequence[tuple[float, TraceReplay]] = ()) -> str:
    """Hit rates against sizes, noise curves of `noise`, (share, replay) pairs, and the guard's excess."""
    from markupsafe import Markup

    groups = _grouped(result)
    sizes = sorted({size for _, size in groups})
    names = list(dict.fromkeys(name for name, _ in groups))
    charts = {"sizes": _against_sizes(groups, names, sizes), "noise": "", "guard": ""}
    noise_names = list(dict.fromkeys(each.policy for _, replay in noise for each in replay.outcomes))
    if noise:
        charts["noise"] = _against_noise(noise, noise_names)
    guarded = next((each for each in reversed(result.outcomes) if each.excess), None)
    if guarded is not None:
        charts["guard"] = _excess(guarded)
    return (
        page_environment("gati.evict.replays")
        .get_template("evict.html")
        .render(
            trace=result.trace,
            headline=_headline(groups, sizes),
            names=names,
            sizes=sizes,
            rows=[{"name": name, "cells": [_cell(groups[name, size]) for size in sizes]} for name in names],
            seeds=max(len(each) for each in groups.values()),
            predictor=predictor,
            charts={name: Markup(svg) for name, svg in charts.items()},  # labels are escaped
            noise_names=noise_names,
            noise_size=noise[0][1].outcomes[0].capacity_blocks if noise else 0,
            guard=guarded.figures["guard"] if guarded is not None else {},
            guard_size=guarded.capacity_blocks if guarded is not None else 0,
            version=__version__,
        )
    )


def _grouped(result: TraceReplay) -> dict[tuple[str, int], list[PolicyOutcome]]:
    groups: dict[tuple[str, int], list[PolicyOutcome]] = defaultdict(list)
    for outcome in result.outcomes:
        groups[outcome.policy, outcome.capacity_blocks].append(outcome)
    return dict(groups)


def _mean(outcomes: Sequence[PolicyOutcome]) -> float:
    return sum(each.hit_rate for each in outcomes) / len(outcomes)


def _mean_of(values: Iterable[float | None]) -> float | None:
    """The mean of the known values; None if there are none."""
    known = [each for each in values if each is not None]
    return sum(known) / len(known) if known else None


def _kind(name: str) -> str:
    return "base" if name in _LIMITS else "gati" if name == "gati" else "peer"


def _cell(outcomes: Sequence[PolicyOutcome]) -> dict[str, str]:
    low, high = (pick(each.hit_rate for each in outcomes) for pick in (min, max))
    beyond = sum(each.hit_rate_beyond_shared for each in outcomes) / len(outcomes)
    text = f"{100 * _mean(outcomes):.2f} %"
    return {
        "hit": text if high - low < 5e-5 else f"{text} ({100 * low:.2f} to {100 * high:.2f})",
        "beyond": f"{100 * beyond:.2f} %",
    }


def _headline(
    groups: dict[tuple[str, int], list[PolicyOutcome]], sizes: Sequence[int]
) -> dict[str, str] | None:
    """The size at which `gati` gains most over LRU."""
    gains = [
        (_mean(groups["gati", size]) - _mean(groups["lru", size]), size)
        for size in sizes
        if ("gati", size) in groups and ("lru", size) in groups
    ]
    if not gains:
        return None
    gain, size = max(gains)
    ours, lru = _mean(groups["gati", size]), _mean(groups["lru", size])
    return {
        "value": f"{100 * gain:+.2f} points",
        "note": f"of hit rate over LRU at {size:,} blocks, {100 * ours:.2f} % instead of {100 * lru:.2f} %; "
        "the other sizes gain less",
    }


def _against_sizes(
    groups: dict[tuple[str, int], list[PolicyOutcome]], names: Sequence[str], sizes: Sequence[int]
) -> str:
    series = [
        ChartLine(name, _kind(name), [(size, _mean(groups[name, size])) for size in sizes]) for name in names
    ]
    return lines(series, "Hit rate against size", "blocks")


def _against_noise(noise: Sequence[tuple[float, TraceReplay]], names: Sequence[str]) -> str:
    series = []
    for name in names:
        points = [
            (share, _mean([each for each in replay.outcomes if each.policy == name]))
            for share, replay in noise
        ]
        series.append(ChartLine(name, _kind(name), points))
    return lines(series, "Hit rate against the share of wrong predictions", "share of predictions reversed")


def _excess(outcome: PolicyOutcome) -> str:
    allowed = slack(outcome.capacity_blocks)
    return lines(
        [
            ChartLine(
                "missed beyond LRU", "gati", [(seen, float(excess)) for seen, excess, _, _ in outcome.excess]
            ),
            ChartLine(
                "LRU takes over", "base", [(seen, most + allowed) for seen, _, most, _ in outcome.excess]
            ),
        ],
        "Blocks missed beyond LRU",
        "blocks requested",
        share=False,
    )


def summary(result: TraceReplay) -> list[dict[str, Any]]:
    """One row per policy and size, for a terminal: means over the seeds."""
    rows = []
    for (name, size), outcomes in _grouped(result).items():
        rows.append(
            {
                "policy": name,
                "size": size,
                **_cell(outcomes),
                "gap": _mean_of(each.gap_closed for each in outcomes),
                "time": _mean_of(each.time_saved for each in outcomes),
                "decision_us": {
                    key: _mean_of(each.decision_us[key] for each in outcomes)
                    for key in outcomes[0].decision_us
                },
                "blocks_per_s": _mean_of(each.blocks_per_s for each in outcomes),
                "truncated": outcomes[0].truncated,
            }
        )
    return rows
