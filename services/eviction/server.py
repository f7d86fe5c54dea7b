"""`gati evict serve`: REST in this process, and a low-priority process that fits, until SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import Callable
from pathlib import Path

import uvloop

from gati.errors import ConfigError, GatiError
from services import logs
from services.again import keep_on
from services.config import ServeConfig
from services.eviction.app import EvictionState, create_eviction_app, find_busy
from services.eviction.continuations import Continuations
from services.eviction.settings import FitterSettings
from services.process import on_signals
from services.scheduler.admission import check_exposure
from services.scheduler.front import Front
from services.scheduler.scheduler import Scheduler
from services.supervisor import Supervised
from services.web import answering, listen, url_of, web_server

_log = logging.getLogger("gati.eviction")

_LOOK_EVERY_S = 1.0  # between checks for a new continuation model
_LONGEST_PAUSE_S = 30.0


def serve_eviction(
    config: ServeConfig,
    fitter: FitterSettings,
    continuation: Path | None,
    announce: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and exit. `announce` gets the URL once the server is ready.

    **Raises:** `ConfigError` if the port is taken, or if other machines could connect without a key;
    `EvictError` if `continuation` contains no model.
    """
    logs.configure("eviction", config.log_level)
    check_exposure(config)
    try:
        fitter.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {fitter.folder} ({error.strerror}); choose another folder") from error
    continuations = Continuations(continuation)
    continuations.look()
    if not continuations.ready:
        from gati.evict.predict.continuation_stored import load_continuation

        load_continuation(continuation or "")  # raises if the model is unreadable
    listening = listen(config)
    uvloop.run(_serve(config, fitter, continuations, listening, announce))


async def _serve(
    config: ServeConfig,
    fitter: FitterSettings,
    continuations: Continuations,
    listening: socket.socket,
    announce: Callable[[str], None],
) -> None:
    fitting = Supervised("fitter", "services.eviction", fitter)
    scheduler = Scheduler(config, {}, {}, fitting)
    app = create_eviction_app(scheduler, EvictionState(continuations, fitter.folder))
    server = web_server(config, Front(app, find_busy))
    stop = asyncio.Event()
    on_signals(stop.set, reload=scheduler.keys.reload)
    await scheduler.start()
    gc.freeze()  # objects that exist now stay; collecting them would take longer than an answer
    async with answering(server, listening, scheduler.drain) as running:
        looking = asyncio.create_task(
            keep_on(
                "looking for a new continuation model",
                lambda: asyncio.to_thread(continuations.look),
                every_s=_LOOK_EVERY_S,
                longest_s=_LONGEST_PAUSE_S,
            )
        )
        announce(url_of(config, listening))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
        _log.info("draining")
        looking.cancel()
        scheduler.leaving = True
    stopped.cancel()
    if fitting.hopeless is not None:
        raise GatiError(fitting.hopeless)
