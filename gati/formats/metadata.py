"""Metadata of an exported file: strings by key, structured values as JSON."""

from __future__ import annotations

import json
from typing import Any

from gati.composition.composition import Composition
from gati.engine.backends import get_backend
from gati.engine.graph.stages import GraphStages
from gati.exploration.library import Manifest
from gati.version import __version__


def metadata_of(
    manifest: Manifest, composition: Composition, stages: GraphStages, *, raw: bool
) -> dict[str, str]:
    """Return the file's metadata.

    `exits` lists the exits in the order of the output `exit`, whose value `len(exits)` means that the whole
    network answered. `input` is `preprocessed` or `image` (uint8, with the preprocessing in the file). The
    certificate of a reduced-precision engine is left out: the file computes in float32 and may answer
    differently.
    """
    exits = [
        {
            "block": leaving.block,
            "variant": leaving.variant,
            "selector": chosen.selector,
            "threshold": leaving.threshold,
        }
        for leaving, chosen in zip(stages.exits, composition.exits, strict=True)
    ]
    certificate = composition.certificate if in_float32(composition) else None
    structured: dict[str, Any] = {
        "exits": exits,
        "certificate": None if certificate is None else certificate.to_json(),
        "class_names": manifest.class_names,
        "preprocessing": manifest.preprocessing,
        "composed_for": {"backend": composition.backend, "placement": composition.placement},
    }
    plain = {
        "gati_version": __version__,
        "model": manifest.model_source.rpartition("/")[2],  # without local paths
        "checkpoint_sha256": manifest.checkpoint_sha256,
        "composition": composition.name,
        "accuracy_target": f"{composition.accuracy_target:g}",
        "input": "image" if raw else "preprocessed",
    }
    return {**plain, **{key: json.dumps(value, allow_nan=False) for key, value in structured.items()}}


def in_float32(composition: Composition) -> bool:
    """Whether the composition's engine computes in float32, like the exported file."""
    return get_backend(composition.backend).in_float32()


def warning_of(composition: Composition) -> str:
    """Return why nothing proves the file's agreement; "" if something does, or if there are no exits."""
    return composition.warning if composition.exits else ""


def describe(composition: Composition, stages: GraphStages, *, raw: bool) -> str:
    """Return a short description for people who open the file in a viewer."""
    blocks = ", ".join(leaving.block for leaving in stages.exits) or "no block (it has no exits)"
    takes = "an image, uint8 [1, H, W, C]" if raw else "one preprocessed input (see metadata 'preprocessing')"
    lines = [
        f"An early-exit network made by Gati. It takes {takes}; easy inputs exit early, after: {blocks}.",
        "probabilities [1, K]: class probabilities. exit [1]: the exit that answered (metadata 'exits'), or "
        "the number of exits if the whole network did. score [1]: of the last lookup, NaN if there was none.",
    ]
    if warning := warning_of(composition):
        lines.append(warning)
    elif composition.certificate is not None and in_float32(composition):
        lines.append(composition.certificate.sentence())
    return "\n".join(lines)
