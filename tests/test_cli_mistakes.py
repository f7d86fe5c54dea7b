"""What people type by mistake: options without effect, folders for files, paths for names; closed pipes."""

from __future__ import annotations

import os
import re
import shlex
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

import gati
from gati.cli import render, run
from gati.cli.asking import AskedServer
from gati.cli.running import tree
from gati.cli.serve import announce
from gati.composition.composition import Composition
from gati.errors import CompositionError, DataError, StorageError
from gati.files import atomic_write_text
from gati.model.pictures import open_image
from gati.model.recordings import read_recording
from tests.composition.libraries import make_library
from tests.conftest import REPOSITORY
from tests.engine.served import composed
from tests.environment import without_proxies
from tests.evict.talking import talks, write
from tests.permissions import close
from tests.services.certificates import certify


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """The one line that a command is refused with."""
    assert run(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("error: ") and shown.err.count("\n") == 1, shown
    return shown.err.removeprefix("error: ").rstrip("\n")


def ends_with(seen: dict[str, Any]) -> Any:
    """A function of the library that notes what it was given, and goes no further."""

    def verb(*arguments: object, **options: object) -> None:
        seen.update(options, arguments=arguments)
        raise CompositionError("enough seen")

    return verb


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A library with the compositions `bold` and `default`."""
    made = make_library(tmp_path / "my runs" / "net")
    for name in ("bold", "default"):
        composed(made.manifest.checkpoint_sha256, ()).save(made.composition_path(name))
    return made.directory


# Options without effect -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        "--seed 1",
        "--seed 0",
        "--device cpu",
        "--mean 0.5",
        "--std 0.5",
        "--resize 8",
        "--variants fc(8)",
        "--companion itself",
        "--companion-checkpoint none",
        "--class-names names.txt",
        "--label-map map.json",
        "--tokenizer t.json",
        "--text-column query",
        "--sample-rate 8000",
        "--budget 1h",
        "--epochs 2",
        "--out elsewhere",
        "--checkpoint w.pt",
        "--unique",
        "--lookup-cores 2",
    ],
)
def test_training_further_refuses_what_it_would_ignore(
    given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gati, "explore_more", ends_with({}))
    said = refused(capsys, ["explore", "--more", "1h", "runs/mine", *given.split()])
    assert said.startswith(f"{given.split()[0]} cannot be used with --more: the library keeps its own")


def test_training_further_names_every_option_that_it_would_ignore(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["explore", "--mean", "0.5", "runs/mine", "--more", "1h", "--data", "v.npz", "--seed", "1"]
    assert refused(capsys, asked).startswith("--seed, --mean cannot be used with --more")


def test_training_further_takes_its_own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(gati, "explore_more", ends_with(seen))
    run(
        ["explore", "--more", "1h", "runs/mine", "--data", "v.npz", "--train-data", "t.npz"]
        + ["--ray", "local", "--ray-cores", "2", "--ray-gpus", "1"]
    )
    del seen["progress"]
    assert seen == {
        "arguments": ("runs/mine",),
        "budget_s": 3600.0,
        "data": "v.npz",
        "train_data": "t.npz",
        "ray": "local",
        "ray_cores": 2,
        "ray_gpus": 1,
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["compose", "x", "--latency", "2ms", "--accuracy", "0.99"], "leave out --accuracy, or --latency"),
        (["compose", "x", "--pareto", "--name", "fast"], "--pareto composes nothing: leave out --name"),
        (["explore", "m:f", "--ray-cores", "4"], "--ray-cores would have no effect without --ray"),
        (["stream", "x", "--source", "v.mp4", "--page-port", "80"], "--page-port requires --page"),
        (["stream", "x", "--source", "a.mp4", "--seed=1", "--source", "b.mp4"], "--source is given 2 times"),
        (["evict", "replay", "x", "--policy", "lru", "--policy", "lru"], "--policy is given 2 times"),
    ],
)
def test_other_options_without_effect_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, arguments)


def test_a_line_with_a_repeated_option_is_still_completed() -> None:
    """The error was printed into the line that was being typed."""
    line = ["stream", "x", "--seed", "1", "--seed", "2"]
    stream = tree().commands[line[0]]
    assert stream.make_context(line[0], line[1:], resilient_parsing=True).command is stream


# Files, folders and standard output -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["evaluate", "x", "--data", "t.npz", "--json"],
        ["report", "x", "--out"],
        ["stream", "x", "--source", "v.mp4", "--json"],
        ["export", "x", "--out"],
        ["evict", "compare", "t.jsonl", "--out"],
        ["evict", "synthesise", "t.jsonl", "--out"],
    ],
    ids=" ".join,
)
def test_a_folder_in_place_of_a_file_is_refused_before_any_work(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, [*arguments, str(tmp_path)]) == (
        f"{arguments[-1]} {tmp_path} is a folder; give the name of a file"
    )


def test_the_library_says_that_a_file_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"it is a folder; give the name of a file$"):
        atomic_write_text(tmp_path, "text")


def test_two_results_do_not_mix_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, ["report", "x", "--json", "-", "--out", "/dev/stdout"])
    assert said.endswith("both name standard output; give one of them a file")
    assert "--json" in said and "--out" in said


def test_a_network_on_standard_output_is_alone_there(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def export(directory: Path, out: Path, **options: object) -> None:
        print("tracing")
        atomic_write_text(out, "<network>")
        raise CompositionError("enough seen")

    monkeypatch.setattr(gati, "export", export)
    run(["export", "x", "--out", "-"])
    shown = capfd.readouterr()
    assert shown.out == "<network>" and "tracing" in shown.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--out", "net.pt2"], "--out net.pt2 is called as a pt2 file: give --format pt2, or another name"),
        (["--out", "net.onnx", "--format", "pt2"], "give --format onnx, or another name"),
        (["--out", "net.onnx", "--format", "triton"], "give --format onnx, or another name"),
        (["--out", "-", "--format", "triton"], "writes a folder, which has no place on standard output"),
    ],
)
def test_a_network_is_written_as_its_name_says(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, ["export", "x", *arguments])


@pytest.mark.slow
def test_a_page_and_a_stream_of_eviction_may_be_standard_output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dialogues = write(tmp_path / "talks.jsonl", talks(40))
    assert run(["evict", "synthesise", str(dialogues), "--block", "4", "--for", "5m", "--out", "-"]) == 0
    shown = capfd.readouterr()
    assert shown.out.startswith("{") and shown.out.endswith("}\n") and "wrote" in shown.err
    trace = tmp_path / "stream.jsonl"
    trace.write_text(shown.out)
    asked = ["--size", "20", "--policy", "lru,opt", "--no-noise", "--out", "-"]
    assert run(["evict", "compare", str(trace), *asked]) == 0
    shown = capfd.readouterr()
    assert shown.out.lower().startswith("<!doctype html>") and "hit rate" in shown.err


def test_home_is_found_behind_an_equals_sign(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Shells expand `--out ~/x` alone; a folder called `~` came to be."""
    seen: dict[str, Any] = {}
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(gati, "explore", ends_with(seen))
    run(["explore", "m:f", "--data=~/v.npz", "--out=~/runs/x", "--class-names", "~/as/typed"])
    assert (seen["data"], seen["out"]) == (f"{tmp_path}/v.npz", tmp_path / "runs" / "x")
    assert seen["class_names"] == Path("~/as/typed")


# Names, and what there is in their place --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "verb",
    [
        ["evaluate", "DIR", "--data", "t.npz"],
        ["certify", "DIR", "--data", "t.npz"],
        ["bench", "DIR", "--data", "t.npz"],
        ["predict", "DIR", "a.png"],
        ["report", "DIR"],
        ["export", "DIR", "--out", "net.onnx"],
    ],
    ids=lambda verb: verb[0],
)
def test_a_composition_is_a_name_and_no_path(
    verb: list[str], library: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [str(library) if each == "DIR" else each for each in verb]
    outside = library / "compositions" / "default.json"
    for name in ("../compositions/default", str(outside.with_suffix("")), "a/b", ""):
        said = refused(capsys, [*asked, "--composition", name])
        assert said == f"{name!r} is not the name of a composition; give a name, such as bold, default"
    assert "there are: bold, default" in refused(capsys, [*asked, "--composition", "timid"])


@pytest.mark.slow
def test_a_composition_to_serve_exists_before_a_process_starts(
    library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve = pytest.importorskip("services.serve")
    monkeypatch.setattr(serve, "serve", ends_with({}))
    assert "there are: bold, default" in refused(capsys, ["serve", str(library), "--composition", "timid"])
    assert "'../bold' is not the name" in refused(capsys, ["serve", str(library), "--composition", "../bold"])
    assert refused(capsys, ["serve", str(library), "--composition", "bold"]) == "enough seen"


def test_a_folder_of_libraries_says_which_there_are(
    library: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, ["compose", str(library.parent)])
    assert said.startswith(f"no cache library in {library.parent}") and said.endswith(f"or give {library}")


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        ("report DIR --json HOME/x.json", "cannot write HOME/x.json: Permission denied; choose a folder "),
        ("export DIR --out HOME/x.onnx", "export: cannot read HOME/x.onnx (Permission denied); check "),
        ("serve HOME/serve.toml", "HOME/serve.toml: not readable as TOML ([Errno 13] Permission denied: "),
        ("serve HOME/net --composition bold", "cannot read HOME/net/manifest.json: Permission denied; "),
    ],
)
def test_what_is_in_a_folder_that_is_closed_to_this_user_is_refused(
    verb: str,
    said: str,
    library: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    close(monkeypatch, home)
    places = {"DIR": str(library), "HOME": str(home)}
    words = [re.sub("DIR|HOME", lambda found: places[found[0]], word) for word in verb.split()]
    assert refused(capsys, words).startswith(said.replace("HOME", str(home)))


def test_pictures_and_recordings_are_files(tmp_path: Path) -> None:
    for read in (open_image, read_recording):
        with pytest.raises(DataError, match=rf"^{tmp_path} is a folder; give the \w+( files)? in it"):
            read(tmp_path)


@pytest.mark.parametrize("confidence", ["1", "0", "95"])
def test_a_confidence_is_refused_by_its_name(confidence: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, ["certify", "x", "--data", "t.npz", "--confidence", confidence])
    assert said == (f"confidence is {float(confidence)}, but must lie strictly between 0 and 1, such as 0.95")


def test_a_pipeline_is_asked_for_by_its_whole_name(monkeypatch: pytest.MonkeyPatch) -> None:
    httpx = pytest.importorskip("httpx")
    asked: list[str] = []

    def request(method: str, url: str, **_: object) -> object:
        asked.append(url)
        return httpx.Response(404, json={"error": "none"})

    monkeypatch.setattr(httpx, "request", request)
    run(["pipeline", "status", "a/b?c"])
    assert asked == ["http://127.0.0.1:8000/v1/pipelines/a%2Fb%3Fc"]


def test_what_is_asked_is_a_file_or_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with a space in its name was sent as a text; a long text without spaces is no name of a file."""
    httpx = pytest.importorskip("httpx")
    monkeypatch.chdir(tmp_path)
    Path("my cat.png").write_bytes(b"picture")
    asked: list[tuple[str, object]] = []

    def request(
        method: str, url: str, *, content: bytes | None, headers: dict[str, str], **_: object
    ) -> object:
        asked.append((headers.get("Content-Type", ""), content))
        if method == "GET":
            return httpx.Response(200, json={"pipelines": [{"name": "cats"}]})
        return httpx.Response(503, json={"error": "enough seen"})

    monkeypatch.setattr(httpx, "request", request)
    for given in ("my cat.png", "my dog.png", "字" * 200):
        assert run(["query", "cats", given]) == 1
    assert [each for each in asked if each[1]] == [
        ("application/octet-stream", b"picture"),
        ("text/plain", b"my dog.png"),
        ("text/plain", ("字" * 200).encode()),
    ]


def test_a_query_needs_nothing_that_only_servers_need(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gati.cli.serve.find_spec", lambda name: None)
    run(["query", "model", "--text", "hello", "--url", "http://127.0.0.1:9"])
    assert "no gati serve responds at http://127.0.0.1:9" in capsys.readouterr().err


def test_a_text_in_another_encoding_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """It was an unexpected error of Gati's, to be reported."""
    assert "the text is not UTF-8" in refused(capsys, ["query", "cats", "caf\udce9"])


class Server(BaseHTTPRequestHandler):
    """Answers every GET with an empty JSON object."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")


def test_a_server_of_this_machine_is_asked_without_a_proxy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the environment names a proxy, that was asked for 127.0.0.1; one of SOCKS was a bug to report."""
    pytest.importorskip("httpx")
    without_proxies(monkeypatch)
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere")  # it needs no certificates, either
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert AskedServer(f"http://127.0.0.1:{server.server_port}", None).ask("GET", "/") == {}
        finally:
            server.shutdown()
            thread.join()
    assert run(["adapt", "status", "--url", "http://elsewhere.invalid"]) == 2
    assert "no gati serve responds at http://elsewhere.invalid" in capsys.readouterr().err


@contextmanager
def serving(certificate: Path, key: Path) -> Iterator[str]:
    """The URL of a server of this machine with that certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"https://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_certificate_that_is_not_trusted_is_told_from_a_server_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("httpx")
    certificate, key = certify(tmp_path)
    with serving(certificate, key) as url:
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        assert run(["adapt", "status", "--url", url]) == 2
        said = capsys.readouterr().err
        assert f"the certificate of {url} is not trusted" in said and "SSL_CERT_FILE" in said
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert AskedServer(url, None).ask("GET", "/") == {}


def test_a_certificate_for_another_name_needs_no_authority(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It was said to be not trusted, with the advice that its users had followed already."""
    pytest.importorskip("httpx")
    certificate, key = certify(tmp_path, "DNS:elsewhere.invalid")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with serving(certificate, key) as url:
        assert run(["adapt", "status", "--url", url]) == 2
    said = capsys.readouterr().err
    assert f"the certificate of {url} is not valid for it (" in said and "SSL_CERT_FILE" not in said


@pytest.mark.parametrize("status", [200, 404])
def test_another_server_is_told_from_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    """Its reply was an unexpected error of Gati's, to be reported."""
    httpx = pytest.importorskip("httpx")
    monkeypatch.setattr(httpx, "request", lambda *_, **__: httpx.Response(status, json=["hello"]))
    assert run(["query", "model", "--text", "hello"]) == 2
    said = capsys.readouterr().err
    assert "no gati serve responds at http://127.0.0.1:8000 (its reply is no JSON object)" in said


# Commands to paste ------------------------------------------------------------------------------------------


def next_words(shown: str) -> list[str]:
    (line,) = [each for each in shown.splitlines() if each.startswith("next: ")]
    return shlex.split(line.removeprefix("next: "))


def test_what_to_run_next_can_be_pasted(library: Path, capsys: pytest.CaptureFixture[str]) -> None:
    render.library(gati.Library.open(library))
    assert next_words(capsys.readouterr().out) == ["gati", "compose", str(library)]
    render.composition(Composition.load(library / "compositions" / "bold.json"), library)
    assert next_words(capsys.readouterr().out)[:3] == ["gati", "evaluate", str(library)]


def test_what_to_run_next_on_a_trace_can_be_pasted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "of today.txt"
    trace.write_text("a\nb\na\n")
    assert run(["evict", "inspect", str(trace), "--flat"]) == 0
    assert next_words(capsys.readouterr().out) == ["gati", "evict", "replay", str(trace), "--flat"]


# Pipes that close -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapped", [False, True], ids=["itself", "as a cause"])
def test_a_broken_pipe_that_is_not_standard_output_is_told(
    wrapped: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compose(*_: object, **__: object) -> None:
        try:
            raise BrokenPipeError(32, "Broken pipe")
        except BrokenPipeError as error:
            if wrapped:
                raise StorageError("cannot reach the other process") from error
            raise

    monkeypatch.delenv("GATI_DEBUG", raising=False)
    monkeypatch.setattr(gati, "compose", compose)
    assert run(["compose", "runs/x"]) == (2 if wrapped else 1)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert ("cannot reach the other process" if wrapped else "error: unexpected BrokenPipeError") in said


def test_a_server_goes_on_where_its_address_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose output went to a full disk ended as soon as it was ready."""
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        announce("http://127.0.0.1:8000")
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space left"):
            full.flush()  # what could not be written is still there
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


@pytest.mark.slow
@pytest.mark.parametrize("what", ["print('x')", "print('x', flush=True)", "atomic_write_text(path, 'x')"])
def test_standard_output_that_is_no_longer_read_ends_a_command_quietly(what: str) -> None:
    program = (
        "import sys; from pathlib import Path; from gati.cli import main; from gati.cli.commands import app;"
        "from gati.files import atomic_write_text; path = Path('/dev/stdout');"
        f"app.command('say')(lambda: {what}); sys.argv = ['gati', 'say']; main()"
    )
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": ""},
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
