"""What a network calls becomes its program, which computes what that of `torch.export` does, bit for bit."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gati.model import flatten as flattening
from gati.model.eager import eager_program
from gati.model.flatten import lower
from gati.model.segments import trace
from tests.engine.networks import Network

ROWS, CHANNELS, SIZE = 2, 4, 6


def ready(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for tensor in module.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.05, 0.5)
    return module.eval().requires_grad_(False)


class Recurrent(nn.Module):
    """Its first state is made anew for each batch, as large as that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(SIZE, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.layer(x)[0][:, -1])
        return result


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(SIZE, 2, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).flatten(1)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (Network, (1, 6, 6)),
    "LSTM": (Recurrent, (CHANNELS, SIZE)),
    "attention": (Attention, (CHANNELS, SIZE)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_program_is_the_one_of_torch_export(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, shape = NETWORKS[name]
    module, example = ready(build()), torch.randn(ROWS, *shape)
    assert eager_program(module, example) is not None
    ours = lower(module, example).whole()
    monkeypatch.setattr(flattening, "eager_program", lambda *_: None)
    exported = lower(module, example).whole()
    for rows in (1, 2, 5):
        x = torch.randn(rows, *shape)
        with torch.inference_mode():
            assert torch.equal(ours(x.clone()), exported(x.clone()))


def doubled(x: Tensor) -> Tensor:
    x *= 2.0
    return x


def first_added(x: Tensor) -> Tensor:
    x = x.contiguous()
    view = x.view(-1, SIZE)
    view[:, 0] += 1.0  # written through a view
    return x


def clipped_in_part(x: Tensor) -> Tensor:
    x[:, 1:] = x[:, 1:].clamp(max=0.5)
    return x


def _turned(index: Tensor) -> Tensor:
    return index[index]


STEPS: tuple[Callable[[Tensor], Tensor], ...] = (
    doubled,
    first_added,
    clipped_in_part,
    lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    lambda x: torch.stack(x.unbind(1), 1),
    lambda x: x.reshape(x.shape[0] * 2, -1).sigmoid().reshape(x.shape[0], CHANNELS, SIZE),
    lambda x: x.permute(0, 2, 1).contiguous().view(len(x), CHANNELS, -1),
    lambda x: x + torch.arange(x.size(-1)).to(x.dtype),
    lambda x: x + x.new_ones(x.shape[0], 1, 1),
    lambda x: x.max(1, keepdim=True).values - x,
    lambda x: 1.0 - x.transpose(1, 2).softmax(1).transpose(1, 2),
    lambda x: nn.functional.max_pool1d(x, 3, 1, 1),
    lambda x: nn.functional.interpolate(x, scale_factor=2.0)[..., ::2],
    lambda x: torch.einsum("bcs,bcs->bcs", x, x.flip(1)),
    lambda x: nn.functional.pad(x, (1, 0))[:, :, :-1],
    lambda x: torch.where(x > 0.2, x, x.mean(dim=(1, 2), keepdim=True)),
    lambda x: nn.functional.dropout(x, 0.5, training=False),
    lambda x: x.index_select(1, torch.tensor([3, 1, 0, 2])),
    lambda x: x * np.sqrt(4.0),
    lambda x: x[:, _turned(torch.tensor([1, 2, 3, 0]))],
    lambda x: torch.cat([x[:, :2], x[:, 2:9], x[:, 9:]], 1) + torch.cat(x.split(3, 1), 1),
    lambda x: torch.empty_like(x).copy_(x),
)


class Steps(nn.Module):
    """Steps in a row, a layer with weights in the middle, and class scores at the end."""

    def __init__(self, before: list[int], after: list[int]) -> None:
        super().__init__()
        self.before, self.after = before, after
        self.block, self.head = nn.Linear(SIZE, SIZE), nn.Linear(CHANNELS * SIZE, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        for step in self.before:
            x = STEPS[step](x)
        x = self.block(x)
        for step in self.after:
            x = STEPS[step](x)
        result: Tensor = self.head(x.flatten(1))
        return result


SOME_STEPS = st.lists(st.integers(0, len(STEPS) - 1), max_size=4)


@settings(max_examples=25)
@given(before=SOME_STEPS, after=SOME_STEPS, rows=st.integers(1, 5))
def test_whatever_a_network_calls_its_program_and_its_segments_compute_the_same(
    before: list[int], after: list[int], rows: int
) -> None:
    module = ready(Steps(before, after))
    example = torch.rand(ROWS, CHANNELS, SIZE)
    assert eager_program(module, example) is not None
    traced = trace(module, example, ["block"])
    x = torch.rand(rows, CHANNELS, SIZE)
    with torch.inference_mode():
        expected = module(x.clone())
        assert torch.equal(traced.base(x.clone()), expected)
        carried: Any = (x.clone(),)
        for segment in traced.cut(["block"]):
            carried = segment.run(*carried)
        assert torch.equal(carried, expected)


def test_each_of_the_steps_can_be_followed() -> None:
    for number in range(len(STEPS)):
        assert eager_program(ready(Steps([number], [])), torch.rand(ROWS, CHANNELS, SIZE)) is not None, number


class Looking(nn.Module):
    """What it does depends on values that the example does not show."""

    def __init__(self, look: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.look = look

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) * (1.0 if self.look(x) else 1.0)


UNSEEN: dict[str, Callable[[Tensor], Any]] = {
    "a truth": lambda x: bool((x > 0).any()),
    "an item": lambda x: x.sum().item() > 0,
    "a list": lambda x: x.tolist()[0],
    "an array": lambda x: x.numpy()[0, 0, 0] > 0,
    "a number": lambda x: float(x.max()) > 0,
    "a comparison": lambda x: torch.equal(x, x * 2.0),
    "its memory": lambda x: x.data_ptr(),
    "how many are large": lambda x: len((x > 100.0).nonzero()),
    "how many are left": lambda x: x[x > 100.0].numel(),
    "where they are": lambda x: torch.where(x > 100.0)[0].numel(),
    "how many differ": lambda x: len(torch.unique(x)),
    "how often": lambda x: len(torch.repeat_interleave((x > 100.0).flatten().long())),
    "how many kinds": lambda x: nn.functional.one_hot(x.long()).shape[-1],
}


@pytest.mark.parametrize("name", UNSEEN)
def test_a_network_that_looks_at_values_is_left_to_torch_export(name: str) -> None:
    assert eager_program(ready(Looking(UNSEEN[name])), torch.rand(ROWS, CHANNELS, SIZE)) is None


class Unusual(nn.Module):
    """Goes a way that no call shows."""

    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(x).flatten(1)


UNSEEN_WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "made of an array": lambda x: x + torch.from_numpy(torch.ones(1).numpy().copy()),
    "in another precision": lambda x: _in_bfloat16(x),
    "in inference mode": lambda x: _in_place_in_inference_mode(x),
    "for two inputs only": lambda x: x.view(2, CHANNELS, SIZE),
    "another number of calls": lambda x: torch.stack([row + 1.0 for row in x]),
    "half of the batch": lambda x: x * float(x.shape[0] // 2),
    "parts in a loop": lambda x: torch.cat([x[i : i + 8] + 1.0 for i in range(0, len(x), 8)]),
    "parts by split": lambda x: torch.cat([part + 1.0 for part in x.split(8)]),
    "filled up to eight": lambda x: nn.functional.pad(x, (0, 0, 0, 0, 0, -len(x) % 8))[: len(x)] + 1.0,
    "with casts that change nothing": lambda x: _in_bfloat16(torch.ones_like(x)),
    "scripted in place": lambda x: _changed_by(_clip, x),
    "in another thread": lambda x: _changed_by(_in_a_thread, x),
    "into memory by address": lambda x: _written_by_address(x),
}


@torch.jit.script
def _clip(x: Tensor) -> Tensor:
    return x.clamp_(max=100.0)


def _in_a_thread(x: Tensor) -> None:
    _in_a_thread_run(lambda: x.clamp_(max=100.0))


def _in_a_thread_run(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _changed_by(change: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """Its argument, changed in a way that an example of small numbers does not show."""
    copy = x * 1.0
    change(copy)
    return copy


def _written_by_address(x: Tensor) -> Tensor:
    """As extensions do. What they write does not show in the result: memory may hold the same by chance."""
    memory = torch.empty(x.shape)

    def write() -> None:  # as compiled code, it does not pass by any mode
        ctypes.memmove(memory.data_ptr(), x.data_ptr(), x.numel() * x.element_size())

    _in_a_thread_run(write)
    return x + memory * 0.0


def _in_bfloat16(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ x.transpose(1, 2)).float()


def _in_place_in_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return (x * 1.0).relu_()


@pytest.mark.parametrize("name", UNSEEN_WAYS)
def test_a_network_whose_calls_do_not_tell_all_is_left_to_torch_export(name: str) -> None:
    assert eager_program(ready(Unusual(UNSEEN_WAYS[name])), torch.rand(ROWS, CHANNELS, SIZE)) is None


def test_an_input_in_another_layout_is_computed_like_any_other() -> None:
    module = ready(Unusual(lambda x: x.contiguous().view(len(x), -1) + 1.0))
    program = eager_program(module, torch.rand(ROWS, CHANNELS, SIZE))
    x = torch.rand(SIZE, CHANNELS, 3).permute(2, 1, 0)
    assert program is not None
    assert torch.equal(program.whole()(x), module(x))


def test_nothing_is_left_on_the_network_that_was_followed() -> None:
    module = ready(Steps([0, 1], [2]))
    eager_program(module, torch.rand(ROWS, CHANNELS, SIZE))
    eager_program(Looking(UNSEEN["an item"]), torch.rand(ROWS, CHANNELS, SIZE))
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())
