"""A small trained-looking network and data for exploring in seconds."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import Dataset

from gati.model.preprocess import Preprocessing


class Block(nn.Module):
    """A residual block."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + 0.3 * self.conv(x))


class Net(nn.Module):
    """Four blocks on 8 x 8 grey images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(8) for _ in range(4)))
        self.head = nn.Linear(8 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(torch.relu(self.stem(x)))
        return self.head(nn.functional.avg_pool2d(x, 2).flatten(1))


class WideNet(nn.Module):
    """Ten blocks, so much to compute that a student costs little beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 48, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(48) for _ in range(10)))
        self.head = nn.Linear(48 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(torch.relu(self.stem(x)))
        return self.head(nn.functional.avg_pool2d(x, 2).flatten(1))


class DeepNet(Net):
    """Forty blocks: on a GPU, time goes with the number of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(8) for _ in range(40)))


class Vectors(nn.Module):
    """Takes vectors."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(12)]
        self.blocks, self.head = nn.Sequential(*layers), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


class ConstantNet(Net):
    """Always the same class."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0 + torch.arange(10.0)


class NanNet(Net):
    """Never a number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float("nan")


@cache
def _scans() -> Any:
    from sklearn.datasets import load_digits  # takes seconds, and who serves these networks needs no scans

    return load_digits()


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [N, 8, 8, 1] and labels."""
    data = _scans()
    return (data.images * 15.9375).astype(np.uint8)[..., None], data.target


def write_digits(folder: Path, count: int = 900) -> tuple[Path, Path]:
    """Two npz files, held-out and training inputs."""
    images, labels = digits()
    held, more = folder / "val.npz", folder / "more.npz"
    np.savez(held, images=images[:count], labels=labels[:count])
    np.savez(more, images=images[count:], labels=labels[count:])
    return held, more


def digit_files(folder: Path, count: int = 900) -> dict[str, str]:
    """Files for `explore`: weights of `Net`, held-out and training inputs; see `write_digits`."""
    held, more = write_digits(folder, count)
    checkpoint = folder / "net.safetensors"
    save_file(trained_state(), checkpoint)
    return {"checkpoint": str(checkpoint), "data": str(held), "train_data": str(more)}


def fitted_on_digits(
    kind: type[nn.Module], preprocessing: Preprocessing, *, seed: int, steps: int
) -> nn.Module:
    """A network after a moment of training on digits that are in neither split; the same every time."""
    return deepcopy(_fitted_on_digits(kind, preprocessing, seed, steps))


@cache
def _fitted_on_digits(
    kind: type[nn.Module], preprocessing: Preprocessing, seed: int, steps: int
) -> nn.Module:
    images, labels = digits()
    x, y = preprocessing(images[900:]), torch.from_numpy(labels[900:])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = kind()
        optimiser = torch.optim.Adam(network.parameters(), lr=5e-3)
        for step in range(steps):
            rows = slice(64 * (step % 14), 64 * (step % 14 + 1))
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(x[rows].clone()), y[rows]).backward()
            optimiser.step()
    return network


def trained_state(network: type[nn.Module] = Net) -> dict[str, Tensor]:
    """Weights of `network` after a few seconds of training on the first digits; the same every time."""
    return {name: tensor.clone() for name, tensor in _trained_state(network).items()}


@cache
def _trained_state(network: type[nn.Module]) -> dict[str, Tensor]:
    images, labels = digits()
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    y = torch.from_numpy(labels)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = network()
        optimiser = torch.optim.Adam(net.parameters(), lr=5e-3)
        for step in range(60):
            rows = slice(900 + 64 * (step % 12), 900 + 64 * (step % 12 + 1))
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimiser.step()
    return {name: tensor.detach() for name, tensor in net.state_dict().items()}


class Pictures(Dataset[Any]):
    """Arrays of bytes, which the preset prepares."""

    def __init__(self, images: np.ndarray) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.images[index]
