"""`gati evict serve`, the eviction service; `gati.cli.evict` registers it."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from gati.cli.options import Certificate, CertificateKey, KeysFile
from gati.errors import EvictError
from gati.units import parse_bytes, parse_duration

EXAMPLES = (
    "gati evict serve learned --continuation continuation",
    "gati evict serve learned --port 8001 --keys keys.toml --host 0.0.0.0",
    'curl localhost:8001/v1/continue -d \'{"messages": [{"role": "user", "content": "Thanks, bye!"}]}\'',
)


def serve(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="Folder where engines log accesses and find versions; created if missing."
        ),
    ],
    continuation: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder that gati evict train --dialogues wrote, for /v1/continue; reread when it changes.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 picks a free port.")] = 8001,
    keys: KeysFile = None,
    certificate: Certificate = None,
    certificate_key: CertificateKey = None,
    first_fit: Annotated[
        int, typer.Option("--first-fit", metavar="N", help="Samples before the first predictor is fitted.")
    ] = 2_500,
    step: Annotated[int, typer.Option(metavar="N", help="Maximum number of samples between fits.")] = 20_000,
    trial: Annotated[
        float,
        typer.Option(
            metavar="N", help="Length of a predictor's trial, in multiples of the cache's capacity."
        ),
    ] = 8.0,
    log_limit: Annotated[
        str, typer.Option("--log-limit", metavar="SIZE", help="Size limit of all access logs together.")
    ] = "256MiB",
    look_every: Annotated[
        str, typer.Option("--look-every", metavar="TIME", help="How often access logs are read.")
    ] = "1s",
    log_level: Annotated[str, typer.Option("--log-level", help="debug, info, warning, error.")] = "info",
) -> None:
    """Train eviction predictors outside the engines, and predict whether conversations continue.

    Engines log their accesses in DIR and load the versions that appear there: evict.PrefixCache(...,
    service=DIR), or GATI_EVICT_CONFIG='{"service": "DIR"}' for plug-ins. A predictor is published once it has
    missed fewer blocks than the active one, or LRU, on requests that came after it was fitted. Engines never
    wait for this service. GATI_SERVE_API_KEY is the key for all clients.
    """
    from gati.cli.serve import announce, check_installed

    check_installed()
    if find_spec("lightgbm") is None:
        raise EvictError("fitting predictors needs LightGBM: pip install 'gati[evict]'")
    from services.config import ServeConfig, validated
    from services.eviction.server import serve_eviction
    from services.eviction.settings import FitterSettings

    config = validated(
        ServeConfig,
        host=host,
        port=port,
        keys_file=keys,
        certificate=certificate,
        certificate_key=certificate_key,
        log_level=log_level,
        api_key=os.environ.get("GATI_SERVE_API_KEY"),
    )
    fitter = validated(
        FitterSettings,
        folder=folder.absolute(),
        first_fit=first_fit,
        step=step,
        trial_capacities=trial,
        log_bytes=parse_bytes(log_limit),
        look_every_s=parse_duration(look_every),
        log_level=log_level,
    )
    serve_eviction(config, fitter, continuation, announce)
