"""Latency of predicting which conversations continue: in process, and with `gati evict serve`.

    python -m benchmarks.continuation [--dialogues FILE] [--rounds 40] [--requests 500]

Batches are 512 prompts of different dialogues, each with up to four earlier ones, parsed from JSON right
before; nothing is cached between batches. REST times are those of a client on the same machine with a
keep-alive connection.
The machine's load is printed, and CPU time next to wall time: the difference is due to other work.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks.evict_policies import DATA
from gati.evict import ContinuationClient
from gati.evict.predict.continuation import ContinuationModel, fit_continuation
from gati.evict.predict.continuation_stored import save_continuation
from gati.evict.trace.dialogues import Dialogue, Prompts, halves, read_dialogues
from gati.evict.train import samples_of

DIALOGUES = DATA / "text" / "sgd_dialogues.jsonl.gz"
BATCH = 512
Batch = Sequence[Prompts]
Messages = list[dict[str, str]]


def spread(name: str, work: Callable[[Any], object], rounds: int, given: Callable[[int], Any]) -> None:
    """Print percentiles of the wall and CPU time of `work` on what `given` returns."""
    clock, cpu = [], []
    for number in range(rounds):
        argument = given(number)
        began, spent = time.perf_counter(), time.thread_time()
        work(argument)
        cpu.append(time.thread_time() - spent)
        clock.append(time.perf_counter() - began)
    p10, p50, p99 = 1e3 * np.percentile(clock, [10, 50, 99])
    busy = 1e3 * np.percentile(cpu, [10, 50])
    print(f"| {name} | {p10:.2f} | {p50:.2f} | {p99:.2f} | {busy[0]:.2f}, {busy[1]:.2f} |", flush=True)


def in_process(model: ContinuationModel, batches: Sequence[Batch]) -> None:
    """Time 512 predictions in one batch, and single ones."""
    packed = [orjson.dumps([(each.texts, each.turn) for each in batch]) for batch in batches]
    singles = [prompts for batch in batches for prompts in batch][:2000]

    def unpacked(number: int) -> Batch:
        return [Prompts(tuple(texts), turn) for texts, turn in orjson.loads(packed[number])]

    gc.collect()
    gc.freeze()  # like the service
    model.predict(unpacked(0))
    spread(f"{BATCH} at once", model.predict, len(batches), unpacked)
    spread("one", lambda prompts: model.predict([prompts]), len(singles), lambda number: singles[number])


def over_rest(folder: Path, conversations: Sequence[Messages], requests: int) -> None:
    """Time requests with one conversation, and with 512."""
    command = [sys.executable, "-m", "gati", "evict", "serve", str(folder / "learned"), "--port", "0"]
    command += ["--continuation", str(folder / "model"), "--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        url = service.stdout.readline().split()[2]
        with ContinuationClient(url, timeout_s=60.0) as client:
            client.probabilities(conversations[:BATCH])
            many = [conversations[begin : begin + BATCH] for begin in range(0, len(conversations), BATCH)]
            spread("REST, one", client.probability, requests, lambda n: conversations[n % len(conversations)])
            spread("REST, 512 in a request", client.probabilities, len(many), lambda number: many[number])
        service.terminate()


def messages_of(dialogue: Dialogue, turn: int) -> Messages:
    """Return a chat up to its prompt number `turn`."""
    found: Messages = []
    for said in dialogue.messages:
        found.append({"role": "user" if said.user else "assistant", "content": said.text})
        turn -= said.user
        if turn == 0:
            break
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dialogues", type=Path, default=DIALOGUES)
    parser.add_argument("--rounds", type=int, default=40, help="batches")
    parser.add_argument("--requests", type=int, default=500, help="requests over REST")
    given = parser.parse_args()
    learned, held_out = halves(read_dialogues(given.dialogues))
    model = fit_continuation(*samples_of(learned[:1000]))
    chance = np.random.default_rng(0)
    prompts = samples_of(held_out)[0]
    order = chance.permutation(len(prompts))[: BATCH * given.rounds]
    batches = [[prompts[at] for at in part] for part in np.array_split(order, given.rounds)]
    conversations = [messages_of(each, int(chance.integers(1, 8))) for each in held_out[: 8 * BATCH]]
    del learned, held_out, prompts
    print(f"load {', '.join(f'{each:.1f}' for each in os.getloadavg())} on {os.cpu_count()} processors")
    print("| ms | p10 | p50 | p99 | CPU p10, p50 |\n|---|---|---|---|---|")
    in_process(model, batches)
    with tempfile.TemporaryDirectory(prefix="gati-continuation-") as folder:
        save_continuation(model, Path(folder) / "model", {})
        over_rest(Path(folder), conversations, given.requests)
    print(f"load {', '.join(f'{each:.1f}' for each in os.getloadavg())}")


if __name__ == "__main__":
    main()
