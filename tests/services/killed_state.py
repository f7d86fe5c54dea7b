"""The state of the guard and of memory in a service that is killed at each change of a file.

    python -m tests.services.killed_state FOLDER

`test_killed` runs this. A process follows a version from its trial to its end, or a memory. It tells what it
acts on. Whatever it had told before it was killed, the next process must know.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gati.guard.standing as standing
from services.inference.keeping import ServedStanding
from services.inference.remembering import ServedMemory
from tests.adaptation.test_recall_file import answer, pictures
from tests.services.dying import Death, each_death
from tests.services.test_standing import Run

Tell = Callable[[str], None]
Act = Callable[[Path, Tell], None]
Check = Callable[[Path, Death, list[str]], None]

SAVED_EVERY = 16  # audits
AGREEMENT = 0.9


def main() -> int:
    """Print the changes at which processes were killed, and the last that each had told."""
    folder = Path(sys.argv[1])
    standing._SAVED_EVERY_S = 0.0
    os.fsync = lambda descriptor: None  # what a killed process has written is not lost
    logging.disable()
    each = {"proofs": (follow, check_proofs), "memory": (remember, check_memory)}
    print(json.dumps({what: deaths(folder / what, *those) for what, those in each.items()}))
    return 0


def deaths(folder: Path, act: Act, check: Check) -> list[tuple[str, str]]:
    """Kill processes at each change that `act` makes, and `check` what the next process knows."""
    lines: list[str] = []
    act(folder / "whole" / "small.json", lines.append)
    found = []
    for death in each_death(folder / "state", lambda tell: act(folder / "state" / "small.json", tell)):
        assert death.change or death.told == lines, (death.told, lines)
        again = folder / "again"
        (folder / "state").mkdir(exist_ok=True)
        shutil.copytree(folder / "state", again)
        check(again / "small.json", death, lines)
        found.append((death.change, death.told[-1] if death.told else ""))
        shutil.rmtree(again)
        shutil.rmtree(folder / "state")
    return found


# --- the proof of a version, its taking over, and its end -----------------------------------------------


def follow(path: Path, tell: Tell) -> None:
    """A version is proven, takes over, and is stopped; it begins where the file ends."""
    run = started(path)
    second = run.post("second")
    run.activate(second)
    made = 0
    while run.roster.serving is not second:
        made += 1
        tell(f"made {made}")
        second.watch.audited(agreed=True)
        if made % SAVED_EVERY == 0:
            saved(run)
            tell(f"saved {made}")
        run.roster.give_up()  # as after every request
    asyncio.run(run.standings.recorded())  # as before every answer
    tell(f"took over, {second.watch.proven_on} audits, {run.standings.spending.used} spent")
    while second.may_hit:
        second.watch.audited(agreed=False)
        if second.may_hit:
            saved(run)
    asyncio.run(run.standings.recorded())
    tell(f"stopped, {run.standings.spending.used} spent")
    run.standings.close()
    tell("closed")


def started(path: Path) -> Run:
    """A run that writes which version took over, as `services.inference.versions.Versions` does."""
    run = Run(path)
    run.roster._on_takeover = lambda post: run.standings.save()
    return run


def saved(run: Run) -> None:
    """Write the evidence, and wait for it."""
    run.standings.audited()
    run.standings._thread.submit(int).result()


def check_proofs(path: Path, death: Death, whole: list[str]) -> None:
    """The next process knows what the killed one told, and goes on to the same end."""
    run = started(path)
    try:
        check_run(run, death, whole)
    finally:
        run.standings.close()


def check_run(run: Run, death: Death, whole: list[str]) -> None:
    """`check_proofs` for the next process, which has just begun."""
    told = death.told
    made, kept = last(told, "made "), last(told, "saved ")
    assert not run.standings.distrusted, (death, run.standings.distrusted)
    assert run.standings.spending.used <= last(whole, "stopped, "), death
    second = run.post("second")
    serves = run.activate(second)
    watch = second.watch
    if any(line.startswith("stopped") for line in told):
        assert watch.state == "stopped" and not serves, death
        return
    if any(line.startswith("took over") for line in told):
        # Its guard may have stopped it, which was written before anybody could be told.
        assert serves == (watch.state == "serving") and watch.state != "probation", (death, watch.state)
        return
    if watch.state == "probation":
        assert watch.proof is not None and kept <= watch.proof.audits <= made, (death, watch.proof.audits)
    counted = made if watch.state == "serving" else watch.proof.audits if watch.proof else 0
    while run.roster.serving is not second:
        run.roster.give_up()
        if run.roster.serving is not second:
            watch.audited(agreed=True)
            counted += 1
    end = f"took over, {counted} audits, {run.standings.spending.used} spent"
    assert end in whole, (death, end, whole)


def last(lines: list[str], beginning: str) -> int:
    """The number in the last line that begins so; 0 without one."""
    found = [line for line in lines if line.startswith(beginning)]
    return int(found[-1].removeprefix(beginning).split()[0]) if found else 0


# --- memory ---------------------------------------------------------------------------------------------


class Memory:
    """A service's memory on the file at `path`; what is left to its thread is done when it is asked."""

    def __init__(self, path: Path) -> None:
        self.standings = ServedStanding(path)
        self._thread = ThreadPoolExecutor(1)
        self.memory = ServedMemory(
            AGREEMENT, 0.05, self.standings, self._thread, network="0" * 64, places=4, alone=True
        )

    def settle(self) -> None:
        """Do what was left to threads."""
        asyncio.run(self.standings.recorded())
        for _ in range(3):
            self._thread.submit(int).result()

    def prove(self) -> None:
        """Requests at one place, all of them audited, until memory answers."""
        for x, base in pictures():
            if self.serves:
                return
            looked = self.memory.recall.look(x, "gate", alone=True)
            assert looked is not None
            self.memory.recall.learn(looked, base, drawn=True)
            self.settle()

    def stop(self) -> None:
        """Audits of one answer that is wrong now, until memory does not answer."""
        for x, base in pictures():
            looked = self.memory.recall.look(x, "gate", alone=True)
            if looked is None or looked.answer is None:
                continue
            while self.serves:
                self.memory.recall.learn(looked, answer((base.class_index + 1) % 3), drawn=True)
                self.settle()
            return

    @property
    def serves(self) -> bool:
        """Whether it answers."""
        return self.memory.recall.serves


def remember(path: Path, tell: Tell) -> None:
    """Memory is proven and saved; then what it remembers is wrong, and it stops."""
    made = Memory(path)
    made.prove()
    tell("proven")
    made.memory.save()
    made.standings.save()
    made.settle()
    tell("saved")
    made.stop()
    tell("stopped")
    made.memory.save()
    made.standings.close()
    tell("closed")


def check_memory(path: Path, death: Death, whole: list[str]) -> None:
    """The next process answers from memory if that was proven and not stopped, each thing as itself."""
    again = Memory(path)
    assert not again.standings.distrusted, death
    if "stopped" in death.told:
        assert not again.serves, death
    elif "proven" in death.told:  # what stops it is written before anybody can be told
        assert again.serves == (released_in(path) > 0), death
    if again.serves and "saved" not in death.told:  # later it learns what is wrong
        shown = [each for each, _ in zip(pictures(seed=7), range(12), strict=False)]
        looked = [again.memory.recall.look(x, "gate", alone=True) for x, _ in shown]
        classes = [
            (each.answer.class_index, base.class_index)
            for each, (_, base) in zip(looked, shown, strict=True)
            if each is not None and each.answer is not None
        ]
        assert classes and all(own == base for own, base in classes), (death, classes)
    again.standings.close()


def released_in(path: Path) -> int:
    """The number of settings of memory that may answer, according to the file."""
    ladders: Any = json.loads(path.read_text())["parts"]["memory"]["state"]["ladders"]
    return max(int(each["ladder"]["level"]) for each in ladders)


if __name__ == "__main__":
    sys.exit(main())
