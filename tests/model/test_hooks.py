"""Hooks: right values, nothing left behind."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from gati import zoo
from gati.errors import BlockError, ModelError
from gati.model.checkpoint import state_sha256
from gati.model.hooks import collect_hidden, forward_order


def hooks_left(module: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())


class Overwriting(nn.Module):
    """A ReLU in place after the first block; after the second one only when asked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.also_second = False

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.first(x), inplace=True)
        x = self.second(x)
        if self.also_second:
            x.mul_(2)
        return self.head(x)


def test_hidden_outputs_equal_the_blocks_outputs() -> None:
    network = zoo.resnet20().eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad(), collect_hidden(network, ["layer1.0", "layer3.2"]) as hidden:
        network(images)
        stem = functional.relu(network.bn1(network.conv1(images)))
        assert torch.equal(hidden["layer1.0"], network.layer1[0](stem))
    assert {name: tuple(h.shape) for name, h in hidden.items()} == {
        "layer1.0": (2, 16, 32, 32),
        "layer3.2": (2, 64, 8, 8),
    }


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_later_operation_in_place_does_not_change_a_hidden_output(mode) -> None:
    network, batches = Overwriting(), torch.randn(3, 5, 4)
    with mode(), collect_hidden(network, ["first", "second"]) as hidden:
        for batch in batches:  # the first forward clones, the later ones only what must be
            network(batch)
            expected = functional.linear(batch, network.first.weight, network.first.bias)
            assert torch.equal(hidden["first"], expected)
            assert not hidden["first"].requires_grad


def test_only_overwritten_outputs_are_cloned_after_the_first_forward() -> None:
    network, seen = Overwriting(), []
    network.second.register_forward_hook(lambda module, arguments, output: seen.append(output))
    with torch.no_grad(), collect_hidden(network, ["first", "second"]) as hidden:
        network(torch.randn(2, 4))
        network(torch.randn(2, 4))
        assert hidden["second"].data_ptr() == seen[-1].data_ptr()


def test_an_overwrite_that_comes_and_goes_is_an_error_and_never_a_wrong_value() -> None:
    network = Overwriting()
    with torch.no_grad(), collect_hidden(network, ["second"]) as hidden:
        network(torch.randn(2, 4))
        network.also_second = True
        with pytest.raises(
            ModelError, match="^block second: its output is overwritten in place on some inputs"
        ):
            network(torch.randn(2, 4))
        assert "second" not in hidden


def test_nothing_is_left_on_the_network() -> None:
    network = zoo.resnet20().eval()
    before = state_sha256(network)
    with torch.no_grad(), collect_hidden(network, ["layer1.0"]):
        network(torch.randn(2, 3, 32, 32))
    assert (state_sha256(network), hooks_left(network)) == (before, 0)


def test_nothing_is_left_after_an_exception_in_the_network() -> None:
    network = zoo.resnet20().eval()
    before = state_sha256(network)
    with pytest.raises(RuntimeError), collect_hidden(network, ["layer1.0"]):
        network(torch.randn(2, 5, 32, 32))
    assert (state_sha256(network), hooks_left(network)) == (before, 0)


def test_an_unknown_block_is_an_error_before_anything_is_registered() -> None:
    network = zoo.resnet20()
    with (
        pytest.raises(BlockError, match=r"^the network has no module 'layer1\.9'; did you mean layer1\.2"),
        collect_hidden(network, ["layer1.0", "layer1.9"]),
    ):
        pass
    assert hooks_left(network) == 0


def test_the_first_of_several_tensors_counts() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    network = nn.ModuleDict({"attention": attention})
    network.forward = lambda x: attention(x, x, x)[0]  # type: ignore[method-assign]
    with torch.no_grad(), collect_hidden(network, ["attention"]) as hidden:
        network(torch.randn(2, 3, 8))
    assert hidden["attention"].shape == (2, 3, 8)


def test_a_block_without_a_tensor_is_an_error_and_leaves_nothing() -> None:
    class Nameless(nn.Module):
        def forward(self, x: Tensor) -> str:
            return "done"

    network = nn.Sequential(Nameless())
    message = "^block 0 returns str without a tensor; exclude it from the blocks$"
    with pytest.raises(ModelError, match=message), collect_hidden(network, ["0"]):
        network(torch.zeros(1))
    assert hooks_left(network) == 0


def test_forward_order_is_the_order_of_execution_without_what_does_not_run() -> None:
    network = Overwriting()
    network.unused = nn.Linear(1, 1)
    assert forward_order(network, ["unused", "head", "first"], torch.zeros(1, 4)) == ["first", "head"]
    assert hooks_left(network) == 0


def test_an_example_of_the_wrong_shape_is_one_line() -> None:
    with pytest.raises(ModelError) as error:
        forward_order(zoo.resnet20(), ["layer1.0"], torch.zeros(1, 5, 8, 8))
    assert str(error.value).startswith(
        "the network does not accept float32 input of shape [1, 5, 8, 8] (RuntimeError: "
    )
    assert "\n" not in str(error.value)


class Embedding(nn.Module):
    """Reads ids below 10."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(10, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.head(self.words(ids).mean(1))
        return result


@pytest.mark.parametrize(
    ("network", "example", "advice"),
    [
        (zoo.resnet20, torch.zeros(1, 5, 8, 8), "check the images' size and channels (--resize)"),
        (lambda: nn.Sequential(nn.Linear(3, 2)), torch.zeros(1, 4), "check the shape of the inputs"),
        (
            Embedding,
            torch.full((1, 4), 10),
            "check that ids are below the rows of its embedding, and texts no longer than it takes",
        ),
        (Embedding, torch.zeros(1, 4), "give numbers of the type it takes, or convert them in its forward"),
        (
            lambda: nn.Sequential(nn.Linear(4, 2)),
            torch.zeros(1, 4, dtype=torch.int64),
            "give numbers of the type it takes, or convert them in its forward",
        ),
        (
            lambda: nn.Sequential(nn.Conv2d(3, 4, 3).bfloat16()),
            torch.zeros(1, 3, 8, 8),
            "give numbers of the type it takes, or convert them in its forward",
        ),
        (
            lambda: nn.Sequential(nn.Unflatten(1, (3, 2))),
            torch.zeros(1, 4, dtype=torch.int64),
            "check the names, shapes and types of its arguments",
        ),
    ],
    ids=["images", "vectors", "ids", "floats as ids", "integers", "precision", "arrays"],
)
def test_the_advice_is_about_inputs_of_that_kind(
    network: Callable[[], nn.Module], example: Tensor, advice: str
) -> None:
    with pytest.raises(ModelError) as error:
        forward_order(network(), [], example)
    assert str(error.value).endswith(f"); {advice}")


class Doubling(nn.Module):
    """Doubles what it is given where it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x.mul_(2.0))
        return result


def test_the_input_is_collected_as_it_came() -> None:
    for rounds, inference in ((3, False), (2, True)):
        network = Doubling().eval().requires_grad_(False)
        with collect_hidden(network, ["input", "linear"]) as hidden, torch.inference_mode(inference):
            for _ in range(rounds):
                x = torch.randn(4, 3)
                before = x.clone()
                result = network(x)
                assert torch.equal(hidden["input"], before)
                assert torch.equal(hidden["linear"], result)
        assert not network._forward_pre_hooks and not network._forward_hooks


def test_a_module_called_input_is_a_block_like_any_other() -> None:
    network = nn.ModuleDict({"input": nn.Linear(3, 2)})
    network.forward = lambda x: network["input"](x)  # type: ignore[method-assign]
    with collect_hidden(network, ["input"]) as hidden:
        assert torch.equal(network(torch.ones(1, 3)), hidden["input"])
