"""The live page: its state, its server-sent events, and its display in a browser."""

from __future__ import annotations

import io
import json
import shutil
import socket
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from gati.errors import ConfigError
from gati.evaluation.by_class import exact_interval
from gati.video import Frame, Region, Result
from services.live import LiveSink, LiveState, RunningPage, live_router, serve_page
from services.live.pictures import NewestPicture
from tests.services.living import EXITS, Clock, picture, scene
from tests.waiting import LONG_S, returns, until

pytestmark = pytest.mark.slow

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ANSWER = {"time_s": 1.5, "source": "film.mp4", "region": None, "class_name": "car", "probability": 0.9,
          "exit": "early", "latency_ms": 1.0, "base_latency_ms": 2.0, "version": "v1"}  # fmt: skip


# --- the state ------------------------------------------------------------------------------------------


def test_everything_is_kept_in_windows() -> None:
    state = LiveState()
    for k in range(2000):
        state.publish({**ANSWER, "exit": f"exit{k}", "region": [k, 0, 5, 5], "class_name": "x" * 5000})
        state.event("version", "y" * 5000)
        state.audit(True, k + 1, 0)
    known = state.since()
    assert len(known["points"]) == 600 and len(known["events"]) == 100
    assert len(known["answers"]) == 32 and len(known["exits"]) == 64
    assert len(known["audits"]["outcomes"]) == 60 and known["audits"]["n"] == 2000
    assert len(known["answers"][0]["class_name"]) == 300
    assert len(json.dumps(known)) < 300_000


def test_audits_of_another_version_begin_anew() -> None:
    state = LiveState(promise=0.97)
    state.audit(True, 130, 0)
    known = state.since()["audits"]
    assert known["lower"] < 0.97 and known["upper"] == 1.0, "it holds at all times at once"
    assert exact_interval(130, 130)[0] > 0.97, "which one for a fixed number does not"
    state.no_audits()
    assert state.since()["audits"] is None
    state.audit(False, 1, 1)
    assert state.since()["audits"]["outcomes"] == [False]


def test_rates_and_means_are_of_the_last_200_answers() -> None:
    state = LiveState()
    for _ in range(500):
        state.publish({**ANSWER, "exit": "base", "latency_ms": 9.0})
    for k in range(200):
        state.publish({**ANSWER, "exit": "early" if k % 4 else "base", "latency_ms": 1.0})
    recent = state.since()["recent"]
    assert recent["n"] == 200 and recent["hit_rate"] == 0.75 and recent["exits"] == {"early": 150, "base": 50}
    assert recent["latency_ms"] == 1.0 and recent["gain"] == 2.0
    assert dict(state.since()["exits"]) == {"early": 150, "base": 550}


def test_of_many_regions_the_same_ones_are_shown_with_every_picture() -> None:
    """They were the last 32 answers of whatever was being answered, and nothing said that there are more."""
    state = LiveState()
    for count in (32, 40, 40):
        for k in range(count):
            state.publish({**ANSWER, "region": [k, 0, 5, 5], "probability": count / 100})
        known = state.since()
        assert [answer["region"][0] for answer in known["answers"]] == list(range(32))
        assert {answer["probability"] for answer in known["answers"]} == {count / 100}
        assert known["has_more_regions"] == (count > 32)


def test_exits_stand_in_the_order_of_the_network_and_the_base_model_is_last() -> None:
    state = LiveState()
    state.exits(["b", "a", "base"])
    for name in ("base", "late", "a"):
        state.publish({**ANSWER, "exit": name})
    assert [name for name, _ in state.since()["exits"]] == ["b", "a", "late", "base"]


def test_answers_that_left_at_exits_of_earlier_versions_still_count() -> None:
    """After a change of version, the page counted fewer answers "since the start"."""
    state = LiveState()
    state.exits(["b"])
    for name in ("b", "b", "recall", "base"):
        state.publish({**ANSWER, "exit": name})
    state.exits(["a"])
    assert state.since()["exits"] == [("recall", 1), ("a", 0), ("b", 2), ("base", 1)]


def test_it_is_known_since_when_a_version_answers() -> None:
    """Its event is forgotten after a hundred others: then it was "since the start"."""
    now_s = 1000.0
    state = LiveState(clock=lambda: now_s)
    for version, since_s in (("v1", None), ("v1", None), ("v2", 1002.0), ("v2", 1002.0), ("v1", 1004.0)):
        state.publish({**ANSWER, "version": version})
        assert state.since()["version_since_s"] == since_s
        now_s += 1.0


def test_only_what_is_new_is_told() -> None:
    state = LiveState()
    state.publish(ANSWER)
    state.event("version", "v1")
    told = state.since()["sequence"]
    assert state.since(told)["points"] == [] and state.since(told)["events"] == []
    state.publish({**ANSWER, "latency_ms": 5.0})
    news = state.since(told)
    assert [point[3] for point in news["points"]] == [5.0] and news["events"] == []


def test_an_alarm_lasts_until_the_caches_recovered() -> None:
    state = LiveState()
    state.event("alarm", "too many differ")
    state.event("retraining", "on the last hour")
    assert state.since()["alarm"]["text"] == "too many differ" and state.since()["retraining"]
    state.event("version", "v2")
    assert state.since()["alarm"] is not None and not state.since()["retraining"]
    state.event("recovered", "certified again")
    assert state.since()["alarm"] is None


def test_a_change_of_the_source_is_an_event_by_itself() -> None:
    state = LiveState()
    for word, reason in (("running", ""), ("reconnecting", "silent"), ("reconnecting", "refused")):
        state.source(word, reason)  # type: ignore[arg-type]
    known = state.since()
    assert (known["source"]["state"], known["source"]["reason"]) == ("reconnecting", "refused")
    assert [event[4] for event in known["events"]] == ["reconnecting: silent"]


def test_words_that_mean_nothing_are_refused() -> None:
    state = LiveState()
    with pytest.raises(ValueError, match="unknown event 'fire'; use one of version, alarm"):
        state.event("fire", "")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown source state 'gone'; use one of running, paused"):
        state.source("gone")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"uint8 \[H, W, 3\], not float64 \[4, 4\]"):
        state.frame(np.zeros((4, 4)))  # type: ignore[arg-type]


def test_what_comes_is_made_harmless() -> None:
    state = LiveState()
    state.publish(
        {**ANSWER, "latency_ms": float("nan"), "probability": float("inf"), "class_name": "\udcff",
         "source": "rtsp://user:secret@camera/1"}
    )  # fmt: skip
    known = state.since()
    assert known["points"][0][3] is None and known["answers"][0]["probability"] is None
    assert known["answers"][0]["class_name"] == "?"
    assert "secret" not in json.dumps(known)


def test_a_sink_shows_each_picture_once() -> None:
    state = LiveState()
    sink = LiveSink(state)
    frame = Frame(picture(), 3, 0.1, "film.mp4")
    for region in (Region(0, 0, 9, 9), Region(9, 0, 9, 9)):
        sink.write(Result(0.1, 3, "film.mp4", region, 4, None, 0.8, "base", 2.0, None, "v1"), frame)
    sink.close()
    known = state.since()
    assert known["picture"] == {"number": 1, "size": (320, 192)}
    shown = [(answer["class_name"], answer["region"]) for answer in known["answers"]]
    assert shown == [("4", (0, 0, 9, 9)), ("4", (9, 0, 9, 9))]


def test_pictures_are_encoded_when_asked_for_and_not_too_often() -> None:
    now_s = [0.0]
    pictures = NewestPicture(10.0, lambda: now_s[0])
    assert pictures.jpeg() is None
    pictures.put(np.zeros((1500, 2000, 3), np.uint8))
    first = pictures.jpeg()
    assert first is not None and Image.open(io.BytesIO(first)).size == (960, 720)
    pictures.put(picture())
    assert pictures.jpeg() is first
    now_s[0] += 0.1
    assert pictures.jpeg() is not first


def calls_of(work: Callable[[], object]) -> int:
    """How many functions, of Python and of C, the work calls: its cost on any machine."""
    calls = [0]

    def count(_frame: object, event: str, _argument: object) -> None:
        calls[0] += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls[0]


def test_telling_costs_little_whatever_was_told_before_and_copies_no_picture() -> None:
    """About 10 microseconds, which are tens of calls; encoding one picture takes a thousand times as long."""
    state, image = LiveState(), np.zeros((1080, 1920, 3), np.uint8)

    def tell() -> None:
        state.publish(ANSWER)
        state.frame(image)

    tell()
    first = calls_of(tell)
    for _ in range(2000):
        tell()
    assert calls_of(tell) == first < 100
    tracemalloc.start()
    try:
        for _ in range(10):
            tell()
        assert tracemalloc.get_traced_memory()[1] < image.nbytes / 10
    finally:
        tracemalloc.stop()


def test_producers_may_be_many() -> None:
    state = LiveState()

    def produce() -> None:
        for k in range(500):
            state.publish({**ANSWER, "exit": EXITS[k % 3]})
            state.since(state.sequence - 5)

    threads = [threading.Thread(target=produce) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(total for _, total in state.since()["exits"]) == 2000 == state.sequence


# --- over a socket --------------------------------------------------------------------------------------


@pytest.fixture
def running() -> Iterator[tuple[LiveState, RunningPage]]:
    state = scene("running")
    with serve_page(state) as page:
        yield state, page


@contextmanager
def viewer(url: str, last_event_id: str = "") -> Iterator[Iterator[tuple[str, str, Any]]]:
    headers = {"Last-Event-ID": last_event_id} if last_event_id else {}
    with httpx.stream("GET", url + "events", headers=headers, timeout=LONG_S) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        yield told(response)


def get(url: str, **options: Any) -> httpx.Response:
    return httpx.get(url, timeout=LONG_S, **options)


def told(response: httpx.Response) -> Iterator[tuple[str, str, Any]]:
    fields: dict[str, str] = {}
    for line in response.iter_lines():
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "event" in fields:
            yield fields["event"], fields.get("id", ""), json.loads(fields["data"])
            fields = {}


def test_a_viewer_is_told_everything_and_then_what_is_new(running: tuple[LiveState, RunningPage]) -> None:
    state, page = running
    with viewer(page.url) as events:
        kind, identity, document = next(events)
        assert kind == "snapshot" and len(document["points"]) == 600 and document["version"] == "v3"
        state.publish({**ANSWER, "class_name": "bus"})
        kind, identity, document = next(events)
        assert kind == "delta" and len(document["points"]) == 1
        assert document["answers"][-1]["class_name"] == "bus"
    state.publish(ANSWER)
    with viewer(page.url, identity) as events:  # as a browser that lost its connection does
        kind, _, document = next(events)
        assert kind == "delta" and len(document["points"]) == 1
    with viewer(page.url, "another-12") as events:
        assert next(events)[0] == "snapshot"


def test_news_come_about_ten_times_a_second_at_most(running: tuple[LiveState, RunningPage]) -> None:
    state, page = running
    begun_s = time.monotonic()
    with viewer(page.url) as events:
        next(events)
        came: list[list[Any]] = []
        for _ in range(4):  # each burst is told in a piece or two: 200 answers come in a millisecond or so
            for _ in range(200):
                state.publish(ANSWER)
            came.append(next(events)[2]["points"])
        while sum(map(len, came)) < 800:
            came.append(next(events)[2]["points"])
    took_s = time.monotonic() - begun_s
    assert sum(map(len, came)) == 800, "nothing is told twice"
    assert len(came) <= took_s / 0.1 + 1


def test_a_heartbeat_comes_when_nothing_else_does() -> None:
    from fastapi import FastAPI

    from services.live import page as module

    app = FastAPI()
    app.include_router(live_router(LiveState(), interval_s=0.02, heartbeat_s=0.1), prefix="/dashboard")
    listening = socket.create_server(("127.0.0.1", 0))
    server = module._Server(
        module.uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=lambda: server.run([listening]))
    thread.start()
    try:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/dashboard"
        with viewer(url + "/") as events:
            assert [next(events)[0] for _ in range(3)] == ["snapshot", "heartbeat", "heartbeat"]
        page = get(url, follow_redirects=True)  # relative addresses need the slash
        assert str(page.url) == url + "/" and "<title>Gati live" in page.text
    finally:
        server.should_exit = True
        thread.join()


def test_a_slow_viewer_holds_up_nobody(running: tuple[LiveState, RunningPage]) -> None:
    state, page = running
    slow = socket.create_connection(("127.0.0.1", page.port))
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")  # and never reads
    try:
        with viewer(page.url) as events:
            next(events)
            for _ in range(20):
                returns(lambda: [state.publish(ANSWER) for _ in range(500)])
                assert len(next(events)[2]["points"]) > 0
    finally:
        slow.close()


def test_viewers_are_bounded_and_those_who_leave_make_room(running: tuple[LiveState, RunningPage]) -> None:
    state, page = running
    asked = b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n"
    viewers = [socket.create_connection(("127.0.0.1", page.port)) for _ in range(64)]
    for each in viewers:
        each.sendall(asked)
    for each in viewers:
        assert b"200 OK" in each.recv(1000)
    refused = get(page.url + "events")
    assert refused.status_code == 503 and "close one of the pages" in refused.json()["error"]
    for each in viewers:
        each.close()

    def there_is_room() -> bool:
        with httpx.stream("GET", page.url + "events", timeout=LONG_S) as response:
            return response.status_code == 200

    until(there_is_room, every_s=0.1)


def test_closing_lets_viewers_go_at_once() -> None:
    page = serve_page(scene("running"))
    with viewer(page.url) as events:
        next(events)
        returns(page.close)  # the viewer would stay for ever
        assert list(events) == []
    page.close()
    with pytest.raises(httpx.ConnectError):
        get(page.url)


@pytest.mark.parametrize("port", [-1, 99_999])
def test_a_port_that_cannot_be_is_told_in_a_line(port: int) -> None:
    with pytest.raises(ConfigError, match=f"cannot show the live page on 127.0.0.1:{port} .*0-65535"):
        serve_page(LiveState(), port=port)


def test_a_taken_port_is_told_in_a_line(running: tuple[LiveState, RunningPage]) -> None:
    with pytest.raises(
        ConfigError, match=r"cannot show the live page on 127\.0\.0\.1:\d+ .*choose another port"
    ):
        serve_page(LiveState(), port=running[1].port)


def test_the_newest_picture_is_a_jpeg(running: tuple[LiveState, RunningPage]) -> None:
    state, page = running
    found = get(page.url + "frame.jpg")
    assert found.headers["content-type"] == "image/jpeg" and found.headers["cache-control"] == "no-store"
    assert Image.open(io.BytesIO(found.content)).size == (320, 192)
    with serve_page(LiveState()) as other:
        assert get(other.url + "frame.jpg").json() == {"error": "no picture has come yet"}


def test_the_page_lets_nothing_in(running: tuple[LiveState, RunningPage]) -> None:
    _, page = running
    found = get(page.url)
    policy = found.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert "innerHTML" not in found.text and ' style="' not in found.text
    assert page.url.startswith("http://127.0.0.1:")
    assert get(page.url, headers={"Host": "evil.example"}).status_code == 403
    for own in ("localhost:1", "127.0.0.1", "[::1]:80"):
        assert get(page.url, headers={"Host": own}).status_code == 200


# --- in a browser ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
    if CHROMIUM is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@contextmanager
def visit(browser: Any, url: str, width: int = 1280) -> Iterator[Any]:
    """A visit that ends in an assertion: nothing was complained of, nothing sticks out."""
    context = browser.new_context(viewport={"width": width, "height": 812}, reduced_motion="reduce")
    page = context.new_page()
    page.set_default_timeout(1e3 * LONG_S)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(url)
    page.wait_for_selector("#version:not(:text-is('-'))")
    yield page
    assert complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    context.close()


BANNERS = {
    "running": "Running",
    "alarm": "ALARM: caches stopped, the base model answers",
    "lost": "Source lost, reconnecting: no picture for 5 s, attempt 3",
    "ended": "Ended: the file is over",
}


@pytest.mark.parametrize(("name", "width"), [*zip(BANNERS, (1280, 375, 375, 1280), strict=True)])
def test_every_state_can_be_seen(browser: Any, name: str, width: int) -> None:
    with serve_page(scene(name)) as running, visit(browser, running.url, width) as page:
        page.wait_for_selector("#frame:not([hidden])")
        assert page.locator("#banners strong").all_text_contents() == [BANNERS[name]]
        assert page.locator("#banners").get_attribute("aria-live") == "assertive"
        assert page.locator("#version").text_content() == "v3"
        assert [each.split(" ")[0] for each in page.locator("#exits li").all_text_contents()][-1] == "base"
        assert page.locator("#exits li").count() == 4
        promised = "promise 97 %" in (page.locator("#interval").text_content() or "")
        assert promised == (name != "alarm"), "the caches stopped, and there is no memory"
        assert page.locator("#marks .tag").count() == 2 and page.locator("#marks .box").count() == 2
        assert page.locator("#answers td:nth-child(2)").all_text_contents() == ["automobile", "truck"]
        assert ("Alarm" in page.locator("#log .kind").all_text_contents()) == (name == "alarm")
        drawn = "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v)"
        assert page.locator("#latency").evaluate(drawn)
        for label in page.locator("#marks .tag").all():  # labels stay inside the picture
            box, frame = label.bounding_box(), page.locator("#picture").bounding_box()
            assert frame["x"] <= box["x"] and box["x"] + box["width"] <= frame["x"] + frame["width"] + 1


def test_the_page_follows_what_happens(browser: Any) -> None:
    state = scene("running")
    with serve_page(state) as running, visit(browser, running.url) as page:
        state.event("alarm", "losses")
        page.wait_for_selector(".banner.alarm")
        assert page.title().startswith("ALARM")
        state.source("reconnecting", "silent")
        page.wait_for_selector(".banner.lost")
        assert page.locator(".banner").count() == 2
        state.source("running")
        state.event("recovered", "proven on 299 audits")
        page.wait_for_selector(".banner.good")
        state.publish({**ANSWER, "version": "v4-a-rather-long-name"})
        page.wait_for_selector("#version:text('v4')")
        page.focus("#latency")
        page.keyboard.press("End")
        page.wait_for_selector("#tip:not([hidden])")
        assert "left at early" in page.locator("#tip").text_content()
        page.keyboard.press("Escape")
        page.wait_for_selector("#tip", state="hidden")


def test_the_page_says_no_more_than_what_may_be_watched(browser: Any) -> None:
    """An interval for a fixed number of audits would have said "kept" after 130, and been wrong one day."""
    state = LiveState("small", pictures=False)
    state.publish(ANSWER)
    with serve_page(state) as running, visit(browser, running.url) as page:

        def says(text: str) -> None:
            page.wait_for_selector(f"#verdict:text('{text}')")

        says("Nothing is promised.")
        state.promise(0.97)
        says("At least 97 % is promised; no early answer was audited yet.")
        state.audit(True, 130, 0)
        says("Not decided yet: the promise lies within the interval. 0 of 130 audits disagreed")
        assert page.locator("#agreement").text_content() == "100.0 %"
        state.audit(True, 400, 0)
        says("The promise is kept so far.")
        state.audit(False, 440, 60)
        says("The promise is not kept.")
        assert "bad" in (page.locator("#agreement").get_attribute("class") or "")
        state.no_audits()  # another version
        says("At least 97 % is promised; no early answer was audited yet.")
        assert page.locator("#interval svg").count() == 0
        assert page.locator("#agreement").text_content() == "-"
        state.promise(None)
        says("Nothing is promised.")
        state.event("alarm", "losses")
        says("The guard stopped the caches: nothing is promised.")


def test_caches_on_trial_are_told_apart_from_those_that_answer(browser: Any) -> None:
    state = LiveState("small", pictures=False, promise=0.97)
    state.publish(ANSWER)
    state.audit(True, 10, 0)
    with serve_page(state) as running, visit(browser, running.url) as page:
        page.wait_for_selector(".banner.good")
        assert not page.locator("#proof").is_visible()
        state.proof("7", 57, 1, 150, waits=True)
        page.wait_for_selector("#proof:text('Version 7 waits to be proven: 57 of about 150 audits, 1 of')")
        assert page.locator(".banner.good").count() == 1
        assert "0 of 10 audits disagreed" in (page.locator("#verdict").text_content() or "")
        state.promise(None)
        state.proof("7", 58, 1, 150)
        page.wait_for_selector(".banner:has-text('On probation: the base model answers')")
        state.proof(None)
        page.wait_for_selector(".banner.good")


def test_a_banner_says_no_news_at_every_audit(browser: Any) -> None:
    """A screen reader was interrupted by each: the banner is read aloud whenever its text changes."""
    state = LiveState("small", pictures=False)
    state.publish(ANSWER)
    state.proof("7", 57, 1, 150)
    with serve_page(state) as running, visit(browser, running.url) as page:
        page.wait_for_selector(".banner:has-text('On probation')")
        before = page.locator("#banners").text_content()
        state.proof("7", 58, 1, 150)
        page.wait_for_selector("#proof:has-text('58 of about 150')")
        assert page.locator("#banners").text_content() == before


def test_a_chart_says_what_is_pointed_at_once(browser: Any) -> None:
    """It was said again with every answer: of several lines, the text never equalled itself."""
    state = LiveState("small", pictures=False)
    state.publish({**ANSWER, "base_latency_ms": 5.0})
    with serve_page(state) as running, visit(browser, running.url) as page:
        page.hover("#latency")
        page.wait_for_selector("#tip:not([hidden])")
        page.evaluate("window.line = document.querySelector('#tip p')")
        state.publish({**ANSWER, "latency_ms": 2.0, "version": "v9"})
        page.wait_for_selector("#version:text-is('v9')")
        page.focus("#latency")
        page.keyboard.press("Home")
        assert page.evaluate("window.line.isConnected")


def test_who_answers_is_told_while_lookups_pause_and_where_there_are_no_caches(browser: Any) -> None:
    """It said that the caches answer where they may."""
    state = LiveState("small", pictures=False, promise=0.97)
    state.publish({**ANSWER, "exit": "base"})
    with serve_page(state) as running, visit(browser, running.url) as page:

        def says(text: str) -> None:
            page.wait_for_selector(f".banner.good:has-text('{text}')")

        says("There are no caches: the base model answers.")
        state.exits(["early"])
        says("The caches answer where they may, the base model elsewhere.")
        state.rests(True)
        says("Lookups pause for a while: the base model answers.")
        state.publish({**ANSWER, "exit": "recall"})
        state.event("retraining", "on 400 samples")
        says("Lookups pause for a while: memory or the base model answers. New caches are being trained.")
        state.rests(False)
        says("The caches answer where they may")


def test_what_was_on_another_day_has_its_date(browser: Any) -> None:
    """Of an alarm two days ago, the page said "14:03:00", and of midnight "24:00:30"."""
    clock = Clock(0.0)
    state = LiveState("small", pictures=False, clock=clock)
    midnight_s = time.mktime((2026, 3, 5, 0, 0, 30, 0, 0, -1))
    clock.now_s = midnight_s
    state.publish(ANSWER)
    state.event("alarm", "losses")
    state.event("recovered", "proven")
    state.source("running")
    with serve_page(state) as running, visit(browser, running.url) as page:
        assert page.locator("#log time").all_text_contents() == ["00:00:30", "00:00:30"]
        clock.now_s = midnight_s + 2 * 86_400
        state.source("reconnecting", "silent")
        page.wait_for_selector("#log .source")
        assert page.locator("#log time").all_text_contents() == [
            "00:00:30",
            "Mar 5, 00:00:30",
            "Mar 5, 00:00:30",
        ]
        clock.now_s = midnight_s + 3 * 86_400
        state.event("kept", "nothing better")
        page.wait_for_selector(".banner.lost:has-text('Since Mar 7, 00:00:30')")


def test_memory_answers_where_caches_do_not(browser: Any) -> None:
    """The page said that the base model answers, and that nothing is promised, next to its share."""
    state = LiveState("small", pictures=False, promise=0.97)
    state.publish({**ANSWER, "exit": "recall"})
    with serve_page(state) as running, visit(browser, running.url) as page:
        state.proof("7", 58, 1, 150)
        page.wait_for_selector(".banner:has-text('On probation: memory or the base model answers')")
        page.wait_for_selector("#proof:has-text('memory or the base model answers: 58')")
        state.event("alarm", "losses")
        page.wait_for_selector(".banner:has-text('ALARM: caches stopped, memory or the base model answers')")
        page.wait_for_selector("#verdict:has-text('At least 97 % is promised')")


def test_a_paused_view_stands_still_but_not_for_an_alarm(browser: Any) -> None:
    state = scene("running")
    with serve_page(state) as running, visit(browser, running.url) as page:
        page.click("#pause")
        state.publish({**ANSWER, "version": "v9"})
        state.event("alarm", "losses")
        page.wait_for_selector(".banner.alarm")
        noted = page.locator("#latency-note").text_content()
        for _ in range(200):
            state.publish({**ANSWER, "version": "v9", "latency_ms": 77.0})
        page.hover("#latency")
        page.wait_for_selector("#tip:not([hidden])")
        assert page.locator("#version").text_content() == "v3"
        assert page.locator("#latency-note").text_content() == noted, "it had news while the chart had none"
        page.click("#pause")
        page.wait_for_selector("#version:text-is('v9')")


@pytest.mark.parametrize("width", [375, 1280])
def test_long_and_wicked_names_are_only_text(browser: Any, width: int) -> None:
    wicked = "<img src=x onerror=alert(1)>" + "W" * 250
    state = LiveState(wicked, promise=0.97)
    state.exits([wicked])
    state.publish({**ANSWER, **dict.fromkeys(("class_name", "exit", "version", "source"), wicked)})
    state.publish({**ANSWER, "class_name": wicked, "region": [300, 150, 19, 40]})
    state.event("alarm", wicked)
    state.frame(picture())
    with serve_page(state) as running, visit(browser, running.url, width) as page:
        page.wait_for_selector("#frame:not([hidden])")
        assert page.locator("img").count() == 1


GRID = [[x * 64, y * 60, 64, 60] for y in range(4) for x in range(5)]
OVERLAPS = """tags => tags.map(t => t.getBoundingClientRect()).filter((a, k, all) => all.slice(0, k).some(
  b => a.left < b.right && a.right > b.left && a.top < b.bottom && a.bottom > b.top)).length"""


@pytest.mark.parametrize("width", [320, 1280])
def test_labels_of_many_regions_hide_none_of_each_other(browser: Any, width: int) -> None:
    """On a phone, 44 pairs of 20 labels overlapped, as each was as wide as its text."""
    state = LiveState("twenty", promise=0.97)
    for region in GRID:
        state.publish({**ANSWER, "class_name": "a class with a name of some length", "region": region})
    state.frame(np.zeros((240, 320, 3), dtype=np.uint8))
    with serve_page(state) as running, visit(browser, running.url, width) as page:
        page.wait_for_selector("#marks .tag")
        assert page.locator("#marks .tag").count() == len(GRID)
        assert page.locator("#marks .tag").evaluate_all(OVERLAPS) == 0


CUT = "tags => tags.filter(t => t.scrollWidth > t.clientWidth).map(t => t.textContent)"


def test_labels_of_small_regions_far_apart_are_whole(browser: Any) -> None:
    """From the ninth region on, all labels were as narrow as their regions, whatever the room was."""
    state = LiveState("nine", promise=0.97)
    for x in (20, 420, 820):
        for y in (20, 220, 420):
            state.publish({**ANSWER, "class_name": "tabby cat", "region": [x, y, 40, 40]})
    state.frame(np.zeros((600, 1200, 3), dtype=np.uint8))
    with serve_page(state) as running, visit(browser, running.url, 1280) as page:
        page.wait_for_selector("#marks .tag")
        tags = page.locator("#marks .tag")
        assert tags.count() == 9 and tags.evaluate_all(CUT) == [] and tags.evaluate_all(OVERLAPS) == 0
        assert tags.first.text_content() == "tabby cat 90 % at early"


def test_a_crowded_label_keeps_its_width_with_the_next_pictures(browser: Any) -> None:
    long = "a class with a name of some length"
    state = LiveState("crowded", promise=0.97)

    def show(others: str) -> None:
        for region in GRID:
            state.publish({**ANSWER, "class_name": long if region == GRID[0] else others, "region": region})

    show(long)
    state.frame(np.zeros((240, 320, 3), dtype=np.uint8))
    with serve_page(state) as running, visit(browser, running.url, 320) as page:
        page.wait_for_selector("#marks .tag")
        first = page.locator("#marks .tag").first
        width = first.evaluate("tag => tag.offsetWidth")
        show("x")
        page.wait_for_selector("#marks .tag:has-text('x 90 %')")
        assert first.evaluate("tag => tag.offsetWidth") == width


def test_names_of_any_script_leave_their_numbers_whole(browser: Any) -> None:
    """A name from right to left stood between 73 and its percent sign; half an emoji was shown."""
    state = LiveState("scripts", promise=0.97)
    state.publish({**ANSWER, "class_name": "\u0633\u064a\u0627\u0631\u0629", "probability": 0.73})
    state.publish({**ANSWER, "class_name": "x" + "\U0001f697" * 60, "region": [0, 0, 32, 32]})
    state.frame(picture())
    pieces = """tag => { const range = document.createRange(), rest = tag.lastChild;
      range.setStart(rest, 0); range.setEnd(rest, rest.data.indexOf("%") + 1);
      return range.getClientRects().length; }"""
    with serve_page(state) as running, visit(browser, running.url) as page:
        page.wait_for_selector("#marks .tag")
        assert page.locator("#marks .tag").first.evaluate(pieces) == 1
        cells = page.locator("#answers td:nth-child(2)")
        assert cells.count() == 2 and cells.evaluate_all(
            "all => all.every(c => c.textContent.isWellFormed())"
        )


def test_a_lost_server_is_told_and_found_again(browser: Any, tmp_path: Path) -> None:
    state = scene("running")
    running = serve_page(state)
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(1e3 * LONG_S)
    page.goto(running.url)
    page.wait_for_selector(".banner.good")
    running.close()
    page.wait_for_selector(".banner.lost")
    assert "Connection to Gati lost" in page.locator("#banners").text_content()
    with serve_page(state, port=running.port):
        page.wait_for_selector(".banner.good")
        context.close()


def test_the_chart_has_no_answers_of_the_time_before_the_clock_was_set_back(browser: Any) -> None:
    """They were drawn beyond its edges, and the others before its beginning."""
    clock = Clock(0.0)
    state = LiveState("small", pictures=False, clock=clock)
    for clock.now_s in (5000.0, 5001.0, 1400.0, 1401.0, 1402.0):
        state.publish(ANSWER)
    with serve_page(state) as running, visit(browser, running.url) as page:
        page.wait_for_selector("#latency[aria-label^='Latency of the last 3 answers.']")


def test_nothing_of_the_run_before_is_shown_of_a_new_one(browser: Any) -> None:
    """Until its first answer, it had the gain, events, picture and exits of the one before."""
    running = serve_page(scene("alarm"))
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(1e3 * LONG_S)
    page.goto(running.url)
    page.wait_for_selector("#frame:not([hidden])")
    page.wait_for_selector("#log li")
    running.close()
    with serve_page(LiveState("another"), port=running.port):
        page.wait_for_selector("#title:text-is('another')")
        page.wait_for_selector("#log-empty:not([hidden])")
        assert page.locator("#log li").count() == 0 and page.locator("#marks .tag").count() == 0
        assert not page.locator("#frame").is_visible() and page.locator("#empty").is_visible()
        for name in ("gain", "hits", "agreement", "version"):
            assert page.locator(f"#{name}").text_content() == "-"
        assert page.locator("#gain-note").text_content() == "no answers yet"
        assert page.locator("#latency-note").text_content() == ""
        context.close()


def test_a_server_without_pictures_shows_no_empty_frame(browser: Any) -> None:
    state = LiveState("small", pictures=False)
    state.publish(ANSWER)
    with serve_page(state) as running, visit(browser, running.url) as page:
        assert not page.locator("#picture").is_visible() and page.locator("#answers").is_visible()
