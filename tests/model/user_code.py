"""What a user might point Gati at; imported by name and copied as a file in the tests."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

NUMBER = 3


class Stubborn(nn.Linear):
    def eval(self) -> nn.Module:
        raise NotImplementedError("not supported yet")


def stubborn() -> nn.Module:
    return Stubborn(4, 2)


def tiny() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))


@dataclass
class Factory:
    """Called for a network; has no hash, as it can be compared."""

    classes: int

    def __call__(self) -> nn.Module:
        network = tiny()
        network[3] = nn.Linear(4, self.classes)
        return network


FACTORY = Factory(10)


def grey() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))


def raising() -> nn.Module:
    raise ValueError("no weights\nat all")


def scripted() -> nn.Module:
    return torch.jit.script(tiny())


def scripted_inside() -> nn.Module:
    return nn.Sequential(torch.jit.script(tiny()))


def lazy() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(10))


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return tiny()


def quantized() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(tiny(), {nn.Linear})


def sparse() -> nn.Module:
    """As a network over a graph has it."""
    network = tiny()
    network.register_buffer("neighbours", torch.eye(4).to_sparse())
    return network


def compiled() -> nn.Module:
    return torch.compile(tiny())


def parallel() -> nn.Module:
    """As on a machine with two GPUs, and once more inside."""
    network = nn.DataParallel(nn.Sequential(nn.DataParallel(tiny()), nn.Identity()))
    for each in (network, network.module[0]):
        each.device_ids, each.src_device_obj = [0, 1], torch.device("cuda:0")
    return network


def compiled_inside() -> nn.Module:
    network = tiny()
    network[0].compile()
    network[3] = torch.compile(network[3])
    return network


class Versioned(nn.Linear):
    """Keeps more in its state than tensors."""

    def get_extra_state(self) -> str:
        return "version 3"

    def set_extra_state(self, state: str) -> None:
        assert state == "version 3"


def versioned() -> nn.Module:
    return Versioned(4, 2)


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


class Flipped(Bytes):
    """Items that are mirrored every other time, as random transforms do."""

    def __init__(self, as_tensor: bool = False) -> None:
        self.as_tensor, self.readings = as_tensor, 0

    def __getitem__(self, index: int) -> np.ndarray | torch.Tensor:
        self.readings += 1
        image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3) + index
        image = image[:, ::-1] if self.readings % 2 else image
        return torch.from_numpy(image.transpose(2, 0, 1) / 255.0) if self.as_tensor else image


class Ending(Bytes):
    def __getitem__(self, index: int) -> np.ndarray:
        raise SystemExit(0)


class Broken(Bytes):
    def __getitem__(self, index: int) -> np.ndarray:
        raise OSError("disk gone")
