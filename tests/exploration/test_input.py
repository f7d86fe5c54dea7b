"""Exploring the network's input as a block: who is offered there, and a library that is served with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import gati
from gati.caches import load_cache, register_predictor
from gati.caches.predictors import reads_input
from gati.errors import VariantError
from gati.exploration import candidates, stages
from gati.exploration.explore import explore
from gati.exploration.library import CERTIFY, Library
from gati.exploration.network import load_network
from gati.exploration.progress import SilentProgress
from gati.model.data import load_data
from gati.model.entry import INPUT, INPUT_KIND
from gati.model.preprocess import Preprocessing
from gati.types import Trial
from tests.exploration.networks import Net, digit_files, trained_state
from tests.exploration.quick import quick_selectors

pytestmark = pytest.mark.slow

NETWORKS = Path(__file__).parent / "networks.py"
GREY = Preprocessing((0.0,), (1.0,), channels=1)


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    """Few steps for all, whatever the times: on so small a network nothing pays."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "too_slow", lambda *_: "")
        patch.setattr(stages, "LEAST_EXIT_STEPS", 105)
        patch.setattr(stages, "LEAST_STUDENT_STEPS", 105)
        quick_selectors(patch)
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return digit_files(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def library(files: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Library:
    return explore(
        f"{NETWORKS}:Net",
        **files,
        out=tmp_path_factory.mktemp("out"),
        variants=("student(8)", "grid(16)"),
        epochs=6,
    )


class NetOfInput(nn.Module):
    """`Net`, its stem called `input`."""

    def __init__(self) -> None:
        super().__init__()
        net = Net()
        self.input, self.blocks, self.head = net.stem, net.blocks, net.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(torch.relu(self.input(x)))
        return self.head(nn.functional.avg_pool2d(x, 2).flatten(1))


class Told(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_families_that_read_the_input_are_offered_there_and_nowhere_else(library: Library) -> None:
    first, *others = library.manifest.blocks
    assert (first.index, first.name, first.kind) == (0, INPUT, INPUT_KIND)
    assert first.output_shape == (1, 8, 8)
    assert first.reach_ms == first.latency_ms == 0.0
    assert all(block.kind != INPUT_KIND and block.reach_ms > 0 for block in others)
    placed = {(trial.block, trial.variant) for trial in library.trials}
    assert placed == {(INPUT, "student(8)"), *((block.name, "grid(16)") for block in others)}
    assert [trial.block_index for trial in library.trials] == [0, 1, 2, 3, 4]


def test_its_record_is_of_what_it_says_of_the_inputs(library: Library, files: dict[str, str]) -> None:
    (trial,) = (trial for trial in library.trials if trial.block == INPUT)
    cache = load_cache(library.cache_path(trial.trial_id))
    held = load_data(files["data"], GREY)
    images = held.images(np.arange(len(held)))
    predicted = cache(images)[0].argmax(1).numpy()
    np.testing.assert_array_equal(library.outcomes(trial.trial_id).predicted, predicted)
    assert trial.agreement is not None and trial.agreement > 0.7
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in cache.modules())


def test_a_library_with_it_is_composed_and_served(library: Library, files: dict[str, str]) -> None:
    """Only the lookup at the input is let pay here, so it is chosen; nothing else is needed to serve it."""
    (trial,) = (trial for trial in library.trials if trial.block == INPUT)
    traced = load_network(library, torch.device("cpu")).traced
    assert traced.blocks[0] == INPUT
    assert traced.hidden_shapes[INPUT] == (1, 8, 8)
    rows = [_as_if_cheap(each, each.block == INPUT) for each in library.trials]
    points = list(library.operating_points)
    library.write_trials(rows, points)
    composition = gati.compose(library.directory, accuracy=0.97, backend="torch", placement="inline")
    assert [leaving.trial_id for leaving in composition.exits] == [trial.trial_id]
    engine = gati.load(library.directory)
    held = load_data(files["data"], GREY)
    rows = np.flatnonzero(library.base_outcomes().split == CERTIFY)  # scored as when serving
    above = library.outcomes(trial.trial_id).score[rows] - np.float32(composition.exits[0].threshold)
    hit = np.array([answer.exit == INPUT for answer in engine(held.images(rows))])
    clear = np.abs(above) > 1e-5  # one in another batch differs by rounding
    np.testing.assert_array_equal(hit[clear], above[clear] > 0)
    assert 0 < hit.sum() < len(rows)


def _as_if_cheap(trial: Trial, cheap: bool) -> Trial:
    cost = 1e-6 if cheap else 1e3
    return replace(trial, lookup_ms=cost, overlapped_lookup_ms=cost, overlapped_penalty_ms=cost)


def test_a_networks_own_module_of_that_name_comes_first(files: dict[str, str], tmp_path: Path) -> None:
    state = trained_state()
    renamed = {name.replace("stem.", "input."): tensor for name, tensor in state.items()}
    save_file(renamed, tmp_path / "net.safetensors")
    given = {**files, "checkpoint": str(tmp_path / "net.safetensors")}
    told = Told()
    library = explore(
        f"{__file__}:NetOfInput",
        **given,
        out=tmp_path / "out",
        blocks="input,blocks.1",
        variants=("student(8)", "grid(16)"),
        epochs=1,
        progress=told,
    )
    assert [block.kind for block in library.manifest.blocks] == ["Conv2d", "Block"]
    assert library.manifest.blocks[0].output_shape == (8, 8, 8)
    assert {trial.variant for trial in library.trials} == {"grid(16)"}
    assert "left out student(8): the network has a module named 'input'" in told.notes
    with pytest.raises(VariantError, match="named 'input', so student.* cannot be placed at"):
        explore(f"{__file__}:NetOfInput", **given, out=tmp_path / "no", variants=("student(8)",))


def test_a_family_says_what_it_reads() -> None:
    assert reads_input("student(8)") and not reads_input("grid(16)")
    with pytest.raises(VariantError, match="reads 'nothing': write 'hidden' or 'input'"):
        register_predictor("idle", reads="nothing")  # type: ignore[arg-type]
    with pytest.raises(VariantError, match="unknown variant 'idle'"):
        reads_input("idle")
