"""The seeds that learned eviction takes, everywhere the same: NumPy, LightGBM and scikit-learn take these."""

from __future__ import annotations

from gati.errors import EvictError

_MOST_SEED = 2**32 - 1  # scikit-learn takes no larger ones


def check_seed(seed: int, name: str = "seed") -> None:
    """Raises EvictError for a seed out of range; `name` is what the user calls it."""
    if not 0 <= seed <= _MOST_SEED:
        raise EvictError(f"{name} is {seed}; give a number from 0 to {_MOST_SEED}")
