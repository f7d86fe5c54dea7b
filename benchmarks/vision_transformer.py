r"""Train a small vision transformer (timm) on CIFAR-10, which has no public weights at this size.

    python -m benchmarks.vision_transformer --data ../shared/data --out runs/vit
    gati explore benchmarks/vision_transformer.py:vit --checkpoint runs/vit/vit.safetensors \
        --data known.npz --train-data ../shared/data/cifar10/cifar10_train.npz --out runs/vit/library

Images become 64 patches of 4 x 4 pixels. It is trained for a given time on labels, with flips and shifts.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gati.model.source import import_timm

MEAN, STD = 0.5, 0.25
BATCH = 128
RATE = 1e-3


def vit() -> nn.Module:
    """Six layers of 192 channels with three heads, 10 classes: 2.7 million weights."""
    network: nn.Module = import_timm().create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=4, depth=6, num_classes=10, class_token=False,
        global_pool="avg",
    )  # fmt: skip
    return network


def main() -> int:
    """Write vit.safetensors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("runs/vit"))
    parser.add_argument("--seconds", type=float, default=600.0, help="how long to train")
    arguments = parser.parse_args()
    folder = arguments.data / "cifar10"
    if not (folder / "cifar10_train.npz").is_file():
        print(f"error: no cifar10/cifar10_train.npz in {arguments.data}; give --data FOLDER", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    network = train(*read(folder / "cifar10_train.npz"), seconds=arguments.seconds)
    print(f"{accuracy(network, *read(folder / 'cifar10_val.npz')):.2%} correct", file=sys.stderr)
    save_file(network.state_dict(), arguments.out / "vit.safetensors")
    return 0


def read(file: Path) -> tuple[Tensor, Tensor]:
    """Images [n, 3, 32, 32], as with --mean 0.5 --std 0.25, and labels [n]."""
    with np.load(file) as arrays:
        images = torch.from_numpy(arrays["images"]).permute(0, 3, 1, 2)
        return (images.float() / 255.0 - MEAN) / STD, torch.from_numpy(arrays["labels"]).long()


def train(images: Tensor, labels: Tensor, *, seconds: float) -> nn.Module:
    """Train from scratch in bfloat16; the rate rises, then falls over the given time."""
    torch.manual_seed(0)
    network = vit().train()
    optimiser = torch.optim.AdamW(network.parameters(), RATE, weight_decay=0.05)
    began_s, step = time.monotonic(), 0
    while (past := (time.monotonic() - began_s) / seconds) < 1.0:
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, past / 0.1, (1.0 - past) / 0.7)
        rows = torch.randint(0, len(images), (BATCH,))
        with torch.autocast("cpu", torch.bfloat16):
            logits = network(augmented(images[rows]))
        loss = nn.functional.cross_entropy(logits.float(), labels[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        step += 1
        if step % 200 == 0:
            print(f"{past:.0%}, {step * BATCH} images: loss {loss.item():.3f}", file=sys.stderr)
    return network.eval()


def augmented(images: Tensor) -> Tensor:
    """Flip half of the images, and shift all by up to four pixels."""
    flipped = torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, images.flip(3), images)
    padded = nn.functional.pad(flipped, (4, 4, 4, 4), mode="reflect")
    down, right = torch.randint(0, 9, (2,)).tolist()
    return padded[:, :, down : down + 32, right : right + 32]


@torch.no_grad()
def accuracy(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    found = torch.cat([network(batch).argmax(1) for batch in images.split(200)])
    return float((found == labels).float().mean())


if __name__ == "__main__":
    raise SystemExit(main())
