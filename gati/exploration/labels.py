"""The names and labels that a library's network knows, for data of any verb."""

from __future__ import annotations

from dataclasses import dataclass

from gati.exploration.library import Library
from gati.model.labels import ClassNames, LabelMap, fit_labels, read_class_names, read_label_map, unmapped
from gati.model.sequence import Data


@dataclass(frozen=True)
class Named:
    """Data labelled as the network numbers its classes, and their names; `note` says what is missing."""

    data: Data
    class_names: tuple[str, ...] | None
    note: str = ""


def name_and_label(
    library: Library,
    data: Data,
    class_names: ClassNames | None = None,
    label_map: LabelMap | None = None,
) -> Named:
    """Fit the labels of data to the network, with the names and the label map that explore was given.

    `class_names` and `label_map` take precedence over those. What explore knows about its own data is not
    held against data that has other labels.

    **Raises:** `DataError` as `read_class_names`, `read_label_map` and `fit_labels` do.
    """
    manifest = library.manifest
    names = manifest.class_names if class_names is None else read_class_names(class_names, manifest.classes)
    if label_map is not None:
        mapped = read_label_map(label_map, manifest.classes)
        return Named(fit_labels(data, manifest.classes, names, mapped).data, names)
    stored = manifest.settings.get("label_map")
    known = stored if stored and not unmapped(data, stored) else None
    fitted = fit_labels(data, manifest.classes, names, known)
    return Named(fitted.data, names, fitted.note)
