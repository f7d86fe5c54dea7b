"""`POST /v1/continue`: the predictor's probabilities, access rights, and one-line errors."""

from __future__ import annotations

import asyncio
import errno
import gzip
import io
import json
import random
import shutil
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gati.errors import TraceError
from gati.evict.predict.continuation import ContinuationModel, ContinuationSettings
from gati.evict.predict.continuation_stored import load_continuation, save_continuation
from gati.evict.predict.hashing import TextHasher
from gati.evict.trace.dialogues import Utterance, prompts_of, utterance_of
from services.config import ServeConfig
from services.eviction import continuations as loading
from services.eviction.app import _BODY, EvictionState, create_eviction_app, find_busy
from services.eviction.continuations import Continuations
from services.eviction.conversations import MOST_CONVERSATIONS, MOST_MESSAGES
from services.scheduler.front import Front
from services.scheduler.scheduler import Scheduler
from tests.waiting import LONG_S

URL = "/v1/continue"
BYE = {"messages": [{"role": "user", "content": "Thanks, bye!"}]}
Test = Callable[[httpx.AsyncClient], Awaitable[None]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stored model of random weights."""
    return stored(tmp_path_factory.mktemp("model"), seed=0)


def stored(folder: Path, *, seed: int) -> Path:
    made = ContinuationSettings(features=2**12)
    weights = np.random.default_rng(seed).normal(0.0, 0.1, made.features).astype(np.float32)
    save_continuation(ContinuationModel(weights, 0.1, made), folder, {})
    return folder


def run(test: Test, folder: Path | None, tmp: Path | None = None, **config: Any) -> None:
    async def main() -> None:
        continuations = Continuations(folder)
        continuations.look()
        scheduler = Scheduler(ServeConfig(**config), {}, {})
        app = create_eviction_app(scheduler, EvictionState(continuations, tmp or Path("none")))
        transport = httpx.ASGITransport(Front(app, find_busy))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await test(client)

    asyncio.run(main())


contents = st.text(max_size=40) | st.sampled_from(["bye", "x" * 700, "and a table for 2?"])
messages = st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), contents), max_size=12)
spoken = messages.filter(lambda rows: any(role == "user" for role, _ in rows))


@given(st.lists(spoken, max_size=12), st.booleans())
@settings(max_examples=25, deadline=None)
def test_rest_gives_what_the_predictor_gives(
    folder: Path, rows: list[list[tuple[str, str]]], packed: bool
) -> None:
    """To the last bit, for one conversation and for many, packed or not."""
    own = load_continuation(folder)
    prompts = [prompts_of(Utterance(role == "user", text) for role, text in row)[-1] for row in rows]
    expected = own.predict(prompts).tolist()
    asked = [{"messages": [{"role": role, "content": text} for role, text in row]} for row in rows]

    async def test(client: httpx.AsyncClient) -> None:
        body, headers = json.dumps({"conversations": asked}).encode(), {}
        if packed:
            body, headers = gzip.compress(body), {"Content-Encoding": "gzip"}
        reply = await client.post(URL, content=body, headers=headers)
        assert reply.status_code == 200 and reply.json()["p"] == expected
        for one, p in zip(asked[:2], expected, strict=False):
            assert (await client.post(URL, json=one)).json()["p"] == p

    run(test, folder)


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        pytest.param(b"", 400, "is not JSON", id="nothing"),
        pytest.param(b"{" * 5000, 400, "is not JSON", id="deep"),
        pytest.param(b"[]", 400, "send {", id="a list"),
        pytest.param(b'{"messages": [], "conversations": []}', 400, "send {", id="both"),
        pytest.param(b'{"chats": []}', 400, "unknown field 'chats'", id="key"),
        pytest.param(b'{"messages": 7}', 400, "messages must be a list", id="no list"),
        pytest.param(b'{"conversations": {}}', 400, "conversations must be a list", id="no rows"),
        pytest.param(b'{"conversations": [BYE, []]}', 400, "conversation 1 must be", id="no row"),
        pytest.param(b'{"messages": []}', 422, "messages has no message of a user", id="empty"),
        pytest.param(
            b'{"conversations": [BYE, {"messages": [{"role": "system", "content": "x"}]}]}',
            422, "conversation 1 has no message of a user", id="no prompt",
        ),
        pytest.param(b'{"messages": [{"role": "user"}]}', 422, "a message is", id="no content"),
        pytest.param(b'{"messages": [{"role": 1, "content": "x"}]}', 422, "a message is", id="no role"),
        pytest.param(b'{"messages": ["hello\\nyou"]}', 422, "messages holds 'hello", id="text alone"),
        pytest.param(b'{"messages": [' * 17_500, 400, "is not JSON", id="deep messages"),
        pytest.param(
            b'{"messages": [' + b"{}," * MOST_MESSAGES + b"{}]}",
            413, "16385 messages; send at most 16384", id="more than is read",
        ),
        pytest.param(
            b'{"conversations": [{"messages": [' + b"[]," * MOST_MESSAGES + b"[]]}, BYE]}",
            413, "16386 messages; send at most 16384", id="more of several than are read",
        ),
        pytest.param(b'{"messages": "' + b"x" * 400_000 + b'"}', 413, "larger than 300000 bytes", id="large"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_in_one_line(folder: Path, body: bytes, status: int, says: str) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        reply = await client.post(URL, content=body.replace(b"BYE", json.dumps(BYE).encode()))
        assert reply.status_code == status
        assert reply.json().keys() == {"error"}
        assert says in reply.json()["error"] and "\n" not in reply.json()["error"]

    run(test, folder, largest_body_bytes=300_000)


def test_conversations_and_messages_are_bounded(folder: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        reply = await client.post(URL, json={"conversations": [BYE] * MOST_CONVERSATIONS})
        assert reply.status_code == 200 and len(reply.json()["p"]) == MOST_CONVERSATIONS
        reply = await client.post(URL, json={"conversations": [BYE] * (MOST_CONVERSATIONS + 1)})
        assert reply.status_code == 413 and "send at most 1024" in reply.json()["error"]
        long = {"messages": BYE["messages"] * MOST_MESSAGES}
        assert (await client.post(URL, json=long)).status_code == 200

    run(test, folder)


def test_texts_may_have_as_many_brackets_as_they_like(folder: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        said = {"role": "user", "content": 'the code is {"a": [' + "{[" * 20_000}
        reply = await client.post(URL, json={"messages": [said]})
        assert reply.status_code == 200

    run(test, folder)


def test_messages_that_call_tools_are_read_over(folder: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        calls = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]}
        found = await client.post(URL, json={"messages": [calls, *BYE["messages"]]})
        assert found.json() == (await client.post(URL, json=BYE)).json()

    run(test, folder)


@pytest.mark.parametrize("role", ["user", "USER", "u", "human", "assistant", "system", "User ", 1, None])
@pytest.mark.parametrize(
    "rest",
    [
        {"content": "hello"},
        {"content": None},
        {"content": None, "tool_calls": [{"id": "1"}]},
        {"tool_calls": [{"id": "1"}]},
        {"function_call": {"name": "f"}},
        {"content": [{"type": "text", "text": "hello"}, {"type": "image_url"}]},
        {"content": []},
        {"content": 7},
        {"content": {"text": "hello"}},
        {},
    ],
)
def test_the_schema_says_which_messages_are_read(role: Any, rest: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    body = _BODY["requestBody"]["content"]["application/json"]["schema"]
    said = {"role": role, **rest}
    try:
        utterance_of(said, "here")
    except TraceError:
        read = False
    else:
        read = True
    asked = {"messages": [said]}
    assert jsonschema.Draft202012Validator(body).is_valid(asked) is read


def test_content_may_come_in_parts(folder: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        parts = [{"type": "text", "text": "Thanks, bye!"}, {"type": "image_url", "image_url": {"url": "x"}}]
        found = await client.post(URL, json={"messages": [{"role": "user", "content": parts}]})
        assert found.json() == (await client.post(URL, json=BYE)).json()

    run(test, folder)


def test_keys_and_quotas_are_those_of_other_routes(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        '[keys.reader]\nkey = "reading-only"\nrights = ["read"]\n'
        '[keys.engine]\nkey = "engine-key"\nrequests_per_second = 0.001\n'
    )

    async def test(client: httpx.AsyncClient) -> None:
        async def status(key: str) -> int:
            return (await client.post(URL, json=BYE, headers={"X-API-Key": key} if key else {})).status_code

        assert [await status(key) for key in ("", "wrong", "reading-only")] == [401, 401, 401]
        found = [await status("engine-key") for _ in range(20)]
        assert found[0] == 200 and found[-1] == 429 and set(found) == {200, 429}
        assert (await client.get("/v1/eviction")).status_code == 401
        assert (await client.get("/v1/eviction", headers={"X-API-Key": "reading-only"})).json() == {}

    run(test, folder, keys_file=keys)


def test_pages_of_other_sites_are_refused(folder: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        reply = await client.post(URL, json=BYE, headers={"Origin": "https://elsewhere.example"})
        assert reply.status_code == 403
        assert (await client.post(URL, json=BYE, headers={"Host": "elsewhere.example"})).status_code == 403

    run(test, folder)


def test_bent_requests_never_fail_here(folder: Path) -> None:
    """2xx or 4xx, whatever is sent."""
    chance = random.Random(0)
    good = json.dumps({"conversations": [BYE, BYE]}).encode()
    odd: tuple[Any, ...] = (None, True, -1, 1e308, 10**30, "", "\ud800", [], [[]], {}, {"role": []}, [None])

    def bent() -> bytes:
        if chance.random() < 0.5:
            body = bytearray(good)
            for _ in range(chance.choice((1, 2, 8))):
                place = chance.randrange(len(body) or 1)
                body[place : place + chance.choice((0, 1, 9))] = chance.choice(
                    (b"", b"\x00", b"\xff", b'"', b"{[")
                )
            return bytes(body)
        said = [{"role": chance.choice(("user", *odd)), "content": chance.choice(odd)} for _ in range(3)]
        return json.dumps(
            {chance.choice(("messages", "conversations", "x")): chance.choice((said, *odd))}
        ).encode()

    async def test(client: httpx.AsyncClient) -> None:
        found = set()
        for _ in range(400):
            headers = chance.choice(({}, {}, {}, {"Content-Encoding": "gzip"}, {"Content-Length": "x"}))
            reply = await client.post(URL, content=bent(), headers=headers)
            found.add(reply.status_code)
            assert reply.status_code < 500 and (reply.is_success or reply.json().keys() == {"error"})
        assert {200, 400, 422} <= found

    run(test, folder)


def test_a_short_request_does_not_wait_for_a_long_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop answers it itself, while a thread hashes the texts of the other."""
    hashing, answered = threading.Event(), threading.Event()
    waited: list[bool] = []
    hashed = TextHasher.texts_within

    def slow(hasher: TextHasher, texts: Sequence[str], newest: int, most: int | None = None) -> Any:
        if newest > 1:
            hashing.set()
            waited.append(answered.wait(LONG_S))  # without an end, the event loop could wait for it forever
        return hashed(hasher, texts, newest, most)

    monkeypatch.setattr(TextHasher, "texts_within", slow)

    async def test(client: httpx.AsyncClient) -> None:
        long = asyncio.create_task(client.post(URL, json={"conversations": [BYE] * 500}))
        assert await asyncio.to_thread(hashing.wait, LONG_S)
        short = await client.post(URL, json=BYE)
        answered.set()
        assert (await long).json()["p"] == [short.json()["p"]] * 500

    run(test, folder)
    assert waited == [True]


def test_without_a_model_it_says_so(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        reply = await client.post(URL, json=BYE)
        assert reply.status_code == 503 and "--continuation DIR" in reply.json()["error"]
        assert (await client.get("/v2/health/ready")).status_code == 200  # it learns for engines all the same
        assert "gati_rejected" in (await client.get("/metrics")).text

    run(test, None)


def test_another_model_is_taken_when_it_appears_and_a_damaged_one_is_not(
    folder: Path, tmp_path: Path
) -> None:
    own = tmp_path / "model"
    found = Continuations(own)
    found.look()
    assert not found.ready
    prompts = prompts_of([Utterance(True, "Thanks, bye!")])
    shutil.copytree(folder, own)
    found.look()
    first = found.predict(prompts)
    weights = own / "continuation.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-9])
    found.look()
    assert found.predict(prompts) == first
    new = stored(tmp_path / "new", seed=1)
    shutil.copy(new / weights.name, weights)  # the document is written after the weights
    found.look()
    assert found.predict(prompts) == first
    shutil.copy(new / "continuation.json", own)
    found.look()
    second = found.predict(prompts)
    assert second[1] != first[1] and second[0] != first[0]


@pytest.mark.parametrize("name", ["continuation.json", "continuation.safetensors"])
def test_a_model_that_cannot_be_read_once_is_read_later(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until its files changed it was not read again, whatever the reason was."""
    found = Continuations(folder)
    open_file = io.open
    calls: list[Path] = []

    def few(path: Any, *given: Any, **more: Any) -> Any:
        if Path(str(path)).name == name and len(calls) < 3:
            calls.append(Path(path))
            raise OSError(errno.EMFILE, "Too many open files")
        return open_file(path, *given, **more)

    monkeypatch.setattr(io, "open", few)  # which `Path.open` calls
    for _ in range(3):
        found.look()
        assert not found.ready
    assert len(calls) == len(caplog.records) + 2 == 3, "told once"
    found.look()
    assert found.ready


def test_a_damaged_model_is_not_read_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "model"
    shutil.copytree(folder, own)
    (own / "continuation.safetensors").write_bytes(b"damaged")
    found = Continuations(own)
    reads: list[Path] = []

    def counted(path: Path) -> Any:
        reads.append(path)
        return load_continuation(path)

    monkeypatch.setattr(loading, "load_continuation", counted)
    for _ in range(3):
        found.look()
    assert len(reads) == 1 and not found.ready
