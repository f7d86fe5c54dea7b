"""Finding the segments of a network that do the same work."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gati.model.cuts import Segment
from gati.model.segments import TracedModel

_NAME = re.compile(r"[A-Za-z_]\w*")
_RELEASE = re.compile(r"^ *del .*\n", re.MULTILINE)  # their alphabetical order depends on the names


def work_of(traced: TracedModel, blocks: Sequence[str]) -> tuple[str, ...]:
    """Describe the work of each segment of the network cut at `blocks`, the last one included.

    Segments with equal texts run the same operators on tensors of the same shapes; only weights may differ.
    Raises as `cut`.
    """
    shapes: tuple[Any, ...] = (traced.input_shape,)
    found = []
    for segment in traced.cut(blocks):
        found.append(f"{shapes}\n{_without_names(segment)}")
        shapes = tuple((each.shape[1:] if each.batched else each.shape) for each in segment.carried)
    return tuple(found)


def _without_names(segment: Segment) -> str:
    """The source with constants replaced by their description and locals numbered by appearance."""
    known: Mapping[str, Any] = segment.run.__globals__
    called: dict[str, str] = {}

    def anonymous(match: re.Match[str]) -> str:
        name = match.group()
        if keyword.iskeyword(name):
            return name
        if name in known and known[name] is not segment.run:
            value = known[name]
            if isinstance(value, Tensor):
                return f"<{list(value.shape)} {value.dtype}>"
            return f"<{getattr(value, '__name__', value)}>" if callable(value) else f"<{value!r}>"
        return called.setdefault(name, f"v{len(called)}")

    return _NAME.sub(anonymous, _RELEASE.sub("", segment.source))
