"""The scripts of examples/evict, started with programs that only write down how they were started."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import tomllib
from pathlib import Path

import pytest

from gati.evict.plugins import lmcache, sglang
from gati.evict.plugins.settings import VARIABLE, PluginSettings, plugin_settings

REPOSITORY = Path(__file__).resolve().parents[3]


def started(script: str, folder: Path, *more: str, **variables: str) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment that a script starts its engine with."""
    program = (
        "#!/usr/bin/env python3\nimport json, os, sys\nprint(json.dumps([sys.argv, dict(os.environ)]))\n"
    )
    for name in ("vllm", "sglang"):
        path = folder / name
        path.write_text(program)
        path.chmod(0o755)
    own = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment = {**own, "PATH": f"{folder}:{os.environ['PATH']}", **variables}
    told = subprocess.run(
        [REPOSITORY / "examples" / "evict" / script, *more],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    arguments, environment = json.loads(told.stdout)
    return arguments, environment


@pytest.mark.parametrize("script", ["vllm.sh", "sglang.sh", "lmcache.sh"])
def test_its_settings_are_read(script: str, tmp_path: Path) -> None:
    _, environment = started(script, tmp_path)
    assert plugin_settings({VARIABLE: environment[VARIABLE]}) == PluginSettings()


@pytest.mark.parametrize("script", ["vllm.sh", "sglang.sh", "lmcache.sh"])
def test_it_passes_on_arguments_and_keeps_settings(script: str, tmp_path: Path) -> None:
    arguments, _ = started(script, tmp_path)
    assert "Qwen/Qwen2.5-7B-Instruct" in arguments
    mine = '{"policy": "lru"}'
    arguments, environment = started(script, tmp_path, "my model", "--port", "80", **{VARIABLE: mine})
    at = arguments.index("my model")
    assert arguments[at : at + 3] == ["my model", "--port", "80"]
    assert environment[VARIABLE] == mine


def test_vllm_is_told_where_the_policy_is(tmp_path: Path) -> None:
    arguments, _ = started("vllm.sh", tmp_path)
    extra = json.loads(arguments[-1])["kv_connector_extra_config"]
    module = importlib.import_module(extra["cache_policy_module_path"])
    assert module.VllmEviction.__name__ == "VllmEviction"
    assert extra["eviction_policy"] == "GatiCachePolicy"


def test_sglang_and_lmcache_are_told_the_names_that_are_registered(tmp_path: Path) -> None:
    arguments, _ = started("sglang.sh", tmp_path)
    assert arguments[arguments.index("--radix-cache-backend") + 1] == sglang.NAME
    _, environment = started("lmcache.sh", tmp_path)
    assert environment["LMCACHE_CACHE_POLICY"] == lmcache.NAME


def test_the_package_names_what_engines_load() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for group in ("vllm.general_plugins", "sglang.srt.plugins"):
        for entry in project["entry-points"][group].values():
            module, _, name = entry.partition(":")
            assert callable(getattr(importlib.import_module(module), name))
