"""The command line: help, options, errors as one line, exit statuses, and what tables show."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import pytest
import typer

import gati
from gati.cli import main, run
from gati.composition.composition import Composition, Exit, Expected
from gati.errors import CompositionError, StorageError
from gati.files import atomic_write_text
from gati.types import TrialId
from tests.composition.libraries import make_library
from tests.conftest import REPOSITORY

VERBS = [
    "blocks", "doctor", "explore", "compose", "evaluate", "certify", "bench", "report", "serve", "query",
    "stream", "replay", "predict", "export", "demo", "pipeline", "evict", "adapt",
]  # fmt: skip


def failing(error: BaseException) -> Any:
    def verb(*arguments: object, **options: object) -> None:
        raise error

    return verb


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What stands on stderr, which must be exactly one line."""
    text = capsys.readouterr().err
    assert text.endswith("\n") and text.count("\n") == 1, text
    return text.rstrip("\n")


# Help -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_help_loads_neither_torch_nor_solvers() -> None:
    program = (
        "import sys; from gati.cli import run; run(['--help']); run(['explore', '--help']);"
        "sys.exit(bool({'torch', 'numpy', 'scipy', 'highspy', 'gurobipy', 'sklearn'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0


def test_help_names_every_verb_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    lines = capsys.readouterr().out.split("Commands", 1)[1].splitlines()
    listed = [line.split()[1] for line in lines if line.startswith("│ ") and not line.startswith("│  ")]
    assert listed == VERBS


@pytest.mark.parametrize("group", ["", "evict", "pipeline", "adapt"])
def test_no_arguments_show_the_help(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([group] if group else []) == 0
    shown = capsys.readouterr()
    assert f"gati {group or 'demo'}" in shown.out and not shown.err


def test_an_interrupt_while_modules_load_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupts(MetaPathFinder):
        def find_spec(self, fullname: str, *_: object) -> None:
            if fullname == "gati.cli.running":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "gati.cli.running")
    monkeypatch.setattr(sys, "meta_path", [Interrupts(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert one_line(capsys) == "error: interrupted"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"gati {gati.__version__}\n"


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gati", "compose", "nowhere"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no cache library in nowhere")


# What goes wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explore"], "error: Missing argument 'MODEL' (see gati explore --help)"),
        (["blocks", "m:f", "--bloks", "x"], "error: No such option: --bloks"),
        (["bake"], "error: No such command 'bake'"),
        (["compose", "x", "--accuracy", "high"], "error: Invalid value for '--accuracy'"),
        (["compose", "x", "--solver", "cplex"], "error: Invalid value for '--solver'"),
        (
            ["compose", "x", "--solver"],
            "error: Option '--solver' requires an argument (see gati compose --help)",
        ),
        (["evict", "inspect"], "error: Missing argument 'TRACE' (see gati evict inspect --help)"),
    ],
    ids=["no model", "misspelled option", "unknown verb", "not a number", "unknown solver", "no value"]
    + ["verb of a group"],
)
def test_wrong_usage_is_one_line_that_names_the_help(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    line = one_line(capsys)
    assert line.startswith(message)
    assert line.endswith("--help)")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["explore", "m:f", "--data", "v.npz", "--out", "o", "--mean", "0.5,grey"],
            "error: --mean '0.5,grey' is not a list of numbers; write one per channel, such as 0.5,0.5,0.5",
        ),
        (
            ["explore", "m:f", "--data", "v.npz", "--out", "o", "--budget", "soon"],
            "error: 'soon' is not a duration; write for example 10m, 90s or 500ms",
        ),
        (["explore", "m:f", "--data", "v.npz"], "error: --out is missing: give a folder"),
        (["explore", "m:f", "--out", "o"], "error: --data is missing: give inputs"),
        (
            ["explore", "--more", "1h", "o", "--blocks", "x"],
            "error: --blocks cannot be used with --more: the library keeps its own setting",
        ),
        (["compose", "x", "--memory", "lots"], "error: 'lots' is not a size; write for example 256MiB"),
        (["blocks", "m:f", "--size", "32"], "error: --size '32' is not a size in pixels; write HEIGHTxWIDTH"),
        (["blocks", "resnet18"], "error: unknown model 'resnet18'"),
        (["evaluate", "nowhere", "--data", "x.npz"], "error: no cache library in nowhere"),
        (["predict", "nowhere", "x.png"], "error: no cache library in nowhere"),
        (["export", "nowhere", "--out", "x.onnx"], "error: no cache library in nowhere"),
    ],
    ids=["mean", "budget", "no out", "no data", "more", "memory", "size", "model"]
    + [f"{verb} without library" for verb in ("evaluate", "predict", "export")],
)
def test_bad_values_are_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert one_line(capsys).startswith(message)


def test_an_error_of_ours_prints_its_message_and_gives_its_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gati, "compose", failing(CompositionError("no caches:\n  none pays")))
    assert run(["compose", "runs/x"]) == CompositionError.exit_status
    assert one_line(capsys) == "error: no caches: none pays"


@pytest.mark.parametrize(
    ("variables", "is_red"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_errors_are_red_in_a_terminal_that_wants_colours(
    variables: dict[str, str],
    is_red: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in ({"TERM": "xterm"} | variables).items():
        monkeypatch.setenv(name, value)
    assert run(["bake"]) == 2
    assert ("\x1b[31m" in one_line(capsys)) == is_red


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoding", "name", "path"),
    [
        ("latin-1", rb"\u732b", rb"p\udcff.toml"),
        ("utf-8", "猫".encode(), rb"p\udcff.toml"),
        ("utf-8:surrogateescape", "猫".encode(), b"p\xff.toml"),  # as in the locale C
    ],
)
def test_characters_that_the_locale_lacks_are_shown_by_number(
    encoding: str, name: bytes, path: bytes, tmp_path: Path
) -> None:
    """A class name in another script, or a file name that is no text, ended in a report of a defect."""
    file = tmp_path / "p\udcff.toml"
    one = '{ library = "lib", accuracy = 0.5, latency_ms = 1.0 }'
    file.write_text(f'name = "p"\nclass_names = ["猫"]\nstages.only.options.one = {one}\n', encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "gati", "pipeline", "check", str(file)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONIOENCODING": encoding},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert name in done.stdout and path in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("closed", "asked"), [(">&-", "check p.toml"), ("2>&-", "check missing.toml")])
def test_a_stream_that_is_closed_ends_no_verb(closed: str, asked: str, tmp_path: Path) -> None:
    one = '{ library = "lib", accuracy = 0.5, latency_ms = 1.0 }'
    (tmp_path / "p.toml").write_text(f'class_names = ["a"]\nstages.only.options.one = {one}\n')
    command = f"{sys.executable} -m gati pipeline {asked} {closed}"
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=env, check=False)
    assert done.returncode == (2 if "missing" in asked else 0)


def test_a_full_disk_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "runs/x/trials.csv")
    monkeypatch.setattr(gati, "compose", failing(full))
    assert run(["compose", "runs/x"]) == StorageError.exit_status
    assert one_line(capsys).startswith("error: disk full while writing runs/x/trials.csv: free some space")


@pytest.mark.parametrize("command", [["explore", "m:f", "--data", "v.npz", "--out", "o"], ["demo"]])
def test_what_resumes_says_so_when_it_is_interrupted(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gati, command[0], failing(KeyboardInterrupt()))
    assert run(command) == 130
    assert f"run the same gati {command[0]} command again to resume" in one_line(capsys)


def test_an_interrupt_elsewhere_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gati, "compose", failing(KeyboardInterrupt()))
    assert run(["compose", "runs/x"]) == 130
    assert one_line(capsys) == "error: interrupted"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's handler of SIGINT, though a script in whose background this runs lets it be ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def swallowing(error: Exception) -> Any:
    """Swallows an interrupt, as some packages do while they are imported, and fails later."""

    def verb(*_: Any, **__: Any) -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise error

    return verb


@pytest.mark.parametrize("debug", ["0", "1"])
def test_an_interrupt_that_an_import_swallowed_is_no_error_to_report(
    debug: str, interruptible: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While torch was imported, it ended as an AttributeError or RecursionError in what was half imported."""
    monkeypatch.setenv("GATI_DEBUG", debug)
    half_imported = AttributeError("module 'numpy' has no attribute 'matrix'")
    monkeypatch.setattr(gati, "compose", swallowing(half_imported))
    assert run(["compose", "runs/x"]) == 130
    shown = capsys.readouterr().err
    assert shown.endswith("error: interrupted\n") and ("no attribute 'matrix'" in shown) == (debug == "1")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), StorageError.exit_status, "disk full"),
        (PermissionError(errno.EACCES, "Permission denied", "runs/x"), 1, "Permission denied: 'runs/x'"),
        (typer.BadParameter("give two numbers"), 2, "give two numbers"),
    ],
)
def test_what_an_interrupt_cannot_have_caused_is_reported_after_one_that_an_import_swallowed(
    error: Exception,
    status: int,
    told: str,
    interruptible: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(gati, "compose", swallowing(error))
    assert run(["compose", "runs/x"]) == status
    assert told in one_line(capsys)


def test_an_unexpected_error_is_one_line_that_asks_for_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GATI_DEBUG", raising=False)
    monkeypatch.setattr(gati, "compose", failing(ZeroDivisionError("by zero")))
    assert run(["compose", "runs/x"]) == 1
    line = one_line(capsys)
    assert line.startswith("error: unexpected ZeroDivisionError: by zero; please report it")
    assert "GATI_DEBUG=1" in line


@pytest.mark.parametrize("way", ["variable", "option"])
def test_debug_shows_the_traceback(
    way: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GATI_DEBUG", "1" if way == "variable" else "0")  # restored afterwards
    monkeypatch.setattr(gati, "compose", failing(ZeroDivisionError("by zero")))
    assert run([*(["--debug"] if way == "option" else []), "compose", "runs/x"]) == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown and shown.splitlines()[-1].startswith("error: unexpected ZeroDivisionError")


@pytest.mark.slow
def test_a_closed_pipe_is_silent() -> None:
    command = f"{sys.executable} -m gati blocks gati.zoo:digits_resnet | head -0"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""


# What reaches the library -----------------------------------------------------------------------------------


def test_explore_hands_every_option_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def explore(*arguments: object, **options: object) -> None:
        seen.update(options, arguments=arguments)
        raise CompositionError("enough seen")

    monkeypatch.setattr(gati, "explore", explore)
    run(
        ["explore", "timm:vit", "--checkpoint", "w.safetensors", "--data", "v.npz", "--train-data", "t.npz"]
        + [
            "--out",
            "runs/v",
            "--unique",
            "--blocks",
            "blocks.*",
            "--variants",
            "fc(512), conv(3,1)",
            "--device",
            "cuda",
        ]
        + ["--budget", "10m", "--seed", "7", "--mean", "0.5", "--std", "0.25,0.5,1", "--resize", "256"]
        + ["--sample-rate", "16000", "--seconds", "1.5"]
        + ["--ray", "10.0.0.1:6379", "--ray-cores", "2", "--ray-gpus", "1", "--lookup-cores", "3"]
        + ["--tokenizer", "tokenizer.json", "--max-length", "64", "--text-column", "query"]
        + ["--label-column", "intent"]
        + ["--epochs", "2.5", "--class-names", "names.txt", "--label-map", "map.json"]
        + ["--companion", "timm:small", "--companion", "own.pt2"]
        + ["--companion-checkpoint", "s.safetensors", "--companion-checkpoint", "none"]
    )
    del seen["progress"]
    assert seen == {
        "arguments": ("timm:vit", Path("w.safetensors")),
        "data": "v.npz",
        "train_data": "t.npz",
        "out": Path("runs/v"),
        "unique": True,
        "blocks": "blocks.*",
        "variants": ("fc(512)", "conv(3,1)"),
        "device": "cuda",
        "epochs": 2.5,
        "budget_s": 600.0,
        "seed": 7,
        "ray": "10.0.0.1:6379",
        "ray_cores": 2,
        "ray_gpus": 1,
        "lookup_cores": 3,
        "tokenizer": Path("tokenizer.json"),
        "max_length": 64,
        "text_column": "query",
        "label_column": "intent",
        "mean": (0.5,),
        "std": (0.25, 0.5, 1.0),
        "resize": 256,
        "sample_rate": 16000,
        "seconds": 1.5,
        "class_names": Path("names.txt"),
        "label_map": Path("map.json"),
        "companions": [("timm:small", "s.safetensors"), ("own.pt2", None)],
    }


@pytest.mark.parametrize(
    ("options", "budget_s"),
    [([], 1500.0), (["--epochs", "2"], None), (["--budget", "none"], None), (["--budget", "1h"], 3600.0)],
)
def test_explore_has_a_budget_unless_epochs_are_given(
    monkeypatch: pytest.MonkeyPatch, options: list[str], budget_s: float | None
) -> None:
    seen: dict[str, Any] = {}

    def explore(*arguments: object, **given: object) -> None:
        seen.update(given)
        raise CompositionError("enough seen")

    monkeypatch.setattr(gati, "explore", explore)
    run(["explore", "m:f", "--data", "v.npz", "--out", "o", *options])
    assert seen["budget_s"] == budget_s


def test_compose_reads_sizes_and_prints_what_was_chosen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, Any] = {}

    def compose(directory: Path, **options: object) -> Composition:
        seen.update(options)
        return composition()

    monkeypatch.setattr(gati, "compose", compose)
    monkeypatch.setattr(gati, "explain", lambda *arguments: ())
    status = run(["compose", "runs/x", "--memory", "256MiB", "--accuracy", "0.97", "--name", "small"])
    assert status == 0
    assert (seen["memory_bytes"], seen["accuracy"], seen["name"]) == (256 * 2**20, 0.97, "small")
    shown = capsys.readouterr().out
    for expected in ("layer2.3", "deep(64)", "41.0 %", "97.80 %", "gain 1.60x", "gap 0.00 %", "solver highs"):
        assert expected in shown
    assert "next: gati evaluate runs/x --data TEST --composition small" in shown


@pytest.fixture
def evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a composition whose evaluation takes no time."""
    from gati.evaluation.evaluate import Evaluation, ExitCount, Latency

    measured = Evaluation(
        n=100, agreement=0.98, accuracy=0.93, base_accuracy=0.94, hit_rate=0.6,
        latency_ms=Latency(mean=0.5, p50=0.4, p90=1.0, p99=1.1),
        base_latency_ms=Latency(mean=1.0, p50=1.0, p90=1.0, p99=1.05),
        gain=2.0, tail_ratio=1.048, memory_bytes=2048, backend="torch",
        exits=(
            ExitCount(
                block="layer1.0", variant="fc(512)", threshold=0.9, placement="inline",
                hits=60, agreement=0.97,
            ),
            ExitCount(
                block="layer2.0", variant="fc(512)", threshold=0.9, placement="inline",
                hits=0, agreement=None,
            ),
        ),
    )  # fmt: skip
    monkeypatch.setattr(gati, "evaluate", lambda *arguments, **options: measured)
    composition().save(tmp_path / "compositions" / "default.json")
    return tmp_path


def test_evaluate_writes_the_json_it_printed(evaluated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["evaluate", str(evaluated), "--data", "t.npz", "--json", str(evaluated / "e.json")]) == 0
    assert json.loads((evaluated / "e.json").read_text())["latency_ms"]["p99"] == 1.1
    shown = capsys.readouterr().out
    for expected in ("2.00x", "98.00 %", "-1.00 points", "layer1.0", "gain 2.00x", "tail ratio 1.05"):
        assert expected in shown
    assert (
        "note: NOT CERTIFIED: nothing proves that at least 97 % of answers of composition 'default'" in shown
    )


@pytest.mark.parametrize("place", ["-", "/dev/stdout", "/dev/fd/1", "link"])
def test_numbers_on_standard_output_are_alone_there(
    place: str, evaluated: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if place == "link":
        (evaluated / "link").symlink_to("/dev/stdout")
        place = str(evaluated / "link")
    assert run(["evaluate", str(evaluated), "--data", "t.npz", "--json", place]) == 0
    shown = capfd.readouterr()
    assert json.loads(shown.out)["gain"] == 2.0
    assert "gain 2.00x" in shown.err and "note: NOT CERTIFIED" in shown.err
    print("and what follows is not redirected")
    assert capfd.readouterr().out


def test_a_page_on_standard_output_is_alone_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def report(directory: Path, *, composition: str, out: Path) -> dict[str, int]:
        atomic_write_text(out, "<page>")
        return {}

    monkeypatch.setattr(gati, "report", report)
    assert run(["report", str(tmp_path), "--out", "-"]) == 0
    assert capfd.readouterr().out == "<page>"


def test_what_was_evaluated_is_shown_if_it_cannot_be_written(
    evaluated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (evaluated / "file").write_text("in the way")
    asked = ["evaluate", str(evaluated), "--data", "t.npz", "--json", str(evaluated / "file" / "e.json")]
    assert run(asked) == StorageError.exit_status
    shown = capsys.readouterr()
    assert "gain 2.00x" in shown.out and "file/e.json" in shown.err


def composition() -> Composition:
    return Composition(
        name="small",
        objective="full",
        solver="highs",
        gap=0.0,
        alpha=None,
        accuracy_target=0.97,
        confidence=0.95,
        memory_limit_bytes=256 * 2**20,
        backend="torch",
        placement="inline",
        exits=(
            Exit(
                trial_id=TrialId("layer2.3--deep-64"),
                block="layer2.3",
                block_index=12,
                variant="deep(64)",
                selector="maximum",
                threshold=0.9,
                placement="inline",
                expected_hit_rate=0.41,
                expected_agreement=0.978,
                lookup_ms=0.11,
                memory_bytes=90_000,
                exit_ms=1.9,
            ),
        ),
        expected=Expected(2.5, 4.0, 1.6, 0.41, 0.991, 90_000),
        certificate=None,
        checkpoint_sha256="0" * 64,
        created="2026-01-01T00:00:00+00:00",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (["--pareto", "--latency", "2ms"], "--pareto shows the trade-off, --latency composes at one latency"),
        (
            ["--pareto", "--solver", "highs"],
            "--solver requires --accuracy; it works with neither --pareto nor",
        ),
        (["--latency", "2ms", "--objective", "full"], "--objective requires --accuracy"),
    ],
)
def test_options_that_would_be_ignored_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], refusal: str
) -> None:
    make_library(tmp_path)
    assert run(["compose", str(tmp_path), *options]) == 2
    assert f"error: {refusal}" in capsys.readouterr().err


def test_pareto_shows_from_careful_to_fast_and_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = str(make_library(tmp_path).directory)
    assert run(["compose", directory, "--pareto"]) == 0
    said = capsys.readouterr().out
    points = json.loads((tmp_path / "pareto.json").read_text())["points"]
    assert len(points) >= 3
    assert [point["mean_latency_ms"] for point in points] == sorted(
        (point["mean_latency_ms"] for point in points), reverse=True
    )
    assert said.count("x ") >= len(points)
    assert "all these agreements hold together with 95 % confidence" in said
    assert not (tmp_path / "compositions").exists(), "the frontier is for looking; nothing is composed"


@pytest.mark.slow
def test_compose_finds_the_most_agreement_within_a_latency(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = make_library(tmp_path)
    within_ms = 0.8 * library.manifest.profile.base_ms
    compose = ["compose", str(tmp_path), "--backend", "torch"]  # whose latencies the library holds
    assert run([*compose, "--latency", f"{within_ms}ms"]) == 0
    composed = Composition.load(library.composition_path())
    assert composed.expected.mean_latency_ms <= within_ms
    assert "certificate: With 95 % confidence" in capsys.readouterr().out
    status = run([*compose, "--latency", "0.1ms", "--name", "impossible"])
    assert status == CompositionError.exit_status
    assert "no composition has a mean latency of 0.1 ms: the fastest" in one_line(capsys)


def test_a_composition_is_measured_with_the_threads_it_was_composed_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from gati.cli.options import threads_as_measured
    from tests.composition.libraries import make_library
    from tests.engine.served import composed

    library = make_library(tmp_path / "library")
    known = library.manifest.profile
    plain = composed(library.manifest.checkpoint_sha256, ())
    plain.save(library.composition_path("older"))
    conditions = replace(known.conditions, threads=known.threads + 5)
    replace(plain, measured_on=conditions).save(library.composition_path("newer"))
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr("gati.cores.usable_cores", lambda: set(range(64)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    unnamed = replace(conditions, processor="", threads=known.threads + 6)
    replace(plain, measured_on=unnamed).save(library.composition_path("unnamed"))
    for name in ("older", "newer", "unnamed"):
        threads_as_measured(library.directory, name)
    assert asked == [known.threads, known.threads + 5, known.threads + 6]
    threads_as_measured(library.directory, "missing")
    elsewhere = replace(conditions, processor="of another machine")
    replace(plain, measured_on=elsewhere).save(library.composition_path("elsewhere"))
    threads_as_measured(library.directory, "elsewhere")
    assert len(asked) == 3
