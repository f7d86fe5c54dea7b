"""`gati stream` and `gati replay` on a short video: results, sinks, tables, and errors as one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gati.adaptation.pictures import origin_of
from gati.cli import run
from gati.errors import AdaptError
from gati.video import Region
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
    here = origin_of("film.mp4")
    assert here == origin_of(str(tmp_path / "a" / "film.mp4"))
    monkeypatch.chdir(tmp_path / "b")
    assert here != origin_of("film.mp4")


def test_stream_with_adapt_keeps_samples_for_the_next_run(library: Path, video: Path, tmp_path: Path) -> None:
    from gati.adaptation.settings import model_name
    from gati.samples.store import RecordStore

    arguments = ["stream", str(library), "--source", str(video), "--adapt", "--state", str(tmp_path)]
    assert run(arguments) == 0
    with RecordStore.open(f"sqlite:///{tmp_path}/records.db") as store:
        assert 0 < store.count(model_name(library)) <= FRAMES
    assert run(arguments) == 0


def _heed_interrupts() -> None:
    """What a shell starts in the background ignores them, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_stream_with_a_summary(library: Path, tmp_path: Path, number: signal.Signals) -> None:
    lines = tmp_path / "results.jsonl"
    endless = Camera(plays())
    command = [sys.executable, "-m", "gati", "stream", str(library), "--source", endless.url]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with endless:
        process = subprocess.Popen(
            [*command, "--json", str(lines)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            preexec_fn=_heed_interrupts,
        )
        until(lambda: process.poll() is not None or (lines.exists() and lines.read_text() != ""))
        process.send_signal(number)
        _, said = process.communicate(timeout=LONG_S)
    assert process.returncode == 0, said
    assert "ended by Ctrl-C or SIGTERM" in said and "answers" in said and "Traceback" not in said


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
        (["--source", "VIDEO", "--variants", "student(8)"], "no place for student(8) at block"),
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


def test_a_page_is_served_or_its_absence_told(
    library: Path, video: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from importlib.util import find_spec

    status = run(["stream", str(library), "--source", str(video), "--page"])
    said = capsys.readouterr().err
    if find_spec("services.live") is None:
        assert status == 2 and "services.live is missing" in said
    else:
        assert status == 0 and "page at http://127.0.0.1:" in said
