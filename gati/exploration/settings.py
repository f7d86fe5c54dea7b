"""The settings that identify an exploration: the same command in another process gives the same ones."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gati.exploration.companions import NamedNetwork
from gati.exploration.splits import content_hash
from gati.files import lasting_source
from gati.model.labels import ClassNames, LabelMap, read_class_names, read_label_map
from gati.model.load import LoadedModel
from gati.model.preprocess import Preprocessing
from gati.version import __version__


def settings_of(
    loaded: LoadedModel,
    class_names: ClassNames | None,
    label_map: LabelMap | None,
    companions: Sequence[NamedNetwork],
    **others: Any,
) -> dict[str, Any]:
    """The settings of an exploration, as JSON types; the `others` are such already.

    Of class names and label maps the contents count, not their files.

    **Raises:** `DataError` for names or a map that cannot be read.
    """
    settings: dict[str, Any] = {
        "model": loaded.source,
        "checkpoint_sha256": loaded.checkpoint_sha256,
        "preprocessing": _without_ranges(loaded.preprocessing).to_json(),
        **others,
        "gati": __version__,
    }
    if class_names is not None:
        settings["class_names"] = list(read_class_names(class_names))
    if label_map is not None:
        settings["label_map"] = read_label_map(label_map)
    if companions:
        settings["companions"] = [
            [
                each.variant,
                each.loaded.source,
                each.loaded.checkpoint_sha256,
                # its outcomes and its own preprocessing are stored together
                replace(_without_ranges(each.loaded.preprocessing), crop_rounds_down=False).to_json(),
            ]
            for each in companions
        ]
    return settings


def _without_ranges(preprocessing: Preprocessing) -> Preprocessing:
    """Without the ranges of arrays: an older Gati did not look for them, and its libraries are the same."""
    tensors = preprocessing.tensors
    return replace(preprocessing, tensors=tensors and tensors.without_ranges())


def sources_of(given: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
    """What identifies inputs by argument: their path, or the content of an object, which is read for it.

    `given` has each source, and the `Data` of an object. "objects" names those that no later command finds.
    """
    found: dict[str, Any] = {}
    objects = []
    for name, (source, opened) in given.items():
        if source is None or isinstance(source, str | Path):
            found[name] = None if source is None else lasting_source(source)
        else:
            content = hashlib.sha256(f"{opened.fingerprint} {content_hash(opened)}".encode()).hexdigest()
            found[name] = f"{type(source).__name__} of {len(opened)} inputs, {content}"
            objects.append(name)
    return {**found, "objects": objects} if objects else found
