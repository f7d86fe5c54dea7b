"""Numbers in a terminal: none promises more than what was certified, none is a limit of arithmetic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gati
from gati.cli import query, render, run
from gati.composition.composition import Exit
from gati.composition.headroom import ExitHeadroom, Headroom, Prospect
from gati.composition.pareto import ParetoPoint
from gati.errors import CompositionError
from gati.evaluation.evaluate import Evaluation, Latency
from gati.types import TrialId
from tests.composition.libraries import make_library
from tests.engine.served import composed

PLAIN = composed("0" * 64, ())


@pytest.mark.parametrize(("target", "shown"), [(0.97, "97 %"), (0.9715, "97.15 %"), (0.9999, "99.99 %")])
def test_a_target_is_not_rounded_up(target: float, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    """compose --latency certified 97.15 % and showed 97.2 %."""
    render.composition(replace(PLAIN, accuracy_target=target), Path("runs/mine"))
    assert f"(target {shown})" in capsys.readouterr().out


def test_a_confidence_is_not_rounded_up(capsys: pytest.CaptureFixture[str]) -> None:
    point = ParetoPoint(
        mean_latency_ms=1.0, gain=2.0, agreement=0.99, certified_agreement=0.98, confidence=0.9996,
        memory_bytes=1, blocks=(0,), trials=("a",), thresholds=(0.5,),
    )  # fmt: skip
    render.frontier([point], Path("runs/mine"))
    assert "hold together with 99.96 % confidence" in capsys.readouterr().out


def test_what_follows_a_frontier_of_every_class_promises_every_class(
    capsys: pytest.CaptureFixture[str],
) -> None:
    point = ParetoPoint(
        mean_latency_ms=1.0, gain=2.0, agreement=0.99, certified_agreement=0.98, confidence=0.95,
        memory_bytes=1, blocks=(0,), trials=("a",), thresholds=(0.5,), per_class=True,
    )  # fmt: skip
    render.frontier([point], Path("runs/mine"))
    assert "next: gati compose runs/mine --per-class --accuracy TARGET" in capsys.readouterr().out


@pytest.mark.parametrize(("slo_ms", "shown"), [(7.4, "7.4"), (0.5, "0.5"), (80.0, "80"), (3.6e6, "3600000")])
def test_an_slo_is_shown_as_it_was_asked_for(
    slo_ms: float, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An answer after 7.2 ms had met an SLO of 7 ms."""
    answer = {"label": "cat", "latency_ms": 7.2, "latency_slo_ms": slo_ms, "slo_met": slo_ms > 7.2}
    query._show_answer({**answer, "stages": [], "skipped": []})
    assert f"7.2 ms of {shown} ms, SLO {'met' if slo_ms > 7.2 else 'missed'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("slo_ms", "met", "shown"), [(80.0, True, "; 5.0 ms of 40.0 ms\n"), (None, None, "; 5.0 ms\n")]
)
def test_a_stage_without_an_slo_shows_no_budget(
    slo_ms: float | None, met: bool | None, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was half of the timeout: "5.0 ms of 4986.2 ms"."""
    stage = {"stage": "a", "option": "b", "model": "m", "version": "v", "label": "cat", "probability": 0.9}
    taken = {"from_cache": False, "latency_ms": 5.0, "budget_ms": 40.0}
    answer = {"label": "cat", "latency_ms": 7.2, "latency_slo_ms": slo_ms, "slo_met": met, "skipped": []}
    query._show_answer({**answer, "stages": [{**stage, **taken}]})
    assert shown in capsys.readouterr().out


def test_a_gain_without_a_limit_has_no_digits(capsys: pytest.CaptureFixture[str]) -> None:
    """A free lookup at the input leaves nothing to compute, which was shown as 1000.00x."""
    current, free = (
        Prospect(mean_latency_ms=1.0 / gain, gain=gain, agreement=1.0) for gain in (7.76, 1000.0)
    )
    trial = TrialId("input--student-8")
    exit_ = Exit(
        trial_id=trial, block="input", block_index=0, variant="student(8)", selector="maximum",
        threshold=0.9, placement="inline", expected_hit_rate=1.0, expected_agreement=1.0, lookup_ms=0.1,
        memory_bytes=1, exit_ms=0.1,
    )  # fmt: skip
    each = ExitHeadroom(trial, "input", free=free, knowing=current, right=current)
    found = Headroom(inputs=9, chosen=current, exits=(each,), free=free, oracle=current, free_oracle=free)
    render.composition(replace(PLAIN, exits=(exit_,), headroom=found), Path("runs/mine"))
    shown = capsys.readouterr().out
    assert shown.count("over 100x") == 3 and "1000" not in shown and "current gain 7.76x" in shown


def test_a_table_in_a_pipe_breaks_no_word(capsys: pytest.CaptureFixture[str]) -> None:
    """Selectors were folded where a variant is called companion(itself)."""
    exit_ = Exit(
        trial_id=TrialId("input--companion-itself"), block="features.denseblock3.denselayer12", block_index=0,
        variant="companion(itself)", selector="maximum-probability", threshold=0.9, placement="overlapped",
        expected_hit_rate=0.75, expected_agreement=0.99, lookup_ms=12.345, memory_bytes=123_456_789,
        exit_ms=12.345,
    )  # fmt: skip
    render.composition(replace(PLAIN, exits=(exit_,)), Path("runs/mine"))
    shown = capsys.readouterr().out
    assert all(each in shown for each in (exit_.block, exit_.variant, exit_.selector, exit_.placement))


@pytest.mark.parametrize(("threads", "shown"), [(1, "(torch, 1 thread)"), (2, "(torch, 2 threads)")])
def test_one_thread_is_one(threads: int, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    latency = Latency(mean=1.0, p50=1.0, p90=1.0, p99=1.0)
    render.evaluation(
        Evaluation(
            n=9, agreement=1.0, accuracy=None, base_accuracy=None, hit_rate=0.0, latency_ms=latency,
            base_latency_ms=latency, gain=1.0, tail_ratio=1.0, memory_bytes=0, backend="torch", exits=(),
            threads=threads,
        )
    )  # fmt: skip
    assert shown in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        ["predict", "a.png"],
        ["certify", "--data", "t.npz"],
        ["stream", "--source", "nothing.mp4"],
        ["replay", "--source", "nothing.mp4"],
    ],
    ids=lambda asked: asked[0],
)
def test_verbs_run_on_as_many_threads_as_were_measured(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each warned that latencies differ, and named functions of Python as a remedy."""
    import torch

    def stops(*_: Any, **__: Any) -> None:
        raise CompositionError("enough seen")

    library = make_library(tmp_path)
    known = library.manifest.profile
    conditions = replace(known.conditions, threads=known.threads + 5)
    replace(composed(library.manifest.checkpoint_sha256, ()), measured_on=conditions).save(
        library.composition_path()
    )
    chosen: list[int] = []
    monkeypatch.setattr(gati, asked[0], stops, raising=False)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr("gati.cores.usable_cores", lambda: set(range(64)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run([asked[0], str(tmp_path), *asked[1:]])
    assert chosen == [known.threads + 5]
