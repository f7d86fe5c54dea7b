"""The verb `doctor`: what it says of networks that fit, of those that do not, and what its numbers imply."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import gati
from gati.cli import run
from gati.composition.binomial import p_value
from gati.engine.backends import BACKENDS
from gati.engine.engine import Engine
from gati.errors import CompositionError, DataError, ModelError
from gati.evaluation import engine_speeds
from gati.evaluation.diagnosis import CheapestLookup, Diagnosis, forecast_targets, parts_of
from gati.exploration.splits import LEAST_HELD_OUT, split_inputs
from gati.model.data import load_data
from gati.model.preprocess import Preprocessing
from tests.engine.networks import traced_network
from tests.exploration.networks import Net, digit_files, digits
from tests.waiting import Clock

HERE = Path(__file__).resolve().parent
NETWORKS = HERE.parent / "exploration" / "networks.py"
NET = f"{NETWORKS}:Net"
CLOCK = Clock()


class Slow(Net):
    """Takes two seconds for each input."""

    def forward(self, x: Tensor) -> Tensor:
        CLOCK.now_s += 2.0 * len(x)
        return super().forward(x)


class Rare(Net):
    """Answers class 3 unless the first pixel is bright; takes a second for a hundred inputs."""

    def forward(self, x: Tensor) -> Tensor:
        CLOCK.now_s += 0.01 * len(x)
        common = torch.nn.functional.one_hot(torch.full((len(x),), 3), 10) * 1e3
        return super().forward(x) + common * (x[:, 0, :1, 0] < 0.9)


class Fragile(Rare):
    """Fails on an input whose first pixel is bright."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x[:, 0, 0, 0] >= 0.9).any()):
            raise RuntimeError("too bright")
        return super().forward(x)


class Blind(Rare):
    """Returns NaN for an input whose first pixel is bright."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.where(x[:, 0, :1, 0] >= 0.9, torch.nan, 0.0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return digit_files(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def looked(files: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Diagnosis, list[Path]]:
    """What it finds, and the files that were written meanwhile, there or in the folder where it ran."""
    folder, elsewhere = Path(files["data"]).parent, tmp_path_factory.mktemp("elsewhere")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(elsewhere)
        found = gati.doctor(NET, **files, within_s=600.0)
    written = [path for path in folder.rglob("*") if before.get(path) != path.stat().st_mtime_ns]
    return found, [*written, *elsewhere.iterdir()]


@pytest.fixture(scope="module")
def found(looked: tuple[Diagnosis, list[Path]]) -> Diagnosis:
    return looked[0]


@pytest.fixture(autouse=True)
def _only_torch(found: Diagnosis, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other engines were looked at once, for `found`; they take seconds to start."""
    monkeypatch.setattr(engine_speeds, "BACKENDS", {"torch": BACKENDS["torch"]})


def findings(found: Diagnosis, *, refusing: bool = True) -> dict[str, str]:
    return {each.about: each.message for each in found.findings if each.refuses == refusing}


def about_the_data_alone() -> dict[str, Any]:
    """Options with which the time is over after the first question, which is about the data."""
    ticks = count(step=20)
    return {"within_s": 30.0, "clock": lambda: float(next(ticks))}


# What it says -----------------------------------------------------------------------------------------------


def test_a_network_that_fits_is_described_from_blocks_to_certificate(found: Diagnosis) -> None:
    assert found.can_be_cut and not found.refused
    assert found.input_shape == (1, 8, 8)
    assert found.profile is not None
    assert [block.name for block in found.profile.blocks] == ["input", *(f"blocks.{i}" for i in range(4))]
    by_name = {engine.name: engine for engine in found.engines}
    assert (by_name["torch"].base_ms or 0.0) > 0.0
    assert by_name["cuda-graph"].reason.startswith("needs a CUDA device")
    assert "gati compose does that" in by_name["openvino-int8"].reason
    measured = {name: engine.base_ms for name, engine in by_name.items() if engine.base_ms is not None}
    assert all(not by_name[name].reason for name in measured)
    assert found.fastest is not None
    assert found.fastest.base_ms == min(measured.values())


def test_inputs_are_divided_as_explore_divides_them(found: Diagnosis) -> None:
    assert found.data is not None
    images, _ = digits()
    distinct = len(np.unique(images[:900].reshape(900, -1), axis=0))
    assert found.data.exact
    assert found.data.select + found.data.certify == distinct
    assert found.data.train == len(images) - 900
    assert (found.data.select, found.data.certify) == (400, 500)
    assert [target.losses_allowed is not None for target in found.data.targets] == 5 * [True] + 2 * [False]


def test_inputs_that_are_no_evidence_are_not_promised(files: dict[str, str], tmp_path: Path) -> None:
    images = np.load(files["data"])["images"]
    data, options = tmp_path / "twice.npz", {**files, **about_the_data_alone()}
    np.savez(data, images=np.concatenate([images, images]))
    twice = gati.doctor(NET, **{**options, "data": str(data)})
    once = gati.doctor(NET, **{**options, **about_the_data_alone(), "data": str(data), "unique": True})
    assert twice.data is not None and once.data is not None
    assert (once.data.select, once.data.certify, once.data.train) == (400, 500, 897)
    assert twice.data.certify < 500
    told = " ".join(each.message for each in twice.findings if each.about == "data")
    assert f"{twice.data.certify} inputs are evidence" in told and "explore with --unique" in told


def test_the_forecast_names_what_explore_would_train(found: Diagnosis) -> None:
    forecast = found.explore
    assert forecast is not None
    trained = {block for block, _ in forecast.exits} | ({"input"} if forecast.at_the_input else set())
    assert trained == {lookup.block for lookup in found.lookups}
    for variants, passes, pass_s in (
        (forecast.at_the_input, forecast.input_passes, forecast.input_pass_s),
        (forecast.exits, forecast.exit_passes, forecast.exit_pass_s),
    ):
        assert (passes is not None) == (pass_s is not None) == bool(variants)
        assert passes is None or passes > 0.0
    assert (forecast.usual_s or 0.0) >= forecast.measuring_s > 0.0


def test_nothing_is_written(looked: tuple[Diagnosis, list[Path]]) -> None:
    assert not looked[1]


def test_strict_json_has_the_implied_numbers(found: Diagnosis) -> None:
    written = json.loads(found.to_json())
    assert written["can_be_cut"] is True
    assert written["refused"] is False
    assert written["fastest"] == (found.fastest and found.fastest.name)
    assert [block["name"] for block in written["profile"]["blocks"]][1] == "blocks.0"
    assert found.best is None or written["bound"] == found.best.gain(1.0)


# What it refuses --------------------------------------------------------------------------------------------


def test_bad_data_are_refused_and_the_network_is_looked_at_all_the_same(
    files: dict[str, str], tmp_path: Path
) -> None:
    found = gati.doctor(
        NET, files["checkpoint"], data=str(tmp_path / "nowhere.npz"), size=(8, 8), within_s=1e3
    )
    assert found.refused and found.can_be_cut
    assert found.data is None and found.explore is None
    assert "nowhere.npz" in findings(found)["data"]


def test_too_few_inputs_are_refused_as_by_explore(files: dict[str, str], tmp_path: Path) -> None:
    images, _ = digits()
    np.savez(tmp_path / "few.npz", images=images[:30])
    found = gati.doctor(NET, files["checkpoint"], data=tmp_path / "few.npz", **about_the_data_alone())
    assert "give enough for at least 60" in findings(found)["data"]


def test_a_network_without_blocks_says_what_to_name(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 30 * 30, 10))\n"
    )
    found = gati.doctor(f"{tmp_path / 'plain.py'}:build")
    assert found.can_be_cut and not found.refused  # at the input
    assert found.input_shape == (3, 32, 32)
    (note,) = (each.message for each in found.findings if each.about == "blocks")
    assert "name them with --blocks, from: " in note


def test_a_network_that_cannot_be_cut_says_why(tmp_path: Path) -> None:
    (tmp_path / "wayward.py").write_text(
        "from tests.exploration.networks import Net\n"
        "class Wayward(Net):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x - x.mean(0, keepdim=True))\n"
    )
    found = gati.doctor(f"{tmp_path / 'wayward.py'}:Wayward", size=(8, 8))
    assert not found.can_be_cut and found.refused
    assert "depends on the other inputs of its batch" in findings(found)["blocks"]


@pytest.mark.parametrize("fails", ["when it starts", "when it runs"])
def test_an_engine_that_fails_is_a_finding_about_it(
    fails: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Engine):
        def __init__(self, *given: Any, backend: str, **options: Any) -> None:
            if fails == "when it starts" and backend == "failing":
                raise RuntimeError("InvalidGraph: type tensor(bfloat16)\nin operator Conv")
            super().__init__(*given, backend="torch", **options)
            self.fails = backend == "failing"

        def __call__(self, *given: Any, **options: Any) -> Any:
            if self.fails:
                raise RuntimeError("InvalidGraph: type tensor(bfloat16)\nin operator Conv")
            return super().__call__(*given, **options)

    both = {"torch": BACKENDS["torch"], "failing": BACKENDS["torch"]}
    monkeypatch.setattr(engine_speeds, "BACKENDS", both)
    monkeypatch.setattr(engine_speeds, "Engine", Failing)
    found = gati.doctor(NET, files["checkpoint"], size=(8, 8))
    reasons = {engine.name: engine.reason for engine in found.engines}
    assert reasons == {
        "torch": "",
        "failing": "cannot run this network (RuntimeError: InvalidGraph: type tensor(bfloat16))",
    }
    assert found.engines[0].base_ms is not None


def test_a_network_in_another_precision_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text(
        "import torch\n"
        "from tests.exploration.networks import Net\n"
        "class Half(Net):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.bfloat16()\n"
        "        self.scale = torch.nn.Parameter(torch.ones(1))  # mixed, so it is not converted as a whole\n"
        "    def forward(self, x):\n"
        "        return super().forward(x.bfloat16()).float()\n"
    )
    found = gati.doctor(f"{tmp_path / 'half.py'}:Half", size=(8, 8))
    assert (
        "is bfloat16, and caches read float32; let the network compute in float32"
        in findings(found)["blocks"]
    )


def test_inputs_that_do_not_fit_say_what_to_give(files: dict[str, str]) -> None:
    found = gati.doctor(NET, files["checkpoint"], data=files["data"], resize=16)
    assert "fails on inputs of shape [64, 1, 16, 16]" in findings(found)["network"]
    assert "give inputs of the shape it expects" in findings(found)["network"]


@pytest.mark.parametrize(
    ("network", "message"),
    [
        pytest.param("NanNet", "NaN or infinity", id="never a number"),
        pytest.param("ConstantNet", "the same class for all", id="one class"),
    ],
)
def test_what_the_network_answers_is_checked(files: dict[str, str], network: str, message: str) -> None:
    found = gati.doctor(f"{NETWORKS}:{network}", data=files["data"], mean=(0.0,), std=(1.0,))
    assert message in findings(found)["network"]


def with_one_bright_pixel(folder: Path) -> Path:
    images = digits()[0][:900].copy()
    images[1, 0, 0] = 255
    np.savez(folder / "bright.npz", images=images)
    return folder / "bright.npz"


def test_a_class_that_is_much_more_common_than_others_is_not_refused(tmp_path: Path) -> None:
    """As of fraud or defects: explore takes such data, though a sample shows one class."""
    plain, folder = {"mean": (0.0,), "std": (1.0,), "blocks": "none"}, tmp_path
    found = gati.doctor(f"{__name__}:Rare", data=with_one_bright_pixel(folder), clock=CLOCK, **plain)
    assert "network" not in findings(found) | findings(found, refusing=False)
    short = gati.doctor(f"{__name__}:Rare", data=folder / "bright.npz", within_s=3.0, clock=CLOCK, **plain)
    assert "network" not in findings(short)
    assert "predicts class 3 for all 90 inputs that were" in findings(short, refusing=False)["network"]


@pytest.mark.parametrize(
    ("network", "message"),
    [("Fragile", "fails on inputs of shape .*too bright"), ("Blind", "NaN or infinity")],
)
def test_a_network_that_fails_outside_the_sample_is_a_finding(
    tmp_path: Path, network: str, message: str
) -> None:
    plain: dict[str, Any] = {"mean": (0.0,), "std": (1.0,), "blocks": "none"}
    found = gati.doctor(f"{__name__}:{network}", data=with_one_bright_pixel(tmp_path), clock=CLOCK, **plain)
    assert re.search(message, findings(found)["network"])


def test_where_the_sample_shows_several_classes_no_others_are_looked_for(files: dict[str, str]) -> None:
    """Its few inputs took all the time, but nothing is missing that would be worth a longer look."""
    found = gati.doctor(f"{__name__}:Slow", **files, within_s=6.0, clock=CLOCK)
    told = findings(found, refusing=False)
    assert "blocks" in told and "network" not in told | findings(found)


@pytest.mark.slow
def test_a_slow_network_leaves_time_for_other_questions(files: dict[str, str]) -> None:
    began_s = CLOCK.now_s
    found = gati.doctor(f"{__name__}:Slow", **files, clock=CLOCK)
    assert found.can_be_cut and found.engines
    assert CLOCK.now_s - began_s < 120.0, "all inputs of the sample alone would have taken that long"


def test_a_slow_network_is_asked_less_often_on_each_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Counting(Engine):
        def __call__(self, *given: Any, **options: Any) -> Any:
            asked[-1] += 1
            return super().__call__(*given, **options)

    monkeypatch.setattr(engine_speeds, "Engine", Counting)
    traced = traced_network()
    for answer_s in (0.001, 2.0):
        asked.append(0)
        speeds, _ = engine_speeds.engine_speeds(
            traced, torch.randn(4, 1, 6, 6), "logits", answer_s, 15.0, lambda: False
        )
        assert speeds[0].base_ms is not None
    often, seldom = asked
    assert often >= 35 and seldom <= 16


def test_without_a_network_there_is_nothing_to_look_at() -> None:
    with pytest.raises(ModelError, match="nowhere"):
        gati.doctor("nowhere:build")


def test_an_impossible_confidence_is_refused() -> None:
    with pytest.raises(CompositionError, match="confidence is 1.0, but must lie"):
        gati.doctor(NET, confidence=1.0)


@pytest.mark.parametrize("asked", [{"train_data": "more.npz"}, {"unique": True}])
def test_what_needs_data_is_refused_without(asked: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="need --data: give that, too, or leave them out"):
        gati.doctor(NET, **asked)


def test_when_time_is_over_no_further_question_is_asked(files: dict[str, str]) -> None:
    found = gati.doctor(NET, **files, **about_the_data_alone())
    assert not found.can_be_cut and not found.refused
    assert "the 30 seconds were up" in findings(found, refusing=False)["network"]


# What the numbers imply -------------------------------------------------------------------------------------

MILLISECONDS = st.floats(0.01, 100.0)
few = settings(max_examples=40, deadline=None)


@few
@given(MILLISECONDS, st.floats(0.0, 1.0), MILLISECONDS, st.floats(1.01, 20.0))
def test_the_share_for_a_gain_gives_that_gain(
    base: float, reached: float, lookup: float, gain: float
) -> None:
    one = CheapestLookup(
        block="block", variant="variant", reach_ms=reached * base, lookup_ms=lookup, base_ms=base
    )
    share = one.share_for(gain)
    if share is None:
        assert one.gain(1.0) <= gain * (1.0 + 1e-9)
    else:
        assert one.gain(share) == pytest.approx(gain)
        assert share <= 1.0


@few
@given(st.integers(0, 3000), st.sampled_from((0.9, 0.95, 0.99)), st.booleans())
def test_targets_are_those_that_the_exact_binomial_allows(
    certify: int, confidence: float, separate: bool
) -> None:
    delta = 1.0 - confidence
    for target in forecast_targets(certify, confidence, separate):
        allowed = [k for k in range(80) if p_value(k, certify, target.accuracy) <= delta]
        if (target.losses_allowed or 0) < 79:
            assert target.losses_allowed == (allowed[-1] if allowed else None)
        needed = target.held_out_needed
        assert p_value(0, parts_of(needed, separate)[2], target.accuracy) <= delta
        _, select, fewer = parts_of(needed - 1, separate)
        assert p_value(0, fewer, target.accuracy) > delta or select + fewer < LEAST_HELD_OUT


@pytest.mark.parametrize("separate", [False, True])
def test_explore_takes_as_many_inputs_as_the_lowest_target_needs(
    files: dict[str, str], *, separate: bool
) -> None:
    grey = Preprocessing(channels=1, mean=(0.0,), std=(1.0,))
    held = load_data(files["data"], grey, what="--data")
    more = load_data(files["train_data"], grey, what="--train-data") if separate else None
    needed = forecast_targets(1000, 0.5, separate)[0].held_out_needed
    assert split_inputs(held.subset(range(needed)), more, 0).evidence > 0
    with pytest.raises(DataError, match=f"has {needed - 1} inputs; only 59 are left to measure on"):
        split_inputs(held.subset(range(needed - 1)), more, 0)


@few
@given(st.integers(60, 20_000), st.booleans())
def test_every_input_has_one_part(inputs: int, separate: bool) -> None:
    parts = parts_of(inputs, separate)
    assert sum(parts) == inputs
    assert (parts[0] == 0) == separate


# The command ------------------------------------------------------------------------------------------------


def arguments(files: dict[str, str], **more: Any) -> list[str]:
    given_ = {"checkpoint": files["checkpoint"], "data": files["data"], **more}
    return [part for name, value in given_.items() for part in (f"--{name}", str(value))]


def test_the_command_shows_all_of_it(
    files: dict[str, str], found: Diagnosis, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(gati, "doctor", lambda *given, **options: found)
    assert run(["doctor", NET, *arguments(files, json=tmp_path / "doctor.json")]) == 0
    said = capsys.readouterr().out
    for part in (
        "blocks.3",
        "can be cut at 5 places",
        "engine torch (f32)",
        "explore would train",
        "400 to select on",
    ):
        assert part in said
    assert json.loads((tmp_path / "doctor.json").read_text())["model"] == found.model


def test_the_command_shows_the_confidence_that_was_asked_for(
    files: dict[str, str], found: Diagnosis, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    assert found.data is not None
    asked = replace(found, data=replace(found.data, confidence=0.999))
    monkeypatch.setattr(gati, "doctor", lambda *given, **options: asked)
    assert run(["doctor", NET, *arguments(files)]) == 0
    assert "for one engine at 99.9 % confidence" in " ".join(capsys.readouterr().out.split())


def test_what_the_time_was_too_short_for_is_not_said_to_be_impossible(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """As if the network would have to be another one."""
    assert run(["doctor", NET, *arguments(files, within="0.001ms")]) == 0
    said = capsys.readouterr().out
    assert "weights) was not examined in the time, see below" in said
    assert "note: network: not examined: the 1e-06 seconds were up; give a longer --within" in said


def test_the_command_fails_where_explore_would(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "empty.npz", images=np.zeros((0, 8, 8, 1), dtype=np.uint8))
    status = run(["doctor", f"{NETWORKS}:NanNet", "--data", str(tmp_path / "empty.npz"), "--size", "8x8"])
    said = capsys.readouterr().out
    assert status == 2
    assert "refused: data: --data" in said and "is empty" in said
    assert "refused: network: the network returns NaN" in said
