"""What a user might point Gati at; imported by name and copied as a file in the tests."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

NUMBER = 3


def tiny() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))


def grey() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))


def raising() -> nn.Module:
    raise ValueError("no weights\nat all")


def wants_width(width: int) -> nn.Module:
    return nn.Linear(width, 2)


def not_a_module() -> int:
    return NUMBER


def float_tensors() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(6, 3, 4, 4, generator=generator), torch.arange(6) % 3)


class Bytes(Dataset):
    """uint8 [H, W, C] arrays without labels."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> np.ndarray:
        return np.full((4, 4, 3), index, dtype=np.uint8)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


class Nothing(Bytes):
    def __len__(self) -> int:
        return 0


class Texts(Bytes):
    def __getitem__(self, index: int) -> str:
        return "cat"


class Sizes(Bytes):
    """Images that differ in size, with names for labels."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, str]:
        return np.zeros((4 + index, 4, 3), dtype=np.uint8), "cat"


class Broken(Bytes):
    def __getitem__(self, index: int) -> np.ndarray:
        raise OSError("disk gone")
