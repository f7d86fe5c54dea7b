"""Compare Gati's memory with peers that also answer from memory, on traffic videos at the same guarantee.

    python -m benchmarks.video_peers LIBRARY --data FOLDER [--composition NAME] [--accuracy 0.97]

There are no caches, only methods that answer before the network:

- *difference detector* (NoScope): the last answer for that place, if little has changed since;
- *nearest neighbours* (Potluck, FoggyCache): the answer of the nearest stored images, if all five agree and
  the nearest is close enough;
- *nearest on hidden outputs*: the same on the hidden output of an early block, including the cost of the
  network up to there; hashing (LSH) would find at most as many;
- *memory*: Gati's.

A peer has four thresholds, at multiples of the median distance of its first 60 requests, which needs no
labels. All methods are proven by audits drawn in the same way (`gati.guard`) and learn by the same rules.
Gains count the CPU time of the lookup, and of the network if nothing answers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.videos import VIDEOS
from gati.adaptation.memory import sketch
from gati.adaptation.recall import Recall
from gati.adaptation.recall_records import Looked
from gati.adaptation.replay import RecordedRequests, record, worst_window
from gati.composition.load import open_served
from gati.engine.exits import BASE, Prediction
from gati.guard.auditor import RECALL, Auditor, Given
from gati.guard.draws import Draws
from gati.guard.ladder import Ladder
from gati.guard.proof import Proof, Spending

DELTA = 0.05
AUDITS, SAMPLING = 0.05, 0.2
MULTIPLES = (1.0, 1.5, 2.5, 4.0)
FIRST = 60  # requests whose distances set the thresholds
NEAREST = 5
CAPACITY = 128


class Found(NamedTuple):
    """A method's result for an input: `answer` is returned if `confident`."""

    confident: bool
    answer: Prediction | None
    looked: Any


class Method(Protocol):
    """A method that may answer before the network once it is proven."""

    @property
    def proving(self) -> Proof | None: ...

    def look(self, x: Tensor, place: str) -> Found | None: ...

    def learn(self, looked: Any, base: Prediction, *, drawn: bool, tried: bool = False) -> None: ...


class Distant(NamedTuple):
    """An input as a peer sees it, and the distance of its known answer."""

    place: str
    seen: NDArray[np.float32]
    distance: float
    answer: Prediction | None
    would_answer: tuple[bool, ...]
    epoch: int


View = Callable[[Tensor], NDArray[np.float32]]


class Peer:
    """The nearest of a place's last `capacity` inputs, if the `votes` nearest neighbours agree."""

    def __init__(self, agreement: float, view: View, *, capacity: int, votes: int) -> None:
        self._view, self._capacity, self._votes = view, capacity, votes
        self._ladder = Ladder(len(MULTIPLES), agreement, Spending(DELTA).next, of_all=True)
        self._known: dict[str, list[tuple[NDArray[np.float32], Prediction]]] = {}
        self._first: list[float] = []
        self._thresholds: NDArray[np.float64] | None = None
        self._epoch = 0

    @property
    def proving(self) -> Proof | None:
        """The proof under way, if it has prospects."""
        proof = self._ladder.proof
        return None if self._thresholds is None or proof is None or proof.hopeless else proof

    def look(self, x: Tensor, place: str) -> Found | None:
        """Look up a similar known input."""
        seen = self._view(x)
        distance, answer = self._nearest(seen, self._known.get(place, []))
        if self._thresholds is None:
            would = (False,) * len(MULTIPLES)
            self._place_thresholds(distance)
        else:
            would = tuple((distance < self._thresholds).tolist())
        confident = self._ladder.level > 0 and would[self._ladder.level - 1]
        return Found(confident, answer, Distant(place, seen, distance, answer, would, self._epoch))

    def _nearest(
        self, seen: NDArray[np.float32], known: list[tuple[NDArray[np.float32], Prediction]]
    ) -> tuple[float, Prediction | None]:
        if len(known) < self._votes:
            return np.inf, None
        apart = np.stack([each for each, _ in known]) - seen
        distances = np.sqrt((apart * apart).mean(1))
        nearest = np.argsort(distances)[: self._votes]
        answers = [known[at][1] for at in nearest]
        agree = len({each.class_index for each in answers}) == 1
        return (float(distances[nearest[0]]) if agree else np.inf), answers[0]

    def _place_thresholds(self, distance: float) -> None:
        if np.isfinite(distance):
            self._first.append(distance)
        if len(self._first) == FIRST:
            self._thresholds = np.median(self._first) * np.array(MULTIPLES)

    def learn(self, looked: Distant, base: Prediction, *, drawn: bool, tried: bool = False) -> None:
        """Learn the base model's answer, by the rules of `gati.adaptation.recall`."""
        tested = len(MULTIPLES) if self._ladder.level else 1
        if (drawn or tried) and looked.epoch == self._epoch and looked.answer is not None:
            right = looked.answer.class_index == base.class_index
            agreed = [right if would else None for would in looked.would_answer]
            judged = self._ladder.audited(agreed, guards=drawn, tested=tested)
            self._epoch += judged is not None
        if drawn or not any(looked.would_answer[:tested]):
            known = self._known.setdefault(looked.place, [])
            known.append((looked.seen, base))
            del known[: -self._capacity]


class OwnMemory:
    """Gati's memory, with the interface of the peers."""

    def __init__(self, agreement: float) -> None:
        def at_once(fit: Callable[[], None]) -> bool:
            fit()
            return True

        self._recall = Recall(
            agreement,
            Spending(DELTA).next,
            10_000.0,
            leave=at_once,
            on_change=lambda *_: None,
        )

    @property
    def proving(self) -> Proof | None:
        """The proof under way, if it has prospects."""
        return self._recall.proving

    def look(self, x: Tensor, place: str) -> Found | None:
        """Look up a similar known input."""
        looked: Looked | None = self._recall.look(x, place, alone=True)
        if looked is None:
            return None
        return Found(looked.confident, None if looked.seen is None else looked.seen.answer, looked)

    def learn(self, looked: Looked, base: Prediction, *, drawn: bool, tried: bool = False) -> None:
        """Learn the base model's answer."""
        self._recall.learn(looked, base, drawn=drawn, tried=tried)


@dataclass(frozen=True)
class Row:
    """A method's results on a recording; gains are in CPU time, `after` from its first answer."""

    answered: NDArray[np.bool_]
    agreed: NDArray[np.bool_]
    look_ms: float
    base_ms: float

    def gain(self, first: int = 0) -> float:
        """Return the base model's time / this method's, from request `first` on."""
        return self.base_ms / (self.look_ms + (1.0 - float(self.answered[first:].mean())) * self.base_ms)


def run(method: Method, recording: RecordedRequests, base_ms: float, seed: int) -> Row:
    """Send all requests through a method."""
    auditor = Auditor[Any](memory=method)
    draws = Draws(AUDITS, SAMPLING, 1.0, seed=seed)
    answered, agreed = np.zeros(len(recording), bool), np.ones(len(recording), bool)
    spent_s = 0.0
    for number, (x, base) in enumerate(zip(recording.inputs, recording.base, strict=True)):
        decided = auditor.decide(None, None, draws, room=lambda: True, more_samples=1.0)
        began = time.thread_time()
        found = method.look(x, recording.place[number] or "")
        spent_s += time.thread_time() - began
        given = Given(base._replace(exit=BASE), None if found is None else found.looked)
        if found is not None and found.confident and found.answer is not None:
            given = given._replace(prediction=found.answer._replace(exit=RECALL))
            answered[number] = True
            agreed[number] = found.answer.class_index == base.class_index
        if decided.looked_at and auditor.needs(decided, given, base) is not None:
            auditor.settle(decided, given, base, ())
        elif not given.recalled:
            auditor.learn(decided, given, base)
    return Row(answered, agreed, 1e3 * spent_s / len(recording), base_ms)


def main() -> int:
    """Print a row per video and method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--composition", default="default")
    parser.add_argument("--accuracy", type=float, default=0.97)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--videos", nargs="+", choices=list(VIDEOS), default=list(VIDEOS))
    arguments = parser.parse_args()
    served = open_served(arguments.library, composition=arguments.composition, threads=1)
    traced = served.engine.traced
    blocks = [name for name in traced.blocks if traced.block_kinds[name] != "network input"]
    early = traced.cut([blocks[len(blocks) // 6]])[0]

    def hidden(x: Tensor) -> NDArray[np.float32]:
        with torch.inference_mode():
            return sketch(early.run(x.clone())[0])

    def pixels(x: Tensor) -> NDArray[np.float32]:
        return x.reshape(-1).numpy()

    print("| video | method | answered | from | agreement | worst 200 | gain | after |")
    print(f"|{'---|' * 8}")
    for video in arguments.videos:
        name, regions = VIDEOS[video]
        recording = record(served, str(arguments.data / name), regions=regions)
        base_ms = _mean_ms(served.engine.base, recording)
        made: dict[str, Callable[[], Method]] = {
            "difference detector": lambda: Peer(arguments.accuracy, pixels, capacity=1, votes=1),
            "nearest neighbours": lambda: Peer(arguments.accuracy, sketch, capacity=CAPACITY, votes=NEAREST),
            "nearest on hidden outputs": lambda: Peer(
                arguments.accuracy, hidden, capacity=CAPACITY, votes=NEAREST
            ),
            "memory": lambda: OwnMemory(arguments.accuracy),
        }
        for method, make in made.items():
            rows = [run(make(), recording, base_ms, seed) for seed in range(arguments.seeds)]
            print(f"| {video} | {method} | {_told(rows, recording)} |", flush=True)
    return 0


def _mean_ms(call: Callable[[Tensor], object], recording: RecordedRequests, count: int = 300) -> float:
    began = time.thread_time()
    for x in recording.inputs[:count]:
        call(x)
    return 1e3 * (time.thread_time() - began) / min(count, len(recording))


def _told(rows: list[Row], recording: RecordedRequests) -> str:
    """Format means over seeds; agreement is over the method's answers, the worst window over all requests."""
    firsts = [int(row.answered.argmax()) if row.answered.any() else len(recording) for row in rows]
    began = [first for first in firsts if first < len(recording)]
    gain = float(np.mean([row.gain() for row in rows]))
    if not began:
        return f"0 % | | | | {gain:.2f}x | "
    own = [row.agreed[row.answered].mean() for row in rows if row.answered.any()]
    after = [row.gain(first) for row, first in zip(rows, firsts, strict=True) if first < len(recording)]
    worst = min(worst_window(row.agreed, recording.frame) for row in rows)
    return (
        f"{np.mean([row.answered.mean() for row in rows]):.0%} | {np.mean(recording.time_s[began]):.1f} s | "
        f"{np.mean(own):.4f} | {worst:.3f} | {gain:.2f}x | {np.mean(after):.2f}x"
    )


if __name__ == "__main__":
    raise SystemExit(main())
