"""Plans of groups: which engine computes base answers, and what ends a training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gati.exploration.augment import Augmentation
from gati.exploration.budget import Budget
from gati.exploration.groups import GroupLesson, GroupTask
from gati.exploration.pace import Pace
from gati.exploration.planning import GroupPlanner
from gati.exploration.recipes import STUDENTS
from gati.exploration.schedule import ProbeSize, most_steps
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


@pytest.mark.parametrize(
    ("allowed_s", "concurrent", "by_time"),
    [
        pytest.param(1000.0, False, True, id="as ResNet-56 in 25 minutes"),
        pytest.param(1000.0, True, False, id="elsewhere, where time must decide nothing"),
        pytest.param(100_000.0, False, False, id="time for all that is useful: the seed decides"),
        pytest.param(5.0, False, False, id="so few steps that another one would take too long"),
    ],
)
def test_time_ends_a_training_that_is_shorter_than_useful(
    allowed_s: float, concurrent: bool, by_time: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pace is known from a few steps only: with more or fewer than planned it uses the same time."""
    monkeypatch.setattr(GroupPlanner, "_fitting", lambda _, task: task)
    monkeypatch.setattr(GroupPlanner, "_found_pace", lambda *_, students: ("torch", Pace(0.1, 0.1), 0.0))
    classroom: Any = SimpleNamespace(
        train=range(50_000), batch_size=128, classes=10, device=torch.device("cpu")
    )
    budget = Budget(None, lambda: 0.0, 0.0, SimpleNamespace(spent_s=0.0))  # type: ignore[arg-type]
    executor: Any = SimpleNamespace(concurrent=concurrent)
    lesson = GroupLesson("students", STUDENTS, Augmentation())
    task = GroupTask("students", lesson, (), StagePlan(1, None))
    plan = GroupPlanner(classroom, budget, executor, 0.001).by_time(task, allowed_s, students=True)
    assert plan is not None and plan.planned_s == pytest.approx(allowed_s / 1.05)
    most = most_steps(50_000, 128, students=True)
    assert plan.most_steps == (most if by_time else None) and plan.steps <= most
