"""Plot latency against agreement of Gati and its peers, from the tables in `benchmarks/README.md`.

    python -m benchmarks.latency_plot [--out docs/images]

Nothing is measured here: the figures are those of the sections "Students" and "Peers". Writes
`latency-light.svg` and `latency-dark.svg`, for pages with a light and a dark background.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
MEASURED = REPOSITORY / "benchmarks" / "README.md"
ENGINES = ("PyTorch", "OpenVINO, float32", "OpenVINO, lookups in 8-bit integers")
INKS = {"light": "#24292f", "dark": "#e6edf3"}
COLOURS = {
    "Gati": "#2da44e",
    "cascade": "#d4772c",
    "BranchyNet-style exits": "#8250df",
    "SDN-style exits": "#1f7fd6",
}
MARKERS = {"Gati": "o", "cascade": "s", "BranchyNet-style exits": "^", "SDN-style exits": "v"}


class Point(NamedTuple):
    """One method on one engine: its agreement with the network, and its speedup."""

    engine: str
    method: str
    agreement: float
    gain: float
    certified: bool

    @property
    def latency(self) -> float:
        """Mean latency relative to the network's on the same engine."""
        return 1.0 / self.gain


def measured_points(text: str) -> list[Point]:
    """Return the points in the text of `benchmarks/README.md`. Raises ValueError if a table differs."""
    students = _table(text, "## Students", "same answer: Gati, cascade")
    peers = _table(text, "### Peers", "over the same engine alone")
    points = [point for row in students for point in _students(row)]
    for engine, network, gain, agreement in peers:
        if network.endswith("exits"):  # Gati and the cascade are above, measured later
            points.append(Point(engine, network, float(agreement), _factor(gain), certified=False))
    return [point for point in points if point.engine in ENGINES]


def _students(row: list[str]) -> Iterator[Point]:
    engine, _, gati, cascade, _, same_answer, _ = row
    agreements = [float(number) for number in same_answer.split(", ")]
    yield Point(engine, "Gati", agreements[0], _factor(gati), certified=True)
    if cascade:
        yield Point(engine, "cascade", agreements[1], _factor(cascade), certified=True)


def _factor(cell: str) -> float:
    found = re.fullmatch(r"\**(\d+\.\d+)x\**", cell)
    if found is None:
        raise ValueError(f"{MEASURED}: {cell!r} is not a gain, such as 1.81x")
    return float(found[1])


def _table(text: str, heading: str, column: str) -> list[list[str]]:
    """Return the rows of the table with that column, in the section below a heading."""
    section = text.partition(f"\n{heading}\n")[2]
    lines = section.splitlines()
    head = next(
        (number for number, line in enumerate(lines) if line.startswith("|") and column in line), None
    )
    if head is None:
        raise ValueError(f"{MEASURED}: no table with a column {column!r} below {heading!r}")
    rows = []
    for line in lines[head + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def draw(points: list[Point], ink: str, path: Path) -> None:
    """Write one image with a transparent background."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    style = {
        **dict.fromkeys(
            ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink
        ),
        "svg.fonttype": "none",
        "svg.hashsalt": "gati",  # reproducible output
        "font.family": "sans-serif",
        "font.size": 10,
    }
    with plt.rc_context(style):
        figure, panels = plt.subplots(1, len(ENGINES), figsize=(10.0, 3.6), sharex=True, sharey=True)
        for axes, engine in zip(panels, ENGINES, strict=True):
            here = [point for point in points if point.engine == engine]
            axes.plot(100.0, 1.0, marker="D", color=ink, linestyle="", label="network alone")
            for method in COLOURS:
                of_method = sorted(point for point in here if point.method == method)
                if of_method:
                    _line(axes, of_method, method)
            axes.set(title=engine, xlim=(96.0, 100.25), ylim=(0.0, 1.1))
            axes.title.set_fontsize(10)
            axes.grid(color=ink, alpha=0.15)
            axes.spines[["top", "right"]].set_visible(False)
        panels[0].set_ylabel("mean latency, network alone = 1")
        panels[1].set_xlabel("answers equal to the network's, %, on images that nothing had seen")
        handles = {
            label: handle
            for axes in panels
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            handles.values(), handles, loc="lower center", ncols=len(handles), frameon=False, fontsize=9
        )
        figure.tight_layout(rect=(0.0, 0.08, 1.0, 1.0))
        figure.savefig(path, transparent=True, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def _line(axes: object, points: list[Point], method: str) -> None:
    certified = points[0].certified
    axes.plot(  # type: ignore[attr-defined]
        [100.0 * point.agreement for point in points],
        [point.latency for point in points],
        marker=MARKERS[method],
        color=COLOURS[method],
        markerfacecolor=COLOURS[method] if certified else "none",
        label=method if certified else f"{method} (not certified)",
    )
    for point in points:
        place = (100.0 * point.agreement, point.latency)
        below = method in ("Gati", "SDN-style exits")
        axes.annotate(  # type: ignore[attr-defined]
            f"{point.gain:.2f}x",
            place,
            xytext=(0, -14 if below else 7),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )


def main() -> None:
    """Read the tables and write both images."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "images", help="an existing folder")
    out = parser.parse_args().out
    points = measured_points(MEASURED.read_text(encoding="utf-8"))
    for name, ink in INKS.items():
        draw(points, ink, out / f"latency-{name}.svg")


if __name__ == "__main__":
    main()
