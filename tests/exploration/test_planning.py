"""Plans of groups: which engine computes base answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gati.exploration.budget import Budget
from gati.exploration.groups import GroupTask
from gati.exploration.pace import Pace
from gati.exploration.planning import GroupPlanner
from gati.exploration.schedule import ProbeSize
from gati.exploration.state import StagePlan


@pytest.mark.parametrize(
    ("answer_s", "expected"), [(0.2, "openvino-int8"), (0.35, "openvino"), (None, "openvino")]
)
def test_answers_in_8_bits_are_planned_where_they_are_clearly_faster(
    answer_s: float | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training quantises again, for as long as the probe did. None: the network cannot be quantised."""
    now = [0.0]

    def probe(_planner: Any, task: Any, _size: Any) -> Any:
        assert task.plan.engine == "openvino-int8"
        now[0] += 7.0
        if answer_s is None:
            return SimpleNamespace(pace=Pace(0.1, 0.2), engine_name="openvino")
        return SimpleNamespace(pace=Pace(answer_s, 0.2), engine_name=task.plan.engine)

    monkeypatch.setattr(GroupPlanner, "_probed", probe)
    planner = GroupPlanner.__new__(GroupPlanner)
    planner.budget = Budget(None, lambda: now[0], 0.0, SimpleNamespace(spent_s=0.0))  # type: ignore[arg-type]
    usual: Any = SimpleNamespace(pace=Pace(0.4, 0.2), engine_name="openvino")
    task = GroupTask("students", None, (), StagePlan(10, None))  # type: ignore[arg-type]
    found, opening_s = planner._probed_in_8_bits(task, ProbeSize(8, 128), usual)
    assert (found.engine_name, opening_s) == (expected, 7.0 if found is not usual else 0.0)
