"""Two models of one `gati serve` that adapt at the same time, under a steady load.

    python -m benchmarks.adapting LIBRARY [LIBRARY] --data unseen.npz [--composition NAME] [--json FILE]

Both models, or the same library twice, are asked at `--rate` requests per second each, whether or not earlier
ones are answered. Class frequencies follow Zipf's law with exponent `--zipf`, each model's in another order;
after `--change` seconds the order changes, with another class in front. Takes about seven minutes.

The images must be unknown to the libraries; no input occurs twice (see `benchmarks.drift`). Every answer is
compared with that of the base model, computed beforehand. `GET /v1/adaptation` says when which model was
retrained, until its new version was loaded; the answers say which version gave them. Latency is counted from
the time at which a request was due. Server, retraining and clients share this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.drift import deck, exactly, orders, percent, shifted
from benchmarks.serving import HOST, Connection, infer_message, open_loop, serving
from gati.cli.adapt import lines
from gati.composition.load import Served, open_served
from gati.model.data import Data, load_data

WARM_UP_S = 10.0
LOOK_EVERY_S = 0.5
LEAST = 100  # requests that a quantile needs
BATCH = 64
PUBLISHED = ("activated", "reused")
ENDLESS = float("inf")
QUIET, ITSELF, OTHER = "nothing is retrained", "it is retrained", "the other is"
MODEL = """
[models.{name}]
library = "{library}"
composition = "{composition}"
threads = 1
state = "{folder}/state-{name}"
records = "sqlite:///{folder}/records.db"
repository = "{folder}/versions"
sampling = 0.5
"""


class Row(NamedTuple):
    """One answered request: when it was due and answered (seconds since 1970), by what, and how."""

    due_s: float
    done_s: float
    version: str
    hit: bool
    agreed: bool


class Retraining(NamedTuple):
    """A retraining of one model until its version is loaded, and what came of it."""

    began_s: float
    ended_s: float
    outcome: str
    message: str


class Stream:
    """The requests for one model, the base model's answers to them, and what was answered."""

    def __init__(self, name: str, served: Served, data: Data, exponent: float, seed: int) -> None:
        if data.labels is None:
            raise SystemExit(f"error: {data.name} has no labels to mix classes by")
        self.name, self._served = name, served
        self._images = data.images(range(len(data)))
        self._classes = int(data.labels.max()) + 1
        self._orders = orders(self._classes, np.random.default_rng(seed))
        self._random = np.random.default_rng((seed, 1))
        self._decks = [
            deck(np.flatnonzero(data.labels == each), np.random.default_rng((seed, 2, each)))
            for each in range(self._classes)
        ]
        self._share = 1.0 / np.arange(1, self._classes + 1) ** exponent
        self.messages: list[bytes] = []
        self.base: list[int] = []
        self.rows: list[Row] = []
        self.not_answered = 0
        self.changed_s = ENDLESS  # when the first request with the other order was due

    def prepare(self, count: int, changes_at: int) -> None:
        """Draw `count` requests, from `changes_at` on in the other order, and have the base model answer."""
        self._changes_at = changes_at
        inputs = [self._input(int(at >= changes_at)) for at in range(count)]
        for start in range(0, count, BATCH):
            batch = torch.cat(inputs[start : start + BATCH])
            self.base += [each.class_index for each in self._served.engine.base(batch)]
        self.messages = [infer_message(self.name, x.numpy()) for x in inputs]

    async def send(self, port: int, rate: float, seconds: float, seed: int) -> None:
        """Send the requests, and keep what is answered."""
        since_s = time.time() - time.monotonic()

        def heard(at: int, due_s: float, body: bytes) -> None:
            document = json.loads(body)
            agreed = document["outputs"][0]["data"][0] == self.base[at]
            hit = document["parameters"]["exit"] != "base"
            self.rows.append(Row(since_s + due_s, time.time(), document["model_version"], hit, agreed))
            if at >= self._changes_at:
                self.changed_s = min(self.changed_s, since_s + due_s)

        replies = await open_loop(port, self.messages, rate, seconds, heard=heard, seed=seed)
        self.rows.sort()
        self.not_answered = len(replies.rows) - len(self.rows)

    def _input(self, phase: int) -> Tensor:
        share = np.empty(self._classes)
        share[self._orders[phase]] = self._share / self._share.sum()
        image, form = next(self._decks[int(self._random.choice(self._classes, p=share))])
        return shifted(self._images[image : image + 1], form)


class Watched:
    """Retrainings of each model, as the server publishes them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.found: dict[str, dict[float, Retraining]] = {name: {} for name in names}
        self.last: dict[str, Any] = {}  # status

    async def keep_looking(self, port: int) -> None:
        """Ask for the state of adaptation until cancelled."""
        request = f"GET /v1/adaptation HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()
        async with Connection(port) as connection:
            while True:
                _, body = await connection.ask(request)
                self.look(json.loads(body))
                await asyncio.sleep(LOOK_EVERY_S)

    def look(self, document: dict[str, Any]) -> None:
        """Take in one status."""
        self.last = document
        for model in document["models"]:
            each, known = model["retraining"], self.found[model["name"]]
            if each is None or each["began_s"] is None:
                continue
            began_s, ended_s = each["began_s"], each["changed_s"]
            for earlier, open_one in known.items():
                if earlier != began_s and open_one.ended_s == ENDLESS:  # its version was never loaded
                    known[earlier] = open_one._replace(ended_s=began_s)
            if began_s in known and known[began_s].ended_s < ENDLESS:
                continue
            known[began_s] = Retraining(began_s, ENDLESS, "", "")
            if not each["under_way"] and ended_s is not None and ended_s >= began_s:
                loaded = str(each["version"]) in [version["version"] for version in model["versions"]]
                if each["outcome"] in PUBLISHED:
                    ended_s = time.time() if loaded else ENDLESS
                known[began_s] = Retraining(began_s, ended_s, each["outcome"], each["message"])

    def during(self, name: str, row: Row) -> bool:
        """Whether that model was being retrained while a request was answered."""
        return any(
            row.due_s <= each.ended_s and row.done_s >= each.began_s for each in self.found[name].values()
        )


async def load(port: int, streams: Sequence[Stream], watched: Watched, rate: float, seconds: float) -> None:
    """Send all streams at once."""
    looking = asyncio.create_task(watched.keep_looking(port))
    try:
        await asyncio.gather(*(each.send(port, rate, seconds, seed) for seed, each in enumerate(streams)))
        if looking.done():
            looking.result()  # raises what went wrong
    finally:
        looking.cancel()


# Figures ------------------------------------------------------------------------------------------------


def figures(stream: Stream, watched: Watched) -> dict[str, Any]:
    """Everything about one model."""
    name, changed_s = stream.name, stream.changed_s
    rows = [row for row in stream.rows if row.due_s >= stream.rows[0].due_s + WARM_UP_S]
    known = {row.version for row in rows if row.due_s < changed_s}
    taken_s = next((row.due_s for row in rows if row.version not in known), ENDLESS)

    def when(busy: Callable[[Row], bool]) -> dict[str, float]:
        return latencies([1e3 * (row.done_s - row.due_s) for row in rows if busy(row)])

    def other(row: Row) -> bool:
        return any(watched.during(each, row) for each in watched.found if each != name)

    timed = {
        QUIET: when(lambda row: not (watched.during(name, row) or other(row))),
        ITSELF: when(lambda row: watched.during(name, row)),
        OTHER: when(lambda row: other(row) and not watched.during(name, row)),
    }
    retrainings = list(watched.found[name].values())
    return {
        "requests": len(stream.rows),
        "not_answered": stream.not_answered,
        "before": shares([row for row in rows if row.due_s < changed_s]),
        "changed": shares([row for row in rows if changed_s <= row.due_s < taken_s]),
        "retrained": shares([row for row in rows if row.due_s >= taken_s]),
        "taken_over_after_s": None if taken_s == ENDLESS else round(taken_s - changed_s, 1),
        "retrainings": [each._asdict() for each in retrainings],
        "published": sum(each.outcome in PUBLISHED for each in retrainings),
        "released": list(dict.fromkeys(row.version for row in rows))[1:],
        "latency_ms": timed,
        "rise": {
            what: round(timed[what]["p99"] / timed[QUIET]["p99"], 3)
            for what in (ITSELF, OTHER)
            if "p99" in timed[what] and "p99" in timed[QUIET]
        },
    }


def shares(rows: Sequence[Row]) -> dict[str, float] | None:
    """Hit rate and agreement; None without requests."""
    if not rows:
        return None
    return {
        "n": len(rows),
        "hit_rate": round(float(np.mean([row.hit for row in rows])), 4),
        "agreement": round(float(np.mean([row.agreed for row in rows])), 4),
    }


def latencies(values: Sequence[float]) -> dict[str, float]:
    """The number of requests and, if they are enough, quantiles in ms."""
    if len(values) < LEAST:
        return {"n": len(values)}
    return {"n": len(values)} | {f"p{q}": round(float(np.percentile(values, q)), 3) for q in (50, 90, 99)}


def show(models: dict[str, dict[str, Any]]) -> None:
    """Print what was learned, then what it cost."""
    phases = ("before", "changed", "retrained")
    print("| model | hits before, after the change, after retraining | agreement | retrainings | published | "
          "released | not answered |\n" + "|---" * 7 + "|")  # fmt: skip
    for name, each in models.items():
        cells: list[Any] = [
            ", ".join("-" if each[phase] is None else form(each[phase][what]) for phase in phases)
            for what, form in (("hit_rate", percent), ("agreement", exactly))
        ]
        cells += [len(each["retrainings"]), each["published"], len(each["released"]), each["not_answered"]]
        print(f"| {name} | {' | '.join(map(str, cells))} |")
    print("\n| model | while | n | p50 | p99 | p99 rises |\n" + "|---" * 6 + "|")
    for name, each in models.items():
        for what, timed in each["latency_ms"].items():
            ms = [f"{timed[q]:.2f} ms" if q in timed else "too few" for q in ("p50", "p99")]
            rises = each["rise"].get(what)
            print(f"| {name} | {what} | {timed['n']} | {' | '.join(ms)} | "
                  f"{'' if rises is None else f'{rises:.2f}x'} |")  # fmt: skip


def main() -> int:
    """Serve, send the load, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("libraries", type=Path, nargs="+", metavar="LIBRARY")
    parser.add_argument("--data", type=Path, required=True, help="labelled images unknown to the libraries")
    parser.add_argument("--composition", default="default")
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second for each model")
    parser.add_argument("--seconds", type=float, default=360.0)
    parser.add_argument("--change", type=float, default=80.0, help="seconds until the class mix changes")
    parser.add_argument("--interval", type=float, default=40.0, help="seconds between retrainings")
    parser.add_argument("--zipf", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    libraries = dict(zip(("first", "second"), 2 * asked.libraries, strict=False))
    streams = []
    for seed, (name, library) in enumerate(libraries.items(), asked.seed):
        served = open_served(library, composition=asked.composition, threads=1)
        data = load_data(str(asked.data), served.engine.preprocessing, what="requests")
        streams.append(Stream(name, served, data, asked.zipf, seed))
        streams[-1].prepare(int(1.1 * asked.rate * asked.seconds) + 100, int(asked.rate * asked.change))
    watched = Watched(list(libraries))
    with tempfile.TemporaryDirectory(prefix="gati-adapting-") as folder:
        file = Path(folder, "serve.toml")
        common = {"composition": asked.composition, "folder": folder}
        models = (
            MODEL.format(name=name, library=library.resolve(), **common)
            for name, library in libraries.items()
        )
        adaptation = f"[adaptation]\ninterval_s = {asked.interval}\nlook_every_s = 1.0\nwindow_inputs = 700\n"
        file.write_text(adaptation + "".join(models), encoding="utf-8")
        with serving(file) as port:
            asyncio.run(load(port, streams, watched, asked.rate, asked.seconds))
    found = {each.name: figures(each, watched) for each in streams}
    show(found)
    print("\nAt the end:", *lines(watched.last, time.time()), sep="\n")
    if asked.json is not None:
        options = {name: str(value) for name, value in vars(asked).items()}
        document = {"options": options, "models": found, "status": watched.last}
        asked.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
