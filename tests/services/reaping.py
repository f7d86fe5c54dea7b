"""Kills the process that runs this, once at each stage; see `Reaper` in `tests.services.dying`.

`sitecustomize` runs it before anything else, so it imports nothing that is large.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from importlib import import_module
from typing import Any

_VERSION = re.compile(r"/versions/\d{8}$")
_SERVICES = {"services.inference", "services.adaptation"}


def reap(died: str, stages: str) -> None:
    """Let this process die at the next stage that is not in the file `died`, if it is a service.

    Only stages that match the expression `stages` as a whole count; its first group is the name, if any.
    """
    if "serve" in sys.orig_argv:
        _begin_again_soon()
    if not _SERVICES & set(sys.orig_argv):
        return

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "os.rename":
            return
        stage = _stage(os.fsdecode(arguments[0]), os.fsdecode(arguments[1]))
        if (found := re.fullmatch(stages, stage)) is None:
            return
        stage = next(filter(None, found.groups()), stage)
        with open(died, encoding="utf-8") as file:
            if stage in file.read().splitlines():
                return
        descriptor = os.open(died, os.O_WRONLY | os.O_APPEND)
        os.write(descriptor, f"{stage}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _begin_again_soon() -> None:
    """Let a server that starts processes again wait seconds, not half a minute, after many deaths."""
    supervisor: Any = import_module("services.supervisor")
    supervisor._LONGEST_PAUSE_S = 2.0


def _stage(source: str, target: str) -> str:
    """The stage that renaming a file to `target` would complete; empty for another file."""
    if _VERSION.search(target):
        return "published"
    if "/activations/" in target:
        return "activated"
    if "gati-version-" in target:
        return "fetched"
    if "/standing/" in target and target.endswith(".npz"):
        return "memory saved"
    if "/standing/" in target and target.endswith(".json") and ".versions." not in target:
        return _states(source)
    return ""


def _states(path: str) -> str:
    """The state of the version that serves, and of the one that is on trial; `base` has no caches."""
    with open(path, encoding="utf-8") as file:
        document = json.load(file)
    known = document["versions"]
    answering = (document["parts"].get("answering") or {}).get("state") or {}
    said = [
        f"{role}: {known[found]['state'] if found else 'base'}"
        for role in ("serving", "trial")
        if (name := answering.get(role))
        for found in [next((each for each in (name, name.partition(" at ")[0]) if each in known), None)]
    ]
    return ", ".join(said) or "at first: " + ", ".join(sorted({each["state"] for each in known.values()}))
