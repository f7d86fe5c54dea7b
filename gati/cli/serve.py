"""The verbs that serve: `gati serve` and `gati query`; `gati.cli` registers them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from gati.errors import DataError, GatiError, RequestError, UnavailableError
from gati.units import parse_duration

__all__ = ["query", "serve"]

_NEEDED = (
    "fastapi",
    "fastapi_offline",
    "httpx",
    "orjson",
    "prometheus_client",
    "thrift",
    "uvicorn",
    "uvloop",
)


def serve(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG|DIR",
            help="A cache library, a folder of them, a pipeline, or a TOML file with \\[models] and "
            "\\[pipelines].",
        ),
    ],
    host: Annotated[str | None, typer.Option(help="Address to listen on; 127.0.0.1 unless given.")] = None,
    port: Annotated[int | None, typer.Option(help="8000 unless given; 0 picks a free port.")] = None,
    composition: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Composition of the cache library; 'default' unless given."),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(metavar="N", help="Processes per model that share its requests; 1 unless given."),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS]",
            help="Run the models' processes on a Ray cluster, the one of this machine unless an address is "
            "given: HOST:PORT.",
        ),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Several keys, with rights and quotas; read again on SIGHUP."),
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Serve HTTPS with this certificate (PEM).")
    ] = None,
    certificate_key: Annotated[
        Path | None, typer.Option("--certificate-key", metavar="FILE", help="The certificate's key (PEM).")
    ] = None,
    drain: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="After SIGTERM, keep answering this long while not ready, for load balancers.",
        ),
    ] = None,
    log_level: Annotated[
        str | None, typer.Option("--log-level", help="debug, info (one line per request), warning, error.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the effective settings and their origins; start nothing.")
    ] = False,
) -> None:
    """Serve models and pipelines over REST, one process or more per model.

    Single models speak the Open Inference Protocol (V2), pipelines take an image and a latency SLO; /docs
    documents both. Caches answer if they are certified or proven by audits, else the base model does;
    each response states its promise. Settings come from the file, then the environment (GATI_SERVE_PORT and
    so on), then options.
    """
    _check_installed()
    from services.config import read_config
    from services.serve import serve as run
    from services.serve import with_pipeline_models

    options = {
        "host": host,
        "port": port,
        "replicas": replicas,
        "ray": ray,
        "log_level": log_level,
        "keys_file": keys,
        "certificate": certificate,
        "certificate_key": certificate_key,
        "drain_s": None if drain is None else parse_duration(drain),
    }
    effective = read_config(target, options, composition=composition)
    if dry_run:
        _show_settings(effective.rows(), with_pipeline_models(effective.config)[0].models)
        return
    run(effective.config, lambda url: typer.echo(f"serving at {url} (documentation: {url}/docs)"))


def query(
    pipeline: Annotated[str, typer.Argument(metavar="PIPELINE", help="Name of the pipeline in gati serve.")],
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="An image file.")],
    slo: Annotated[
        str | None, typer.Option("--slo", metavar="TIME", help="Latency SLO, such as 80ms.")
    ] = None,
    url: Annotated[str, typer.Option(help="Where gati serve listens.")] = "http://127.0.0.1:8000",
    priority: Annotated[int | None, typer.Option(help="1 is served first.")] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="GATI_API_KEY", help="If the server requires one.")
    ] = None,
) -> None:
    """Query a served pipeline with an image: options that answered, exits, and latency."""
    _check_installed()
    wishes: dict[str, Any] = {}
    if slo is not None:
        wishes["latency_slo_ms"] = 1e3 * parse_duration(slo)
    if priority is not None:
        wishes["priority"] = priority
    _show_answer(_ask(url, pipeline, image, wishes, api_key))


def _ask(url: str, pipeline: str, image: Path, wishes: Mapping[str, Any], api_key: str | None) -> Any:
    import httpx

    try:
        data = image.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {image} ({error.strerror}); give an image file") from error
    headers = {"Content-Type": "application/octet-stream"}
    if api_key is not None:
        headers["X-API-Key"] = api_key
    try:
        where = f"{url}/v1/pipelines/{pipeline}/query"
        reply = httpx.post(where, content=data, params=dict(wishes), headers=headers, timeout=60)
        document = reply.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise UnavailableError(f"no Gati answers at {url} ({error}); start one with gati serve") from error
    if reply.is_error:
        again = reply.headers.get("Retry-After")
        message = f"{document.get('error', reply.reason_phrase)} (status {reply.status_code})"
        raise _RefusedError(message + (f"; ask again in {again} s" if again else ""))
    return document


class _RefusedError(RequestError):
    """The server's reason for refusing."""

    exit_status = 1


def _show_answer(answer: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.tree import Tree

    met = {True: "SLO met", False: "SLO missed", None: "no SLO"}[answer["slo_met"]]
    slo = "" if answer["latency_slo_ms"] is None else f" of {answer['latency_slo_ms']:.0f} ms"
    tree = Tree(f"[bold]{escape(answer['label'])}[/bold]  {answer['latency_ms']:.1f} ms{slo}, {met}")
    for stage in answer["stages"]:
        left = f"left after {stage['exit']}" if stage["from_cache"] else "ran to the end"
        label, likely = f"[bold]{escape(stage['label'])}[/bold]", f"{stage['probability']:.0%}"
        branch = tree.add(f"{escape(stage['stage'])}: {label} ({likely})")
        ran = f"{stage['option']} ({stage['model']}, version {stage['version']}) {left}"
        branch.add(escape(f"{ran}; {stage['latency_ms']:.1f} ms of {stage['budget_ms']:.1f} ms"))
    for name in answer["skipped"]:
        tree.add(f"[dim]{escape(name)}: skipped[/dim]")
    Console(highlight=False).print(tree)


def _show_settings(rows: list[tuple[str, str, str]], models: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("setting", "value", "from", title="Effective settings")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)
    served = Table("model", "made from", title="Inference processes")
    for name, model in models.items():
        source = str(model.address or model.library or model.model)
        if model.library is not None:
            source += f" {model.composition if model.caches else '(no caches)'}"
        served.add_row(name, source)
    console.print(served)


def _check_installed() -> None:
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise GatiError(f"serving needs {', '.join(missing)}; install them with pip install 'gati[serve]'")
