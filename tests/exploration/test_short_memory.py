"""Training where memory is short: in smaller batches, which a resumed run keeps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gati.caches import distillation_loss
from gati.errors import ModelError
from gati.exploration import memory, stages
from gati.exploration.explore import explore
from gati.exploration.library import Library
from gati.exploration.progress import SilentProgress
from gati.exploration.state import StagePlan
from tests.exploration.killing import Killed, KilledAfter
from tests.exploration.networks import trained_state, write_digits
from tests.exploration.quick import few_steps
from tests.exploration.slow_networks import TIME, on_fake_time

pytestmark = pytest.mark.slow

NET = f"{Path(__file__).parent / 'networks.py'}:Net"
MIB, GIB = 2**20, 2**30


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    few_steps(monkeypatch)
    yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("digits")
    held, more = write_digits(folder, count=300)
    save_file(trained_state(), folder / "net.safetensors")
    return {
        "checkpoint": folder / "net.safetensors",
        "data": str(held),
        "train_data": str(more),
        "variants": ("student(8)", "grid(8)"),
        "blocks": "blocks.1",
        "epochs": 0.1,
    }


def weights(library: Library) -> dict[str, Tensor]:
    caches = sorted((library.directory / "caches").iterdir())
    return {f"{path.name} {name}": each for path in caches for name, each in load_file(path).items()}


def plans(folder: Path) -> list[StagePlan]:
    return [StagePlan(*each) for each in json.loads((folder / ".state" / "plans.json").read_text()).values()]


def test_a_run_in_smaller_batches_goes_on_in_them_whatever_memory_there_is_later(
    files: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 3 * MIB // 4)
    monkeypatch.setattr(stages, "_SAVE_EVERY_S", 0.0)
    whole = explore(NET, **files, out=tmp_path / "whole")
    with pytest.raises(Killed):
        explore(NET, **files, out=tmp_path / "killed", progress=KilledAfter(20))
    (plan,) = plans(tmp_path / "killed")
    assert plan.batch_size is not None and 2 <= plan.batch_size < 128
    monkeypatch.setattr(memory, "available_bytes", lambda: 16 * GIB)
    student = next(trial for trial in whole.trials if trial.variant == "student(8)")
    resumed = explore(NET, **files, out=tmp_path / "killed")
    same = next(trial for trial in resumed.trials if trial.variant == "student(8)")
    assert same.images_seen == student.images_seen and same.images_seen % plan.batch_size == 0
    first, second = weights(whole), weights(resumed)
    of_student = [name for name in first if "student" in name]
    assert of_student and all(torch.equal(first[name], second[name]) for name in of_student)


def test_batches_are_as_ever_where_memory_suffices(
    files: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 16 * GIB)
    with pytest.raises(Killed):
        explore(NET, **files, out=tmp_path, progress=KilledAfter(20))
    assert [plan.batch_size for plan in plans(tmp_path)] == [None]


class _Notes(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.parametrize("timed", [False, True], ids=["epochs", "time"])
def test_training_that_lacks_memory_begins_again_with_half_the_inputs(
    timed: bool, files: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small_gpu(logits: Tensor, *arguments: Any, **options: Any) -> Tensor:
        if len(logits) > 40:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return distillation_loss(logits, *arguments, **options)

    monkeypatch.setattr("gati.exploration.train.distillation_loss", small_gpu)
    notes = _Notes()
    net, options = NET, files
    if timed:
        on_fake_time(monkeypatch)
        TIME.reset(0.01)
        net = "tests.exploration.slow_networks:SlowNet"
        options = {**files, "epochs": None, "budget_s": 30.0, "clock": TIME}
    library = explore(net, **options, out=tmp_path, progress=notes)
    trained = [trial for trial in library.trials if trial.status == "trained"]
    assert len(trained) >= 1 + (not timed) and all(trial.images_seen % 32 == 0 for trial in trained)
    if not timed:
        assert all(trial.images_seen == 160 * 32 for trial in trained), "four times the steps"
        assert "too little memory: students begin again with 64 inputs a step" in notes.notes


def test_training_that_never_fits_gets_one_line(
    files: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_gpu(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr("gati.exploration.train.distillation_loss", no_gpu)
    with pytest.raises(ModelError, match="^2 inputs do not fit into memory with this network"):
        explore(NET, **files, out=tmp_path)
