"""Folding normalisation away, and keeping networks as data, change nothing of what is computed."""

from __future__ import annotations

import copy
import pickle
import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gati import zoo
from gati.errors import ModelError
from gati.model.fold import settled, trainable_without_normalisation, without_normalisation
from gati.model.portable import pack_network, unpack_network

HERE = Path("here.safetensors")


def trained_looking(module: nn.Module) -> nn.Module:
    """Normalisation that does something, as after training."""
    torch.manual_seed(0)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.uniform_(-0.5, 0.5)
            layer.running_var.uniform_(0.5, 2.0)
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.uniform_(layer.bias, -0.5, 0.5)
    return module.eval().requires_grad_(False)


def normalisations(module: nn.Module) -> int:
    return sum(isinstance(layer, nn.BatchNorm2d) for layer in module.modules())


class NormalisedFirst(nn.Module):
    """One normalisation before a convolution, one after; and one after a convolution that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.first = nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3, bias=False)
        self.after, self.second = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)
        self.twice = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(torch.relu(self.after(self.first(self.before(x)))))
        return (self.twice(hidden) + hidden).mean((2, 3))


class Activating(nn.BatchNorm2d):
    """A normalisation that also activates, as timm's."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


class Shared(nn.Module):
    """One convolution and its normalisation are run twice, so neither may change for one of the times."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.norm(self.conv(x))
        return x.mean((2, 3))


class Tricky(nn.Module):
    """Reads the weights of its layers itself: the layers are run, and then looked into."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).mean((2, 3)) + self.norm.running_mean


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "left"),
    [
        (zoo.resnet20, 0),
        (NormalisedFirst, 2),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), Activating(4), nn.Flatten(), nn.Linear(4 * 196, 2)), 0),
        (Shared, 1),
        (Tricky, 1),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 256, 2)), 0),
    ],
)
def test_what_is_folded_computes_the_same(build, left: int) -> None:
    module = trained_looking(build())
    before = copy.deepcopy(module.state_dict())
    x = torch.randn(4, 3, 16, 16)
    folded = without_normalisation(module, x[:2])
    torch.testing.assert_close(folded(x), module(x), rtol=1e-4, atol=1e-4)
    assert normalisations(folded) == left
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


@pytest.mark.slow
def test_a_network_is_rebuilt_from_its_program_and_its_weights() -> None:
    module = trained_looking(zoo.resnet20())
    program = pack_network(module, torch.randn(2, 3, 16, 16))
    rebuilt = unpack_network(program, HERE)
    x = torch.randn(5, 3, 16, 16)
    assert not torch.equal(rebuilt(x), module(x)), "the weights are in the program, too"
    rebuilt.load_state_dict(module.state_dict())
    assert torch.equal(rebuilt(x), module(x))
    assert len(program) < 50_000
    assert str(Path(__file__).parent).encode() not in zlib.decompress(program)


def test_what_is_no_program_is_refused() -> None:
    class Evil:
        def __reduce__(self):
            return exec, ("raise SystemExit('it ran')",)

    for content in (b"", b"nothing", zlib.compress(b"nothing"), zlib.compress(pickle.dumps(Evil()))):
        with pytest.raises(ModelError, match="here.safetensors"):
            unpack_network(content, HERE)


@pytest.mark.slow
def test_folded_anew_in_every_step_it_learns_as_it_would_with_its_normalisation() -> None:
    module = trained_looking(zoo.resnet20())
    x = torch.randn(6, 3, 32, 32)
    folded = trainable_without_normalisation(module, x)
    assert folded is not None and normalisations(folded) == 0
    torch.testing.assert_close(folded(x), module(x), rtol=1e-3, atol=1e-4)
    for each in (module, folded):
        each.requires_grad_(True)
        each(x).log_softmax(1)[:, 3].sum().backward()
    learned = folded.conv1.parametrizations.weight.original
    torch.testing.assert_close(learned.grad, module.conv1.weight.grad, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(folded.conv1.bias.grad, module.bn1.bias.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_folded_for_good_it_is_plain_and_what_was_trained_stays_as_it_is() -> None:
    module = trained_looking(zoo.resnet20())
    x = torch.randn(4, 3, 32, 32)
    folded = trainable_without_normalisation(module, x)
    assert folded is not None
    with torch.no_grad():
        for parameter in folded.parameters():
            parameter.mul_(1.1)
    names = list(folded.state_dict())
    plain = settled(folded)
    torch.testing.assert_close(plain(x), folded(x))
    assert list(folded.state_dict()) == names
    assert not any("parametrizations" in name for name in plain.state_dict())
    assert len(list(plain.parameters())) < len(list(folded.parameters()))


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_network_with_weight_normalisation_of_old_is_copied_after_training_too() -> None:
    """Its layers keep the weight that the last forward computed, with the history of that."""
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.utils.weight_norm(nn.Conv2d(4, 4, 3)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ).eval()
    x = torch.randn(2, 3, 8, 8)
    taught = trainable_without_normalisation(network, x)
    assert taught is not None
    taught(x).sum().backward()
    torch.testing.assert_close(settled(taught)(x), taught(x))


def test_where_there_is_nothing_to_fold_there_is_nothing_to_train() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten()).eval()
    assert trainable_without_normalisation(module, torch.randn(2, 3, 8, 8)) is None
    assert settled(module) is module
