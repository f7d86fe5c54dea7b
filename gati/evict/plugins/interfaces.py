"""Compares an installed engine's interface with the one that a plug-in was written for.

Engines call these interfaces experimental or internal. Another version could fail at its first request, or
evict as by LRU without saying so, as where a hook is never called. So each plug-in checks when it is chosen.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from gati.errors import EvictError

WRITTEN_FOR = {"vllm": "0.33.0", "sglang": "0.5.23", "lmcache": "0.5.6"}  # packages, and their versions
_FREE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_methods(package: str, own: type, theirs: type, names: Iterable[str]) -> None:
    """Check that an engine's class calls these methods with the parameters that our class has for them.

    Ours may have `*more` or `**options` for the rest. New methods of theirs are accepted unless they
    are abstract. Raises EvictError that names the first difference.
    """
    for name in names:
        method = getattr(theirs, name, None)
        if method is None:
            raise other_version(package, f"its {theirs.__name__} has no {name}")
        asked, known = _parameters(method), _parameters(getattr(own, name))
        if any(each.kind in _FREE for each in asked):  # as where something else has wrapped it
            continue
        rest = any(each.kind in _FREE for each in known)
        ours = [each.name for each in known if each.kind not in _FREE]
        if [each.name for each in asked][: len(ours) if rest else None] != ours:
            raise other_version(
                package,
                f"its {theirs.__name__}.{name} has the parameters {', '.join(each.name for each in asked)}",
            )
    for name in sorted(getattr(theirs, "__abstractmethods__", ())):
        if not hasattr(own, name):
            raise other_version(package, f"its {theirs.__name__} asks for a method {name}")


def check_attributes(package: str, theirs: object, names: Iterable[str]) -> None:
    """Check that an engine's class or object has these attributes or fields. Raises EvictError."""
    fields = getattr(theirs, "__dataclass_fields__", {})
    for name in names:
        if name not in fields and not hasattr(theirs, name):
            kind = theirs if isinstance(theirs, type) else type(theirs)
            raise other_version(package, f"its {kind.__name__} has no {name}")


def other_version(package: str, difference: str) -> EvictError:
    """The error for an engine whose interface has a `difference`."""
    try:
        found = version(package)
    except PackageNotFoundError:
        found = "that is installed"
    return EvictError(
        f"{package} {found} does not fit Gati's plug-in: {difference}. Install {package} "
        f"{WRITTEN_FOR[package]}, for which it was written, or choose a policy of the engine's own"
    )


def _parameters(method: object) -> list[inspect.Parameter]:
    found = inspect.signature(method).parameters.values()  # type: ignore[arg-type]
    return [each for each in found if each.name not in ("self", "cls")]
