"""The verb `gati serve`; `gati.cli` registers it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from gati.cli.options import Certificate, CertificateKey, Host, KeysFile, LogLevel, Port
from gati.errors import GatiError
from gati.units import parse_duration

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
    host: Host = None,
    port: Port = None,
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
    keys: KeysFile = None,
    certificate: Certificate = None,
    certificate_key: CertificateKey = None,
    drain: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="After SIGTERM, report not ready but keep answering for this long, for load balancers.",
        ),
    ] = None,
    log_level: LogLevel = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the effective settings and their origins; start nothing.")
    ] = False,
) -> None:
    """Serve models and pipelines over REST, one process or more per model.

    Single models speak the Open Inference Protocol (V2), pipelines take an image, a text or a recording, with
    a latency SLO; /docs documents both. Caches answer if they are certified or proven by audits, else the
    base model does; each response states its promise. Settings come from the file, then the environment
    (GATI_SERVE_PORT and so on), then options.
    """
    check_installed()
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
    if composition is not None:
        _check_composition(target, composition)
    effective = read_config(target, options, composition=composition)
    if dry_run:
        _show_settings(effective.rows(), with_pipeline_models(effective.config)[0].models)
        return
    run(effective.config, announce)


def announce(url: str) -> None:
    """Print where a server answers. It goes on where that cannot be written, as on a full disk."""
    with suppress(OSError):
        typer.echo(f"serving at {url} (documentation: {url}/docs)")


def _check_composition(target: Path, composition: str) -> None:
    """Check the name of a composition, and that a library has it, before a process starts for it.

    Raises CompositionError, and StorageError if the library cannot be read.
    """
    from gati.composition.composition import Composition
    from gati.exploration.library import Library
    from gati.files import is_file

    library = Library(target)
    path = library.composition_path(composition)
    if is_file(library.manifest_path):
        Composition.load(path)


def _show_settings(rows: list[tuple[str, str, str]], models: Mapping[str, Any]) -> None:
    from rich.table import Table

    from gati.cli.tables import console

    table = Table("setting", "value", "from", title="Effective settings")
    for row in rows:
        table.add_row(*row)
    console().print(table)
    served = Table("model", "made from", title="Inference processes")
    for name, model in models.items():
        source = str(model.address or model.library or model.model)
        if model.library is not None:
            source += f" {model.composition if model.caches else '(no caches)'}"
        served.add_row(name, source)
    console().print(served)


def check_installed() -> None:
    """Check that the packages for serving are installed. Raises `GatiError` naming those that are not."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise GatiError(f"serving needs {', '.join(missing)}; install them with pip install 'gati[serve]'")
