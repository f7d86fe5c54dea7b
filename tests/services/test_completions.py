"""`/v1/completions` over real sockets: OpenAI's client, refused requests, and disconnecting clients."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gati.cli import run
from gati.errors import ConfigError, RequestError
from gati.evict.engine.decoder import Decoder, DecoderSettings
from gati.evict.engine.driver import EngineDriver
from gati.evict.engine.engine import PrefixEngine, PrefixEngineLimits, pool_for
from gati.evict.engine.generation import GenerationRequest
from gati.evict.engine.pages import KeptPrefixes
from gati.evict.engine.tokens import ByteTokens, Vocabulary
from services.completions.app import CompletionsApp
from services.completions.asking import read_completion
from services.completions.running import RunningCompletion, TextWriter
from services.completions.serve import CompletionsSettings, completions_app
from services.config import ServeConfig, validated
from services.web import listen, web_server
from tests.conftest import REPOSITORY
from tests.evict.engine.small import save_decoder
from tests.waiting import LONG_S, until

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    import openai


@pytest.fixture(scope="module", autouse=True)
def _client() -> None:
    """Imported for these tests alone: it takes seconds, and every process collects all files."""
    global openai
    import openai


DECODER = Decoder.random(
    DecoderSettings(layers=1, width=32, heads=4, key_heads=2, inner_width=48, length=400), seed=5
)
PAGES = 40
STOPS = "stop: give a text or up to four texts, none of them empty"


class Served(NamedTuple):
    url: str
    engine: PrefixEngine
    failures: list[BaseException]
    app: CompletionsApp

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=LONG_S)


@contextmanager
def serving(
    *, runs: bool = True, most_waiting: int = 50, tokens: Vocabulary | None = None, **config: Any
) -> Iterator[Served]:
    """The application on a free port, in a thread of its own; `runs` is whether the engine does."""
    pool = pool_for(DECODER, PAGES * 4096)
    limits = PrefixEngineLimits(most_waiting=most_waiting)
    engine = PrefixEngine(DECODER, pool, KeptPrefixes("lru"), limits)
    settings = ServeConfig(port=0, **config)
    app = CompletionsApp(engine, tokens or ByteTokens(), "tiny", settings)
    listening = listen(settings)
    server = web_server(settings, app)
    failures: list[BaseException] = []
    driver = EngineDriver(engine, failures.append)
    if runs:
        driver.start()
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
    thread.start()
    try:
        yield Served(f"http://127.0.0.1:{listening.getsockname()[1]}", engine, failures, app)
    finally:
        driver.stop()
        server.should_exit = True
        thread.join(LONG_S)
        listening.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as running:
        yield running


def test_a_server_that_is_being_stopped_takes_no_more_requests() -> None:
    """Clients with connections in a pool kept it from ever being idle."""
    with serving() as running, httpx.Client(base_url=running.url, timeout=LONG_S) as client:
        asked = {"model": "tiny", "prompt": "ab", "max_tokens": 1}
        assert client.post("/v1/completions", json=asked).status_code == 200
        running.app.ready = False
        reply = client.post("/v1/completions", json=asked)
        assert reply.status_code == 503 and "is being stopped" in reply.json()["error"]["message"]
        assert reply.headers["Retry-After"] == "1" and reply.headers["Connection"] == "close"


def expected_tokens(prompt: str, count: int) -> list[int]:
    """What the network generates by itself."""
    engine = PrefixEngine(DECODER, pool_for(DECODER, PAGES * 4096), KeptPrefixes("lru", reuse=False))
    generation = engine.submit(GenerationRequest(tuple(prompt.encode()), count))
    engine.run_until_idle()
    return generation.generated


def expected(prompt: str, count: int) -> str:
    """The same as text."""
    return "".join(map(ByteTokens().writer(), expected_tokens(prompt, count)))


class Continuing(ByteTokens):
    """Writes how many tokens the prompt had."""

    def writer(self, prompt: Sequence[int] = ()) -> Callable[[int], str]:
        return lambda token: f"{len(prompt)} "


def test_what_is_generated_is_written_as_following_its_prompt() -> None:
    with serving(tokens=Continuing()) as running:
        asked: dict[str, Any] = {"model": "tiny", "prompt": ["12345", "12"], "max_tokens": 2}
        found = running.client().completions.create(**asked, extra_body={"ignore_eos": True})
    assert [choice.text for choice in found.choices] == ["5 5 ", "2 2 "]


class Holding(ByteTokens):
    """Writes all but the first token, as if it began a character of two."""

    def writer(self, prompt: Sequence[int] = ()) -> Callable[[int], str]:
        texts = iter(("", "ab", "c"))
        return lambda token: next(texts)


def test_a_stream_tells_when_the_first_token_came_even_if_it_has_no_text_yet() -> None:
    """Clients measure the time to it."""
    asked: dict[str, Any] = {"model": "tiny", "prompt": "12", "max_tokens": 3, "stream": True}
    with serving(tokens=Holding()) as running:
        pieces = running.client().completions.create(**asked, extra_body={"ignore_eos": True})
        assert [piece.choices[0].text for piece in pieces] == ["", "ab", "c"]


def test_openais_client_gets_the_networks_text_whole_and_streamed(served: Served) -> None:
    client = served.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "gati"
    prompt = "a prompt that is longer than a page or two, so that some of it stays"
    asked: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 20, "temperature": 0}
    whole = client.completions.create(**asked)
    assert whole.choices[0].text == expected(prompt, 20)
    streamed = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].text for piece in streamed[:-1]) == whole.choices[0].text
    assert len(streamed) > 3
    assert [piece.choices[0].finish_reason for piece in streamed[-2:-1]] == [whole.choices[0].finish_reason]
    usage = streamed[-1].usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == len(prompt) // 16 * 16
    assert (usage.prompt_tokens, usage.total_tokens) == (len(prompt), len(prompt) + usage.completion_tokens)


def test_a_stream_that_tells_usage_says_in_each_event_that_it_is_yet_to_come(served: Served) -> None:
    """OpenAI's API has a null there; strict clients expect the field."""
    asked = {"model": "tiny", "prompt": "ab", "max_tokens": 3, "stream": True, "ignore_eos": True}
    for told in (True, False):
        options = {"stream_options": {"include_usage": told}}
        reply = httpx.post(f"{served.url}/v1/completions", json=asked | options, timeout=LONG_S)
        *lines, end = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
        assert end == "[DONE]"
        events = list(map(json.loads, lines))
        usage = [event.get("usage", "none") for event in events]
        if told:
            assert usage[-1]["completion_tokens"] == 3 and set(usage[:-1]) == {None}
        else:
            assert set(usage) == {"none"}


def test_several_prompts_are_several_choices(served: Served) -> None:
    prompts = ["first of them", "second of them"]
    found = served.client().completions.create(
        model="tiny", prompt=prompts, max_tokens=4, temperature=0, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in found.choices] == [0, 1]
    as_tokens = served.client().completions.create(
        model="tiny", prompt=list(b"second of them"), max_tokens=4, temperature=0
    )
    assert found.choices[1].text == as_tokens.choices[0].text
    assert found.usage is not None and found.usage.completion_tokens == 8


def test_draws_follow_the_seed(served: Served) -> None:
    def drawn(seed: int) -> str:
        made = served.client().completions.create(
            model="tiny", prompt="x", max_tokens=12, seed=seed, extra_body={"ignore_eos": True}
        )
        return made.choices[0].text

    assert drawn(1) == drawn(1) != drawn(2)


def test_a_stop_ends_the_text_before_it(served: Served) -> None:
    prompt = "a prompt"
    text = expected(prompt, 30)
    stop = text[6:8]
    found = served.client().completions.create(
        model="tiny", prompt=prompt, max_tokens=30, temperature=0, stop=[stop, "never"]
    )
    assert found.choices[0].text == text[: text.index(stop)]
    assert found.choices[0].finish_reason == "stop"
    until(lambda: served.engine.figures()["pages"]["used"] == 0)


def test_usage_counts_the_tokens_up_to_the_stop_however_far_the_engine_is() -> None:
    """Here it has generated all of them before the first one is read."""
    engine = PrefixEngine(DECODER, pool_for(DECODER, PAGES * 4096), KeptPrefixes("lru"))
    prompts = ["a prompt", "another"]
    first, second = (expected_tokens(prompt, 30) for prompt in prompts)
    stop = next(token for token in first[10:] if token < 128 and token not in second)

    async def count(**more: Any) -> object:
        body = {"model": "tiny", "prompt": prompts, "max_tokens": 30, "temperature": 0, **more}
        asked = read_completion(json.dumps(body).encode(), ByteTokens())
        with RunningCompletion(engine, ByteTokens(), asked, lambda _: None) as running:
            await asyncio.to_thread(engine.run_until_idle)
            async for _ in running.pieces():
                pass
            return running.usage()["completion_tokens"]

    assert asyncio.run(count()) == len(first) + len(second)
    assert asyncio.run(count(stop=chr(stop))) == first.index(stop) + 1 + len(second)


def test_what_does_not_fit_the_budget_is_a_clients_mistake_and_says_so(served: Served) -> None:
    with serving() as small:
        small.engine.allow(8)
        with pytest.raises(
            openai.BadRequestError, match="whole budget has 8; send a shorter prompt"
        ) as large:
            small.client().completions.create(model="tiny", prompt="x" * 200)
    with pytest.raises(openai.BadRequestError, match="exceed the network's length of 400 tokens") as long:
        served.client().completions.create(model="tiny", prompt="x" * 390)
    assert large.value.code == long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as other:
        served.client().completions.create(model="tiny", prompt="")
    assert other.value.code is None
    with pytest.raises(openai.NotFoundError, match="no model 'other' is served; there is 'tiny'"):
        served.client().completions.create(model="other", prompt="x")


def test_a_client_that_goes_leaves_its_pages(served: Served) -> None:
    cancelled = served.engine.figures()["cancelled"]
    with served.client().completions.create(
        model="tiny", prompt="x", max_tokens=399, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    until(lambda: served.engine.figures()["pages"]["used"] == 0)
    assert served.engine.figures()["cancelled"] in (cancelled, cancelled + 1)  # it may have been done


def test_a_client_that_goes_while_it_waits_is_forgotten() -> None:
    with serving(runs=False) as idle:
        body = b'{"model": "tiny", "prompt": "x"}'
        with socket.create_connection(urlsplit(idle.url).netloc.split(":")) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            until(lambda: idle.engine.figures()["waiting"] == 1)
        until(lambda: bool(idle.engine._cancelled))
        assert not idle.engine.step()
        assert idle.engine.figures()["cancelled"] == 1


def test_more_than_may_wait_are_told_to_come_again() -> None:
    with serving(runs=False, most_waiting=2) as idle:
        with pytest.raises(openai.BadRequestError, match="has 3 prompts, but only 2 may wait; send fewer"):
            idle.client().completions.create(model="tiny", prompt=["x"] * 3)
        for _ in range(2):
            idle.engine.submit(GenerationRequest((1,), 1))
        with pytest.raises(
            openai.RateLimitError, match="the queue is full: 2 requests are waiting"
        ) as caught:
            idle.client().completions.create(model="tiny", prompt="x")
        assert caught.value.response.headers["retry-after"] == "1"
        page = httpx.get(f"{idle.url}/metrics", timeout=LONG_S).text
        assert 'gati_engine_refused_total{reason="overload"} 1.0' in page
        assert 'gati_engine_under_way{state="waiting"} 2.0' in page


def test_an_engine_that_fails_ends_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("out of luck")

    with serving() as failing:
        monkeypatch.setattr(failing.engine, "_sample", broken)
        with pytest.raises(openai.InternalServerError, match="the engine failed"):
            failing.client().completions.create(model="tiny", prompt="x")
        until(lambda: bool(failing.failures))
        assert [str(error) for error in failing.failures] == ["out of luck"]
        with pytest.raises(openai.InternalServerError, match="closed"):
            failing.client().completions.create(model="tiny", prompt="x")


def test_keys_are_asked_for_as_openai_sends_them() -> None:
    with serving(api_key="the right one") as locked:
        with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
            locked.client("another").models.list()
        assert locked.client("the right one").models.list().data[0].id == "tiny"
        assert httpx.get(f"{locked.url}/metrics", timeout=LONG_S).status_code == 200
        assert httpx.get(f"{locked.url}/v1/models", timeout=LONG_S).status_code == 401


def test_figures_are_what_happened() -> None:
    with serving() as counted:
        for _ in range(2):
            counted.client().completions.create(model="tiny", prompt="y" * 40, max_tokens=2)
        page = httpx.get(f"{counted.url}/metrics", timeout=LONG_S).text
        found = dict(re.findall(r"^(gati\S+) (\S+)$", page, re.MULTILINE))
    seconds = "gati_engine_time_to_first_token_seconds"
    assert found[f'{seconds}_count{{prefix="hit"}}'] == found[f'{seconds}_count{{prefix="miss"}}'] == "1.0"
    assert found["gati_evict_requested_total"] == "4.0"
    assert found["gati_evict_hit_total"] == "2.0"
    assert found['gati_engine_pages{state="used"}'] == "0.0"
    assert found['gati_engine_pages{state="cached"}'] == "2.0"
    assert found['gati_engine_pages{state="free"}'] == f"{PAGES - 2}.0"


def test_health_and_what_is_not_offered(served: Served) -> None:
    for path, status in (
        ("/v2/health/live", 200),
        ("/v2/health/ready", 200),
        ("/v1/completions", 404),
        ("/v1/models/other", 404),
    ):
        assert httpx.get(served.url + path, timeout=LONG_S).status_code == status
    assert httpx.post(f"{served.url}/v1/models", timeout=LONG_S).status_code == 404
    reply = httpx.post(f"{served.url}/v1/completions", content=b"x" * (5 * 2**20), timeout=LONG_S)
    assert (reply.status_code, reply.json()["error"]["type"]) == (413, "invalid_request_error")
    reply = httpx.post(
        f"{served.url}/v1/completions",
        json={},
        headers={"Origin": "https://elsewhere.example"},
        timeout=LONG_S,
    )
    assert reply.status_code == 403


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("{", "the body: invalid JSON"),
        ("[1]", "the body: "),
        ('{"prompt": "x"}', "model: field required"),
        ('{"model": "m"}', "prompt: field required"),
        ('{"model": "m", "prompt": 4}', "prompt: give a text, a list of tokens"),
        ('{"model": "m", "prompt": [1, "x"]}', "prompt: give a text"),
        ('{"model": "m", "prompt": []}', "prompt: the list has 0 prompts; give 1 to 64"),
        ('{"model": "m", "prompt": "x", "max_tokens": 1.5}', "max_tokens: "),
        ('{"model": "m", "prompt": "x", "temperature": NaN}', "temperature is nan"),
        ('{"model": "m", "prompt": "x", "temperature": 3}', "temperature is 3; give 0 to 2"),
        ('{"model": "m", "prompt": "x", "n": 2}', "n: "),
        ('{"model": "m", "prompt": "x", "logprobs": 1}', "logprobs: "),
        ('{"model": "m", "prompt": "x", "logprobs": 0}', "logprobs: input should be null or false"),
        ('{"model": "m", "prompt": "x", "logprobs": true}', "logprobs: "),
        ('{"model": "m", "prompt": "x", "suffix": " end"}', "suffix: "),
        ('{"model": "m", "prompt": "x", "store": true}', "store: "),
        ('{"model": "m", "prompt": "x", "metadata": 3}', "metadata: "),
        ('{"model": "m", "prompt": "x", "top_p": 0.5}', "top_p: "),
        ('{"model": "m", "prompt": "x", "repetition_penalty": 1.1}', "repetition_penalty: "),
        ('{"model": "m", "prompt": "x", "top_k": 5}', "top_k: "),
        ('{"model": "m", "prompt": "x", "min_tokens": 2}', "min_tokens: "),
        *[
            (f'{{"model": "m", "prompt": "x", "stop": {stop}}}', STOPS)
            for stop in ('""', '[""]', '["a", "b", "c", "d", "e"]', "4", f'"{"a" * 257}"')
        ],
        ('{"model": "m", "prompt": "x", "continue_probability": 2}', "continue_probability: "),
        ('{"model": "m", "prompt": "x", "best": 2}', "unknown parameter 'best'"),
    ],
)
def test_what_cannot_be_done_names_the_parameter(body: str, words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)):
        read_completion(body.encode(), ByteTokens())


def test_a_million_wrong_prompts_are_one_mistake() -> None:
    body = b'{"model": "m", "prompt": [' + b"1.5," * 500_000 + b"1.5]}"
    with pytest.raises(RequestError, match="prompt: give"):
        read_completion(body, ByteTokens())


def test_what_is_not_said_is_as_openai_has_it() -> None:
    asked = read_completion(b'{"model": "m", "prompt": "ab", "user": "me", "n": 1}', ByteTokens())
    (request,) = asked.requests
    assert (request.prompt, request.most_tokens, request.sampling.temperature) == ((97, 98), 16, 1.0)
    assert request.ends_early and request.goes_on is None and not asked.streams


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("metadata", ["null", "{}", '{"run": "7"}']),
        ("store", ["null", "false"]),
        ("logprobs", ["null", "false"]),
        ("suffix", ["null", '""']),
        ("logit_bias", ["null", "{}"]),
        ("echo", ["null", "false"]),
        *[(name, ["null", "1", "1.0"]) for name in ("n", "best_of", "top_p")],
        *[(name, ["null", "0", "0.0", "-0.0"]) for name in ("presence_penalty", "frequency_penalty")],
        ("repetition_penalty", ["null", "1", "1.0"]),  # vLLM's, as its benchmark sends it
        ("top_k", ["null", "-1", "0"]),
        *[(name, ["null", "0"]) for name in ("min_p", "min_tokens")],
    ],
)
def test_what_changes_nothing_is_accepted(name: str, values: list[str]) -> None:
    plain = read_completion(b'{"model": "m", "prompt": "ab"}', ByteTokens())
    for value in values:
        body = f'{{"model": "m", "prompt": "ab", "{name}": {value}}}'
        assert read_completion(body.encode(), ByteTokens()) == plain


class Unwritable(ByteTokens):
    """A tokenizer that fails at the second prompt."""

    def writer(self, prompt: Sequence[int] = ()) -> Callable[[int], str]:
        if 50 in prompt:
            raise ValueError("no such token")
        return super().writer(prompt)


def test_a_tokenizer_that_fails_leaves_no_generation_running() -> None:
    engine = PrefixEngine(DECODER, pool_for(DECODER, PAGES * 4096), KeptPrefixes("lru"))
    asked = read_completion(b'{"model": "m", "prompt": [[1], [50]], "max_tokens": 30}', ByteTokens())

    async def enter() -> None:
        with (
            pytest.raises(ValueError, match="no such token"),
            RunningCompletion(engine, Unwritable(), asked, lambda _: None),
        ):
            pass
        assert not engine.step()

    asyncio.run(enter())
    assert engine.figures()["cancelled"] == 2


@given(text=st.text("ab", max_size=12), stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_no_text_goes_out_that_a_stop_takes_back(text: str, stops: list[str]) -> None:
    writer = TextWriter(chr, stops)
    out = ""
    for number, character in enumerate(text):
        out += writer.add(ord(character), last=number == len(text) - 1)
        assert text.startswith(out)
    ends = [number for number in range(len(text) + 1) if any(text[:number].endswith(stop) for stop in stops)]
    if ends:
        complete = text[: min(ends)]
        assert out == complete[: min(complete.index(stop) for stop in stops if stop in complete)]
    else:
        assert out == text
    assert writer.stopped == bool(ends)


def test_a_network_in_a_folder_is_called_as_the_folder_is(tmp_path: Path) -> None:
    save_decoder(DECODER, tmp_path / "stories")
    settings = CompletionsSettings(tmp_path / "stories", budget_bytes=2**20, kept=KeptPrefixes("lru"))
    app, engine = completions_app(settings, validated(ServeConfig, port=0))
    assert app.name == "stories"
    generation = engine.submit(GenerationRequest(tuple(b"a prompt"), 5))
    engine.run_until_idle()
    assert "".join(map(ByteTokens().writer(), generation.generated)) == expected("a prompt", 5)
    engine.close()


def test_settings_that_are_wrong_are_told() -> None:
    with pytest.raises(ConfigError, match="port"):
        validated(ServeConfig, port=100_000)
    with pytest.raises(ConfigError, match="^(?!.*Value error).*certificate_key needs its certificate"):
        validated(ServeConfig, certificate_key="key.pem")
    app, engine = completions_app(
        CompletionsSettings(seed=3, budget_bytes=2**20, kept=KeptPrefixes("lru")),
        validated(ServeConfig, port=0),
    )
    assert app.name == "random-3"
    assert engine.pages == 2**20 // (4 * 2 * 16 * 64 * 4)
    engine.close()


@pytest.mark.parametrize(("policy", "said"), [("lpc", 1), ("lru", 1), ("gati", 0)])
def test_a_policy_that_only_logs_for_the_service_is_told(
    policy: str, said: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = KeptPrefixes(policy, service=str(tmp_path / "learned"))
    with caplog.at_level("INFO", logger="gati.completions"):
        settings = CompletionsSettings(budget_bytes=2**20, kept=kept)
        _, engine = completions_app(settings, validated(ServeConfig, port=0))
    engine.close()
    line = f"policy {policy} uses no predictor of the service; accesses are only logged there"
    assert [record.message for record in caplog.records] == [line] * said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        pytest.param(["--threads", "0"], "threads is 0; give 1 to 1024", id="no threads"),
        pytest.param(["--threads", "4294967296"], "threads is 4294967296; give", id="too many threads"),
        pytest.param(
            ["--service", "learned", "--predictor", "own"],
            "give either a predictor (own) or a service, not both",
            id="two predictors",
        ),
        pytest.param(["--chunk", "0"], "every limit of an engine must be at least 1", id="limit"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    assert run(["evict", "engine", "--port", "0", "--budget", "1MiB", *options]) == 2
    said = capsys.readouterr().err
    assert says in said and said.startswith("error: ") and len(said.splitlines()) == 1
    assert list(tmp_path.iterdir()) == [] and os.environ == before


@pytest.mark.parametrize(("policy", "sleep"), [(None, True), ("active", False)])
def test_threads_sleep_while_they_wait_for_each_other(
    tmp_path: Path, policy: str | None, sleep: bool
) -> None:
    """Where other processes used the cores, they kept each other waiting: a step took a second."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_DISPLAY_ENV": "verbose"}
    environment.pop("OMP_WAIT_POLICY", None)
    if policy is not None:  # the environment goes first
        environment["OMP_WAIT_POLICY"] = policy
    done = subprocess.run(
        [sys.executable, "-P", "-m", "gati", "evict", "engine", "--threads", "0"],
        env=environment,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        timeout=LONG_S,
    )
    assert done.returncode == 2 and "threads is 0" in done.stderr
    spins = re.search(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    if spins is None:
        pytest.skip("torch has another OpenMP here")
    assert (spins[1] == "0") is sleep


def test_the_command_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    log = tmp_path / "accesses.jsonl"
    command = [sys.executable, "-P", "-m", "gati", "evict", "engine", "--port", "0", "--budget", "8MiB"]
    process = subprocess.Popen(
        [*command, "--policy", "lru", "--name", "mine", "--access-log", str(log)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
    )
    try:
        assert process.stdout is not None
        announced = re.match(r"serving mine at (\S+)/completions", process.stdout.readline())
        assert announced is not None
        client = openai.OpenAI(base_url=announced[1], api_key="none", max_retries=0, timeout=LONG_S)
        client.completions.create(model="mine", prompt="z" * 50, max_tokens=3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG_S) == 0
    finally:
        process.kill()
        process.wait()
    assert len(log.read_text().splitlines()) == 1
