r"""Train VGG-16 with batch norm on log-mel spectrograms of spoken digits, and write the data for Gati.

    python -m benchmarks.spoken_digits --data ../shared/data --out runs/spoken_digits
    gati explore benchmarks/spoken_digits.py:vgg16 --checkpoint runs/spoken_digits/vgg16.safetensors \
        --data runs/spoken_digits/known.npz --train-data runs/spoken_digits/train.npz \
        --mean 0.5 --std 0.25 --out runs/spoken_digits/library

The recordings (ten digits, six speakers, fifty takes each) are split by take, with every speaker in each
part: takes 20 to 49 train network and caches, 8 to 19 are for explore and compose, 0 to 7 stay unseen.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from scipy.io import wavfile
from scipy.signal import stft
from torch import Tensor, nn

RATE_HZ = 8000
MELS = FRAMES = 32
PARTS = {"unseen": range(0, 8), "known": range(8, 20), "train": range(20, 50)}
STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # VGG-16: channels, convolutions; then max pooling
BATCH = 64


def vgg16() -> nn.Sequential:
    """VGG-16 with batch norm (Simonyan, Zisserman 2015, configuration D), one channel in, ten classes out.

    After five max poolings a 32x32 spectrogram is one pixel, so the classifier is one linear layer.
    """
    stages: list[nn.Module] = []
    before = 1
    for channels, convolutions in STAGES:
        layers: list[nn.Module] = []
        for _ in range(convolutions):
            convolution = nn.Conv2d(before, channels, 3, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(channels), nn.ReLU()]
            before = channels
        stages.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
    return nn.Sequential(nn.Sequential(*stages), nn.Flatten(), nn.Linear(before, 10))


def main() -> int:
    """Write known.npz, unseen.npz, train.npz and vgg16.safetensors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("runs/spoken_digits"))
    parser.add_argument("--epochs", type=int, default=12)
    arguments = parser.parse_args()
    archive = arguments.data / "fsdd" / "fsdd_recordings.tar.gz"
    if not archive.is_file():
        print(f"error: {archive} does not exist; give --data FOLDER", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    parts = read(archive)
    for name, (images, labels) in parts.items():
        np.savez(arguments.out / f"{name}.npz", images=images[..., None], labels=labels)
    began_s = time.monotonic()
    network = train(*parts["train"], epochs=arguments.epochs)
    print(f"trained in {time.monotonic() - began_s:.0f} s", file=sys.stderr)
    for name, (images, labels) in parts.items():
        right = accuracy(network, images, labels)
        print(f"{name}: {len(labels)} recordings, {right:.2%} correct", file=sys.stderr)
    save_file(network.state_dict(), arguments.out / "vgg16.safetensors")
    return 0


def read(archive: Path) -> dict[str, tuple[NDArray[np.uint8], NDArray[np.int64]]]:
    """Return spectrograms [n, MELS, FRAMES] and digits [n] of each part."""
    found: dict[str, list[tuple[NDArray[np.uint8], int]]] = {name: [] for name in PARTS}
    with tarfile.open(archive) as recordings:
        for member in sorted(recordings, key=lambda member: member.name):
            match = re.search(r"(\d)_[a-z]+_(\d+)\.wav$", member.name)
            if match is None:
                continue
            handle = recordings.extractfile(member)
            if handle is None:
                raise ValueError(f"{member.name} in {archive} is not a file")
            rate_hz, sound = wavfile.read(io.BytesIO(handle.read()))
            if rate_hz != RATE_HZ:
                raise ValueError(f"{member.name} has {rate_hz} Hz, expected {RATE_HZ}")
            part = next(name for name, takes in PARTS.items() if int(match[2]) in takes)
            found[part].append((spectrogram(sound.astype(np.float64)), int(match[1])))
    return {
        name: (np.stack([image for image, _ in rows]), np.array([digit for _, digit in rows]))
        for name, rows in found.items()
    }


def spectrogram(sound: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return log-mel energies as 0..255 for the top 60 dB, with the recording stretched to FRAMES frames."""
    _, _, spectrum = stft(sound, RATE_HZ, nperseg=256, noverlap=192, boundary=None, padded=True)
    energy = mel_filters(spectrum.shape[0]) @ np.abs(spectrum) ** 2
    decibels = 10.0 * np.log10(np.maximum(energy / energy.max(), 1e-6))
    at = np.linspace(0.0, decibels.shape[1] - 1.0, FRAMES)
    below = np.floor(at).astype(int)
    above = np.minimum(below + 1, decibels.shape[1] - 1)
    stretched = decibels[:, below] * (1.0 - (at - below)) + decibels[:, above] * (at - below)
    image: NDArray[np.uint8] = np.round((stretched + 60.0) / 60.0 * 255.0).astype(np.uint8)
    return image


def mel_filters(bins: int) -> NDArray[np.float64]:
    """Return triangular filters [MELS, bins], evenly spaced on the mel scale."""
    highest = 2595.0 * np.log10(1.0 + RATE_HZ / 2 / 700.0)
    edges_hz = 700.0 * (10.0 ** (np.linspace(0.0, highest, MELS + 2) / 2595.0) - 1.0)
    bins_hz = np.linspace(0.0, RATE_HZ / 2, bins)
    rising = (bins_hz - edges_hz[:-2, None]) / (edges_hz[1:-1, None] - edges_hz[:-2, None])
    falling = (edges_hz[2:, None] - bins_hz) / (edges_hz[2:, None] - edges_hz[1:-1, None])
    return np.maximum(np.minimum(rising, falling), 1e-9)


def train(images: NDArray[np.uint8], labels: NDArray[np.int64], *, epochs: int) -> nn.Sequential:
    """Train from scratch, with random shifts and masking of each spectrogram."""
    torch.manual_seed(0)
    network = vgg16().train()
    inputs, targets = normalised(images), torch.from_numpy(labels)
    steps = epochs * (len(inputs) // BATCH)
    optimiser = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.1, total_steps=steps)
    for epoch in range(epochs):
        order = torch.randperm(len(inputs))
        for start in range(0, len(inputs) - BATCH + 1, BATCH):
            rows = order[start : start + BATCH]
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(network(augmented(inputs[rows])), targets[rows])
            loss.backward()
            optimiser.step()
            schedule.step()
        print(f"epoch {epoch + 1} of {epochs}: loss {loss.item():.3f}", file=sys.stderr)
    return network.eval()


def augmented(inputs: Tensor) -> Tensor:
    """Shift in time and pitch by up to three cells, and mask a band of each (Park et al. 2019)."""
    shifted = torch.roll(inputs, (int(torch.randint(-3, 4, ())), int(torch.randint(-3, 4, ()))), dims=(2, 3))
    for dimension in (2, 3):
        at, width = int(torch.randint(0, MELS - 6, ())), int(torch.randint(0, 6, ()))
        shifted.narrow(dimension, at, width).fill_(-2.0)
    return shifted


@torch.no_grad()
def accuracy(network: nn.Module, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> float:
    answers = torch.cat([network(batch).argmax(1) for batch in normalised(images).split(200)])
    return float((answers.numpy() == labels).mean())


def normalised(images: NDArray[np.uint8]) -> Tensor:
    """Normalise like --mean 0.5 --std 0.25, to [n, 1, MELS, FRAMES]."""
    return (torch.from_numpy(images).float().unsqueeze(1) / 255.0 - 0.5) / 0.25


if __name__ == "__main__":
    raise SystemExit(main())
