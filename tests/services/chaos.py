"""A server under load with one fault after another; checks the outcome of every request.

`python -m benchmarks.chaos` runs it for as long as wanted, `test_chaos` for a moment.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from gati.composition.load import open_served
from tests.conftest import REPOSITORY
from tests.engine.served import images
from tests.services import faults
from tests.services.asking import Asking, Question, capacity
from tests.services.faults import Census, census
from tests.services.running import Serving, make_folder
from tests.waiting import until

__all__ = ["KINDS", "Chaos", "Report"]

MODELS = ("small", "other")
INPUTS = 32
TIMEOUT_S = 4.0  # that requests ask for
MOMENT_S = 1.0  # for so long lasts what passes by itself
MEASURED_S = 8.0  # for so long it is found what the server can answer
HANG_S = 120.0  # who has no answer by then will have none
REFUSALS = (429, 503, 504)
CLOSE = 1e-4  # of probabilities; those of two inputs differ by more than eight times that

CONFIGURATION = """
hang_timeout_s = 4.0
head_timeout_s = 5.0
body_timeout_s = 5.0
drain_timeout_s = 5.0
log_sampling = 0.01
[models.small]
library = "library"
threads = 1
queue_capacity = 32
records = "sqlite:///{folder}/records.db"
repository = "versions"
audit_budget = 0.2
[models.other]
library = "library"
composition = "other"
threads = 1
queue_capacity = 32
"""


@dataclass
class Report:
    """What happened. `wrong`, `unexplained` and `left` must be empty."""

    seconds: float = 0.0
    capacity: float = 0.0  # requests a second, before there were faults; 0 where that was not measured
    rate: float = 0.0  # at which it was asked
    faults: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  # answers of another input
    unexplained: list[str] = field(default_factory=list)  # neither answered nor refused with a reason
    latest_s: float = 0.0  # the longest that an answer came after its deadline, see `Chaos.kept_waiting`
    latest: dict[str, float] = field(default_factory=dict)  # the same by the fault that had begun last
    clients_lag_s: float = 0.0  # the longest that the clients were late themselves: the machine is too busy
    before: Census | None = None
    after: Census | None = None
    resident_bytes: list[int] = field(default_factory=list)  # of the scheduler, after each fault
    restarts: int = 0
    logged: Counter[str] = field(default_factory=Counter)  # of warnings and errors, by what they say
    mistakes: list[str] = field(default_factory=list)  # tracebacks in the log
    left: list[str] = field(default_factory=list)  # processes, and folders of the moment
    status: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        values = dict(vars(self))
        for name in ("faults", "statuses", "logged"):
            values[name] = dict(values[name].most_common())
        for name in ("before", "after"):
            values[name] = None if values[name] is None else asdict(values[name])
        return values


class Chaos:
    """A server in `folder`; `run` lets faults happen to it, and ends it.

    It is asked `rate` times a second, or `load` times as often as it could answer when it was asked before.
    """

    def __init__(self, folder: Path, *, seed: int = 0, load: float = 0.7, rate: float | None = None) -> None:
        self._folder = make_folder(folder)
        self._temporary = folder / "t"
        self._temporary.mkdir()
        self._clock = faults.JumpingClock(folder / "clock")
        (folder / "versions").mkdir()
        (folder / "chaos.toml").write_text(CONFIGURATION.format(folder=folder), encoding="utf-8")
        self._dice = random.Random(seed)
        self._load_share, self._rate, self._seed = load, rate, seed
        self._inputs = images(INPUTS)
        self.answers = _answers(folder / "library", self._inputs)
        self._lock = threading.Lock()
        self._fault = "none"
        self._deaf: list[tuple[float, float]] = []  # when the scheduler could not take requests in
        self._seen: set[int] = set()
        self.report = Report()

    def run(self, seconds: float, every_s: float, kinds: tuple[str, ...] = ()) -> Report:
        """Let a fault begin every so often, for so long; in turn, each kind before any comes again.

        Each kind comes at least once, however short the time.
        """
        environment = {
            "TMPDIR": str(self._temporary),
            "PYTHONPATH": os.pathsep.join((str(self._clock.folder), str(REPOSITORY))),
            "OMP_NUM_THREADS": "1",
        }
        running = Serving(self._folder / "chaos.toml", environment=environment)
        with running:
            self._place = _place(running.url)
            for model, _ in itertools.product(MODELS, range(20)):
                assert running.client.post(f"/v2/models/{model}/infer", json=self._body(0)).status_code == 200
            self.report.before = census(running.process.pid)
            questions = self._questions()
            if self._rate is None:
                self.report.capacity = capacity(running.url, questions, MEASURED_S)
            self.report.rate = rate = self._rate or self._load_share * self.report.capacity
            asking = Asking(running.url, questions, self._asked, rate=rate, hang_s=HANG_S, seed=self._seed)
            with asking:
                self._let_happen(running, seconds, every_s, kinds or tuple(KINDS))
                self._settle(running)
            self.report.clients_lag_s = asking.lag_s
            self._count(running)
        self.report.status = running.stop()
        self.read_log(running.said)
        self._look_for_remains()
        self._clock.close()
        return self.report

    # ----------------------------------------------------------------------------------------------------

    def _let_happen(self, running: Serving, seconds: float, every_s: float, kinds: tuple[str, ...]) -> None:
        began_s = time.monotonic()
        turn = self._dice.sample(kinds, len(kinds))
        while (now_s := time.monotonic()) - began_s < seconds or turn:
            turn = turn or self._dice.sample(kinds, len(kinds))
            kind = turn.pop()
            self._seen.update(running.processes().values())
            self._fault = kind
            KINDS[kind](self, running)
            self.report.faults[kind] += 1
            self.report.resident_bytes.append(census(running.process.pid).resident_bytes)
            time.sleep(max(0.0, every_s - (time.monotonic() - now_s)))
        self.report.seconds = time.monotonic() - began_s

    def _settle(self, running: Serving) -> None:
        """Until all is well again: every model answers, again and again."""
        running.wait_until_ready()
        for model in MODELS:
            until(
                lambda model=model: (  # type: ignore[misc]
                    running.client.post(f"/v2/models/{model}/infer", json=self._body(0)).status_code == 200
                )
            )
        self._seen.update(running.processes().values())

    def _count(self, running: Serving) -> None:
        before = self.report.before
        assert before is not None

        def settled() -> bool:
            self.report.after = now = census(running.process.pid)
            return now.children == len(MODELS) and now.files <= before.files + 8

        self.report.left += [] if _soon(settled) else ["the scheduler keeps files or processes"]
        page = running.client.get("/metrics").text
        found = [line for line in page.splitlines() if line.startswith("gati_restarts_total{")]
        self.report.restarts = round(sum(float(line.rsplit(" ", 1)[1]) for line in found))

    def read_log(self, lines: list[str]) -> None:
        """Count what the server warned of, and keep what it did not expect."""
        for line in lines:
            if "Traceback" in line:
                self.report.mistakes.append(line[:2000])
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict) and entry.get("level") in ("warning", "error"):
                self.report.logged[f"{entry['level']}: {entry.get('message')}"] += 1

    def _look_for_remains(self) -> None:
        ended = _soon(lambda: not any(map(faults.alive, self._seen)))
        self.report.left += [] if ended else [f"processes {[pid for pid in self._seen if faults.alive(pid)]}"]
        self.report.left += [str(path) for path in self._temporary.iterdir() if path.name.startswith("gati-")]

    # Honest clients -------------------------------------------------------------------------------------

    def _body(self, number: int) -> dict[str, Any]:
        data = self._inputs[number : number + 1]
        tensor = {
            "name": "input",
            "shape": list(data.shape),
            "datatype": "UINT8",
            "data": data.ravel().tolist(),
        }
        return {"inputs": [tensor], "parameters": {"timeout_ms": 1e3 * TIMEOUT_S}}

    def _questions(self) -> list[Question]:
        return [
            Question(number, model, json.dumps(self._body(number)).encode())
            for number, model in itertools.product(range(INPUTS), MODELS)
        ]

    def _asked(self, question: Question, reply: httpx.Response | httpx.HTTPError, took_s: float) -> None:
        if isinstance(reply, httpx.Response):
            now_s = time.monotonic()
            self.take_in(question.number, reply, took_s - self.kept_waiting(now_s - took_s, now_s))
        else:
            with self._lock:
                self.report.unexplained.append(f"{question.model} after {took_s:.1f} s: {reply!r}")

    @contextmanager
    def deaf(self) -> Iterator[None]:
        """While the scheduler is stopped or may open nothing, it cannot take requests in."""
        began_s = time.monotonic()
        self._deaf.append((began_s, math.inf))
        try:
            yield
        finally:
            self._deaf[-1] = (began_s, time.monotonic())

    def kept_waiting(self, began_s: float, ended_s: float) -> float:
        """How much of this time the scheduler was `deaf`: a request's deadline begins when it is taken in."""
        return sum(max(0.0, min(ended_s, until) - max(began_s, since)) for since, until in list(self._deaf))

    def take_in(self, number: int, reply: httpx.Response, took_s: float) -> None:
        """Judge a reply to an input."""
        with self._lock:
            report = self.report
            report.statuses[reply.status_code] += 1
            report.latest_s = max(report.latest_s, took_s - TIMEOUT_S)
            report.latest[self._fault] = max(report.latest.get(self._fault, 0.0), took_s - TIMEOUT_S)
            if reply.status_code == 200:
                outputs = {each["name"]: each["data"] for each in reply.json()["outputs"]}
                given = np.array(outputs["probabilities"])
                if not any(np.abs(given - right).max() < CLOSE for right in self.answers[number]):
                    report.wrong.append(f"input {number}: {given.tolist()} from {outputs['exit']}")
            elif reply.status_code not in REFUSALS or not _reason(reply):
                report.unexplained.append(f"{reply.status_code}: {reply.text[:300]}")

    # Faults ---------------------------------------------------------------------------------------------

    def _victim(self, running: Serving) -> int:
        found = running.processes()
        return found[self._dice.choice(sorted(found))] if found else running.process.pid

    def _kill(self, running: Serving) -> None:
        if (pid := self._victim(running)) != running.process.pid:
            faults.killed(pid)

    def _pause(self, running: Serving) -> None:
        if (pid := self._victim(running)) == running.process.pid:
            return
        with faults.stopped(pid):
            time.sleep(MOMENT_S)

    def _hang(self, running: Serving) -> None:
        """Stop a process for so long that it is taken for dead."""
        if (pid := self._victim(running)) == running.process.pid:
            return
        with faults.stopped(pid):
            _soon(lambda: not faults.alive(pid))

    def _pause_scheduler(self, running: Serving) -> None:
        with self.deaf(), faults.stopped(running.process.pid):
            time.sleep(MOMENT_S)

    def _cut(self, running: Serving) -> None:
        whole = self._message()
        for _ in range(50):
            faults.cut(self._place, whole[: self._dice.randint(0, len(whole))])

    def _half_sent(self, running: Serving) -> None:
        whole = self._message()
        with faults.half_sent(
            self._place, [whole[: self._dice.randint(0, len(whole) - 1)] for _ in range(100)]
        ):
            time.sleep(MOMENT_S)

    def _slow(self, running: Serving) -> None:
        faults.trickled(self._place, self._message(), 2 * MOMENT_S)

    def _disk_full(self, running: Serving) -> None:
        with faults.disk_full(running.process.pid, *running.processes().values()):
            self._load(running)
            time.sleep(MOMENT_S)

    def _no_files(self, running: Serving) -> None:
        pid = running.process.pid
        with self.deaf(), faults.no_files_left(pid), faults.half_sent(self._place, [b""] * 5):
            time.sleep(MOMENT_S)

    def _jump(self, running: Serving) -> None:
        self._clock.jump(self._dice.choice((-1, 1)) * self._dice.choice((1.0, 3600.0, 86_400.0, 3e7)))

    def _store_gone(self, running: Serving) -> None:
        file = self._folder / "records.db"
        if file.exists():
            with faults.gone(file):
                time.sleep(MOMENT_S)

    def _repository_gone(self, running: Serving) -> None:
        with faults.gone(self._folder / "versions"):
            time.sleep(3.0)

    def _load(self, running: Serving) -> None:
        """Not a fault, but what an operator may do while there are some."""
        parameters = {"composition": self._dice.choice(("default", "other"))}
        reply = running.client.post("/v2/repository/models/small/load", json={"parameters": parameters})
        if reply.status_code not in (200, 409, *REFUSALS) or not (reply.status_code == 200 or _reason(reply)):
            with self._lock:
                self.report.unexplained.append(f"load: {reply.status_code}: {reply.text[:300]}")

    def _message(self) -> bytes:
        body = json.dumps(self._body(self._dice.randrange(INPUTS))).encode()
        head = (
            f"POST /v2/models/small/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


KINDS: dict[str, Callable[[Chaos, Serving], None]] = {
    "a model's process is killed": Chaos._kill,
    "a model's process is stopped for a moment": Chaos._pause,
    "a model's process hangs": Chaos._hang,
    "the scheduler is stopped for a moment": Chaos._pause_scheduler,
    "connections are cut": Chaos._cut,
    "requests are half sent": Chaos._half_sent,
    "a request is slow": Chaos._slow,
    "the disk is full": Chaos._disk_full,
    "no file can be opened": Chaos._no_files,
    "the clock jumps": Chaos._jump,
    "the record store is gone": Chaos._store_gone,
    "the repository is gone": Chaos._repository_gone,
    "a version is loaded": Chaos._load,
}


def _answers(library: Path, inputs: np.ndarray[Any, np.dtype[np.uint8]]) -> list[list[np.ndarray[Any, Any]]]:
    """What may be answered to each input: by the first cache that hits, or by all of the network."""
    engine = open_served(library).engine
    assert engine.preprocessing is not None
    x = engine.preprocessing(inputs)
    found = [
        [each.probabilities.numpy() for each in (engine(row)[0], engine.base(row)[0])]
        for row in (x[number : number + 1] for number in range(len(inputs)))
    ]
    for one, other in itertools.combinations(found, 2):
        assert all(np.abs(a - b).max() > 8 * CLOSE for a in one for b in other), "answers look alike"
    engine.close()
    return found


def _reason(reply: httpx.Response) -> bool:
    try:
        return bool(reply.json()["error"])
    except (ValueError, KeyError, TypeError):
        return False


def _place(url: str) -> tuple[str, int]:
    address = urlsplit(url)
    assert address.hostname is not None and address.port is not None
    return address.hostname, address.port


def _soon(condition: Callable[[], bool]) -> bool:
    """Whether something comes to be within the time that a hanging request has."""
    end_s = time.monotonic() + HANG_S
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.05)
    return True
