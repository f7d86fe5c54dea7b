r"""Trains `gati.zoo:spectrogram_vgg` on a folder of recordings; Gati then takes the same folders as they are.

    tar xf fsdd_recordings.tar.gz          # files called {digit}_{speaker}_{take}.wav
    python examples/train_spoken_digits.py recordings --out digits
    gati explore gati.zoo:spectrogram_vgg --checkpoint digits/network.safetensors \
        --data digits/known --train-data digits/train --out runs/digits
    gati compose runs/digits --accuracy 0.97
    gati evaluate runs/digits --data digits/unseen
    gati predict runs/digits digits/unseen/7_theo_0.wav

It divides the recordings by take, every speaker in each part: takes from 20 on train, 8 to 19 are known to
explore and compose, 0 to 7 are unseen.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gati.errors import DataError, GatiError
from gati.model.data import Data, load_data
from gati.zoo import PRESETS, spectrogram_vgg

PARTS = {"unseen": range(0, 8), "known": range(8, 20), "train": range(20, 10_000)}
BATCH = 64


def main() -> int:
    """Write the folders unseen, known and train, and network.safetensors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--out", type=Path, default=Path("digits"))
    parser.add_argument("--epochs", type=int, default=8)
    arguments = parser.parse_args()
    try:
        divide(arguments.recordings, arguments.out)
        preprocessing = PRESETS[spectrogram_vgg]
        parts = {name: load_data(arguments.out / name, preprocessing, what=name) for name in PARTS}
        network = train(parts["train"], arguments.epochs)
        for name, data in parts.items():
            print(f"{name}: {len(data)} recordings, {accuracy(network, data):.2%} right", file=sys.stderr)
    except GatiError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    save_file(network.state_dict(), arguments.out / "network.safetensors")
    return 0


def divide(recordings: Path, out: Path) -> None:
    """Copy each recording into the folder of its part, by the take at the end of its name."""
    takes = [(path, re.search(r"_(\d+)$", path.stem)) for path in sorted(recordings.glob("*_*.wav"))]
    if not any(take for _, take in takes):
        raise DataError(f"no recordings called DIGIT_SPEAKER_TAKE.wav in {recordings}; check the path")
    for path, take in takes:
        if take is not None:
            part = next(name for name, numbers in PARTS.items() if int(take[1]) in numbers)
            (out / part).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, out / part / path.name)


def train(data: Data, epochs: int) -> nn.Sequential:
    """Train from scratch on labelled recordings, each shifted and partly blanked anew each time."""
    torch.manual_seed(0)
    network = spectrogram_vgg(len(data.class_names or ())).train()
    inputs, targets = data.images(np.arange(len(data))), torch.from_numpy(data.labels)
    steps = epochs * max(1, len(inputs) // BATCH)
    optimiser = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.1, total_steps=steps)
    loss = torch.zeros(())
    for epoch in range(epochs):
        order = torch.randperm(len(inputs))
        for start in range(0, max(1, len(inputs) - BATCH + 1), BATCH):
            rows = order[start : start + BATCH]
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(network(augmented(inputs[rows])), targets[rows])
            loss.backward()
            optimiser.step()
            schedule.step()
        print(f"epoch {epoch + 1} of {epochs}: loss {loss.item():.3f}", file=sys.stderr)
    return network.eval()


def augmented(inputs: Tensor) -> Tensor:
    """Shift spectrograms [n, 1, mels, frames] in time and pitch, and blank bands (Park et al. 2019)."""
    shifts = (int(torch.randint(-2, 3, ())), int(torch.randint(-6, 7, ())))
    shifted = torch.roll(inputs, shifts, dims=(2, 3))
    for dimension in (2, 3):
        width = int(torch.randint(0, 8, ()))
        at = int(torch.randint(0, shifted.shape[dimension] - width, ()))
        shifted.narrow(dimension, at, width).fill_(-1.0)
    return shifted


@torch.no_grad()
def accuracy(network: nn.Module, data: Data) -> float:
    """Share of recordings that the network answers with their own label."""
    batches = data.images(np.arange(len(data))).split(200)
    answers = torch.cat([network(batch).argmax(1) for batch in batches]).numpy()
    return float((answers == data.labels).mean())


if __name__ == "__main__":
    raise SystemExit(main())
