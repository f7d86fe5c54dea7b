"""Students read inputs of any size, cost what is said of them, and run on every engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from gati.caches import (
    LearnedCache,
    build_predictor,
    fold_normalisation,
    load_cache,
    save_cache,
    student,
    student_operations,
    student_widths,
)
from gati.caches.students import _look
from gati.errors import VariantError

SHAPES = {
    "CIFAR": (3, 32, 32),
    "grey digits": (1, 28, 28),
    "tiny digits": (1, 8, 8),
    "spectrogram": (1, 64, 64),
    "long spectrogram": (1, 40, 101),
    "photograph": (3, 224, 224),
    "odd photograph": (3, 299, 331),
    "smallest": (2, 4, 4),
    "frames of a sensor": (90, 6),
    "long recording": (1_001, 13),
    "one step": (1, 3),
    "vector": (64,),
    "one number": (1,),
}


def counted(network: nn.Module, shape: tuple[int, ...]) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network.eval()(torch.zeros(1, *shape))
    return int(counter.get_total_flops())


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_student_reads_it_and_all_of_it_learns(shape: tuple[int, ...]) -> None:
    network = build_predictor("student(8)", shape, 7)
    logits = network(torch.randn(3, *shape))
    assert logits.shape == (3, 7)
    logits.square().sum().backward()
    assert all(each.grad is not None and torch.isfinite(each.grad).all() for each in network.parameters())


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_its_arithmetic_is_what_is_counted(shape: tuple[int, ...]) -> None:
    assert student_operations(shape, 7, 16) == counted(student(shape, 7, 16), shape)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(4, 700), st.integers(4, 700))
def test_the_first_convolutions_work_on_few_cells_and_every_pixel_counts(
    channels: int, height: int, width: int
) -> None:
    look = _look((channels, height, width))
    assert look.height <= 28 and look.width <= 28
    for side, cells, window, before, after in zip(
        (height, width), (look.height, look.width), look.average, *look.padding, strict=True
    ):
        assert (side + before) / window + after == cells * look.square
        assert before < window and after < look.square


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 30, 50), (3, 130, 117), (300, 4), (20,)])
def test_folding_normalisation_changes_no_answer(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    network = student(shape, 5, 8)
    for _ in range(3):
        network(2 * torch.randn(6, *shape) + 1)
    inputs = torch.randn(4, *shape)
    expected = network.eval()(inputs)
    folded = fold_normalisation(network)
    torch.testing.assert_close(folded(inputs), expected, rtol=1e-4, atol=1e-4)
    assert not any(isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d) for layer in folded.modules())


@pytest.mark.parametrize("shape", [(3, 3, 3), (3, 200, 2), (1, 1, 1)])
def test_pictures_of_too_few_pixels_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(VariantError, match=r"a student needs images of at least 4 pixels"):
        build_predictor("student(8)", shape, 3)
    with pytest.raises(VariantError):
        student_widths(shape, 3, 10**9)


def test_a_width_of_none_is_refused() -> None:
    with pytest.raises(VariantError, match="the width must be at least 1"):
        build_predictor("student(0)", (3, 32, 32), 3)


@pytest.mark.parametrize(
    ("shape", "classes", "base"),
    [
        ((3, 32, 32), 10, 251_000_000),
        ((3, 224, 224), 1000, 800_000_000),
        ((128, 9), 6, 60_000_000),
        ((64,), 10, 8_400_000),
    ],
)
def test_widths_cost_about_the_shares_that_are_worth_it(
    shape: tuple[int, ...], classes: int, base: int
) -> None:
    widths = student_widths(shape, classes, base)
    assert len(widths) == 3 and all(width % 8 == 0 for width in widths) and list(widths) == sorted(widths)
    for width, share in zip(widths, (0.09, 0.18, 0.35), strict=True):
        here = student_operations(shape, classes, width) / base
        others = [student_operations(shape, classes, other) / base for other in (width - 8, width + 8)]
        assert others[0] < share < others[1]
        assert 0.6 * share < here < 1.7 * share


def test_the_narrowest_student_of_resnet56_is_the_one_of_10_million_multiplications() -> None:
    assert student_widths((3, 32, 32), 10, 2 * 125_500_000) == (32, 48, 64)
    assert 10e6 < student_operations((3, 32, 32), 10, 32) / 2 < 11e6


def test_students_too_narrow_to_be_faster_are_left_out() -> None:
    """On OpenVINO a ResNet-20's student(16) takes as long as its student(24) and answers fewer inputs."""
    assert student_widths((3, 32, 32), 10, 2 * 40_800_000) == (24, 40)
    assert all(width < 24 for width in student_widths((3, 32, 32), 10, 2 * 8_000_000))


@given(st.integers(1, 3 * 10**9))
@settings(max_examples=60, deadline=None)
def test_no_width_costs_more_than_it_can_save(base: int) -> None:
    widths = student_widths((3, 32, 32), 10, base)
    assert all(student_operations((3, 32, 32), 10, width) <= 0.6 * base for width in widths)
    if not widths:
        assert student_operations((3, 32, 32), 10, 8) > 0.35 * base


def test_a_student_is_kept_and_loaded_as_any_cache(tmp_path: Path) -> None:
    cache = LearnedCache("student(8)", (1, 20, 30), 4, "maximum-probability")
    save_cache(tmp_path / "student.safetensors", cache)
    inputs = torch.randn(5, 1, 20, 30)
    for expected, found in zip(
        cache(inputs), load_cache(tmp_path / "student.safetensors")(inputs), strict=True
    ):
        assert torch.equal(expected, found)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 30, 50), (3, 120, 130), (300, 4), (20,)])
def test_onnx_runtime_and_openvino_answer_the_same(shape: tuple[int, ...], tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    openvino = pytest.importorskip("openvino")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    network = fold_normalisation(student(shape, 4, 8))
    inputs = torch.randn(1, *shape)
    expected = network(inputs).detach().numpy()
    path = tmp_path / "student.onnx"
    torch.onnx.export(network, (inputs,), str(path), dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})[0]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    compiled = openvino.Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    np.testing.assert_allclose(compiled([inputs.numpy()])[0], expected, rtol=1e-3, atol=1e-4)
