"""Whether the figures of a pipeline have changed enough for a new plan.

Everything that a plan depends on is compared: how often each label follows, and for each option its accuracy,
its latency with queue and transport, and how its levels of confidence follow each finding of the previous
stage.
"""

from __future__ import annotations

from collections.abc import Mapping

from gati.pipelines.pipeline import Finding, Option, Pipeline, Stage

_TAIL = 0.95  # quantile of latencies; the share above it is compared, too
_ACCURACY_FINER = 10  # the tolerance is smaller by this factor: 1 % of accuracy matters more than of latency


def have_moved(planned: Pipeline, now: Mapping[str, Stage], tolerance: float) -> bool:
    """Whether any figure differs from that of the current plan by more than the tolerance."""
    return any(
        now[name] is not stage
        and (
            _apart(stage.shares, now[name].shares) > tolerance
            or any(
                _option_moved(option, now[name].options[key], _before(planned, name), tolerance)
                for key, option in stage.options.items()
            )
        )
        for name, stage in planned.stages.items()
    )


def _option_moved(planned: Option, now: Option, before: Stage | None, tolerance: float) -> bool:
    """As `have_moved`; `before` is the previous stage if its findings count, else None."""
    if now is planned:
        return False
    return (
        _latency_moved(planned, now, tolerance)
        or abs(now.measured_accuracy - planned.measured_accuracy) > tolerance / _ACCURACY_FINER
        or _apart(planned.behaviour().shares, now.behaviour().shares) > tolerance
        or (before is not None and _followed_moved(planned, now, before, tolerance))
    )


def _latency_moved(planned: Option, now: Option, tolerance: float) -> bool:
    before, after = planned.measured_latency, now.measured_latency
    limit_ms = before.quantile_ms(_TAIL)
    if (
        abs(after.mean_ms - before.mean_ms) > tolerance * before.mean_ms
        or abs(after.reaches(limit_ms) - before.reaches(limit_ms)) > tolerance
    ):
        return True
    was, is_now = planned.behaviour(), now.behaviour()
    apart_ms = sum(
        share * abs(new.mean_ms - old.mean_ms)
        for share, old, new in zip(was.shares, was.latencies, is_now.latencies, strict=True)
    )
    return apart_ms > tolerance * before.mean_ms


def _followed_moved(planned: Option, now: Option, before: Stage, tolerance: float) -> bool:
    """Whether the levels after a finding of the previous stage have changed; rare findings count less."""
    return any(
        _share(before, finding) * _apart(known.shares, now.behaviours[finding].shares) > tolerance
        for finding, known in planned.behaviours.items()
        if finding is not None
    )


def _share(stage: Stage, finding: Finding) -> float:
    """How often a stage's option answers at a level; 0 for levels that it does not distinguish."""
    option = stage.options.get(finding.option)
    shares = () if option is None else option.behaviour().shares
    return shares[finding.level] if finding.level < len(shares) else 0.0


def _before(planned: Pipeline, stage: str) -> Stage | None:
    """The previous stage, None if there is not exactly one."""
    edges = planned.edges_to[stage]
    return planned.stages[edges[0].source] if len(edges) == 1 else None


def _apart(before: tuple[float, ...], after: tuple[float, ...]) -> float:
    return max(abs(one - other) for one, other in zip(before, after, strict=True))
