"""Blocks of the usual architectures, found without being told."""

import functools
import warnings
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn

from gati import zoo
from gati.errors import BlockError, CutError
from gati.model.blocks import find_blocks
from gati.model.segments import trace
from gati.model.source import import_timm, import_torchvision


@functools.cache
def torchvision_network(name: str) -> nn.Module:
    pytest.importorskip("PIL")
    with torch.device("meta"):  # names need no weights
        extra = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        network: nn.Module = import_torchvision().models.get_model(name, weights=None, **extra)
    return network


def timm_network(name: str) -> nn.Module:
    if find_spec("timm") is None:
        pytest.skip("needs timm")
    create: Callable[[str], nn.Module] = import_timm().create_model
    try:
        with torch.device("meta"):
            return create(name)
    except RuntimeError:  # older versions read numbers from tensors on the way
        return create(name)


RESNET18 = [f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1)]
DENSENET = [
    f"features.{name}" for number in (1, 2, 3) for name in (f"denseblock{number}", f"transition{number}")
] + ["features.denseblock4"]
CONVNEXT_DEPTHS = (3, 3, 9, 3)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("resnet18", RESNET18),
        ("vgg16_bn", [f"features.{index}" for index in (6, 13, 23, 33, 43)]),
        ("alexnet", [f"features.{index}" for index in (2, 5, 12)]),
        ("mobilenet_v2", [f"features.{index}" for index in range(1, 18)]),
        ("mobilenet_v3_small", [f"features.{index}" for index in range(1, 12)]),
        (
            "efficientnet_b0",
            [f"features.{stage}.{b}" for stage, n in enumerate((1, 2, 2, 3, 3, 4, 1), 1) for b in range(n)],
        ),
        ("densenet121", DENSENET),
        (
            "convnext_tiny",
            [f"features.{2 * stage + 1}.{b}" for stage, n in enumerate(CONVNEXT_DEPTHS) for b in range(n)],
        ),
        ("vit_b_16", [f"encoder.layers.encoder_layer_{index}" for index in range(12)]),
        (
            "swin_t",
            [f"features.{stage}.{b}" for stage, n in ((1, 2), (3, 2), (5, 6), (7, 2)) for b in range(n)],
        ),
        ("squeezenet1_0", [f"features.{index}" for index in (3, 4, 5, 7, 8, 9, 10, 12)]),
        (
            "googlenet",
            [f"inception{name}" for name in ("3a", "3b", "4a", "4b", "4c", "4d", "4e", "5a", "5b")],
        ),
    ],
)
def test_torchvision_networks(name: str, blocks: list[str]) -> None:
    assert list(find_blocks(torchvision_network(name))) == blocks


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("resnet18", RESNET18),
        ("vgg11_bn", [f"features.{index}" for index in (3, 7, 14, 21, 28)]),
        (
            "mobilenetv2_100",
            [f"blocks.{s}.{b}" for s, n in enumerate((1, 2, 3, 4, 3, 3, 1)) for b in range(n)],
        ),
        (
            "mobilenetv3_small_100",
            [f"blocks.{s}.{b}" for s, n in enumerate((1, 2, 3, 2, 3)) for b in range(n)],
        ),
        ("densenet121", DENSENET),
        ("convnext_atto", [f"stages.{s}.blocks.{b}" for s, n in enumerate((2, 2, 6, 2)) for b in range(n)]),
        ("vit_tiny_patch16_224", [f"blocks.{index}" for index in range(12)]),
        ("regnety_002", [f"s{s}.b{b}" for s, n in enumerate((1, 1, 4, 7), 1) for b in range(1, n + 1)]),
    ],
)
def test_timm_networks(name: str, blocks: list[str]) -> None:
    assert list(find_blocks(timm_network(name))) == blocks


def test_zoo_networks() -> None:
    expected = tuple(f"layer{stage}.{block}" for stage in (1, 2, 3) for block in range(9))
    assert find_blocks(zoo.resnet56()) == expected
    assert find_blocks(zoo.resnet56(), example=torch.zeros(1, 3, 32, 32)) == expected


def test_separable_convolutions_written_as_plain_sequences_are_blocks() -> None:
    def unit(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, inputs, 3, groups=inputs), nn.ReLU(), nn.Conv2d(inputs, outputs, 1), nn.ReLU()
        )

    stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    network = nn.Sequential(nn.Sequential(stem, unit(8, 16), unit(16, 16)), nn.Flatten(), nn.Linear(16, 2))
    assert find_blocks(network) == ("0.1", "0.2")


class Backwards(nn.Module):
    """Runs its layers against the order of registration and leaves one out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers[0](self.layers[2](x))
        return output


def test_an_example_gives_the_order_of_execution() -> None:
    network = Backwards().eval()
    assert find_blocks(network) == ("layers.0", "layers.1", "layers.2")
    assert find_blocks(network, example=torch.zeros(2, 3, 8)) == ("layers.2", "layers.0")


@pytest.mark.parametrize(
    ("pattern", "blocks"),
    [
        ("layer1.*", ["layer1.0", "layer1.1", "layer1.2"]),
        ("layer?.0", ["layer1.0", "layer2.0", "layer3.0"]),
        ("layer3.2, layer1.1", ["layer1.1", "layer3.2"]),
        ("layer[13].[!0]", ["layer1.1", "layer1.2", "layer3.1", "layer3.2"]),
        (r"layer(1|2)\.[02]", ["layer1.0", "layer1.2", "layer2.0", "layer2.2"]),
        ("layer1.0**bn1", ["layer1.0.bn1"]),
    ],
)
def test_a_pattern_names_blocks_as_glob_or_expression(pattern: str, blocks: list[str]) -> None:
    assert list(find_blocks(zoo.resnet20(), pattern)) == blocks


@pytest.mark.parametrize("pattern", ["stage*", "(", ""])
def test_a_pattern_that_matches_nothing_lists_names(pattern: str) -> None:
    with pytest.raises(BlockError) as error:
        find_blocks(zoo.resnet20(), pattern)
    message = str(error.value)
    assert message.startswith(
        f"no module of ResNet matches {pattern!r}; choose from: conv1, layer1, layer1.0, layer1.0.conv1, "
    )
    assert "\n" not in message and len(message) < 1000


def test_a_network_without_blocks_lists_names() -> None:
    with pytest.raises(BlockError) as error:
        find_blocks(nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    assert str(error.value) == "no blocks found in Sequential; name them with --blocks, from: 1, 3"


def test_blocks_that_never_run_are_no_blocks() -> None:
    with pytest.raises(BlockError, match="^no blocks found in Backwards"):
        find_blocks(Backwards().eval(), "layers.1", example=torch.zeros(2, 3, 8))


def test_residual_blocks_around_a_single_convolution_are_found() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x + self.conv(x))

    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sequential(Block(), Block(), Block()), nn.Flatten())
    assert find_blocks(network) == ("1.0", "1.1", "1.2")


def test_a_scripted_submodule_does_not_keep_blocks_from_being_found() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU(), nn.Conv2d(3, 3, 3))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        network = nn.Sequential(block(), torch.jit.script(block()), block())
    assert {"0", "2"} <= set(find_blocks(network))


def test_modules_called_as_exits_that_are_at_no_block_are_no_blocks() -> None:
    """A hit at `base` would count as an answer of the whole network, which is never audited."""

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.second(self.first(x)))

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.recall, self.top, self.head = Unit(), Unit(), Unit(), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.head(self.top(self.recall(self.base(x))).mean((2, 3)))
            return scores

    network = Network().eval()
    assert find_blocks(network) == ("top",)
    for name in ("base", "recall"):
        with pytest.raises(CutError, match=f"^no exit can be at block '{name}'.*with other --blocks$"):
            trace(network, torch.rand(2, 4, 3, 3), find_blocks(network, name))
