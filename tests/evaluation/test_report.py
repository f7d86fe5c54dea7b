"""`gati report`: one page that loads nothing, escapes everything and says what is missing."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gati
from gati.cli import run
from gati.composition.pareto import ParetoPoint
from gati.composition.walk import certify as walk
from gati.composition.walk import certify_every_class
from gati.documents import values_of
from gati.engine.backends import BACKENDS
from gati.errors import LibraryError
from gati.evaluation.bench_result import (
    Bench,
    BenchMachine,
    BenchMethod,
    BenchRow,
    Histogram,
    Kind,
    spread,
)
from gati.evaluation.charts import Point, bars, scatter
from gati.evaluation.evaluate import Latency
from tests.engine.served import exit_at, images, make_served, rewrite

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    np.savez(tmp_path / "test.npz", images=images(12), labels=np.arange(12) % 4)
    return make_served(tmp_path)


@pytest.fixture(scope="module")
def measured_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    data = folder / "test.npz"
    np.savez(data, images=images(12), labels=np.arange(12) % 4)
    library = make_served(folder)
    with pytest.MonkeyPatch.context() as patch:
        # Compiling for each backend, once a client, takes most of a minute.
        module = import_module("gati.evaluation.bench")  # the verb of that name hides the room
        patch.setattr(module, "BACKENDS", {"torch": BACKENDS["torch"]})
        arguments = ["--data", str(data), "--repetitions", "1", "--clients", "1", "--seconds", "0.05"]
        assert run(["bench", str(library), *arguments]) == 0
    assert run(["evaluate", str(library), "--data", str(data)]) == 0
    return library


@pytest.fixture
def measured(measured_once: Path, tmp_path: Path) -> Path:
    """A library of its own for each test, with what `gati bench` and `gati evaluate` found."""
    return shutil.copytree(measured_once, tmp_path / "measured")


def page_of(library: Path) -> str:
    return (library / "report.html").read_text(encoding="utf-8")


def test_what_was_not_measured_names_its_command(library: Path) -> None:
    facts = gati.report(library)
    page = page_of(library)
    assert facts["bench"] is None and facts["evaluation"] is None
    for command in ("gati bench", "gati evaluate", "gati compose"):
        assert f"<code>{command} {library}" in page


@pytest.mark.slow
def test_the_page_shows_what_was_measured_and_loads_nothing(measured: Path) -> None:
    facts = gati.report(measured)
    page = page_of(measured)
    assert facts["evaluation"]["n"] == 12
    assert "gati torch" in page and "<svg" in page
    assert facts["evaluation"]["classes"][0]["name"] in page
    assert not re.search(r"<(script|link|img|iframe)|url\(|@import", page)
    addresses = set(re.findall(r"https?://[^\"' <]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}


@pytest.mark.slow
def test_a_measurement_of_another_composition_is_not_shown(measured: Path) -> None:
    default = (measured / "compositions/default.json").read_text()
    (measured / "compositions/other.json").write_text(default.replace('"name": "default"', '"name": "other"'))
    assert gati.report(measured, composition="other")["bench"] is None


@pytest.mark.slow
def test_a_measurement_of_an_earlier_composition_of_that_name_is_not_shown(measured: Path) -> None:
    before = gati.report(measured)
    assert before["bench"] is not None and before["evaluation"] is not None
    rewrite(measured, created="2026-01-02T00:00:00Z")
    facts = gati.report(measured)
    assert facts["bench"] is None and facts["evaluation"] is None


def test_the_page_shows_what_the_function_evaluated(library: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = library.parent / "test.npz"
    measured = gati.evaluate(library, data)
    assert gati.report(library)["evaluation"] == json.loads(measured.to_json())
    shutil.rmtree(library / "evaluations")
    (library / "evaluations").write_text("in the way")
    assert gati.evaluate(library, data).agreement == measured.agreement
    assert "the evaluation is not kept for gati report: cannot write" in caplog.text


def test_a_command_on_the_page_can_be_pasted(library: Path) -> None:
    there = library.rename(library.parent / "my runs")
    gati.report(there)
    assert f"gati evaluate &#39;{there}&#39; --data TEST" in page_of(there)


def test_what_limits_the_figures_is_said_where_they_are(library: Path) -> None:
    """Results on inputs that explore has seen, or on a busy machine, and costs that may be wrong."""
    seen = "gati explore has seen 3 of these 12 inputs"
    write_bench(library, note=seen, disturbed=True, disturbance="busy")
    certificate = walk([(0, 400)], 0.97, 0.05)
    rewrite(library, note="chosen by latencies that may be wrong", certificate=certificate, confidence=0.95)
    gati.report(library)
    page = page_of(library)
    assert page.count(seen) == 2  # headline and table
    assert "do not quote: busy" in page and "Do not quote these latencies: busy" in page
    assert "chosen by latencies that may be wrong" in page


def test_a_slower_composition_is_not_called_faster(library: Path) -> None:
    write_bench(library, gain=0.5)
    gati.report(library)
    assert '<p class="figure">0.50x</p>' in page_of(library)
    assert "gain in mean latency" in page_of(library) and "faster in" not in page_of(library)


def test_a_share_of_zero_has_no_sign(library: Path) -> None:
    shares = (0.6, 0.4000000000000003)  # together above 1, by rounding
    exits = tuple(replace(exit_at(index, 0.3), expected_hit_rate=share) for index, share in enumerate(shares))
    rewrite(library, exits=exits)
    gati.report(library)
    assert ">0.0 %<" in page_of(library) and "-0.0 %" not in page_of(library)


POINT = ParetoPoint(
    mean_latency_ms=1.0,
    gain=1.5,
    agreement=1.0,
    certified_agreement=0.98996,
    confidence=0.95,
    memory_bytes=1,
    blocks=(0,),
    trials=("trial-0",),
    thresholds=(0.5,),
)


def page_with(library: Path, point: ParetoPoint) -> str:
    points = {"format": 1, "placement": "inline", "points": [values_of(point)]}
    (library / "pareto.json").write_text(json.dumps(points))
    gati.report(library)
    return page_of(library)


@pytest.mark.parametrize("per_class", [False, True])
def test_the_trade_off_says_what_is_certified_and_that_the_split_was_used_before(
    library: Path, per_class: bool
) -> None:
    page = page_with(library, replace(POINT, per_class=per_class, use=3))
    assert ("with 95 % confidence, in every class." in page) == per_class
    assert ("--per-class --accuracy TARGET" in page) == per_class
    assert "This is the 3rd use of the library" in page and "covers each use on its own" in page
    assert "use of the library" not in page_with(library, POINT)


def test_certified_limits_are_rounded_down(library: Path) -> None:
    page = page_with(library, POINT)
    assert '<td data-label="certified">98.99 %</td>' in page
    assert "99.00 %" not in re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL)


def write_bench(directory: Path, gain: float = 2.0, **changes: Any) -> None:
    """Write a `bench.json` for the composition of `directory`."""
    latency = Latency(mean=1.0, p50=1.0, p90=1.0, p99=1.0)

    def row(kind: Kind, by: float) -> BenchRow:
        return BenchRow(
            name=f"{kind} torch",
            kind=kind,
            backend="torch",
            latency_ms=latency,
            gain_same=spread([by]),
            gain_fastest=spread([by]),
            agreement=1.0,
            accuracy=None,
            hit_rate=0.0,
            memory_bytes=1,
            throughput={},
            histogram=Histogram(edges_ms=(0.0, 1.0), counts=(1.0,)),
        )

    machine = BenchMachine(cpu="cpu", cores=1, threads=1, system="Linux", load_average=(0.0,))
    bench = Bench(
        composition="default",
        accuracy_target=0.97,
        data="test.npz",
        n=12,
        repetitions=1,
        clients=1,
        accuracy_f32=None,
        fastest_static="base torch",
        rows=(row("base", 1.0), row("gati", gain)),
        left_out=(),
        machine=machine,
        versions={},
        method=BenchMethod(text="", warm_up_requests=1, throughput_seconds=0.0),
        created="2026-01-01T00:00:00Z",
        composed="2026-01-01T00:00:00Z",
    )
    (directory / "bench.json").write_text(replace(bench, **changes).to_json())


def test_everything_is_escaped(library: Path) -> None:
    rewrite(library, certificate=certify_every_class([[(0, 400)]], 0.97, 0.05, ["<script>alert(1)</script>"]))
    gati.report(library)
    assert "<script>" not in page_of(library)
    drawing = scatter([Point(1.0, 0.9, "<b>", "gati")], "x", "y") + bars([("<i>", 0.5, "gati")])
    assert "<b>" not in drawing and "<i>" not in drawing


def test_a_damaged_measurement_is_named(library: Path) -> None:
    for name, content, message in (
        ("bench.json", "{", r"bench\.json is damaged .* run gati bench again"),
        ("bench.json", '{"format": 1}', r"bench\.json: has no field 'composition'; run gati bench again"),
        ("evaluations/default.json", '{"n": "3"}', r"field 'n' is '3', expected .* run gati evaluate again"),
        ("pareto.json", '{"format": 1, "placement": "inline", "points": [{}]}', r"points\[0\]: has no field"),
    ):
        (library / name).parent.mkdir(exist_ok=True)
        (library / name).write_text(content)
        with pytest.raises(LibraryError, match=message):
            gati.report(library)
        (library / name).unlink()


@pytest.mark.slow
def test_no_horizontal_scroll_in_a_browser(measured: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
    if CHROMIUM is None:
        pytest.skip("needs a browser: apt-get install chromium")
    gati.report(measured)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for width in (390, 1280):
            page = browser.new_page(viewport={"width": width, "height": 900})
            requested: list[str] = []
            page.on("request", lambda request, requested=requested: requested.append(request.url))
            page.goto((measured / "report.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert all(address.startswith("file:") for address in requested)
        browser.close()
