"""Memory of a served model: reuses earlier base answers at the place that a request names.

It is the memory that streams use (`gati.adaptation.recall`), proven and guarded by the same audits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from gati.adaptation.recall import Recall
from gati.adaptation.recall_file import MemoryKeeper, memory_file, memory_identity
from gati.adaptation.recall_settings import MOST
from gati.guard.ladder import Judgement
from gati.guard.standing import Standing
from services.inference.loaded import needed
from services.wire.gen.ttypes import MemoryInfo, ProofProgress

_log = logging.getLogger("gati.inference")


class ServedMemory:
    """Answers from memory with an agreement of at least `agreement`, for at most `places` places.

    All its proofs together err with probability `delta`, which `standing` spends together with the proofs of
    versions. `thread` fits and writes the memory. Not thread-safe: call from the event loop.
    """

    def __init__(
        self,
        agreement: float,
        delta: float,
        standing: Standing,
        thread: Executor,
        *,
        network: str,
        places: int,
        alone: bool,
    ) -> None:
        self.agreement = agreement
        self._standing, self._thread = standing, thread
        spending = standing.spending
        identity = memory_identity(network, agreement, delta)
        self._keeper = MemoryKeeper(standing, memory_file(standing.path), identity)
        self.recall = Recall(
            agreement,
            lambda: spending.next() * delta / spending.delta,
            10_000.0,
            leave=self._leave,
            on_change=self._changed,
            alone=alone,
            places=places,
            known=self._keeper.known(),
        )
        self._keeper.watch(self.recall)

    def settled(self) -> None:
        """Save in the background, if a save is due."""
        if self._keeper.is_due():
            self._leave(self._keeper.save)

    def save(self) -> None:
        """Save now, in this thread."""
        self._keeper.save()

    @property
    def sentence(self) -> str:
        """The promise for its answers."""
        return f"at least {100.0 * self.agreement:g} % of answers are the base model's, proven for memory"

    def describe(self, answers: int) -> Any:
        """As the wire's `MemoryInfo`."""
        recall, proof = self.recall, self.recall.proof
        progress = None
        if proof is not None:
            progress = ProofProgress(proof.audits, proof.losses, needed(proof.agreement, proof.delta))
        return MemoryInfo(
            places=recall.places,
            forgotten=recall.forgotten,
            answers=answers,
            settings=recall.settings,
            level=recall.level,
            agreement=self.agreement,
            proof=progress,
        )

    def _leave(self, job: Callable[[], None]) -> bool:
        self._thread.submit(job).add_done_callback(_ended)
        return True

    def _changed(self, judged: Judgement, level: int, alone: bool) -> None:
        where = "where no lookups are made" if alone else "next to caches"
        released = judged.kind == "released"
        self._standing.save()
        self._leave(self._keeper.save)
        _log.log(
            logging.INFO if released else logging.WARNING,
            f"memory answers by setting {level} of {len(MOST)} {where}"
            if level
            else f"memory stops answering {where}",
            extra={"audits": judged.audits, "disagreements": judged.losses},
        )


def _ended(fit: Future[None]) -> None:
    error = fit.exception()
    if error is not None:
        _log.error("memory cannot be fitted or saved", exc_info=error)
