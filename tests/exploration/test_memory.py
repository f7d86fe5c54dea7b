"""Batches as large as memory holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gati.errors import ModelError
from gati.exploration import memory
from gati.exploration.measure import base_answers, held_out_probabilities
from gati.exploration.memory import (
    MemoryNeed,
    available_bytes,
    fitting,
    halved,
    in_batches,
    is_lack_of_memory,
    lack_of_memory_told,
    may_be_short,
    need_of,
    spare_bytes,
)
from gati.exploration.train import Learner
from gati.types import TrialId

MIB, GIB = 2**20, 2**30
CPU = torch.device("cpu")


def write(root: Path, **files: str) -> Path:
    for name, content in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_the_available_memory_is_that_of_the_machine_or_of_its_control_groups(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
    write(tmp_path, proc__meminfo="MemTotal: 9000000 kB\nMemAvailable: 8388608 kB\nHugePages_Total: 0\n")
    assert available_bytes(tmp_path) == 8 * GIB
    write(
        tmp_path,
        proc__self__cgroup="0::/user/job\n",
        sys__fs__cgroup__user__job__memory_dot_max="max\n",
        sys__fs__cgroup__user__job__memory_dot_current=f"{3 * GIB}\n",
        sys__fs__cgroup__user__memory_dot_max=f"{4 * GIB}\n",
        sys__fs__cgroup__user__memory_dot_current=f"{3 * GIB}\n",
        sys__fs__cgroup__user__memory_dot_stat=f"anon 1\ninactive_file {512 * MIB}\n",
    )
    assert available_bytes(tmp_path) == GIB + 512 * MIB, "what is kept of files is given up"


def test_control_groups_of_version_1_limit_containers(tmp_path: Path) -> None:
    """There the group is named as the host sees it, and mounted without that name."""
    write(
        tmp_path,
        proc__meminfo="MemAvailable: 8388608 kB\n",
        proc__self__cgroup="7:memory:/docker/abc\n6:cpu,cpuacct:/docker/abc\n",
        sys__fs__cgroup__memory__memory_dot_limit_in_bytes=f"{2 * GIB}\n",
        sys__fs__cgroup__memory__memory_dot_usage_in_bytes=f"{GIB}\n",
    )
    assert available_bytes(tmp_path) == GIB
    write(tmp_path, sys__fs__cgroup__memory__memory_dot_limit_in_bytes="9223372036854771712\n")
    assert available_bytes(tmp_path) == 8 * GIB, "the number that means no limit"


class Wide(nn.Module):
    """Holds two tensors of 1 MiB an input at a time, whatever there were before."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(5):
            x = x.new_zeros(len(x), MIB // 4) + 1.0  # zeros live until the sum exists
        return x[:, :10].clone()


@pytest.mark.slow
def test_what_lives_at_a_time_is_counted_and_not_what_was_freed() -> None:
    x = torch.zeros(4, 3)
    need = need_of(lambda inputs: Wide()(x[:inputs]))
    assert 2 * MIB <= need.input_bytes <= 3 * MIB + 1024
    assert need.fixed_bytes < MIB


def test_gradients_need_what_the_way_back_reads() -> None:
    network = nn.Sequential(*(layer for _ in range(10) for layer in (nn.Linear(1000, 1000), nn.Sigmoid())))

    def train(inputs: int) -> None:
        network.zero_grad()  # gradients exist at the end, all activations before
        network(torch.zeros(inputs, 1000)).sum().backward()

    with torch.no_grad():
        alone = need_of(lambda inputs: network(torch.zeros(inputs, 1000)))
    taught = need_of(train, 2)
    assert alone.input_bytes <= 4 * 4000
    assert taught.input_bytes >= 10 * 4000
    assert taught.fixed_bytes >= 10 * 4_000_000, "gradients of all weights"


@settings(max_examples=50)
@given(st.integers(1, 300), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**9))
def test_what_fits_fits(most: int, fixed: int, each: int, free: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "available_bytes", lambda: free)
        inputs = fitting(most, MemoryNeed(fixed, each))
    assert 1 <= inputs <= most
    assert inputs == 1 or fixed + inputs * each <= 0.7 * free
    assert inputs == most or fixed + 2 * inputs * max(1, each) > 0.7 * free or 2 * inputs >= most


def test_small_inputs_and_unknown_memory_need_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    image, tokens = torch.zeros(1, 3, 32, 32), torch.zeros(1, 3, 512, dtype=torch.int64)
    monkeypatch.setattr(memory, "available_bytes", lambda: 16 * GIB)
    assert not may_be_short(image, 250)
    assert may_be_short(torch.zeros(1, 3, 512, 512), 250)
    assert may_be_short(tokens, 250)
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    assert not may_be_short(tokens, 250)
    assert fitting(250, MemoryNeed(0, 10**12)) == 250


def _too_much(limit: int, tried: list[int]) -> Any:
    def run(indices: np.ndarray) -> list[int]:
        tried.append(len(indices))
        if len(indices) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return indices.tolist()

    return run


def test_batches_that_do_not_fit_are_halved_and_none_is_lost() -> None:
    tried: list[int] = []
    found = [each for batch in in_batches(700, 250, _too_much(70, tried)) for each in batch]
    assert found == list(range(700))
    assert tried[:4] == [250, 125, 62, 62] and max(tried[2:]) == 62
    growing: list[int] = []
    list(in_batches(700, 250, _too_much(999, growing), first=8))
    assert growing == [8, 16, 32, 64, 128, 250, 202]


def test_one_input_that_does_not_fit_gets_one_line() -> None:
    with pytest.raises(ModelError, match=r"^one input does not fit into memory .* smaller inputs") as caught:
        list(in_batches(10, 4, _too_much(0, [])))
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match="^2 inputs do not fit into memory"):
        halved(2, torch.OutOfMemoryError(), least=2)
    with pytest.raises(KeyError):
        halved(2, KeyError("other"))
    with pytest.raises(ModelError, match="not fit into memory"), lack_of_memory_told():
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(RuntimeError, match="shape"), lack_of_memory_told():
        raise RuntimeError("shape")


def test_what_could_be_computed_again_takes_an_eighth_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for free, kept in ((None, GIB), (16 * GIB, GIB), (GIB, 128 * MIB), (0, 0)):
        monkeypatch.setattr(memory, "available_bytes", lambda free=free: free)
        assert spare_bytes(GIB) == kept


def test_torch_without_memory_on_the_cpu_is_known_by_its_words() -> None:
    assert is_lack_of_memory(MemoryError()) and not is_lack_of_memory(RuntimeError("a shape")), "NumPy's"
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_lack_of_memory(caught.value)


class Counted(nn.Module):
    """Notes how many inputs it gets at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.sizes = Wide(), []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        return self.wide(x.flatten(1)) + x.flatten(1).sum(1, keepdim=True)


class Inputs:
    def __init__(self, count: int) -> None:
        self.tensor = torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tensor)

    def images(self, indices: np.ndarray) -> Tensor:
        return self.tensor[torch.from_numpy(indices)]


def test_answers_of_many_classes_are_in_memory_once() -> None:
    """They were joined from those of each batch, so that for a moment there were two of all."""
    learner = Learner(TrialId("t"), "input", nn.Sequential(nn.Flatten(), nn.Linear(768, 1000)))
    inputs = {count: Inputs(count) for count in (600, 1200)}

    @torch.no_grad()
    def ask(count: int) -> None:
        held_out_probabilities(nn.Identity(), inputs[count], [learner], CPU)

    assert 4000 <= need_of(ask, 600).input_bytes < 6000


@pytest.mark.slow
def test_the_network_answers_no_more_inputs_at_a_time_than_memory_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network, inputs = Counted(), Inputs(70)
    monkeypatch.setattr(memory, "available_bytes", lambda: 96 * MIB)
    small = base_answers(network, inputs, CPU)
    assert max(network.sizes) == 16 and len(small) == 70
    predictor = nn.Sequential(nn.Flatten(), nn.Linear(768, 10))
    learner = Learner(TrialId("t"), "wide", nn.Linear(10, 10))
    network.sizes.clear()
    with torch.no_grad():
        held_out_probabilities(network, inputs, [learner, Learner(TrialId("u"), "input", predictor)], CPU)
    assert max(network.sizes) == 16
    network.sizes.clear()
    monkeypatch.setattr(memory, "available_bytes", lambda: 16 * GIB)
    assert torch.equal(base_answers(network, inputs, CPU), small)
    assert network.sizes == [70], "where memory suffices, nothing is measured"
