"""Class names and labels of a library's network, fitted to the data of any verb."""

from __future__ import annotations

from dataclasses import dataclass

from gati.exploration.library import Library
from gati.model.labels import ClassNames, LabelMap, fit_labels, read_class_names, read_label_map, unmapped
from gati.model.sequence import Data


@dataclass(frozen=True)
class Named:
    """Data whose labels are the network's class numbers, and the class names; `note` says what is missing."""

    data: Data
    class_names: tuple[str, ...] | None
    note: str = ""


def name_and_label(
    library: Library,
    data: Data,
    class_names: ClassNames | None = None,
    label_map: LabelMap | None = None,
) -> Named:
    """Fit the labels of data to the network, with the class names and the label map of the exploration.

    `class_names` and `label_map` override these. The exploration's label map is ignored if the data has
    labels that it does not contain.

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
