"""Students in training: resumable bit for bit with all that a recipe may ask for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gati.caches import build_predictor
from gati.exploration import answers
from gati.exploration.augment import Augmentation
from gati.exploration.average import RunningAverage
from gati.exploration.recipes import EXITS, STUDENTS, Emphasis, Recipe
from gati.exploration.train import Learner, SharedTraining
from gati.types import TrialId
from tests.exploration.networks import Net
from tests.exploration.test_train import RandomInputs

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SURE = Emphasis(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).requires_grad_(False), 0.2)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(1)
    return Net().eval().requires_grad_(False)


def training(
    net: nn.Module,
    recipe: Recipe,
    *,
    steps: int = 20,
    emphasis: Emphasis | None = None,
    feature_block: str | None = None,
    engine: str | None = "torch",
    count: int = 100,
    predictor: nn.Module | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> SharedTraining:
    torch.manual_seed(0)
    learners = [
        Learner(TrialId("input--student-8"), "input", build_predictor("student(8)", (1, 8, 8), 10)),
        Learner(TrialId("input--student-4"), "input", build_predictor("student(4)", (1, 8, 8), 10)),
    ]
    if predictor is not None:
        learners = [Learner(TrialId("x"), "input", predictor)]
    return SharedTraining(
        net,
        RandomInputs(count),
        learners,
        total_steps=steps,
        batch_size=16,
        seed=3,
        augmentation=Augmentation(flip=True, shift_pixels=1, least_side=0.8, light=0.1),
        outputs_kind="logits",
        device=CPU,
        recipe=recipe,
        emphasis=emphasis,
        feature_block=feature_block,
        engine=engine,
        clock=clock,
    )


def weights(finished: SharedTraining) -> list[Tensor]:
    return [tensor.clone() for x in finished.learners for tensor in x.predictor.state_dict().values()]


BRIEF = replace(STUDENTS, rounds=2)
SGD = replace(BRIEF, optimiser="sgd", learning_rate=0.1)
ADAMW = replace(STUDENTS, optimiser="adamw", learning_rate=4e-3, rounds=None)


@pytest.mark.parametrize(
    ("recipe", "emphasis", "feature_block", "engine", "stops"),
    [
        pytest.param(BRIEF, None, None, "torch", (3, 13), id="muon"),
        pytest.param(SGD, None, None, "torch", (3, 13), id="sgd"),
        pytest.param(ADAMW, None, None, "torch", (3, 13), id="adamw"),
        pytest.param(BRIEF, SURE, "blocks.3", "torch", (0, 3, 13), id="emphasis and features"),
        pytest.param(replace(BRIEF, average_decay=0.0), None, None, "torch", (3, 13), id="no average"),
        pytest.param(BRIEF, SURE, "blocks.3", "openvino", (0, 13), id="another engine"),
        pytest.param(BRIEF, None, None, "openvino-int8", (13,), id="an engine that is calibrated"),
    ],
)
def test_a_run_that_stops_and_goes_on_ends_with_the_same_weights(
    net: Net,
    tmp_path: Path,
    recipe: Recipe,
    emphasis: Emphasis | None,
    feature_block: str | None,
    engine: str,
    stops: tuple[int, ...],
) -> None:
    """Before the first step, early, and in a later round."""
    if engine != "torch":
        pytest.importorskip("nncf" if engine == "openvino-int8" else "openvino")
    given = {"emphasis": emphasis, "feature_block": feature_block}
    whole = training(net, recipe, engine=engine, **given)  # type: ignore[arg-type]
    expected_losses = list(whole.run())
    assert whole.step == 20
    first = training(net, recipe, engine=engine, **given)  # type: ignore[arg-type]
    run = first.run()
    losses: list[float] = []
    for stopped in stops:  # the same run, saved where it would be stopped
        losses += [next(run) for _ in range(stopped - len(losses))]
        first.save(tmp_path / f"{stopped}.safetensors")
    run.close()
    for stopped in stops:
        second = training(net, recipe, engine=None if stopped else engine, **given)  # type: ignore[arg-type]
        second.restore(tmp_path / f"{stopped}.safetensors")
        assert second.step == stopped and second.engine_name == engine and not second.finished
        assert losses[:stopped] + list(second.run()) == expected_losses
        assert second.step == 20 and second.finished
        for expected, found in zip(weights(whole), weights(second), strict=True):
            assert torch.equal(expected, found)


def test_a_run_goes_on_with_another_engine_where_its_own_is_not_available(
    net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine without nncf, or without OpenVINO."""
    first = training(net, BRIEF, engine="torch")
    next(first.run())
    first._lessons.engine_name = "openvino-int8"  # type: ignore[union-attr]
    first.save(tmp_path / "state.safetensors")
    monkeypatch.setattr(answers, "find_spec", lambda name: None)
    second = training(net, BRIEF, engine=None)
    second.restore(tmp_path / "state.safetensors")
    list(second.run())
    assert second.step == 20 and second.engine_name == "torch"


def test_the_pace_tells_base_answers_from_the_rest(net: Net) -> None:
    """On a clock that counts its readings: two a step, and two more where the base model is asked.

    So a step takes 1, and 3 with answers.
    """
    readings = iter(range(10_000))
    run = training(net, BRIEF, steps=18, clock=lambda: float(next(readings)))
    assert run.steps_per_round == 6
    assert run.pace == (0.0, 0.0)
    list(run.run())  # 12 steps with base answers, 6 with remembered ones
    assert run.pace == (2.0, 1.0)


@pytest.mark.parametrize("steps", [0, 5, 20], ids=["at once", "early", "at its end"])
def test_a_finished_run_stays_as_it_is(net: Net, tmp_path: Path, steps: int) -> None:
    """Also when time was over before all steps: resumed, it would lose the averaged weights."""
    done = training(net, BRIEF)
    stepping = done.run()
    list(islice(stepping, steps))
    stepping.close()
    assert list(done.run(lambda: 2.0)) == [] and done.finished
    done.save(tmp_path / "state.safetensors")
    again = training(net, BRIEF)
    again.restore(tmp_path / "state.safetensors")
    assert list(again.run()) == []
    for expected, found in zip(weights(done), weights(again), strict=True):
        assert torch.equal(expected, found)


def test_remembered_answers_change_nothing_and_the_base_model_is_asked_once_a_view(net: Net) -> None:
    calls: list[int] = []

    class Counted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            found: Tensor = net(x)
            return found

    remembered = training(Counted(), BRIEF, steps=24)  # 6 batches a round, 2 rounds, twice
    list(remembered.run())
    assert calls == [16] * 12
    calls.clear()
    forgetful = training(Counted(), BRIEF, steps=24)
    assert forgetful._lessons is not None
    forgetful._lessons._answers = None
    list(forgetful.run())
    assert calls == [16] * 24
    for expected, found in zip(weights(remembered), weights(forgetful), strict=True):
        assert torch.equal(expected, found)


def test_training_ends_with_the_average_of_its_weights(net: Net) -> None:
    """Against the average computed apart, from the weights after every step."""
    recipe = replace(BRIEF, average_decay=0.9)
    run = training(net, recipe)
    stepping = run.run()
    averages = [tensor.double() for tensor in weights(run)]
    for step in range(run.total_steps):
        next(stepping)
        decay = min(0.9, (1 + step) / (10 + step))
        averages = [decay * a + (1 - decay) * w.double() for a, w in zip(averages, weights(run), strict=True)]
    last = weights(run)
    assert list(stepping) == []
    fractions = [index for index, tensor in enumerate(last) if tensor.is_floating_point()]
    for index in fractions:
        torch.testing.assert_close(weights(run)[index].double(), averages[index], rtol=1e-4, atol=1e-5)
    assert any(not torch.equal(weights(run)[index], last[index]) for index in fractions)


def test_counters_are_not_averaged() -> None:
    layer = nn.BatchNorm2d(2)
    average = RunningAverage(layer, 0.5)
    layer(torch.randn(4, 2, 3, 3))
    average.update(layer, 0)
    assert int(average.tensors["num_batches_tracked"]) == 1


def test_time_that_is_up_ends_with_the_average_too(net: Net) -> None:
    run = training(net, BRIEF)
    times = iter([0.0, 0.5, 1.2])
    assert len(list(run.run(lambda: next(times)))) == 2
    assert run.finished


def test_the_base_model_is_imitated_and_left_as_it_was(net: Net) -> None:
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    losses = list(training(net, replace(BRIEF, mixed=0.3), steps=120, feature_block="blocks.3").run())
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:10])
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_matching_hidden_outputs_brings_features_closer(net: Net) -> None:
    """How well the student's features tell the base model's, by the projection that was trained with them."""

    def distance(feature_weight: float) -> float:
        run = training(
            net,
            replace(BRIEF, feature_weight=feature_weight, average_decay=0),
            steps=120,
            feature_block="blocks.3",
        )
        list(run.run())
        learner = run.learners[0]
        assert isinstance(learner.predictor, nn.Sequential)
        images = torch.randn(200, 1, 8, 8, generator=torch.Generator().manual_seed(9))
        hidden = net.blocks(torch.relu(net.stem(images))).mean((2, 3))
        with torch.no_grad():
            features = learner.predictor.eval()[:-1](images)
        wanted = nn.functional.layer_norm(hidden, hidden.shape[1:])
        features = torch.cat([features, torch.ones(200, 1)], 1)
        solved = torch.linalg.lstsq(features[:100], wanted[:100]).solution
        return float((features[100:] @ solved - wanted[100:]).square().mean())

    assert distance(3.0) < distance(0.0)


class _Doubling(nn.Sequential):
    """Runs its layers on twice the input, and counts the calls."""

    calls = 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(2 * images)


def test_a_predictor_with_a_forward_of_its_own_is_trained_by_it(net: Net) -> None:
    own = _Doubling(nn.Flatten(), nn.Linear(64, 10))
    list(training(net, BRIEF, steps=3, predictor=own, feature_block="blocks.3").run())
    assert own.calls == 3


class _Tied(nn.Module):
    """Its weights are a layer's and another's, and one layer has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.last = self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.last(self.second(self.first(images.flatten(1)).relu()))
        return found


def test_a_run_with_shared_weights_goes_on_from_where_it_stopped(net: Net, tmp_path: Path) -> None:
    def started() -> SharedTraining:
        torch.manual_seed(0)
        return training(net, BRIEF, steps=3, predictor=_Tied())

    whole, first, second = started(), started(), started()
    list(whole.run())
    stepping = first.run()
    next(stepping)
    first.save(tmp_path / "state.safetensors")
    second.restore(tmp_path / "state.safetensors")
    list(second.run())
    for expected, found in zip(weights(whole), weights(second), strict=True):
        assert torch.equal(expected, found)


def test_a_projection_is_not_part_of_the_predictor(net: Net) -> None:
    plain, matching = training(net, BRIEF), training(net, BRIEF, feature_block="blocks.3")
    for one, other in zip(plain.learners, matching.learners, strict=True):
        assert list(one.predictor.state_dict()) == list(other.predictor.state_dict())


def test_emphasis_weighs_what_the_other_is_sure_of() -> None:
    predictor = nn.Sequential(nn.Flatten(), nn.Identity())
    emphasis = Emphasis(predictor, threshold=0.9, sure_weight=0.2)
    images = torch.tensor([[[5.0, 0.0]], [[1.0, 0.5]], [[0.0, 3.0]]])
    torch.testing.assert_close(emphasis(images), torch.tensor([0.2, 1.0, 0.2]))


class _AllOrNothing(nn.Module):
    """Sure of inputs whose first pixel is positive."""

    def forward(self, x: Tensor) -> Tensor:
        first = x[:, 0, 0, 0]
        return torch.stack([torch.where(first > 0, 50.0, 0.0), torch.zeros(len(x))], 1)


@pytest.mark.parametrize("block", ["input", "blocks.1"])
def test_inputs_without_weight_teach_nothing(net: Net, block: str) -> None:
    """A base model that is wrong on just the inputs that do not count makes no difference."""

    class WrongWhereSure(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.stem, self.head = net.blocks, net.stem, net.head

        def forward(self, x: Tensor) -> Tensor:
            found = net.head(nn.functional.avg_pool2d(self.blocks(torch.relu(self.stem(x))), 2).flatten(1))
            return torch.where(x[:, 0, 0, 0, None] > 0, -found, found)

    def trained(module: nn.Module, emphasis: Emphasis | None) -> list[Tensor]:
        torch.manual_seed(0)
        shape = (1, 8, 8) if block == "input" else (8, 8, 8)
        variant = "student(4)" if block == "input" else "grid(8)"
        run = SharedTraining(
            module.eval(),
            RandomInputs(100),
            [Learner(TrialId("x"), block, build_predictor(variant, shape, 10))],
            total_steps=8,
            batch_size=16,
            seed=0,
            augmentation=Augmentation(),
            outputs_kind="logits",
            device=CPU,
            recipe=EXITS,
            emphasis=emphasis,
            engine="torch",
        )
        list(run.run())
        return weights(run)

    nothing = Emphasis(_AllOrNothing(), 0.9, sure_weight=0.0)
    for right, wrong in zip(trained(net, nothing), trained(WrongWhereSure(), nothing), strict=True):
        torch.testing.assert_close(right, wrong, rtol=1e-3, atol=1e-4)
    differs = zip(trained(net, None), trained(WrongWhereSure(), None), strict=True)
    assert any(not torch.allclose(right, wrong, rtol=1e-2, atol=1e-2) for right, wrong in differs)


def test_a_network_with_a_block_of_that_name_hands_on_its_own(net: Net) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.input, self.rest = nn.Conv2d(1, 3, 3, padding=1), nn.Linear(3 * 64, 10)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.rest(self.input(x).flatten(1))
            return found

    run = SharedTraining(
        Named().eval().requires_grad_(False),
        RandomInputs(40),
        [Learner(TrialId("x"), "input", build_predictor("grid(8)", (3, 8, 8), 10))],
        total_steps=2,
        batch_size=8,
        seed=0,
        augmentation=Augmentation(),
        outputs_kind="logits",
        device=CPU,
    )
    assert len(list(run.run())) == 2
