"""`gati adapt`: the adaptation of models in a running `gati serve`; `gati.cli` registers the group."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from gati.cli.asking import AskedServer
from gati.cli.options import SERVER_URL, ServerKey, ServerUrl, examples_below
from gati.errors import UnavailableError
from gati.units import percent

_EPILOG = examples_below("gati adapt status", "gati adapt status --url http://127.0.0.1:8000 --json")

adapt = typer.Typer(
    name="adapt",
    help="Show how the models of a running gati serve adapt.",
    no_args_is_help=True,
    epilog=_EPILOG,
)


@adapt.callback()
def _adapt() -> None:
    """Without a callback, typer would turn a group of one command into that command."""


@adapt.command(epilog=_EPILOG)
def status(
    url: ServerUrl = SERVER_URL,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document.")] = False,
    api_key: ServerKey = None,
) -> None:
    """List each model's versions, proofs, memory, last retraining, and when the next one is due."""
    document = AskedServer(url, api_key, UnavailableError).ask("GET", "/v1/adaptation")
    if as_json:
        import json

        typer.echo(json.dumps(document, indent=2))
        return
    for line in lines(document, time.time()):
        typer.echo(line)


def lines(document: Mapping[str, Any], now_s: float) -> Iterator[str]:
    """The lines that show a status, at `now_s` seconds since 1970."""
    if document.get("error"):
        yield f"retraining: {document['error']}"
    for model in document["models"]:
        yield model["name"] if model["ready"] else f"{model['name']}: {model.get('error', 'not ready')}"
        for version in model["versions"]:
            yield f"  version {version['version']}: {_version(version)}"
        if model["memory"] is not None:
            yield f"  memory: {_memory(model['memory'])}"
        if model["retraining"] is not None:
            yield f"  retraining: {_retraining(model['retraining'], now_s)}"


def _version(version: Mapping[str, Any]) -> str:
    parts = [version["state"]]
    parts += ["active"] if version["active"] else []
    parts += ["waiting to take over"] if version["pending"] else []
    parts += ["lookups paused"] if version["resting"] else []
    if (version["settings"] or 0) > 1:
        parts.append(f"setting {version['level']} of {version['settings']}")
    return ", ".join([*parts, *_proof(version)])


def _memory(memory: Mapping[str, Any]) -> str:
    answers = (
        f"setting {memory['level']} of {memory['settings']}" if memory["level"] else "does not answer yet"
    )
    counted = f"{memory['answers']} answers, {memory['places']} places"
    return ", ".join([answers, counted, *_proof(memory)])


def _proof(entry: Mapping[str, Any]) -> list[str]:
    proof = entry["proof"]
    if proof is None:
        return []
    return [f"proof {proof['how_far']}, {proof['losses']} of them disagree"]


def _retraining(found: Mapping[str, Any], now_s: float) -> str:
    began = "" if found["began_s"] is None else f" for {_duration(now_s - found['began_s'])}"
    parts = [f"under way{began}"] if found["under_way"] else []
    if found["outcome"]:
        when = "" if found["changed_s"] is None else f" {_duration(now_s - found['changed_s'])} ago"
        message = f" ({found['message']})" if found["message"] else ""
        parts.append(f"last {found['outcome']}{when}{message}")
    if found["next_s"] is not None:
        parts.append(f"next in {_duration(found['next_s'])}")
    parts.append(f"{found['samples']} samples")
    if found["share"] is not None:
        parts.append(f"share {percent(found['share'], 0)}, {found['used_s']:.1f} s used")
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    seconds = max(0.0, seconds)
    return f"{seconds:.0f} s" if seconds < 120.0 else f"{seconds / 60.0:.0f} min"
