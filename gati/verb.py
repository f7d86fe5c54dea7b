"""Modules of Gati that have the name of a verb, and are that verb when they are called.

`gati.compose` is the room where compositions are made, and `gati.compose(...)` makes one. A name means one
thing only in Python: were it the function, `import gati.compose.problem as problem` would find no `problem`
in it; were it the plain module, nobody could call it. So the module can be called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from inspect import Signature, signature
from types import ModuleType
from typing import Any

__all__ = ["Verb", "make_verb"]


def make_verb(module: str) -> None:
    """Let the module of that name, which is being imported, be called like the verb it is named after.

    The verb of `gati.demo` is the function `demo` in it; that of a package such as `gati.compose` is the
    function `compose` of its module `gati.compose.compose`, which is imported when it is needed.
    """
    sys.modules[module].__class__ = Verb


class Verb(ModuleType):
    """A module that is called; `__doc__` and `__signature__` are those of its verb."""

    def __call__(self, *arguments: Any, **wishes: Any) -> Any:
        """Call the verb."""
        return _function_of(self)(*arguments, **wishes)

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        """Pickled by name, as functions are."""
        return import_module, (self.__name__,)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        """That of the verb: `help(gati.compose)` tells how to call it."""
        return _function_of(self).__doc__

    @property
    def __signature__(self) -> Signature:
        return signature(_function_of(self))


def _function_of(module: ModuleType) -> Callable[..., Any]:
    name = module.__name__.rpartition(".")[2]
    home = import_module(f"{module.__name__}.{name}") if hasattr(module, "__path__") else module
    function: Callable[..., Any] = vars(home)[name]
    return function
