"""Settings of plug-ins from the environment, because engines create policies without options."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gati.errors import EvictError
from gati.evict.learn.following import LearningLink, following
from gati.evict.plugins.books import EngineBooks
from gati.evict.policy.registry import POLICIES, policy_named
from gati.evict.policy.weighed import PathCosts
from gati.evict.predict.conversing import hinted
from gati.evict.predict.named import Maker, predictor_named
from gati.evict.replays.replay import build
from gati.evict.seeds import check_seed

VARIABLE = "GATI_EVICT_CONFIG"
HINT = "gati_continue"  # a parameter of requests: the probability that the conversation continues


@dataclass(frozen=True)
class PluginSettings:
    """Policy, predictor and seed of a plug-in. `service` is as in `PrefixCache`.

    `blocks` is the capacity, for engines that do not report it; by default, it is the number of blocks held
    when the engine first needs room. `gap_s` is the mean pause before a user's next prompt in seconds, for
    `lpc` and `laru+lpc`. `cost_growth` is as in `PrefixCache`.
    """

    policy: str = "gati"
    predictor: str = "reuse"
    seed: int = 0
    blocks: int | None = None
    service: str | None = None
    gap_s: float = 100.0
    cost_growth: float = 0.0

    def books(self, capacity: int, *, flat: bool = False) -> EngineBooks:
        """The index of a cache of `capacity` blocks, in a prefix tree or independent.

        With a `service`, close it when the engine's cache is reset. Raises EvictError for what cannot work.
        """
        maker: Maker = following
        if self.service is None:
            maker = predictor_named(self.predictor, flat=flat, apart=True)
        if POLICIES[self.policy].converses:
            maker = hinted(self.gap_s)
        books = build(
            self.policy,
            capacity,
            maker,
            flat=flat,
            seed=self.seed,
            cost_growth=self.cost_growth,
            kind=EngineBooks,
        )
        assert isinstance(books, EngineBooks)
        if self.service is not None:
            books.link = LearningLink(books, self.service)
        return books


def plugin_settings(environment: Mapping[str, str] = os.environ) -> PluginSettings:
    """Read `GATI_EVICT_CONFIG`: a JSON object, or the path of a file with one; defaults if unset.

        GATI_EVICT_CONFIG='{"policy": "gati", "predictor": "reuse"}'

    Raises EvictError for anything else.
    """
    text = environment.get(VARIABLE, "").strip()
    if not text:
        return PluginSettings()
    try:
        if not text.startswith("{"):
            text = Path(text).read_text(encoding="utf-8")
        given = json.loads(text)
    except (OSError, ValueError) as error:
        raise EvictError(
            f"{VARIABLE} is neither a JSON object nor the path of a file with one: {error}"
        ) from error
    return _checked(given)


def _checked(given: Any) -> PluginSettings:
    kinds: dict[str, type] = {
        "policy": str,
        "predictor": str,
        "seed": int,
        "blocks": int,
        "service": str,
        "gap_s": float,
        "cost_growth": float,
    }
    names = ", ".join(field.name for field in fields(PluginSettings))
    if not isinstance(given, dict):
        raise EvictError(f"{VARIABLE} must hold a JSON object with {names}, not {given!r}")
    for name, value in given.items():
        if name not in kinds:
            raise EvictError(f"{VARIABLE}: unknown setting {name!r}; the settings are {names}")
        kind = kinds[name]
        if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool):
            raise EvictError(f"{VARIABLE}: {name} must be a {kind.__name__}, not {value!r}")
    settings = PluginSettings(**given)
    if settings.blocks is not None and settings.blocks < 1:
        raise EvictError(f"{VARIABLE}: blocks is {settings.blocks}; give at least 1")
    check_seed(settings.seed, f"{VARIABLE}: seed")
    if settings.service is not None and settings.predictor != "reuse":
        raise EvictError(f"{VARIABLE}: give a predictor or a service, not both")
    policy_named(settings.policy, flat=False)  # an invalid name fails when the engine starts
    if settings.policy == "lpc-oracle":
        raise EvictError(f"{VARIABLE}: lpc-oracle needs a whole trace in advance; use lpc")
    hinted(settings.gap_s)(1, 0)
    PathCosts(settings.cost_growth)
    predictor_named(settings.predictor)
    return settings
