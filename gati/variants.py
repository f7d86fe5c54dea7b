"""Names of variants, their earlier names, and the variant that is the network itself."""

from __future__ import annotations

import re

# Of the families that Gati brings; written into what names variants. Up to 1, `pool` and `conv` were names of
# our own weaker forms; since 2 they are those of the publication.
FAMILIES = 2

_CALLED_NOW = {"pool": "pool-linear", "conv": "conv2d"}
_FAMILY = re.compile(r"\s*([a-z][a-z0-9_-]*)")


def companion_variant(name: str) -> str:
    """The variant of the companion called `name` (letters, digits and `._-`)."""
    return f"companion({name})"


SCENE = "scene(8,64,64)"  # what retraining tries at each of its blocks, unless told otherwise

ITSELF_NAME = "itself"  # the companion that is the network, see `gati.exploration.itself`
ITSELF = companion_variant(ITSELF_NAME)


def as_called_now(variant: str, families: int) -> str:
    """Today's name of a variant written down under `families`: `pool(64)` of 1 is `pool-linear(64)`."""
    match = _FAMILY.match(variant)
    if families >= FAMILIES or match is None or match[1] not in _CALLED_NOW:
        return variant
    return _CALLED_NOW[match[1]] + variant[match.end() :]
