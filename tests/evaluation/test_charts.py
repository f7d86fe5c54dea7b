"""Charts: drawings that any browser reads, with a mark for each number and every label escaped."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from gati.evaluation.charts import ChartLine, Point, bars, distribution, lines, scatter

SVG = "{http://www.w3.org/2000/svg}"
names = st.text("ab<>&\"' é", min_size=1, max_size=6)
shares = st.floats(0.0, 1.0)
latencies = st.floats(1e-3, 1e4)


def drawn(text: str, tag: str, kind: str) -> list[ElementTree.Element]:
    """The elements of one sort, from a drawing that must be well-formed."""
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg" and root.get("role") == "img"
    return [each for each in root.iter(f"{SVG}{tag}") if kind in (each.get("class") or "").split()]


def inside(element: ElementTree.Element, across: str, down: str, height: float = 300.0) -> bool:
    x, y = (float(element.get(name) or "nan") for name in (across, down))
    return 0.0 <= x <= 640.0 and 0.0 <= y <= height


@given(st.lists(st.builds(Point, latencies, shares, names, st.just("peer")), min_size=1, max_size=6))
def test_every_point_is_a_mark_inside(points: list[Point]) -> None:
    marks = drawn(scatter(points, "<x>", "y"), "circle", "peer")
    assert len(marks) == len(points)
    assert all(inside(mark, "cx", "cy") for mark in marks)
    order = sorted(range(len(points)), key=lambda at: points[at].x)
    places = [float(marks[at].get("cx") or "nan") for at in order]
    assert places == sorted(places)


@given(st.lists(st.tuples(names, shares, st.just("gati")), min_size=1, max_size=6))
def test_bars_are_as_long_as_their_shares(rows: list[tuple[str, float, str]]) -> None:
    found = drawn(bars(rows), "rect", "gati")
    lengths = [float(bar.get("width") or "nan") for bar in found]
    assert len(found) == len(rows)
    widest = max(share for _, share, _ in rows) or 1.0
    for (_, share, _), length in zip(rows, lengths, strict=True):
        assert abs(length - max(2.0, share / widest * 340)) <= 0.06


@given(counts=st.lists(st.integers(0, 50), min_size=2, max_size=8), name=names)
def test_a_distribution_is_an_area_for_each_series(counts: list[int], name: str) -> None:
    edges = [float(at) for at in range(len(counts) + 1)]
    text = distribution(edges, [(name, "base", counts), ("b", "gati", counts[::-1])])
    assert len(drawn(text, "path", "base")) == len(drawn(text, "path", "gati")) == 1
    assert [each.text for each in drawn(text, "path", "base")[0]] == [name]


@given(st.lists(st.tuples(shares, shares), min_size=1, max_size=6), st.booleans())
def test_lines_end_with_their_number(found: list[tuple[float, float]], share: bool) -> None:
    series = [ChartLine("<a>", "gati", sorted(found)), ChartLine("b", "base", [(0.0, 0.5), (1.0, 0.5)])]
    text = lines(series, "t", "x", share=share)
    assert len(drawn(text, "path", "line")) == 2
    numbers = [each.text for each in ElementTree.fromstring(text).iter(f"{SVG}text")]
    assert {"1", "2"} <= set(numbers)
