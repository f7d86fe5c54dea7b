"""SGLang's radix cache: the backend `gati`, chosen by `--radix-cache-backend gati`.

Written for SGLang 0.5.23. `register` is an entry point of the group `sglang.srt.plugins`, so SGLang finds the
backend if Gati is installed. It is SGLang's unified radix cache with the Python tree, which asks a strategy
for the priority of every leaf; before an eviction, the chosen pages get the lowest priorities. A block is a
page: use pages of 16 tokens or more (`--page-size 16`), because each page gets a name.

For `lpc` and `laru+lpc`, requests pass the probability that their conversation continues as a sampling
parameter: `{"custom_params": {"gati_continue": 0.9}}`; without it, an average is assumed.

Each rank of SGLang has its own cache, and all must evict the same pages. Predictions depend on the clock, so
with several ranks only policies without predictions are accepted.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

from gati.errors import EvictError
from gati.evict.plugins.interfaces import check_attributes, check_methods, other_version
from gati.evict.plugins.settings import HINT, plugin_settings
from gati.evict.policy.registry import POLICIES, policy_named

NAME = "gati"
_OVERRIDDEN = ("match_prefix", "insert", "inc_lock_ref", "dec_lock_ref", "evict", "evict_for_alloc", "reset")
_OF_TREES = ("eviction_strategy", "evictable_device_leaves", "node_by_id", "is_eagle")
_EXPECTED = 1_000  # requests that were counted when room was made, and have not stored yet


class VictimsFirst:
    """SGLang's `EvictionStrategy`: evicts chosen nodes first, in their order, then the least recent."""

    def __init__(self, name_of: Callable[[Any], int | None]) -> None:
        self._name_of = name_of
        self.order: dict[int | None, int] = {}

    def get_priority(self, node: Any) -> tuple[int, float]:
        """The priority of a node; the lowest is evicted first."""
        rank = self.order.get(self._name_of(node))
        return (1, node.last_access_time) if rank is None else (0, float(rank))


class SglangEviction:
    """A mixin; put it before SGLang's `UnifiedRadixCache` in the bases of a class.

    A request is counted when room is made for it or, if none is needed, when it first stores. A page is
    named by its tokens and the name of the page before it.
    """

    disable: bool
    tree_core: Any
    touch_prefix: Callable[[Any], None]

    def __init__(self, params: Any, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._page = params.page_size
        self._clock = clock
        settings = plugin_settings()
        capacity = settings.blocks or params.token_to_kv_pool_allocator.size // self._page
        self._settings = settings
        self._capacity = max(capacity, 1)
        self._books = settings.books(self._capacity)
        self._looked_up: Any = None  # the key of a request that has not stored all of it yet
        self._asked: list[int] | None = None  # its names, once they are needed
        self._begin_anew()
        super().__init__(params)  # type: ignore[call-arg]
        check_attributes("sglang", self.tree_core, _OF_TREES)
        self._strategy = VictimsFirst(self._name)
        self.tree_core.eviction_strategy = self._strategy

    def reset(self) -> None:
        """Forget everything, including what was learned."""
        super().reset()  # type: ignore[misc]
        self._books.close()
        self._books = self._settings.books(self._capacity)
        self._begin_anew()

    def match_prefix(self, params: Any) -> Any:
        """Look up a prefix; room is made next for the last request that was looked up."""
        if params.req is not None:  # SGLang looks up what it has just stored, too: without a request
            self._looked_up, self._asked = params.key, None
            if POLICIES[self._settings.policy].converses and not self.disable:
                self._note(params)
        return super().match_prefix(params)  # type: ignore[misc]

    def insert(self, params: Any) -> Any:
        """Store a request, or a further part of it."""
        result = super().insert(params)  # type: ignore[misc]
        if not self.disable:
            self._stored(self._names(params.key), result.prefix_len // self._page, params.inserted_len > 0)
        return result

    def inc_lock_ref(self, node_id: Any, *more: Any, **options: Any) -> Any:
        """A request uses a path."""
        if not self.disable and (name := self._name(self.tree_core.node_by_id(node_id))) is not None:
            self._books.pin(name)
        return super().inc_lock_ref(node_id, *more, **options)  # type: ignore[misc]

    def dec_lock_ref(self, node_id: Any, *more: Any, **options: Any) -> Any:
        """A request no longer uses a path."""
        if not self.disable and (name := self._name(self.tree_core.node_by_id(node_id))) is not None:
            self._books.unpin(name)
        return super().dec_lock_ref(node_id, *more, **options)  # type: ignore[misc]

    def evict(self, params: Any) -> Any:
        """Free tokens."""
        self._choose(params.num_tokens)
        return super().evict(params)  # type: ignore[misc]

    def evict_for_alloc(self, params: Any, **options: Any) -> Any:
        """Free tokens until there is room for an allocation."""
        self._choose(params.num_tokens)
        return super().evict_for_alloc(params, **options)  # type: ignore[misc]

    def figures(self) -> dict[str, Any]:
        """Counts of policy, predictor and index."""
        return dict(self._books.figures())

    def _begin_anew(self) -> None:
        self._looked_up = self._asked = None
        self._expected: OrderedDict[int, None] = OrderedDict()  # last pages of counted requests
        self._hints: OrderedDict[int, Any] = OrderedDict()  # of requests, by the last page that was looked up
        self._under_way: list[int] = []  # the request for which room was last made
        self._nodes: WeakValueDictionary[int, Any] = WeakValueDictionary()  # by their last pages

    def _stored(self, names: list[int], present: int, goes_on: bool) -> None:
        if not names:
            return
        asked = self._asked_names()
        if names[: len(asked)] == asked:  # room that is needed from now on is not for its prompt
            self._looked_up = self._asked = None
        for name in names[present:]:
            if name in self._books:  # SGLang evicted more than the chosen pages
                self._books.forget(name)
        counted = next((name for name in reversed(names) if name in self._expected), None)
        if counted is not None:
            del self._expected[counted]
        under_way, self._under_way = self._under_way, []
        if under_way and names[: len(under_way)] == under_way:
            self._books.stored(under_way)
            self._books.finish()
            goes_on = True
        elif names == under_way[: len(names)]:  # a part of a long prompt, whose rest is expected
            self._books.stored(names)
            self._books.finish()
            return
        if len(names) == len(under_way) and goes_on:
            return
        if goes_on or counted is not None:
            self._books.resume(names, self._clock())
        else:
            self._begin(names)
        self._books.stored(names)
        self._books.finish()

    def _choose(self, tokens: int) -> None:
        """Give the lowest priorities to the victims; without any, SGLang evicts by recency."""
        self._strategy.order = {}
        count = -(-tokens // self._page)
        if self.disable or count <= 0:
            return
        names = self._asked_names()
        if names and names != self._under_way:
            if names[-1] in self._expected:
                self._books.resume(names, self._clock())
            else:
                self._begin(names)
            self._expected[names[-1]] = None
            if len(self._expected) > _EXPECTED:
                self._expected.popitem(last=False)
            self._under_way = names
        incoming = [name for name in names if name not in self._books]
        victims: Any = self._books.victims(count, incoming)
        if victims is not None:
            self._strategy.order = {name: rank for rank, name in enumerate(victims)}
            self._cut(victims)

    def _note(self, params: Any) -> None:
        """Store a request's continuation probability until the request is counted."""
        names, given = self._names(params.key), params.req.sampling_params.custom_params
        if names:
            self._hints[names[-1]] = given.get(HINT) if isinstance(given, dict) else None
            if len(self._hints) > _EXPECTED:
                self._hints.popitem(last=False)

    def _begin(self, names: list[int]) -> None:
        """Count a request, with the continuation probability stored at its lookup."""
        looked_up = next((name for name in reversed(names) if name in self._hints), None)
        self._books.hint(None if looked_up is None else self._hints[looked_up])
        self._books.begin(names, self._clock())

    def _cut(self, victims: list[int]) -> None:
        """Split nodes if only their last pages are to be evicted."""
        for node in self.tree_core.evictable_device_leaves:
            self._name(node)
        chosen = set(victims)
        for name in victims:
            node = self._nodes.get(name)
            if node is None or node.key.is_bigram:  # with pairs of tokens, the whole node is evicted
                continue
            stays = sum(each not in chosen for each in self._page_names(node.key, self._name(node.parent)))
            if stays:
                self.touch_prefix(_path_key(node, stays * self._page))

    def _asked_names(self) -> list[int]:
        """Names of the pages of the request that was looked up last, until all of them are stored."""
        if self._asked is None:
            self._asked = [] if self._looked_up is None else self._names(self._looked_up)
        return self._asked

    def _names(self, key: Any) -> list[int]:
        key, _ = key.maybe_to_bigram_view(self.tree_core.is_eagle)
        return self._page_names(key.page_aligned(self._page), None)

    def _page_names(self, key: Any, name: int | None) -> list[int]:
        """Names of the pages of `key`, which follows the page with the given name."""
        names = []
        for offset in range(0, len(key) - self._page + 1, self._page):
            name = hash((name, key.child_key_at(offset, self._page)))
            names.append(name)
        return names

    def _name(self, node: Any) -> int | None:
        """The name of the last page of a node, stored in the node; None for the root."""
        path = []
        while node.parent is not None and getattr(node, "gati_name", None) is None:
            path.append(node)
            node = node.parent
        name: int | None = getattr(node, "gati_name", None)
        for each in reversed(path):
            name = each.gati_name = self._page_names(each.key, name)[-1]
            self._nodes[name] = each
        return name


def _path_key(node: Any, tokens: int) -> Any:
    """The key of a node's ancestors and its first `tokens` tokens."""
    parts = [node.key.raw_token_ids()[:tokens]]
    above = node.parent
    while above.parent is not None:
        parts.append(above.key.raw_token_ids())
        above = above.parent
    joined = array("q")
    for part in reversed(parts):
        joined.extend(part)
    return type(node.key)(joined, node.key.extra_key, cache_salt=node.key.cache_salt)


@cache
def _cache_class() -> type:
    try:
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    except ImportError as error:
        raise other_version("sglang", str(error)) from error
    check_methods("sglang", SglangEviction, UnifiedRadixCache, _OVERRIDDEN)
    check_attributes("sglang", UnifiedRadixCache, ["touch_prefix"])
    return type("GatiRadixCache", (SglangEviction, UnifiedRadixCache), {"__doc__": SglangEviction.__doc__})


def make_cache(ctx: Any) -> Any:
    """The factory of the backend `gati` for SGLang.

    Raises EvictError for predictions with several ranks, and for an SGLang with another interface.
    """
    try:
        from sglang.srt.mem_cache.registry import create_unified_radix_cache, default_radix_cache_factory
    except ImportError as error:
        raise other_version("sglang", str(error)) from error

    if ctx.disable_radix_cache:
        return default_radix_cache_factory(ctx)
    name = plugin_settings().policy
    if ctx.tp_size > 1 and policy_named(name, flat=False).predicts:
        raise EvictError(
            f"policy {name} predicts from the clock, so {ctx.tp_size} ranks could evict different pages: "
            "serve with --tp-size 1, or choose a policy without predictions"
        )
    check_attributes("sglang", ctx.params, ["tree_core_backend"])
    ctx.params.tree_core_backend = "python"  # the Rust core has its own priorities
    return create_unified_radix_cache(ctx, cache_class=_cache_class())


def register() -> None:
    """Register the backend with SGLang."""
    from sglang.srt.mem_cache.registry import register_radix_cache_backend, registered_radix_cache_backends

    if NAME not in registered_radix_cache_backends():
        register_radix_cache_backend(NAME, make_cache)
