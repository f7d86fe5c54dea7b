"""How many requests are looked at for a proof of memory."""

from __future__ import annotations

from dataclasses import dataclass

from gati.guard.proof import Proof

_EAGER = 3  # consecutive requests looked at first, in multiples of the audits that complete a lossless proof


@dataclass
class Effort:
    """The share of requests looked at for the current proof, fixed before their answers are known.

    At first it is 1, until the proof has seen several times the audits that would complete it without a loss:
    an early proof saves most. After that it is the share of base answers computed when the proof began.
    """

    _proof: Proof | None = None
    _then: float = 0.0
    _left: int = 0

    def share(self, proof: Proof | None, share: float) -> float:
        """The current share for `proof`, where `share` are computed for other reasons."""
        if proof is not None and proof is not self._proof:
            self._proof, self._then, self._left = proof, share, _EAGER * proof.required
        if proof is None:
            return 0.0
        return 1.0 if self._left else self._then

    def looked(self) -> None:
        """Count a request that is looked at."""
        self._left = max(0, self._left - 1)
