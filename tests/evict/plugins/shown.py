"""Modules of engines that are not installed, for the time of a test."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest


def show(monkeypatch: pytest.MonkeyPatch, modules: Mapping[str, Mapping[str, Any]]) -> None:
    """Let these modules be imported, with the packages that they are in; they have these contents only."""
    for name, contents in modules.items():
        parts = name.split(".")
        for length in range(1, len(parts)):
            package = ".".join(parts[:length])
            if package not in sys.modules:
                monkeypatch.setitem(sys.modules, package, ModuleType(package))
        module = ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
