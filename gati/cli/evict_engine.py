"""`gati evict engine`: a small language model with a prefix cache, behind OpenAI's API."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from gati.cli.options import Certificate, CertificateKey, Host, LogLevel, Port
from gati.errors import EvictError
from gati.units import parse_bytes, parse_duration

_NEEDED = ("httptools", "orjson", "prometheus_client", "pydantic", "starlette", "uvicorn", "uvloop")


def engine(
    network: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR",
            help="Folder with config.json and model.safetensors of a Llama; default: a small random network.",
        ),
    ] = None,
    budget: Annotated[
        str,
        typer.Option(metavar="BYTES", help="Memory for keys and values of all requests, cached or in use."),
    ] = "256MiB",
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="Eviction policy: gati, lru, laru, lpc and others.")
    ] = "gati",
    predictor: Annotated[
        str, typer.Option(metavar="NAME", help="reuse, or the folder that gati evict train wrote.")
    ] = "reuse",
    cost_growth: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="By what share of a first page's time each page before it makes a page dearer to compute; "
            "default: from the network's sizes; 0: gati saves pages instead of time.",
        ),
    ] = None,
    gap: Annotated[
        str, typer.Option("--gap", metavar="TIME", help="Mean pause before a user's next prompt, for lpc.")
    ] = "100s",
    reuse: Annotated[bool, typer.Option(help="Cache prefixes; --no-reuse for comparison.")] = True,
    page: Annotated[int, typer.Option(metavar="N", help="Tokens per page.")] = 16,
    chunk: Annotated[int, typer.Option(metavar="N", help="Prompt tokens per step.")] = 256,
    running: Annotated[
        int, typer.Option(metavar="N", help="Maximum number of requests computed concurrently.")
    ] = 16,
    waiting: Annotated[
        int, typer.Option(metavar="N", help="Maximum queue length; further requests get status 429.")
    ] = 256,
    service: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of a gati evict serve, which then fits the predictor."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The network's name for clients; default: its folder's name."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random network and of randomised policies.")] = 0,
    threads: Annotated[
        int | None,
        typer.Option(metavar="N", help="Threads that compute. Default: torch's choice."),
    ] = None,
    access_log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Append a line for each request of a page or more: a trace for gati evict replay and train.",
        ),
    ] = None,
    host: Host = None,
    port: Port = None,
    keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="API keys of clients, as for gati serve."),
    ] = None,
    certificate: Certificate = None,
    certificate_key: CertificateKey = None,
    log_level: LogLevel = None,
) -> None:
    """Serve a language model on the CPU over /v1/completions, /v1/models and /metrics.

    Computed prefixes of prompts stay in pages until the policy evicts them, so time to first token can be
    measured under each policy with OpenAI's clients. Caching changes no answer.
    """
    from gati.evict.seeds import check_seed  # loads NumPy, which help does without

    check_seed(seed, "--seed")
    missing = [package for package in _NEEDED if find_spec(package) is None]
    if missing:
        raise EvictError(f"gati evict engine needs {', '.join(missing)}: pip install 'gati[serve,evict]'")
    from gati.evict.engine.engine import PrefixEngineLimits
    from gati.evict.engine.pages import KeptPrefixes
    from services.completions.serve import CompletionsSettings, serve_completions
    from services.config import ENVIRONMENT_PREFIX, ServeConfig, validated

    settings = CompletionsSettings(
        network=network,
        name=name,
        seed=seed,
        budget_bytes=parse_bytes(budget),
        page_tokens=page,
        kept=KeptPrefixes(
            policy,
            predictor,
            parse_duration(gap),
            seed,
            reuse,
            None if service is None else str(service),
            cost_growth,
        ),
        limits=PrefixEngineLimits(running, waiting, chunk),
        access_log=access_log,
        threads=threads,
    )
    config = validated(
        ServeConfig,
        host=host,
        port=port,
        api_key=os.environ.get(f"{ENVIRONMENT_PREFIX}API_KEY"),
        keys_file=keys,
        certificate=certificate,
        certificate_key=certificate_key,
        log_level=log_level,
    )
    serve_completions(
        settings, config, lambda url, served: typer.echo(f"serving {served} at {url}/v1/completions")
    )
