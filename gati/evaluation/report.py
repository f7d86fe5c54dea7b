"""`gati report`: one HTML page of what a composition promises and its measurements."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gati.composition.certificate import of_uses
from gati.composition.composition import Composition
from gati.composition.pareto import ParetoPoint, read_frontier
from gati.documents import values_of
from gati.evaluation.bench_result import Bench, BenchRow
from gati.evaluation.charts import Point, bars, distribution, scatter
from gati.evaluation.evaluate import Evaluation, kept_evaluation
from gati.evaluation.pages import page_environment
from gati.exploration.library import Library
from gati.files import atomic_write_text
from gati.types import Profile
from gati.units import at_least, at_most, format_bytes
from gati.version import __version__

Measured = TypeVar("Measured", Bench, Evaluation)


def report(
    directory: str | Path, *, composition: str = "default", out: str | Path | None = None
) -> dict[str, Any]:
    """Write a self-contained HTML page about a composition, and return its contents as strict JSON values.

    `out` defaults to `report.html` in the library. The page shows the results of `gati bench` and `gati
    evaluate` for this composition; a section without results names the command that measures them.

    Raises:
        LibraryError, CompositionError: as for `gati.Library.open` and `Composition.load`.
        StorageError: the page cannot be written.
    """
    library = Library.open(directory)
    facts = _facts(library, Composition.of(library, composition))
    target = library.directory / "report.html" if out is None else Path(out)
    atomic_write_text(target, _page(facts))
    return facts.to_json()


@dataclass(frozen=True, kw_only=True)
class _Explored:
    """What the library was made from: input counts by use, data sets and package versions."""

    counts: dict[str, int]
    data: dict[str, str]
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What the page shows; None for what was not measured for this composition."""

    model: str
    directory: str
    composition: Composition
    promise: str
    profile: Profile
    explored: _Explored
    bench: Bench | None
    evaluation: Evaluation | None
    frontier: tuple[ParetoPoint, ...]
    frontier_missing: str  # why it is empty
    version: str = __version__

    def to_json(self) -> dict[str, Any]:
        """Return the facts as strict JSON values."""
        documents = (
            ("composition", self.composition),
            ("bench", self.bench),
            ("evaluation", self.evaluation),
        )
        own = {name: json.loads(each.to_json()) for name, each in documents if each is not None}
        return {name: own[name] if name in own else values_of(value) for name, value in vars(self).items()}

    @property
    def own_rows(self) -> tuple[BenchRow, BenchRow] | None:
        """The base model and Gati on the composition's backend, if both were measured."""
        rows = () if self.bench is None else self.bench.rows
        backend = self.composition.backend
        found = {row.kind: row for row in rows if row.kind != "peer" and row.backend == backend}
        return (found["base"], found["gati"]) if len(found) == 2 else None


def _facts(library: Library, chosen: Composition) -> _Facts:
    manifest = library.manifest
    frontier, frontier_missing = _frontier(library)
    bench = _measured(Bench.load, library.directory / "bench.json", chosen)
    return _Facts(
        model=manifest.model_source,
        directory=str(library.directory),
        composition=chosen,
        promise=_promise(chosen),
        profile=manifest.profile,
        explored=_Explored(counts=manifest.counts, data=manifest.data, versions=manifest.versions),
        bench=bench,
        evaluation=_measured(Evaluation.load, kept_evaluation(library, chosen.name), chosen),
        frontier=frontier,
        frontier_missing=frontier_missing,
    )


def _promise(chosen: Composition) -> str:
    if chosen.warning:
        return chosen.warning
    certificate = chosen.certificate
    if certificate is not None:
        return certificate.sentence()
    return chosen.note or "No caches were chosen, so every answer is the base model's."


def _measured(load: Callable[[Path], Measured], path: Path, chosen: Composition) -> Measured | None:
    """Return the stored measurement; None if there is none, or only for another composition."""
    found = load(path) if path.is_file() else None
    of = None if found is None else (found.composition, found.composed)
    return found if of == (chosen.name, chosen.created) else None


def _frontier(library: Library) -> tuple[tuple[ParetoPoint, ...], str]:
    """Return the stored frontier; without one, say why. To make one uses the certify split."""
    path = library.directory / "pareto.json"
    return (read_frontier(path), "") if path.is_file() else ((), "No trade-off was computed yet.")


def _page(facts: _Facts) -> str:
    from markupsafe import Markup

    environment = page_environment("gati.evaluation")
    environment.filters["percent"] = lambda share: "-" if share is None else f"{100 * share:.2f} %"
    environment.filters["ms"] = lambda value: "-" if value is None else f"{value:.3f} ms"
    environment.filters["size"] = format_bytes
    environment.filters["quoted"] = shlex.quote
    environment.filters["used_before"] = of_uses
    environment.filters |= {"at_least": at_least, "at_most": at_most}
    charts = {name: Markup(svg) for name, svg in _charts(facts).items()}  # their labels are escaped
    value, note = _headline(facts)
    page = environment.get_template("report.html")
    return page.render(**vars(facts), charts=charts, headline={"value": value, "note": note})


def _headline(facts: _Facts) -> tuple[str, str]:
    """Return the headline figure from the best available source, and a note on what it is."""
    if facts.own_rows is not None:
        gain = facts.own_rows[1].gain_same
        spread = f"{gain.min:.2f} to {gain.max:.2f} over the repetitions of gati bench"
        note = f"mean latency, against the same engine; {spread}{_caveats(facts.bench)}"
        return f"{gain.median:.2f}x", note
    if facts.evaluation is not None:
        note = f"mean latency, measured by gati evaluate{_caveats(facts.evaluation)}"
        return f"{facts.evaluation.gain:.2f}x", note
    gain_expected = facts.composition.expected.gain
    return f"{gain_expected:.2f}x", "expected mean latency; not yet measured on unseen inputs"


def _caveats(measured: Bench | Evaluation | None) -> str:
    """Return warnings about the inputs of a measurement, and about a busy machine."""
    if measured is None:
        return ""
    disturbed = f"do not quote: {measured.disturbance}" if measured.disturbed else ""
    return "".join(f"; {each}" for each in (measured.note, disturbed) if each)


def _charts(facts: _Facts) -> dict[str, str]:
    charts = dict.fromkeys(("latency", "peers", "exits", "frontier"), "")
    if facts.own_rows is not None:
        series = [(row.name, row.kind, row.histogram.counts) for row in facts.own_rows]
        charts["latency"] = distribution(facts.own_rows[0].histogram.edges_ms, series)
    if facts.bench is not None:
        points = [Point(row.latency_ms.mean, row.agreement, row.name, row.kind) for row in facts.bench.rows]
        charts["peers"] = scatter(points, "mean latency, ms", "Agreement")
    exits = facts.composition.exits
    if exits:
        rows = [(each.block, each.expected_hit_rate, "gati") for each in exits]
        left = sum(each.expected_hit_rate for each in exits)
        rows.append(("runs to the end", max(0.0, 1.0 - left), "base"))  # the sum may be above 1 by rounding
        charts["exits"] = bars(rows)
    if facts.frontier:
        points = [
            Point(each.mean_latency_ms, each.certified_agreement, f"{each.gain:.2f}x", "gati")
            for each in facts.frontier
        ]
        charts["frontier"] = scatter(points, "mean latency, ms", "Certified agreement")
    return charts
