"""Requirements on every sink, and on every source that can be read to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image

from gati.errors import GatiError
from gati.video import JsonLinesSink, SourceState, open_source
from gati.video.annotated import AnnotatedVideoSink
from gati.video.sinks import Sink
from gati.video.webhook import WebhookSink
from tests.video.answers import answer, frame
from tests.video.films import film, number_of, picture
from tests.video.test_webhook import Hook, hook  # noqa: F401  # a fixture

MakeSink = Callable[[], Sink]


@pytest.fixture(params=["lines", "video", "webhook"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> MakeSink:
    """A way to open each kind of sink."""
    if request.param == "webhook":
        served: Hook = request.getfixturevalue("hook")
        return lambda: WebhookSink(served.url)
    if request.param == "lines":
        return lambda: JsonLinesSink(tmp_path / "answers.jsonl")
    return lambda: AnnotatedVideoSink(tmp_path / "answers.mp4")


def test_a_sink_takes_results_and_leaves_those_that_it_was_given_alone(make: MakeSink) -> None:
    sink, shown = make(), frame(3)
    before = shown.image.copy()
    for number in range(3, 6):
        sink.write(answer(number), shown if number == 3 else frame(number))
    sink.close()
    assert (shown.image == before).all()


def test_a_closed_sink_takes_nothing_and_may_be_closed_again(make: MakeSink) -> None:
    sink = make()
    sink.write(answer(0), frame(0))
    sink.close()
    sink.close()
    with pytest.raises(GatiError, match="closed"):
        sink.write(answer(1), frame(1))


def test_a_sink_that_nothing_was_written_to_closes(make: MakeSink) -> None:
    make().close()


COUNT = 6


@pytest.fixture(params=["film", "film through OpenCV", "folder", "film as if it were live"])
def readable(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The text that means a source of `COUNT` pictures, and the policy to read it with."""
    if request.param == "folder":
        for number in range(COUNT):
            Image.fromarray(picture(number)).save(tmp_path / f"{number}.png")
        yield str(tmp_path), "auto"
        return
    path = film(tmp_path / "film.mp4", COUNT)
    if "OpenCV" in request.param:
        pytest.importorskip("cv2")
        yield f"opencv:{path}", "auto"
        return
    yield str(path), "drop-oldest" if "live" in request.param else "auto"


def test_a_source_gives_pictures_in_order_and_ends(readable: tuple[str, str]) -> None:
    text, policy = readable
    with open_source(text, policy=policy) as source:
        frames = list(source)
        assert list(source) == []  # it has ended, and says so each time it is asked
    assert source.state is SourceState.ENDED
    numbers = [number_of(each.image) for each in frames]
    assert numbers == [each.index for each in frames]
    assert numbers == list(range(COUNT)) or (policy == "drop-oldest" and numbers == sorted(set(numbers)))
    assert all(later.time_s > earlier.time_s for earlier, later in pairwise(frames))
    found = source.statistics
    assert found.delivered == len(frames) and found.delivered + found.dropped == COUNT
    assert {each.source for each in frames} == {source.name}


def test_a_closed_source_gives_nothing_more(readable: tuple[str, str]) -> None:
    text, policy = readable
    source = open_source(text, policy=policy)
    next(source)
    source.close()
    source.close()
    assert list(source) == []
