"""Shared training: resumable bit for bit, and harmless to the base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gati.caches import build_predictor
from gati.exploration.augment import Augmentation, choose_augmentation, choose_augmentations
from gati.exploration.groups import timekeeper
from gati.exploration.modes import modes_of_training
from gati.exploration.state import RunState, StagePlan
from gati.exploration.train import Learner, SharedTraining
from gati.types import TrialId
from tests.exploration.networks import Net

CPU = torch.device("cpu")


class RandomInputs:
    def __init__(self, count: int) -> None:
        self.tensor = torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tensor)

    def images(self, indices: np.ndarray) -> Tensor:
        return self.tensor[torch.from_numpy(indices)]


def _training(net: Net, steps: int = 12) -> SharedTraining:
    learners = []
    for name in ("blocks.0", "blocks.2"):
        for variant in ("grid(8)", "pyramid(4)"):
            torch.manual_seed(len(learners))
            learners.append(
                Learner(TrialId(f"{name} {variant}"), name, build_predictor(variant, (8, 8, 8), 10))
            )
    return SharedTraining(
        net,
        RandomInputs(100),
        learners,
        total_steps=steps,
        batch_size=16,
        seed=3,
        augmentation=Augmentation(flip=True, shift_pixels=1),
        outputs_kind="logits",
        device=CPU,
    )


@pytest.fixture
def net() -> Net:
    torch.manual_seed(1)
    return Net().eval().requires_grad_(False)


def _weights(training: SharedTraining) -> list[Tensor]:
    return [tensor for x in training.learners for tensor in x.predictor.state_dict().values()]


@pytest.mark.parametrize("steps", [0, 5], ids=["before its first step", "after five steps"])
def test_a_run_that_stops_and_goes_on_ends_with_the_same_weights(
    net: Net, tmp_path: Path, steps: int
) -> None:
    whole = _training(net)
    list(whole.run())

    first = _training(net)
    run = first.run()
    for _ in range(steps):
        next(run)
    run.close()
    first.save(tmp_path / "state.safetensors")
    second = _training(net)
    second.restore(tmp_path / "state.safetensors")
    assert second.step == steps
    list(second.run())

    assert second.step == whole.step == 12
    for expected, found in zip(_weights(whole), _weights(second), strict=True):
        assert torch.equal(expected, found)


def test_in_bfloat16_each_step_computes_with_the_weights_that_the_last_one_left(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autocast keeps what it has cast until the outermost one ends: explore runs within one that is off."""
    monkeypatch.setattr("gati.exploration.precision.bfloat16_pays", lambda: True)
    outside = list(_training(net).run())
    with modes_of_training():
        inside = list(_training(net).run())
    assert inside == outside


def test_training_lowers_the_loss_and_leaves_the_base_model_as_it_was(net: Net) -> None:
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    losses = list(_training(net, steps=80).run())
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_closing_the_run_early_removes_every_hook(net: Net) -> None:
    run = _training(net).run()
    next(run)
    run.close()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_augmentation_is_drawn_from_its_generator_alone() -> None:
    images = torch.randn(6, 2, 8, 8)
    augment = Augmentation(flip=True, shift_pixels=2)
    first, second, other = (augment(images, np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(Augmentation()(images, np.random.default_rng(0)), images)


def test_a_shift_moves_pixels_and_invents_none() -> None:
    images = torch.rand(20, 1, 8, 8) + 1
    shifted = Augmentation(shift_pixels=2)(images, np.random.default_rng(0))
    for before, after in zip(images, shifted, strict=True):
        kept = after[after > 0]
        assert len(kept) >= 36
        assert set(kept.tolist()) <= set(before.flatten().tolist())


def test_mirroring_is_not_used_where_it_changes_the_class() -> None:
    class LeftOrRight(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([x[..., :4].sum((1, 2, 3)), x[..., 4:].sum((1, 2, 3))], 1)

    class Brightness(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([x.sum((1, 2, 3)), -x.sum((1, 2, 3))], 1)

    images = torch.randn(64, 1, 8, 8)
    assert not choose_augmentation(LeftOrRight(), images).flip
    assert choose_augmentation(Brightness(), images).flip


class FirstHalfDark(RandomInputs):
    """As a folder sorted by class: half of the inputs are dark, and look the same when they are mirrored."""

    is_images = True

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.tensor[: count // 2] = 0.0


def test_what_is_harmless_for_the_first_class_alone_is_not_harmless(tmp_path: Path) -> None:
    class LeftOrRight(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            left, right = x[..., :4].mean((1, 2, 3)), x[..., 4:].mean((1, 2, 3))
            return torch.stack([torch.full_like(left, 1e-6), left, right], 1)

    inputs: Any = FirstHalfDark(600)
    plain, bold = choose_augmentations(inputs, LeftOrRight(), CPU, RunState(tmp_path), 128)
    assert not plain.flip
    assert not bold.flip


def test_a_resumed_run_has_the_augmentations_it_began_with_and_tries_none(tmp_path: Path) -> None:
    class Brightness(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([x.sum((1, 2, 3)), -x.sum((1, 2, 3))], 1)

    class Unasked(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("asked")

    inputs: Any = FirstHalfDark(600)
    first = choose_augmentations(inputs, Brightness(), CPU, RunState(tmp_path), 128)
    assert first[1].flip
    assert choose_augmentations(inputs, Unasked(), CPU, RunState(tmp_path), 20) == first


def test_augmentations_are_tried_in_batches_that_fit_into_memory() -> None:
    class SmallGpu(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 40:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return torch.stack([x.sum((1, 2, 3)), -x.sum((1, 2, 3))], 1)

    assert choose_augmentation(SmallGpu(), torch.randn(64, 1, 8, 8)).flip


def test_without_time_to_try_any_there_are_no_augmentations(tmp_path: Path) -> None:
    class Unreadable(FirstHalfDark):
        def images(self, indices: Any) -> Tensor:
            raise AssertionError("read")

    inputs: Any = Unreadable(600)
    found = choose_augmentations(inputs, torch.nn.Identity(), CPU, RunState(tmp_path), 0)
    assert found == (Augmentation(), Augmentation())


def test_time_that_suffices_changes_nothing(net: Net) -> None:
    """Neither a clock that runs ahead of the steps for a moment, nor one that just keeps up."""
    plain, timed = _training(net), _training(net)
    list(plain.run())
    jitter = iter([0.0, 0.04, 0.0, 0.2, 0.29, 0.3, 0.45, 0.54, 0.6, 0.7, 0.79, 0.87, 0.95])
    assert len(list(timed.run(timekeeper(StagePlan(12, 1.0), timed, 1.0, lambda: next(jitter))))) == 12
    for first, second in zip(_weights(plain), _weights(timed), strict=True):
        assert torch.equal(first, second)


def test_training_that_lags_hurries_and_ends_a_little_after_its_time(net: Net) -> None:
    training = _training(net)
    times = iter([0.0, 0.0, 0.3, 0.6, 0.9, 1.0, 1.04, 1.06])
    assert len(list(training.run(timekeeper(StagePlan(12, 1.0), training, 1.0, lambda: next(times))))) == 6
    assert training.step == 6


@pytest.mark.parametrize(
    ("step_s", "steps"),
    [
        pytest.param(7.1, 15, id="as planned"),
        pytest.param(14.2, 8, id="half as fast"),
        pytest.param(3.55, 30, id="twice as fast"),
        pytest.param(1.0, 40, id="so fast that further steps teach nothing"),
    ],
)
def test_a_training_that_time_ends_is_as_long_whatever_its_pace(
    net: Net, tmp_path: Path, step_s: float, steps: int
) -> None:
    """Planned are 15 steps in 100 s; it may take 5 % longer. The last step may begin at the end.

    The learning rate follows, also where training is interrupted half-way.
    """
    plan = StagePlan(15, 100.0, most_steps=40)
    shares: list[float] = []

    def clock() -> float:
        return step_s * len(shares)

    training = _training(net, 40)
    while not training.finished:
        run = training.run(timekeeper(plan, training, 100.0, clock, left_s=105.0 - clock()))
        for _ in run:
            shares.append(training.share)
            if len(shares) == steps // 2:
                break
        run.close()
        training.save(tmp_path / "state.safetensors")
        training = _training(net, 40)
        assert training.restore(tmp_path / "state.safetensors")
    assert training.step == len(shares) == steps
    assert np.diff([*shares, 1.0]).min() > -1e-9
    assert np.diff([*shares, 1.0]).max() <= 2.0 / steps
