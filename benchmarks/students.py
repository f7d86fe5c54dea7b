"""Students of ResNet-56 on CIFAR-10, trained with one of several recipes: hit rates and costs.

Prints one JSON document. `answers_at_0.53` is the largest share of validation images that pass a threshold on
the largest class probability while 0.53 % of all images get a different class from ResNet-56.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from gati.caches import build_predictor, fold_normalisation, student_operations
from gati.exploration.augment import choose_augmentation
from gati.exploration.measure import accuracy_curve, base_answers
from gati.exploration.recipes import EXITS, STUDENTS, Recipe
from gati.exploration.train import Learner, SharedTraining
from gati.model.data import Data, load_data
from gati.model.load import LoadedModel, load_model
from gati.types import TrialId

LOSSES = (0.0053, 0.022)  # share of inputs that 1,500 certify inputs allow at 0.99 and 0.97


def main() -> int:
    """Train one student and print its results."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    images = arguments.data / "cifar10"
    if not (images / "cifar10_val.npz").is_file():
        print(f"error: no cifar10/cifar10_val.npz in {arguments.data}; give --data FOLDER", file=sys.stderr)
        return 2
    loaded = load_model("gati.zoo:resnet56", arguments.data / "checkpoints" / "resnet56-4bfd9763.th")
    loaded.module.to(arguments.device)
    held = load_data(str(images / "cifar10_val.npz"), loaded.preprocessing, what="--data")
    train = load_data(str(images / "cifar10_train.npz"), loaded.preprocessing, what="--train-data")
    if arguments.inputs:
        train = train.subset(np.random.default_rng(0).permutation(len(train))[: arguments.inputs])
    training = build(arguments, loaded, train)
    spent = run(training, arguments.state)
    learner = training.learners[0]
    folded = learner._replace(predictor=fold_normalisation(learner.predictor).requires_grad_(False))
    if arguments.weights:
        weights = {name: tensor.contiguous() for name, tensor in folded.predictor.state_dict().items()}
        save_file(weights, arguments.weights)
    found = judge(loaded, held, folded, torch.device(arguments.device))
    print(json.dumps(describe(arguments, training) | spent | found, indent=1))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--images", type=int, default=400_000, help="total training inputs shown")
    parser.add_argument("--inputs", type=int, help="training images to use; default: all")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--recipe", choices=["exits", "students"], default="students")
    parser.add_argument("--optimiser")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--weight-decay", type=float)
    parser.add_argument("--warm-up", type=float)
    parser.add_argument("--mixed", type=float, help="share of batches")
    parser.add_argument("--rounds", type=int, help="rounds of views; 0: never repeat a view")
    parser.add_argument("--soft-weight", type=float)
    parser.add_argument("--average-decay", type=float)
    parser.add_argument("--feature-weight", type=float)
    parser.add_argument("--features", help="block whose pooled hidden output is matched")
    parser.add_argument("--bold", action="store_true", help="also vary crops and brightness if harmless")
    parser.add_argument("--engine", help="engine for base answers; default: the fastest")
    parser.add_argument("--state", type=Path, help="checkpoint to resume from and write to")
    parser.add_argument("--weights", type=Path, help="write the trained student, normalisation folded")
    return parser.parse_args()


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    """Return the named recipe with the given overrides."""
    chosen = EXITS if arguments.recipe == "exits" else STUDENTS
    names = (
        "optimiser",
        "learning_rate",
        "weight_decay",
        "warm_up",
        "mixed",
        "rounds",
        "soft_weight",
        "average_decay",
        "feature_weight",
    )
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if given.get("rounds") == 0:
        given["rounds"] = None
    return replace(chosen, **given)


def build(arguments: argparse.Namespace, loaded: LoadedModel, train: Data) -> SharedTraining:
    """Set up the training of one student."""
    sample = train.images(np.arange(256)).to(arguments.device)
    chosen = choose_augmentation(loaded.module, sample)
    torch.manual_seed(arguments.seed)
    predictor = build_predictor(f"student({arguments.width})", tuple(sample.shape[1:]), 10)
    return SharedTraining(
        loaded.module,
        train,
        [Learner(TrialId("student"), "input", predictor)],
        total_steps=arguments.images // arguments.batch,
        batch_size=arguments.batch,
        seed=arguments.seed,
        augmentation=chosen if arguments.bold else chosen.plain(),
        outputs_kind="logits",
        device=torch.device(arguments.device),
        recipe=recipe_of(arguments),
        feature_block=arguments.features,
        engine=arguments.engine,
    )


def run(training: SharedTraining, state: Path | None) -> dict[str, Any]:
    """Train to the end; return wall and CPU time of this run."""
    if state is not None and state.is_file():
        training.restore(state)
    first, began_s, used_s = training.images_seen, time.perf_counter(), time.process_time()
    for _ in training.run():
        if training.step % 200 == 0:
            loss = training.losses[TrialId("student")]
            wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - used_s
            done = training.images_seen - first
            print(
                f"step {training.step}/{training.total_steps} loss {loss:.3f} "
                f"{done / wall_s:.0f} images/s, {done / cpu_s:.0f} per CPU second",
                file=sys.stderr,
                flush=True,
            )
            if state is not None:
                training.save(state)
    if state is not None:
        training.save(state)
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - used_s
    done = training.images_seen - first
    return {
        "wall_s": round(wall_s, 1),
        "processor_s": round(cpu_s, 1),
        "images_per_s": round(done / wall_s, 1),
        "images_per_processor_s": round(done / cpu_s, 1),
        "load_average": os.getloadavg()[1],
    }


def describe(arguments: argparse.Namespace, training: SharedTraining) -> dict[str, Any]:
    """Describe what was trained, and how."""
    return {
        "width": arguments.width,
        "multiply_adds": student_operations((3, 32, 32), 10, arguments.width) // 2,
        "training_inputs": len(training.inputs),
        "images_seen": training.images_seen,
        "epochs": round(training.images_seen / len(training.inputs), 2),
        "batch": arguments.batch,
        "seed": arguments.seed,
        "threads": arguments.threads,
        "engine": training.engine_name,
        "augmentation": training.augmentation._asdict(),
        "recipe": vars(training.recipe),
        "features": arguments.features,
        "loss": round(training.losses[TrialId("student")], 4),
    }


def judge(loaded: LoadedModel, held: Data, learner: Learner, device: torch.device) -> dict[str, Any]:
    """Return the agreement with ResNet-56 on held-out images, and the share of answers at each loss."""
    base_class = base_answers(loaded.module, held, device).argmax(1).numpy()
    images = [
        held.images(np.arange(start, min(start + 250, len(held)))) for start in range(0, len(held), 250)
    ]
    with torch.no_grad():
        answers = [learner.predictor(batch.to(device)).softmax(1).cpu() for batch in images]
    probabilities = torch.cat(answers).numpy()
    predicted = probabilities.argmax(1)
    agrees = predicted == base_class
    found: dict[str, Any] = {"agreement": round(float(agrees.mean()), 4)}
    if held.labels is not None:
        found["accuracy"] = round(float((predicted == held.labels).mean()), 4)
        found["base_accuracy"] = round(float((base_class == held.labels).mean()), 4)
    _, hits, accuracy = accuracy_curve(probabilities.max(1), agrees)
    lost = np.round(hits * (1 - accuracy)) / len(held)
    for allowed in LOSSES:
        found[f"answers_at_{100 * allowed:g}"] = round(
            float(hits[lost <= allowed].max(initial=0) / len(held)), 4
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
