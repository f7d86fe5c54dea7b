"""Tracing a network and cutting it changes nothing of what it computes."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gati import zoo
from gati.errors import CutError, DataError, ModelError
from gati.model.blocks import find_blocks
from gati.model.flatten import export_program, flatten
from gati.model.hooks import forward_order
from gati.model.program import as_module
from gati.model.segments import TracedModel, trace
from gati.model.source import import_torchvision

pytestmark = pytest.mark.slow


def torchvision_network(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        models = import_torchvision().models
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            network: nn.Module = getattr(models, name)(num_classes=10, **options)
        return network

    return build


TINY_TRANSFORMER = {
    "image_size": 16, "patch_size": 8, "num_layers": 3, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32,
}  # fmt: skip
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet20": (zoo.resnet20, 32),
    "resnet18": (torchvision_network("resnet18"), 32),
    "mobilenet_v2": (torchvision_network("mobilenet_v2"), 32),
    "densenet121": (torchvision_network("densenet121"), 32),
    "vision_transformer": (torchvision_network("VisionTransformer", **TINY_TRANSFORMER), 16),
    "googlenet": (torchvision_network("googlenet", init_weights=False), 32),
}


def ready(module: nn.Module) -> nn.Module:
    return module.eval().requires_grad_(False)


@pytest.fixture(scope="module", params=list(NETWORKS))
def traced_network(request: pytest.FixtureRequest) -> tuple[nn.Module, TracedModel]:
    build, size = NETWORKS[request.param]
    torch.manual_seed(0)
    module = ready(build())
    return module, trace(module, torch.randn(2, 3, size, size), find_blocks(module))


def test_as_a_module_it_computes_the_same_from_buffers(traced_network: tuple[nn.Module, TracedModel]) -> None:
    module, traced = traced_network
    x = torch.randn(3, *traced.input_shape)
    (first, *_), found = traced.cut(traced.blocks[:1]), as_module(traced.base)
    with torch.inference_mode():
        assert torch.equal(found(x.clone()), traced.base(x.clone()))
        for ours, wanted in zip(as_module(first.run)(x.clone()), first.run(x.clone()), strict=True):
            assert torch.equal(ours, wanted)
    weights = {parameter.data_ptr() for parameter in module.parameters()}
    assert weights & {buffer.data_ptr() for buffer in found.buffers()}  # they are shared


def run_segments(traced: TracedModel, names: tuple[str, ...], x: Tensor) -> Tensor:
    carried: Any = (x,)
    for segment in traced.cut(names):
        carried = segment.run(*carried)
    result: Tensor = carried
    return result


@pytest.mark.parametrize("rows", [1, 3])
@torch.inference_mode()
def test_the_flat_network_equals_the_module_bit_for_bit(
    traced_network: tuple[nn.Module, TracedModel], rows: int
) -> None:
    module, traced = traced_network
    x = torch.randn(rows, *traced.input_shape)
    assert torch.equal(traced.base(x.clone()), module(x.clone()))


@pytest.mark.parametrize("rows", [1, 3])
@torch.inference_mode()
def test_segments_in_a_row_equal_the_whole_bit_for_bit(
    traced_network: tuple[nn.Module, TracedModel], rows: int
) -> None:
    _, traced = traced_network
    x = torch.randn(rows, *traced.input_shape)
    for names in (traced.blocks, traced.blocks[1::2], ()):
        assert torch.equal(run_segments(traced, names, x.clone()), traced.base(x.clone()))


@torch.inference_mode()
def test_a_segment_hands_on_the_hidden_output_of_its_block_first(
    traced_network: tuple[nn.Module, TracedModel],
) -> None:
    module, traced = traced_network
    name = traced.blocks[1]
    seen: list[Tensor] = []
    handle = module.get_submodule(name).register_forward_hook(
        lambda _module, _inputs, output: seen.append(output.clone())
    )
    x = torch.randn(2, *traced.input_shape)
    module(x.clone())
    handle.remove()
    hidden = traced.cut([name])[0].run(x.clone())[0]
    # nn.MultiheadAttention takes a fused path in eager mode that export does not see
    torch.testing.assert_close(hidden, seen[0])
    assert tuple(hidden.shape[1:]) == traced.hidden_shapes[name]


def test_tracing_leaves_the_users_network_as_it_was() -> None:
    module = ready(zoo.resnet20())
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    trace(module, torch.randn(2, 3, 32, 32), find_blocks(module)).base(torch.randn(1, 3, 32, 32))
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert not any(child._forward_hooks for child in module.modules())


class Skipping(nn.Module):
    """A skip connection across two blocks: after `first`, two tensors are alive."""

    def __init__(self, *, in_place: bool = False, offset: bool = False) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        self.in_place = in_place
        self.register_buffer("table", torch.arange(6.0) if offset else None)

    def forward(self, x: Tensor) -> Tensor:
        stem = self.stem(x)
        offset = self.table * 2.0 if isinstance(self.table, Tensor) else None
        hidden = self.first(stem)
        if self.in_place:
            hidden.relu_()
        hidden = self.second(hidden) + stem
        if offset is not None:
            hidden = hidden + offset
        result: Tensor = self.head(hidden)
        return result


def small(module: nn.Module, *blocks: str, width: int = 4) -> TracedModel:
    return trace(ready(module), torch.randn(2, width), blocks)


def test_every_tensor_that_is_alive_crosses_the_cut_the_hidden_output_first() -> None:
    first, _ = small(Skipping(), "first").cut(["first"])
    assert [tensor.shape for tensor in first.carried] == [(2, 6), (2, 6)]
    assert first.carried[0].name == "linear_1"
    assert all(tensor.batched for tensor in first.carried)


def test_a_tensor_without_a_batch_dimension_crosses_whole() -> None:
    first, _ = small(Skipping(offset=True), "first").cut(["first"])
    assert [tensor.batched for tensor in first.carried] == [True, True, False]


def test_a_hidden_output_changed_in_place_later_is_marked() -> None:
    assert small(Skipping(in_place=True), "first").cut(["first"])[0].hidden_changes_later
    assert not small(Skipping(), "first").cut(["first"])[0].hidden_changes_later


class Aliasing(nn.Module):
    """Two names of one memory cross the cut, and one of them is changed after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        view = hidden.view(-1, 3, 2)
        hidden = torch.sigmoid(self.wait(hidden))
        view.mul_(2.0)
        result: Tensor = self.head(view.reshape(-1, 6) + hidden)
        return result

    def wait(self, hidden: Tensor) -> Tensor:
        return hidden


def test_rows_cannot_be_picked_where_crossing_tensors_share_changing_memory() -> None:
    class Later(Aliasing):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            view = hidden.view(-1, 3, 2)
            out = self.block(hidden)
            view.mul_(2.0)
            result: Tensor = self.head(view.reshape(-1, 6) + hidden + out)
            return result

    assert not small(Later(), "block").cut(["block"])[0].rows_selectable
    assert small(Aliasing(), "first").cut(["first"])[0].rows_selectable


class Folding(nn.Module):
    """Moves a dimension into the batch and back; numbers made of the batch size are in use all along."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 6), nn.Linear(3, 3), nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        hidden = self.first(x)
        folded = self.inner(hidden.reshape(rows * 2, 3))
        hidden = self.last(folded.reshape(rows, 6))
        result: Tensor = self.head(hidden.view(rows, -1))
        return result


@torch.inference_mode()
def test_numbers_made_of_the_batch_size_are_worked_out_again_after_the_cut() -> None:
    traced = small(Folding(), "first", "last")
    for rows in (1, 5):
        x = torch.randn(rows, 4)
        assert torch.equal(run_segments(traced, ("first", "last"), x), traced.base(x))


def test_a_network_that_needs_gradients_is_told_so() -> None:
    class Sensitive(Folding):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_(True)
                (slope,) = torch.autograd.grad(super().forward(x).sum(), x)
            return super().forward(x.detach() + slope)

    with pytest.raises(ModelError, match=r"does not run in inference mode \(RuntimeError: .*gradients$"):
        small(Sensitive(), "first")


def test_a_network_that_takes_large_batches_in_parts_is_told_so() -> None:
    class InParts(Folding):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([super(InParts, self).forward(part) for part in x.split(4)])

    with pytest.raises(ModelError, match="InParts runs otherwise for more than 4 inputs at a time"):
        small(InParts(), "first")


@pytest.mark.parametrize("limit", [65_535, 4])
def test_limits_that_only_an_operator_has_do_not_count(limit: int) -> None:
    class Limited(Folding):
        def forward(self, x: Tensor) -> Tensor:
            torch._check(x.shape[0] <= limit)  # as batch_norm on a GPU does, for 65,535
            return super().forward(x)

    if limit == 65_535:
        assert export_program(ready(Limited()), torch.randn(2, 4)).range_constraints
    else:
        with pytest.raises(ModelError, match="Limited runs otherwise for more than 4 inputs at a time"):
            export_program(ready(Limited()), torch.randn(2, 4))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_a_lack_of_memory_is_not_taken_for_a_fault_of_the_network(error: Exception) -> None:
    class Large(Folding):
        def forward(self, x: Tensor) -> Tensor:
            raise error

    with pytest.raises(type(error)):
        small(Large(), "first")
    with pytest.raises(type(error)):
        forward_order(Large(), ["first"], torch.randn(2, 4))


def test_a_network_that_does_not_run_at_all_is_not_told_about_gradients() -> None:
    class Failing(Folding):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("not today")

    with pytest.raises(ModelError, match=r"inference mode \(ValueError: not today\); fix its forward"):
        small(Failing(), "first")


def test_weights_of_nan_are_told_so() -> None:
    network = Folding()
    nn.init.constant_(next(network.parameters()), torch.nan)
    with pytest.raises(CutError, match=r"output of block 'first' is NaN; check the checkpoint"):
        small(network, "first")


def test_a_block_whose_output_has_no_batch_dimension_first_is_refused() -> None:
    with pytest.raises(
        CutError, match=r"block 'inner' has shape \[4, 3\], its first dimension is not the batch"
    ):
        small(Folding(), "inner")


def test_tensors_that_mix_the_batch_with_other_dimensions_cannot_cross() -> None:
    class Mixing(Folding):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            folded = hidden.reshape(x.shape[0] * 2, 3)
            out = self.last(hidden)
            result: Tensor = self.head(out + self.inner(folded).reshape(x.shape[0], 6))
            return result

    with pytest.raises(CutError, match=r"after block 'last': \w+ \[4, 3\] crosses the cut"):
        small(Mixing(), "last").cut(["last"])


def test_a_network_that_loses_the_dimension_of_a_batch_of_one_is_refused() -> None:
    class Squeezing(Folding):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = super().forward(x)
            return result.squeeze()

    with pytest.raises(ModelError, match=r"shape \[2, 3\] for 2 inputs, and another for one; let its"):
        small(Squeezing(), "first")


def test_blocks_must_exist_and_come_in_forward_order() -> None:
    traced = small(Skipping(), "first", "second")
    with pytest.raises(CutError, match="no block 'third'.*its blocks are first, second"):
        traced.cut(["third"])
    with pytest.raises(CutError, match="cannot cut at 'second' before 'first'"):
        traced.cut(["second", "first"])
    with pytest.raises(CutError, match="no module 'third'; its modules are stem, first"):
        small(Skipping(), "third")


def test_of_blocks_that_end_with_the_same_tensor_one_is_to_be_named() -> None:
    network = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 3)).eval()
    traced = trace(network, torch.randn(2, 4), ["0", "0.1"])
    with pytest.raises(CutError, match="^blocks '0' and '0.1' end with the same tensor; name one of them$"):
        traced.cut(["0", "0.1"])


class Layers(nn.Module):
    """Recurrent layers, of whose results only the first is used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTM(4, 6, batch_first=True), nn.GRU(6, 6, batch_first=True)])
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        scores: Tensor = self.head(x[:, -1])
        return scores


def test_what_a_layer_returns_besides_its_output_crosses_no_cut_if_it_is_not_used() -> None:
    network, x = ready(Layers()), torch.randn(3, 5, 4)
    first, second, last = trace(network, x[:2], ["layers.0", "layers.1"]).cut(["layers.0", "layers.1"])
    assert [len(each.carried) for each in (first, second)] == [1, 1]
    assert torch.equal(last.run(*second.run(*first.run(x))), network(x))


def test_a_block_that_returns_no_tensor_is_refused() -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
            return {"x": [x]}

    class Wrapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.named, self.head = Named(), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(self.named(x)["x"][0])
            return result

    with pytest.raises(CutError, match="block 'named' returned no tensor"):
        small(Wrapping(), "named")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_hidden_output_in_another_precision_is_refused(dtype: torch.dtype) -> None:
    """Neither lookups nor all engines take it."""

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 4).to(dtype), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(self.inner(self.stem(x).to(dtype)).float())
            return result

    with pytest.raises(CutError) as error:
        small(Inside(), "stem", "inner")
    assert str(error.value) == (
        f"the output of block 'inner' is {str(dtype)[6:]}, and caches read float32; let the network compute "
        "in float32, or name others with --blocks"
    )
    small(Inside(), "stem")


@pytest.mark.parametrize("squeezed", [False, True])
def test_a_network_of_one_score_is_told_to_return_two(squeezed: bool) -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            score: Tensor = self.head(x)
            return score.squeeze(1) if squeezed else score

    with pytest.raises(ModelError, match=r"one score per input; return one for each class: for a logit"):
        small(Single())


@pytest.mark.parametrize("classes", [4, 2000])
def test_a_network_that_mixes_the_inputs_of_a_batch_is_refused(classes: int) -> None:
    class Centering(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - x.mean(0, keepdim=True)).repeat(1, classes // 4).softmax(1)

    with pytest.raises(ModelError, match="depends on the other inputs of its batch"):
        small(Centering())


@pytest.mark.parametrize("fill", [-1e9, -torch.inf])
def test_masked_classes_do_not_hide_that_a_network_mixes_the_inputs_of_a_batch(fill: float) -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + x.mean()).masked_fill(torch.arange(4) < 1, fill)

    with pytest.raises(ModelError, match="depends on the other inputs of its batch"):
        small(Masked())


def test_a_mask_that_is_added_to_most_scores_does_not_hide_that_either() -> None:
    """The rounding of -10,000 is more than what one input here changes of the other's score."""

    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 0.05 * x.mean() - 1e4 * (torch.arange(4) > 0)

    class Alone(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 0.05 * x.mean(1, keepdim=True) - 1e4 * (torch.arange(4) > 0)

    with pytest.raises(ModelError, match="depends on the other inputs of its batch"):
        small(Masked())
    small(Alone())


@pytest.mark.parametrize(
    "others",
    [
        pytest.param(lambda x: x[:1], id="the first one"),
        pytest.param(lambda x: x[-1:], id="the last one"),
        pytest.param(lambda x: x.cumsum(0), id="those before it"),
        pytest.param(lambda x: x.flip(0).cumsum(0).flip(0), id="those after it"),
    ],
)
def test_nor_that_only_some_inputs_depend_on_others(others: Callable[[Tensor], Tensor]) -> None:
    """The first of a batch, or the last, may depend on itself only."""

    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 0.05 * others(x) - 1e4 * (torch.arange(4) > 0)

    with pytest.raises(ModelError, match="depends on the other inputs of its batch"):
        small(Masked())


def test_scores_that_rounding_changes_are_not_said_to_depend_on_the_batch() -> None:
    class Rounding(nn.Module):
        """Probabilities in bfloat16; a single row runs in other kernels."""

        def __init__(self) -> None:
            super().__init__()
            sizes = (768, 512, 512, 256, 20_000)
            layers = [nn.Linear(*pair) for pair in zip(sizes, sizes[1:], strict=False)]
            self.layers = nn.Sequential(*(part for layer in layers for part in (nn.ReLU(), layer)))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).softmax(1).bfloat16()  # type: ignore[no-any-return]

    torch.manual_seed(0)
    trace(ready(Rounding()), torch.randn(8, 768), [])


def test_rounding_of_very_large_scores_is_not_said_to_depend_on_the_batch() -> None:
    """As of deep networks of timm that have no weights yet."""
    torch.manual_seed(0)
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 500))
    network = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3), *pooled)
    trace(ready(network), 1e15 * torch.randn(2, 3, 32, 32), [])


@pytest.mark.parametrize("noise", [1e-6, 1.0], ids=["less than rounding", "as dropout that is never off"])
def test_a_network_that_answers_otherwise_each_time_is_refused(noise: float) -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + noise * torch.randn_like(x)

    with pytest.raises(ModelError, match="another result each time, even for the same inputs; remove from"):
        small(Noisy())


def test_a_network_whose_operators_have_no_values_of_their_own_is_refused() -> None:
    class Mapped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.vmap(lambda row: row * 2)(x)

    with pytest.raises(ModelError, match=r"^cannot trace Mapped: NotImplementedError: "):
        small(Mapped())


def test_control_flow_on_values_is_refused_with_one_line(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(ModelError, match="cannot trace Branching with a free batch size") as caught:
        small(Branching())
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", ""), "torch prints a hundred lines"
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_only_what_torch_prints_is_kept_off_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    """While one thread traces, others log requests, and libraries of the network set up their logs."""
    handlers: list[logging.StreamHandler[Any]] = []

    class Talking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            print("of the network", file=sys.stderr)
            other = threading.Thread(target=print, args=("of a request",), kwargs={"file": sys.stderr})
            other.start()
            other.join()
            handlers.append(logging.StreamHandler())
            return x if x.sum() > 0 else -x

    with pytest.raises(ModelError, match="cannot trace Talking"):
        export_program(ready(Talking()), torch.ones(2, 4))
    assert capfd.readouterr().err == "of the network\nof a request\n"
    assert [handler.stream for handler in handlers] == [sys.stderr]
    assert "print" not in vars(torch.export._trace)


def test_a_network_that_returns_no_class_scores_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"shapes \[\(2, 3, 2\)\]; one of shape \[batch, classes\] is needed"
    ):
        small(nn.Unflatten(1, (3, 2)), width=6)


def test_a_network_in_training_mode_is_refused() -> None:
    module = Skipping()
    module.first.train()
    with pytest.raises(ModelError, match="is in training mode"):
        trace(module, torch.randn(2, 4), ["first"])


def test_an_example_of_one_row_is_refused() -> None:
    with pytest.raises(DataError, match=r"shape \[1, 4\] cannot be traced"):
        trace(ready(Skipping()), torch.randn(1, 4), ["first"])


def test_whether_the_network_changes_its_input_is_known() -> None:
    assert small(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3))).changes_input
    assert not small(nn.Sequential(nn.ReLU(), nn.Linear(4, 3))).changes_input


def test_dropout_costs_nothing_in_the_flat_network() -> None:
    flat = flatten(ready(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))), torch.randn(2, 4))
    assert "dropout" not in flat.source  # type: ignore[attr-defined]


def test_a_module_that_cannot_be_flattened_is_used_as_it_is() -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if bool(x.sum() > 0) else -x

    module = ready(Branching())
    assert flatten(module, torch.randn(2, 4)) is module


@pytest.mark.parametrize("rows", [1, 3])
@torch.inference_mode()
def test_cut_at_the_input_the_first_segment_hands_the_request_on(
    traced_network: tuple[nn.Module, TracedModel], rows: int
) -> None:
    module, plain = traced_network
    example = torch.randn(2, *plain.input_shape)
    traced = trace(module, example, ("input", *plain.blocks[:2]))
    assert traced.blocks == ("input", *plain.blocks[:2])
    assert traced.hidden_shapes["input"] == traced.input_shape
    assert (traced.block_kinds["input"], plain.block_kinds.get("input")) == ("network input", None)
    x = torch.randn(rows, *plain.input_shape)
    first = traced.cut(["input", plain.blocks[1]])[0]
    (handed_on,) = first.run(x)
    assert torch.equal(handed_on, x)
    assert [(each.shape, each.batched) for each in first.carried] == [((2, *plain.input_shape), True)]
    for names in (("input",), traced.blocks, traced.blocks[::2]):
        assert torch.equal(run_segments(traced, names, x.clone()), traced.base(x.clone()))
    with pytest.raises(CutError, match="other way round"):
        traced.cut([plain.blocks[0], "input"])


class Doubling(Skipping):
    """Doubles what it is given where it lies."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2.0))


def test_an_input_that_is_changed_in_place_later_is_marked() -> None:
    traced = small(Doubling(), "input", "first")
    assert traced.changes_input
    assert traced.cut(["input"])[0].hidden_changes_later
    assert not small(Skipping(), "input", "first").cut(["input"])[0].hidden_changes_later


def test_tracing_does_not_write_to_the_example() -> None:
    example = torch.randn(2, 4)
    before = example.clone()
    trace(ready(Doubling()), example, ["first"])
    assert torch.equal(example, before)


class OwnInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.input(x).relu())
        return result


def test_a_module_called_input_keeps_its_name() -> None:
    traced = small(OwnInput(), "input")
    assert (traced.hidden_shapes["input"], traced.block_kinds["input"]) == ((6,), "Linear")
