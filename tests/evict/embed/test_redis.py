"""The tier in Redis, with a real server on a unix socket."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gati.errors import EvictError
from gati.evict.embed.cache import EmbeddingCache

redis = pytest.importorskip("redis", reason="needs the package redis: pip install 'gati[redis]'")
if shutil.which("redis-server") is None:
    pytest.skip("needs redis-server: apt-get install redis-server", allow_module_level=True)

from gati.evict.embed.redis_tier import RedisTier  # noqa: E402


@contextmanager
def running(*more: str) -> Iterator[subprocess.Popen[str]]:
    with tempfile.TemporaryDirectory() as folder:  # a path of a socket may not be long
        address = Path(folder) / "redis.sock"
        options = ["--port", "0", "--unixsocket", str(address), "--save", "", "--dir", folder, *more]
        process = subprocess.Popen(["redis-server", *options], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        if not any("ready to accept connections" in line.lower() for line in process.stdout):
            raise AssertionError("redis-server ended before it was ready")
        try:
            yield process
        finally:
            process.terminate()
            process.communicate()


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    with running() as process:
        yield process


def url_of(server: subprocess.Popen[str]) -> str:
    arguments = server.args
    assert isinstance(arguments, list)
    return f"unix://{arguments[arguments.index('--unixsocket') + 1]}"


@pytest.fixture
def url(server: subprocess.Popen[str]) -> str:
    address = url_of(server)
    redis.Redis.from_url(address).flushall()
    return address


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_embedding_bag_bit_for_bit_from_several_threads(url: str, dtype: torch.dtype) -> None:
    weight = torch.randn(3_000, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    RedisTier.write(url, "items", weight)
    slow = RedisTier(url, "items")
    assert (slow.rows, slow.width, slow.dtype) == (3_000, 16, dtype)
    reference = torch.nn.EmbeddingBag.from_pretrained(weight, mode="sum")
    cache = EmbeddingCache(slow, 200, mode="sum")

    def serve(seed: int) -> bool:
        random = np.random.default_rng(seed)
        batches = [torch.from_numpy(random.integers(0, 3_000, (40, 50))) for _ in range(4)]
        return all(torch.equal(cache(ids), reference(ids)) for ids in batches)

    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(serve, range(3)))
    slow.close()


def test_a_row_that_is_missing_or_short_is_named(url: str) -> None:
    slow = RedisTier.write(url, "items", torch.ones(10, 4))
    client = redis.Redis.from_url(url)
    client.delete(b"items:" + np.int64(7).tobytes())
    with pytest.raises(EvictError, match="no row 7 of 16 bytes in table items .1 of 2 are missing"):
        slow.fetch(np.array([6, 7]))
    client.set(b"items:" + np.int64(7).tobytes(), b"short")
    with pytest.raises(EvictError, match="no row 7"):
        slow.fetch(np.array([7, 8]))


def test_a_cache_names_a_missing_row_and_goes_on(url: str) -> None:
    weight = torch.randn(3_000, 16, generator=torch.Generator().manual_seed(0))
    cache = EmbeddingCache(RedisTier.write(url, "items", weight), 500, mode="sum")
    reference = torch.nn.EmbeddingBag.from_pretrained(weight, mode="sum")
    redis.Redis.from_url(url).delete(b"items:" + np.int64(7).tobytes())
    for first in range(10, 2_000, 90):
        ids = torch.arange(first, first + 300).view(10, 30)
        with pytest.raises(EvictError, match="no row 7 of 64 bytes in table items .1 of"):
            cache(torch.cat((ids, torch.full((10, 1), 7)), dim=1))
        assert torch.equal(cache(ids), reference(ids))


def test_a_server_that_went_away_is_named_and_its_successor_is_used(url: str) -> None:
    weight = torch.randn(300, 16, generator=torch.Generator().manual_seed(0))
    slow = RedisTier.write(url, "items", weight)
    client = redis.Redis.from_url(url)
    rows = torch.empty((5, 16))
    waiting = slow.ask(np.arange(5), rows)
    client.client_kill_filter(_type="normal", skipme=True)
    try:
        waiting()
    except EvictError as error:
        assert "is the server running" in str(error)
    else:  # the replies were on their way already
        assert torch.equal(rows, weight[:5])
    slow.ask(np.arange(5, 10), rows)()
    assert torch.equal(rows, weight[5:10])


def test_a_table_that_is_not_there_is_named(url: str) -> None:
    with pytest.raises(EvictError, match="has no table users: write it"):
        RedisTier(url, "users")


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("dtype", "load"),
        ("rows", "many"),
        ("rows", "0"),
        ("rows", "1" + 23 * "0"),
        ("rows", 6_000 * "9"),
        ("width", "-1"),
        ("width", "0"),
    ],
)
def test_a_table_of_an_unknown_shape_or_type_is_named(url: str, key: str, wrong: str) -> None:
    shape: dict[str, str | int] = {"rows": 1, "width": 1, "dtype": "float32"}
    redis.Redis.from_url(url).hset("items", mapping={**shape, key: wrong})
    with pytest.raises(EvictError, match=f"table items at .* {wrong[:4]}.* which is no table: write it"):
        RedisTier(url, "items")
    RedisTier.write(url, "items", torch.ones(3, 2))
    assert RedisTier(url, "items").rows == 3


def test_a_table_with_a_name_that_is_no_text_says_so(url: str) -> None:
    for make in (RedisTier, lambda *at: RedisTier.write(*at, torch.ones(1, 1))):
        with pytest.raises(EvictError, match=r"the name 'items\\udc80' of the table cannot be encoded"):
            make(url, "items\udc80")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("decode_responses=True", "rows are bytes, not text"),
        ("wide=1", "cannot be used: .*wide"),
        ("socket_timeout=-1", "cannot be used"),
    ],
)
def test_an_address_with_an_option_that_cannot_be_used_says_so(url: str, option: str, message: str) -> None:
    at = f"{url}?{option}"
    with pytest.raises(EvictError, match=message):
        RedisTier(at, "items")
    with pytest.raises(EvictError, match=message):
        RedisTier.write(at, "items", torch.ones(1, 1))


def test_a_smaller_table_leaves_no_rows_of_the_one_that_it_replaces(url: str) -> None:
    RedisTier.write(url, "items", torch.ones(2_500, 4))
    RedisTier.write(url, "others", torch.ones(30, 4))
    slow = RedisTier.write(url, "items", torch.zeros(7, 4))
    assert torch.equal(slow.fetch(np.arange(7)), torch.zeros(7, 4))
    client = redis.Redis.from_url(url)
    assert len(client.keys("items:*")) == 7 and len(client.keys("others:*")) == 30


def test_a_write_that_was_interrupted_leaves_no_rows_after_the_next(url: str) -> None:
    client = redis.Redis.from_url(url)
    RedisTier.write(url, "items", torch.ones(2_500, 4))
    before = RedisTier._asked
    commands: list[str] = []

    def until_the_second(tier: RedisTier, *command: Any) -> Any:
        commands.append(command[0])
        if commands.count("MSET") == 2:
            raise KeyboardInterrupt
        return before(tier, *command)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RedisTier, "_asked", until_the_second)
        with pytest.raises(KeyboardInterrupt):
            RedisTier.write(url, "items", torch.ones(4_000, 4))
    with pytest.raises(EvictError, match="has no table items: write it"):
        RedisTier(url, "items")
    RedisTier.write(url, "items", torch.zeros(7, 4))
    assert len(client.keys("items*")) == 8


def test_an_address_that_allows_too_few_connections_says_so(url: str) -> None:
    RedisTier.write(url, "items", torch.ones(3, 4))
    slow = RedisTier(f"{url}?max_connections=1", "items")
    rows = torch.empty((3, 4))
    waiting = slow.ask(np.arange(3), rows)
    with pytest.raises(EvictError, match="limits max_connections; allow one for each thread"):
        slow.fetch(np.arange(3))
    waiting()
    assert torch.equal(rows, torch.ones(3, 4))


def test_a_server_that_is_full_says_so_and_keeps_nothing_of_the_table() -> None:
    with running("--maxmemory", "3mb") as process:
        url = url_of(process)
        client = redis.Redis.from_url(url)
        client.set("other", "x")
        with pytest.raises(EvictError, match="its limit maxmemory is reached: raise it, or write a smaller"):
            RedisTier.write(url, "items", torch.ones(20_000, 64))
        assert client.keys() == [b"other"]
        slow = RedisTier.write(url, "items", torch.ones(20, 64))
        assert torch.equal(slow.fetch(np.arange(20)), torch.ones(20, 64))


@pytest.mark.parametrize(("rows", "fits"), [(100, True), (5_000, True), (7_999, False), (8_000, False)])
def test_on_a_full_server_a_smaller_table_takes_the_room_of_a_larger_one(rows: int, fits: bool) -> None:
    """It was refused, although it needs less. One that needs too much does not leave the server full."""
    with running("--maxmemory", "64mb", "--maxmemory-policy", "noeviction") as process:
        url = url_of(process)
        former = RedisTier.write(url, "items", torch.ones(8_000, 64))
        client = redis.Redis.from_url(url)
        client.config_set("maxmemory", client.info("memory")["used_memory"] - 200_000)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.set("other", "x")
        if fits:
            slow = RedisTier.write(url, "items", torch.zeros(rows, 64))
            assert torch.equal(slow.fetch(np.arange(rows)), torch.zeros(rows, 64))
            assert client.hgetall("items") == {b"rows": b"%d" % rows, b"width": b"64", b"dtype": b"float32"}
            assert client.dbsize() == rows + 1
        else:
            with pytest.raises(EvictError, match="maxmemory is reached: raise it, or write a smaller table"):
                RedisTier.write(url, "items", torch.zeros(rows, 64))
        if rows == former.rows:  # it needs as much room, so the former table serves on
            assert torch.equal(former.fetch(np.arange(rows)), torch.ones(rows, 64))
        else:
            assert fits or client.dbsize() == 0
            client.set("other", "x")


def test_a_server_without_room_for_another_client_names_the_limit() -> None:
    with running("--maxclients", "1") as process:
        first = RedisTier.write(url_of(process), "items", torch.ones(3, 4))
        with pytest.raises(EvictError, match="maxclients"):
            RedisTier(url_of(process), "items")
        first.close()


def test_what_a_server_says_of_its_limit_is_told() -> None:
    with socket.socket() as server, ThreadPoolExecutor(1) as threads:
        server.bind(("127.0.0.1", 0))
        server.listen()
        making = threads.submit(RedisTier, f"redis://127.0.0.1:{server.getsockname()[1]}/0", "items")
        refused = []
        while not making.done():
            server.settimeout(0.1)
            with suppress(TimeoutError):
                refused.append(server.accept()[0])
                refused[-1].sendall(b"-ERR max number of clients reached\r\n")
        for each in refused:
            each.close()
        with pytest.raises(EvictError, match="its limit maxclients is reached: close other connections"):
            making.result()


class Mute:
    """Passes everything on to a server until it is told to be silent; connections stay open.

    One that is told to drop ends a connection at its next command, and passes on what others say.
    """

    def __init__(self, folder: Path, server: str) -> None:
        self.silent, self.drops = threading.Event(), threading.Event()
        self.address, self.server = str(folder / "mute.sock"), server
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(self.address)
        self.listening.listen()
        self.open: list[socket.socket] = [self.listening]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            try:
                client = self.listening.accept()[0]
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(self.server)
            self.open += [client, server]
            for pair in ((client, server), (server, client)):
                threading.Thread(target=self.pass_on, args=pair, daemon=True).start()

    def pass_on(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while content := one.recv(65_536):
                if self.drops.is_set():
                    self.drops.clear()
                    one.shutdown(socket.SHUT_RDWR)
                    return
                if not self.silent.is_set():
                    other.sendall(content)
        except OSError:
            return

    def close(self) -> None:
        for each in self.open:
            each.close()


def test_a_connection_that_was_dropped_is_made_again(url: str) -> None:
    """As by a balancer that forgets idle ones: the client hears of it only after its commands."""
    weight = torch.randn(300, 16, generator=torch.Generator().manual_seed(0))
    RedisTier.write(url, "items", weight)
    with tempfile.TemporaryDirectory() as folder:
        between = Mute(Path(folder), url.removeprefix("unix://"))
        slow = RedisTier(f"unix://{between.address}", "items")
        cache = EmbeddingCache(slow, 100, mode="sum")
        try:
            for first in (0, 100):
                between.drops.set()
                ids = torch.arange(first, first + 200).view(10, 20)
                assert torch.equal(cache(ids), torch.nn.functional.embedding_bag(ids, weight, mode="sum"))
                assert not between.drops.is_set()
        finally:
            between.close()
            slow.close()


def test_a_server_that_wants_a_password_says_so() -> None:
    with running("--requirepass", "right") as process:
        with pytest.raises(EvictError, match="give its user and password in the URL"):
            RedisTier(url_of(process), "items")
        with pytest.raises(EvictError, match="give its user and password in the URL") as caught:
            RedisTier(f"{url_of(process)}?password=wrong", "items")
        assert "wrong" not in str(caught.value).partition(" failed ")[0]
        RedisTier.write(f"{url_of(process)}?password=right", "items", torch.ones(3, 4))


def test_a_part_of_a_cluster_says_so() -> None:
    with ExitStack() as stack:
        for left in (2, 1, 0):
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            try:  # of its own accord a part of a cluster listens on a fixed port
                process = stack.enter_context(
                    running("--cluster-enabled", "yes", "--cluster-port", str(port))
                )
                break
            except AssertionError:  # another program took the port meanwhile
                if not left:
                    raise
        with pytest.raises(EvictError, match="part of a cluster.* use a server of its own"):
            RedisTier(url_of(process), "items")


@pytest.mark.parametrize(
    "address",
    [
        "redis://someone:s3cret@127.0.0.1:1/0",
        "redis://:s3cret@word@127.0.0.1:1/0",
        "redis://127.0.0.1:1/0?username=someone&password=s3cret",
        "http://someone:s3cret@127.0.0.1:1/0",
        "someone:s3cret@127.0.0.1",
        "redis://:s3cret/word@127.0.0.1:1/0",
        "redis://:s3cret?word@127.0.0.1:1/0",
    ],
)
def test_no_password_is_in_a_message(address: str) -> None:
    uses: list[Callable[[], object]] = [
        lambda: RedisTier(address, "items"),
        lambda: RedisTier.write(address, "items", torch.ones(1, 1)),
    ]
    for use in uses:
        with pytest.raises(EvictError, match=r"127\.0\.0\.1|not a Redis URL") as caught:
            use()
        for secret in ("someone", "s3cret", "word@"):
            assert secret not in str(caught.value)


@pytest.mark.parametrize("by_url", [False, True])
def test_a_server_that_falls_silent_has_failed(
    url: str, by_url: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that vanishes without closing its connections."""
    monkeypatch.setattr("gati.evict.embed.redis_tier._TIMEOUT_S", 3600.0 if by_url else 0.3)
    weight = torch.randn(300, 16, generator=torch.Generator().manual_seed(0))
    RedisTier.write(url, "items", weight)
    with tempfile.TemporaryDirectory() as folder:
        mute = Mute(Path(folder), url.removeprefix("unix://"))
        slow = RedisTier(f"unix://{mute.address}" + ("?socket_timeout=0.3" if by_url else ""), "items")
        cache = EmbeddingCache(slow, 100, mode="sum")
        ids = torch.arange(200).view(10, 20)
        expected = cache(ids)
        mute.silent.set()
        with ThreadPoolExecutor(1) as threads:
            serving = threads.submit(cache, torch.arange(100, 300).view(10, 20))
            try:
                with pytest.raises(EvictError, match="failed .*is the server running"):
                    serving.result(timeout=20.0)
            finally:
                mute.close()
        assert torch.equal(expected, torch.nn.functional.embedding_bag(ids, weight, mode="sum"))


def test_a_server_that_accepts_and_never_answers_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gati.evict.embed.redis_tier._TIMEOUT_S", 0.2)
    with socket.socket() as server, ThreadPoolExecutor(1) as threads:
        server.bind(("127.0.0.1", 0))
        server.listen()
        making = threads.submit(RedisTier, f"redis://127.0.0.1:{server.getsockname()[1]}/0", "items")
        with pytest.raises(EvictError, match="failed .*is the server running"):
            making.result(timeout=20.0)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(EvictError, match="failed .* is the server running"):
        RedisTier("unix:///nowhere/redis.sock", "items")
    with pytest.raises(EvictError, match="is not a Redis URL"):
        RedisTier("here", "items")
