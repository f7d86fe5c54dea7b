"""`gati demo`: every step on data that is always available, scikit-learn's scans of handwritten digits.

train.npz    inputs that the base model and the predictors train on
val.npz      inputs that the base model has not seen; for selectors, thresholds, composition and certificate
test.npz     inputs that only evaluate reads
model.safetensors   the trained base model
library/     the cache library
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gati.cli import render
from gati.cli.words import quoted
from gati.exploration.progress import open_progress
from gati.files import atomic_write
from gati.units import percent

if TYPE_CHECKING:
    from torch import Tensor

    from gati.evaluation.evaluate import Evaluation
    from gati.zoo import ResNet

MODEL = "gati.zoo:digits_resnet"
SHARES = {"train": 0.5, "val": 0.3, "test": 0.2}
ACCURACY = 0.97
EXPLORE_BUDGET_S = 80.0
_BATCH_SIZE = 32


def demo(
    out: str | Path = "demo",
    *,
    epochs: int = 60,
    explore_budget_s: float = EXPLORE_BUDGET_S,
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> Evaluation:
    """Train a small residual network on digits, explore, compose and evaluate; write files to folder `out`.

    Existing files in `out` are reused, so an interrupted demo resumes. `say` receives the text, line by line.

    **Raises:** `StorageError` if `out` cannot be written.
    """
    from gati.engine.threads import one_thread

    with one_thread():  # networks this small are faster on one core
        return _demo(Path(out), epochs, explore_budget_s, seed, say)


def _demo(
    folder: Path, epochs: int, explore_budget_s: float, seed: int, say: Callable[[str], None]
) -> Evaluation:
    from gati.composition.compose import compose
    from gati.evaluation.evaluate import evaluate
    from gati.exploration.explore import explore

    library = folder / "library"
    shown = quoted(library)
    checkpoint = folder / "model.safetensors"
    started_s = time.monotonic()
    if checkpoint.is_file():
        say(f"1. Using the trained network in {checkpoint} (remove {folder}/ to start over).")
    else:
        say(f"1. Training {MODEL}, a network of 9 blocks, on scans of handwritten digits.")
        write_digits(folder, seed)
        accuracy = train_digits(folder, epochs, seed, render.counter("passes over the digits"))
        say(f"   {percent(accuracy)} accuracy on unseen digits, after {time.monotonic() - started_s:.0f} s.")

    say("2. Training and measuring learned caches, at the input and after some blocks:")
    data = {name: quoted(folder / f"{name}.npz") for name in SHARES}
    say(f"   gati explore {MODEL} --checkpoint {quoted(checkpoint)} --data {data['val']} \\")
    say(f"     --train-data {data['train']} --out {shown} --budget {explore_budget_s:.0f}s")
    explore(
        MODEL,
        checkpoint,
        data=str(folder / "val.npz"),
        train_data=str(folder / "train.npz"),
        out=library,
        budget_s=explore_budget_s,
        seed=seed,
        progress=open_progress(),
    )

    options = f"--accuracy {ACCURACY} --backend torch"
    say(f"3. Choosing caches and thresholds:\n   gati compose {shown} {options}")
    composition = compose(library, accuracy=ACCURACY, backend="torch")
    render.composition(composition, library)

    say(f"4. Measuring on digits that no step has seen:\n   gati evaluate {shown} --data {data['test']}")
    evaluation = evaluate(library, str(folder / "test.npz"))
    render.evaluation(evaluation)
    say(_next_steps(folder, library, time.monotonic() - started_s, answers_early=bool(composition.exits)))
    return evaluation


def write_digits(folder: Path, seed: int = 0) -> None:
    """Write `train.npz`, `val.npz` and `test.npz`: `images` uint8 [n, 8, 8, 1] and `labels` int64 [n]."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    # floats 0..16 [1797, 8, 8] -> uint8 0..255 [1797, 8, 8, 1]
    images = np.round(digits.images * (255.0 / 16.0)).astype(np.uint8)[..., None]
    labels = digits.target.astype(np.int64)
    order = np.random.default_rng(seed).permutation(len(labels))
    first = round(len(order) * SHARES["train"])
    second = first + round(len(order) * SHARES["val"])
    for name, chosen in zip(SHARES, np.split(order, [first, second]), strict=True):
        _write_npz(folder / f"{name}.npz", images[chosen], labels[chosen])


def _write_npz(path: Path, images: npt.NDArray[np.uint8], labels: npt.NDArray[np.int64]) -> None:
    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:  # given a name, numpy would append .npz to it
            np.savez_compressed(file, images=images, labels=labels)

    atomic_write(path, write)


def train_digits(
    folder: Path, epochs: int, seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> float:
    """Train `digits_resnet` on `train.npz`, save `model.safetensors`, return its accuracy on `val.npz`.

    `progress(done, of)` counts passes over the digits.
    """
    import torch
    from safetensors.torch import save_file

    from gati.zoo import digits_resnet

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = digits_resnet()
        images, labels = _tensors(folder / "train.npz")
        _fit(model, images, labels, epochs, progress)
    model.eval()
    images, labels = _tensors(folder / "val.npz")
    with torch.inference_mode():
        accuracy = float((model(images).argmax(1) == labels).float().mean())
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    atomic_write(folder / "model.safetensors", lambda temporary: save_file(weights, temporary))
    return accuracy


def _tensors(path: Path) -> tuple[Tensor, Tensor]:
    import torch

    from gati.zoo import PRESETS, digits_resnet

    with np.load(path) as arrays:
        return PRESETS[digits_resnet](arrays["images"]), torch.from_numpy(arrays["labels"])


def _fit(
    model: ResNet,
    images: Tensor,
    labels: Tensor,
    epochs: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Stochastic gradient descent on a one-cycle schedule, with images shifted by up to a pixel."""
    import torch
    from torch.nn import functional

    steps = epochs * -(-len(images) // _BATCH_SIZE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
    model.train()
    for epoch in range(epochs):
        for batch in torch.randperm(len(images)).split(_BATCH_SIZE):
            down, right = torch.randint(-1, 2, (2,)).tolist()
            shifted = images[batch].roll((down, right), (2, 3))  # the margins of digits are empty
            loss = functional.cross_entropy(model(shifted), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        if progress is not None:
            progress(epoch + 1, epochs)


def _next_steps(folder: Path, library: Path, seconds: float, *, answers_early: bool) -> str:
    shown, test = quoted(library), quoted(folder / "test.npz")
    next_step = f"gati compose {shown} --accuracy 0.95 --name bold"
    if not answers_early:  # as where other programs took the time to learn
        next_step = f"gati explore --more 3m {shown}\n   {next_step}"
    return f"""Done in {seconds:.0f} s. Look at
   {library}/trials.csv                 what every cache costs and how well it imitates the network
   {library}/operating_points.csv       hit rate and agreement at many thresholds
   {library}/compositions/default.json  what was chosen
Next
   {next_step}
   gati evaluate {shown} --data {test} --composition bold
   gati explore --help                  with a network of your own"""
