"""`gati stream` and `gati replay` on a short video: results, sinks, tables, and errors as one line."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from PIL import Image

from gati.adaptation.adaptation import Adaptation
from gati.adaptation.pictures import origin_of
from gati.cli import run
from gati.errors import AdaptError
from gati.video import Region, open_source
from services.locks import hold
from tests.adaptation.deployed import make_deployed
from tests.video.films import Camera, film, plays, serving
from tests.waiting import LONG_S, until

pytestmark = pytest.mark.slow

pytest.importorskip("av")

ROOT = Path(__file__).resolve().parent.parent
FRAMES = 24


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_deployed(tmp_path_factory.mktemp("stream")).library.directory


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return film(tmp_path_factory.mktemp("video") / "film.mp4", FRAMES)


def test_stream_writes_results_of_every_region_and_an_annotated_video(
    library: Path, video: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, out = tmp_path / "results.jsonl", tmp_path / "out.mp4"
    regions = ["--region", "0,0,32,32", "--region", "8,8,24,24"]
    arguments = ["stream", str(library), "--source", str(video), *regions]
    assert run([*arguments, "--json", str(lines), "--out", str(out)]) == 0
    results = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(results) == 2 * FRAMES and out.stat().st_size > 0
    assert results[0]["region"] == [0, 0, 32, 32] and results[1]["region"] == [8, 8, 24, 24]
    assert [result["frame_index"] for result in results[::2]] == list(range(FRAMES))
    assert all(result["version"] == "0" and result["latency_ms"] > 0 for result in results)
    printed = capsys.readouterr()
    assert f"{FRAMES} pictures, {2 * FRAMES} answers" in printed.err and "hits" in printed.out


def test_streams_do_not_share_what_they_prove_and_remember(
    library: Path, video: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file was whose who wrote last: a restart could believe of one camera what another had proven."""
    arguments = ["stream", str(library), "--source", str(video), "--every", "1s", "--json", "-"]
    taken = hold(tmp_path / "stream.lock")
    assert not isinstance(taken, str)
    assert run([*arguments, "--state", str(tmp_path)]) == AdaptError.exit_status
    assert "another gati stream keeps its state in" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"stream.lock"}
    taken.close()
    assert run([*arguments, "--state", str(tmp_path)]) == 0


def test_what_is_learned_is_not_kept_in_a_folder_that_cannot_be_locked(
    library: Path,
    video: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two streams mixed their proofs there, without a word."""

    locked = fcntl.flock

    def without_locks(file: IO[bytes] | int, operation: int) -> None:
        if not isinstance(file, int) and Path(file.name).parent == tmp_path:
            raise OSError(errno.ENOSYS, "Function not implemented")
        locked(file, operation)

    monkeypatch.setattr("fcntl.flock", without_locks)
    arguments = ["stream", str(library), "--source", str(video), "--every", "1s", "--state", str(tmp_path)]
    said = f"cannot lock {tmp_path / 'stream.lock'} (Function not implemented); "
    assert run([*arguments, "--adapt"]) == AdaptError.exit_status
    assert f"error: {said}give a folder on a local disk" in capsys.readouterr().err
    assert run(arguments) == 0
    assert f"note: {said}run no other gati stream with this folder" in capsys.readouterr().err


def test_stream_prints_results_alone_where_they_are_asked_for(
    library: Path, video: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["stream", str(library), "--source", str(video), "--json", "-", "--every", "1s"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(json.loads(line)["exit"] for line in lines)


def test_what_one_source_proved_does_not_count_for_another(
    library: Path, video: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second camera was answered by what the first one had proven, from its first picture on."""
    (tmp_path / "b").mkdir()
    other = film(tmp_path / "b" / "film.mp4", FRAMES)
    told = "earlier proofs are not known to be of this source"
    arguments = ["stream", str(library), "--adapt", "--state", str(tmp_path)]
    for source, region, known in (
        (video, [], True),
        (video, [], True),
        (other, [], False),
        (other, ["--region", "0,0,32,32"], False),
    ):
        assert run([*arguments, "--source", str(source), *region]) == 0
        printed = capsys.readouterr()
        assert (told in printed.out + printed.err) != known
    assert str(video) not in (tmp_path / "standing-default.json").read_text()


def test_an_origin_tells_sources_and_regions_apart_and_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, parts = "rtsp://user:secret@camera/1", [Region(0, 0, 8, 8), Region(8, 8, 8, 8)]
    origin = origin_of(address, parts)
    assert origin == origin_of(address, parts[::-1]) and "secret" not in origin
    assert origin == origin_of(f" {address} ", parts), "as it is opened"
    others = [
        origin_of(address),
        origin_of(address, parts[:1]),
        origin_of("rtsp://user:secret@camera/2", parts),
    ]
    assert len({origin, *others}) == 4
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "film.mp4").touch()
    monkeypatch.chdir(tmp_path / "a")
    here = [origin_of(f"{reader}film.mp4") for reader in ("", "opencv:")]
    assert here == [origin_of(f"{reader}{tmp_path}/a/film.mp4") for reader in ("", "opencv:")]
    monkeypatch.chdir(tmp_path / "b")
    assert not {*here} & {origin_of(f"{reader}film.mp4") for reader in ("", "opencv:")}


def test_a_camera_that_changes_its_resolution_is_classified_on(library: Path, tmp_path: Path) -> None:
    """Its stream ended where a region did not fit any more; one that did fit showed something else."""
    lines, out, shown = tmp_path / "results.jsonl", tmp_path / "out.mp4", tmp_path / "shown"
    shown.mkdir()
    for number, (width, height) in enumerate([(64, 48), (32, 24), (128, 96), (64, 48)]):
        right_half = np.zeros((height, width, 3), np.uint8)
        right_half[:, width // 2 :] = 255
        Image.fromarray(right_half).save(shown / f"{number}.png")
    arguments = ["stream", str(library), "--source", str(shown), "--region", "32,0,32,48"]
    assert run([*arguments, "--json", str(lines), "--out", str(out)]) == 0
    results = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [result["region"] for result in results] == [[32, 0, 32, 48]] * 4
    assert [result["probability"] for result in results] == pytest.approx([0.71] * 4, abs=0.01)
    drawn = [frame.image for frame in open_source(str(out))]
    assert [image.shape for image in drawn] == [(48, 64, 3)] * 4
    assert all(np.array_equal(image[40:, 40:60] > 128, drawn[0][40:, 40:60] > 128) for image in drawn)


def test_what_a_killed_stream_left_behind_is_removed(
    library: Path, video: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each `kill -9` left the networks of several versions behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "gati-stream-killed"
    left.mkdir()
    for name in ("lock", "network.onnx"):
        (left / name).touch()
    arguments = ["stream", str(library), "--source", str(video), "--every", "1s", "--adapt"]
    assert run([*arguments, "--state", str(tmp_path / "state")]) == 0
    assert [path.name for path in tmp_path.glob("gati-*")] == []


def test_results_are_complete_before_a_retraining_is_waited_for(
    library: Path, video: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was told to end was killed meanwhile, and its video was lost."""
    out, close, complete = tmp_path / "out.mp4", Adaptation.close, list[bool]()

    def closed(self: Adaptation) -> None:
        complete.append(out.exists())
        close(self)

    monkeypatch.setattr(Adaptation, "close", closed)
    assert run(["stream", str(library), "--source", str(video), "--out", str(out)]) == 0
    assert complete == [True]


def test_stream_with_adapt_keeps_samples_for_the_next_run(library: Path, video: Path, tmp_path: Path) -> None:
    from gati.adaptation.settings import model_name
    from gati.samples.store import RecordStore

    arguments = ["stream", str(library), "--source", str(video), "--adapt", "--state", str(tmp_path)]
    assert run(arguments) == 0
    with RecordStore.open(f"sqlite:///{tmp_path}/records.db") as store:
        assert 0 < store.count(model_name(library)) <= FRAMES
    assert run(arguments) == 0


@pytest.mark.parametrize("under", ["a terminal", "nohup"])
def test_ctrl_c_ends_a_stream_with_a_summary(
    library: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    under: str,
) -> None:
    """If the terminal is closed as well, that does not kill it while outputs are closed."""
    lines, killed = tmp_path / "results.jsonl", threading.Event()
    kills: Any = signal.SIG_IGN if under == "nohup" else lambda *_: killed.set()
    # what a shell starts behind ignores SIGINT
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: kills}
    before = {each: signal.signal(each, handler) for each, handler in handlers.items()}
    close = Adaptation.close

    def closed(self: Adaptation) -> None:
        signal.raise_signal(signal.SIGHUP)
        close(self)

    monkeypatch.setattr(Adaptation, "close", closed)
    ended, goes_on = threading.Event(), threading.Event()

    def answers(more_than: int) -> bool:
        return ended.is_set() or (lines.exists() and lines.read_text().count("\n") > more_than)

    def press() -> None:
        until(lambda: answers(0))
        if under == "nohup":
            os.kill(os.getpid(), signal.SIGHUP)
            until(partial(answers, lines.read_text().count("\n") + 3))
        if not ended.is_set():
            goes_on.set()
            os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    try:
        with Camera(plays()) as endless:
            assert run(["stream", str(library), "--source", endless.url, "--json", str(lines)]) == 0
    finally:
        ended.set()
        pressing.join()
        for each, handler in before.items():
            signal.signal(each, handler)
    said = capsys.readouterr().err
    assert "ended by Ctrl-C or SIGTERM" in said and "answers" in said
    assert goes_on.is_set() and not killed.is_set()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_what_a_stream_has_done_is_told_although_it_fails(
    library: Path, video: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After days, there was nothing but the error."""
    assert run(["stream", str(library), "--source", str(video), "--json", "/dev/full"]) == 2
    *_, source, error = capsys.readouterr().err.splitlines()
    assert source.startswith("source ended: 0 dropped") and error.startswith("error: cannot write /dev/full")


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP], ids=["SIGTERM", "a closed terminal"])
def test_a_signal_ends_a_stream_with_a_summary_and_its_video(
    library: Path, tmp_path: Path, sent: signal.Signals
) -> None:
    lines, video = tmp_path / "results.jsonl", tmp_path / "out.mp4"
    endless = Camera(plays())
    command = [sys.executable, "-m", "gati", "stream", str(library), "--source", endless.url]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with endless:
        process = subprocess.Popen(
            [*command, "--json", str(lines), "--out", str(video)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            preexec_fn=partial(signal.signal, sent, signal.SIG_DFL),  # what runs under nohup ignores it
        )
        until(lambda: process.poll() is not None or (lines.exists() and lines.read_text().count("\n") > 5))
        process.send_signal(sent)
        _, said = process.communicate(timeout=LONG_S)
    assert process.returncode == 0, said
    assert "ended by Ctrl-C or SIGTERM" in said and "answers" in said and "Traceback" not in said
    assert video.stat().st_size > 0


def test_replay_prints_a_row_a_version_and_writes_json(
    library: Path, video: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "replay.json"
    assert run(["replay", str(library), "--source", str(video), "--json", str(written)]) == 0
    report = json.loads(written.read_text())
    assert report["total"]["requests"] == FRAMES == sum(each["requests"] for each in report["periods"])
    assert 0.0 <= report["total"]["worst_agreement"] <= report["total"]["agreement"] <= 1.0
    table = capsys.readouterr().out
    assert "agreement" in table and "all" in table


def test_memory_has_room_for_every_region(
    library: Path, video: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 65 regions, each was forgotten before its next picture, and memory answered none."""
    regions = [part for at in range(65) for part in ("--region", f"{at % 32},{at // 32},16,16")]
    written, begun = tmp_path / "replay.json", Adaptation.__init__
    asked = [str(library), "--source", str(video), *regions]
    assert run(["replay", *asked, "--every", "1s", "--json", str(written)]) == 0
    assert json.loads(written.read_text())["settings"]["places"] == 65
    places: list[int] = []

    def begins(self: Adaptation, *given: Any, **options: Any) -> None:
        begun(self, *given, **options)
        places.append(self.settings.places)

    monkeypatch.setattr(Adaptation, "__init__", begins)
    assert run(["stream", *asked, "--every", "1s", "--adapt", "--state", str(tmp_path)]) == 0
    assert places == [65]


def test_replay_shows_no_password_of_an_address(library: Path, video: Path, tmp_path: Path) -> None:
    written = tmp_path / "replay.json"
    with serving(video.parent) as place:
        url = f"http://me:secret@{place}/film.mp4?token=hush"
        assert run(["replay", str(library), "--source", url, "--json", str(written)]) == 0
    assert json.loads(written.read_text())["source"] == f"http://***@{place}/film.mp4?token=***"


def test_replay_sweeps_over_every_combination(
    library: Path, video: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = ["--sampling", "0.2", "--sampling", "0.5", "--interval", "1s", "--interval", "2s"]
    assert run(["replay", str(library), "--source", str(video), *values]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.strip()[:2].isdigit()]
    assert len(rows) == 4


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["stream", "--interval", "1m"], "--interval"),
        (["stream", "--sampling", "0.2"], "--sampling"),
        (["stream", "--window", "1h", "--margin", "0"], "--window, --margin"),
        (["stream", "--recall", "--seed", "0"], "--recall, --seed"),
        (["replay", "--no-adapt", "--delay", "1"], "--delay"),
        (["replay", "--no-adapt", "--interval", "1s", "--interval", "2s"], "--interval"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(
    library: Path, video: Path, arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    verb, *options = arguments
    assert run([verb, str(library), "--source", str(video), *options]) == 2
    without = "without --adapt" if verb == "stream" else "with --no-adapt"
    assert f"error: {named} cannot be used {without}: nothing is learned" in capsys.readouterr().err


def test_options_that_have_an_effect_or_ask_for_nothing_are_taken(
    library: Path, video: Path, tmp_path: Path
) -> None:
    common = [str(library), "--source", str(video), "--every", "1s", "--no-recall", "--accuracy", "0.9"]
    assert run(["stream", *common, "--audits", "0.1", "--state", str(tmp_path)]) == 0
    assert run(["replay", *common, "--no-adapt", "--audits", "0.1", "--seed", "3"]) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--source", "nowhere.mp4"], "nowhere.mp4"),
        (["--source", "VIDEO", "--region", "60,0,32,32"], "region 60,0,32,32"),
        (["--source", "VIDEO", "--region", "left"], "x,y,width,height"),
        (["--source", "VIDEO", "--sampling", "0"], "sampling"),
        (["--source", "VIDEO", "--interval", "soon"], "soon"),
        (["--source", "VIDEO", "--every", "1s", "--fps", "2"], "give one of them"),
        (["--source", "x" * 5_000], "there is no file or folder 'xxx"),
        (["--source", f"opencv:{'x' * 5_000}"], "there is no file 'xxx"),
        (["--source", "VIDEO", "--adapt", "--variants", "student(8)"], "no place for student(8) at block"),
    ],
)
@pytest.mark.parametrize("verb", ["stream", "replay"])
def test_what_makes_no_sense_is_one_line(
    library: Path, video: Path, verb: str, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(video) if option == "VIDEO" else option for option in options]
    assert run([verb, str(library), *given]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors[-1].startswith("error: ") and said in errors[-1]


def test_a_page_is_served(library: Path, video: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["stream", str(library), "--source", str(video), "--page"]) == 0
    assert "page at http://127.0.0.1:" in capsys.readouterr().err
