"""The network's answers to the held-out inputs, kept while it computes them.

A slow network answers for hours, before anything is trained. What it has answered is written once a minute,
or after each input that takes longer, so an interruption costs no more than that.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gati.exploration.budget import Budget
from gati.exploration.state import RunState
from gati.files import atomic_write

_EVERY_S = 60.0


class KeptAnswers:
    """The rows [m, K] of the first m inputs, in files of an exploration's state.

    `inputs` identifies all inputs in their order, and `probe` (JSON) the network. Rows of other inputs are
    removed, and rows whose probe `same_network` refuses. `seconds` is the time that the rows have taken, in
    earlier runs, too.
    """

    def __init__(
        self,
        state: RunState,
        budget: Budget,
        inputs: str,
        probe: Any,
        same_network: Callable[[Any], bool],
    ) -> None:
        self._folder, self._budget = state.answers_path, budget
        self._inputs, self._probe, self._same_network = inputs, probe, same_network
        self._batches: list[Tensor] = []
        self._written, self._parts = 0, 0  # rows, and the files that hold them
        self._seconds_written = self.seconds = 0.0
        if not self._read():
            self.forget()

    def __len__(self) -> int:
        """The number of inputs that are answered."""
        return sum(map(len, self._batches))

    @property
    def rows(self) -> Tensor:
        """All rows, [m, K]."""
        if len(self._batches) > 1:
            self._batches = [torch.cat(self._batches)]
        return self._batches[0]

    def collect(self, batches: Iterable[Tensor]) -> None:
        """Add the rows of further inputs, batch by batch."""
        last_s = written_s = self._budget.clock()
        for batch in batches:
            self._batches.append(batch)
            now_s = self._budget.clock()
            self.seconds += now_s - last_s
            last_s = now_s
            if now_s - written_s >= _EVERY_S:
                self._write()
                written_s = now_s
        if self._parts:  # what follows takes long, too
            self._write()

    def forget(self) -> None:
        """Remove all rows."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._batches, self._written, self._parts = [], 0, 0
        self._seconds_written = self.seconds = 0.0

    def _write(self) -> None:
        if self._written == len(self):
            return
        seconds = self.seconds - self._seconds_written
        notes = {"inputs": self._inputs, "first": str(self._written), "seconds": repr(seconds)}
        notes |= {"probe": json.dumps(self._probe)}
        rows = {"rows": self.rows[self._written :].clone()}
        atomic_write(
            self._folder / f"{self._parts:06}.safetensors",
            lambda temporary: save_file(rows, temporary, notes),
        )
        self._parts += 1
        self._written, self._seconds_written = len(self), self.seconds
        self._budget.note()

    def _read(self) -> bool:
        """Read what an interrupted run has written; False if it is another's, or not whole."""
        for path in sorted(self._folder.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    notes, rows = file.metadata() or {}, file.get_tensor("rows")
            except (OSError, SafetensorError):
                return False
            if notes.get("inputs") != self._inputs or int(notes["first"]) != len(self):
                return False
            if not self._same_network(json.loads(notes["probe"])):
                return False
            self._batches.append(rows)
            self._parts, self._written = self._parts + 1, len(self)
            self._seconds_written = self.seconds = self.seconds + float(notes["seconds"])
        return True
