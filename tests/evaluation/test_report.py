"""`gati report`: one page that loads nothing, escapes everything and says what is missing."""

from __future__ import annotations

import re
import shutil
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import gati
from gati.cli import run
from gati.composition.walk import certify_every_class
from gati.engine.backends import BACKENDS
from gati.errors import LibraryError
from gati.evaluation.charts import Point, bars, scatter
from tests.engine.served import images, make_served, rewrite

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Compiling for each backend, once a client, takes most of a minute.
    module = import_module("gati.evaluation.bench")  # the verb of that name hides the room
    monkeypatch.setattr(module, "BACKENDS", {"torch": BACKENDS["torch"]})
    np.savez(tmp_path / "test.npz", images=images(12), labels=np.arange(12) % 4)
    return make_served(tmp_path)


def page_of(library: Path) -> str:
    return (library / "report.html").read_text(encoding="utf-8")


def test_what_was_not_measured_names_its_command(library: Path) -> None:
    facts = gati.report(library)
    page = page_of(library)
    assert facts["bench"] is None and facts["evaluation"] is None
    for command in ("gati bench", "gati evaluate", "gati compose"):
        assert f"<code>{command} {library}" in page


@pytest.mark.slow
def test_the_page_shows_what_was_measured_and_loads_nothing(library: Path) -> None:
    data = str(library.parent / "test.npz")
    assert run(["bench", str(library), "--data", data, "--repetitions", "1", "--clients", "1"]) == 0
    assert run(["evaluate", str(library), "--data", data]) == 0
    facts = gati.report(library)
    page = page_of(library)
    assert facts["evaluation"]["n"] == 12
    assert "gati torch" in page and "<svg" in page
    assert facts["evaluation"]["classes"][0]["name"] in page
    assert not re.search(r"<(script|link|img|iframe)|url\(|@import", page)
    addresses = set(re.findall(r"https?://[^\"' <]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}


@pytest.mark.slow
def test_a_measurement_of_another_composition_is_not_shown(library: Path) -> None:
    data = str(library.parent / "test.npz")
    assert run(["bench", str(library), "--data", data, "--repetitions", "1", "--clients", "1"]) == 0
    shutil.copy(library / "compositions/default.json", library / "compositions/other.json")
    rewrite(library)
    (library / "compositions/other.json").write_text(
        (library / "compositions/default.json").read_text().replace('"name": "default"', '"name": "other"')
    )
    assert gati.report(library, composition="other")["bench"] is None


@pytest.mark.slow
def test_a_measurement_of_an_earlier_composition_of_that_name_is_not_shown(library: Path) -> None:
    data = str(library.parent / "test.npz")
    assert run(["bench", str(library), "--data", data, "--repetitions", "1", "--clients", "1"]) == 0
    assert run(["evaluate", str(library), "--data", data]) == 0
    measured = gati.report(library)
    assert measured["bench"] is not None and measured["evaluation"] is not None
    rewrite(library, created="2026-01-02T00:00:00Z")
    facts = gati.report(library)
    assert facts["bench"] is None and facts["evaluation"] is None


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
def test_no_horizontal_scroll_in_a_browser(library: Path, tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
    if CHROMIUM is None:
        pytest.skip("needs a browser: apt-get install chromium")
    data = str(library.parent / "test.npz")
    assert run(["bench", str(library), "--data", data, "--repetitions", "1", "--clients", "1"]) == 0
    assert run(["evaluate", str(library), "--data", data]) == 0
    gati.report(library)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for width in (390, 1280):
            page = browser.new_page(viewport={"width": width, "height": 900})
            requested: list[str] = []
            page.on("request", lambda request, requested=requested: requested.append(request.url))
            page.goto((library / "report.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert all(address.startswith("file:") for address in requested)
        browser.close()
