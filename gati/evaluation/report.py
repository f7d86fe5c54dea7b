"""`gati report`: what a composition promises and what was measured of it, as one HTML page."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gati.composition.composition import Composition
from gati.composition.pareto import pareto
from gati.composition.plans import Settings
from gati.errors import GatiError, LibraryError
from gati.evaluation.charts import Point, bars, distribution, scatter
from gati.evaluation.pages import page_environment
from gati.exploration.library import Library
from gati.files import atomic_write_text
from gati.units import format_bytes
from gati.version import __version__

__all__ = ["report"]


def report(
    directory: str | Path, *, composition: str = "default", out: str | Path | None = None
) -> dict[str, Any]:
    """Write one self-contained HTML page about a composition, and return what it shows as strict JSON values.

    `out` is `report.html` in the library unless given. What `gati bench` and `gati evaluate` measured of this
    composition is shown where they were run; a part without measurement names the command that measures it.

    Raises:
        LibraryError, CompositionError: as `gati.Library.open` and `Composition.load`.
        StorageError: the page cannot be written.
    """
    library = Library.open(directory)
    chosen = Composition.load(library.composition_path(composition))
    facts = _facts(library, chosen)
    target = library.directory / "report.html" if out is None else Path(out)
    atomic_write_text(target, _page(facts))
    return facts


def _facts(library: Library, chosen: Composition) -> dict[str, Any]:
    manifest = library.manifest
    frontier, frontier_missing = _frontier(library)
    return {
        "model": manifest.model_source,
        "directory": str(library.directory),
        "composition": json.loads(chosen.to_json()),
        "promise": _promise(chosen),
        "profile": asdict(manifest.profile),
        "explored": {"counts": manifest.counts, "data": manifest.data, "versions": manifest.versions},
        "bench": _measured(library.directory / "bench.json", chosen.name, "gati bench"),
        "evaluation": _measured(
            library.directory / "evaluations" / f"{chosen.name}.json", chosen.name, "gati evaluate"
        ),
        "frontier": frontier,
        "frontier_missing": frontier_missing,
        "version": __version__,
    }


def _promise(chosen: Composition) -> str:
    if chosen.warning:
        return chosen.warning
    certificate = chosen.certificate
    if certificate is not None:
        return certificate.sentence()
    return chosen.note or "No caches were chosen, so every answer is the base model's."


def _measured(path: Path, composition: str, command: str) -> dict[str, Any] | None:
    """The stored measurement, None if there is none of this composition."""
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found if found["composition"] == composition else None
    except (ValueError, KeyError, TypeError) as error:
        raise LibraryError(f"{path} is damaged ({error!r}); run {command} again") from error


def _frontier(library: Library) -> tuple[list[dict[str, Any]], str]:
    """The stored frontier, or a new one; else why there is none."""
    path = library.directory / "pareto.json"
    if path.is_file():
        try:
            points: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["points"]
            return points, ""
        except (ValueError, KeyError, TypeError) as error:
            raise LibraryError(f"{path} is damaged ({error!r}); run gati compose --pareto again") from error
    try:
        return [asdict(point) for point in pareto(library.directory, Settings())], ""
    except GatiError as error:
        return [], str(error)


def _page(facts: dict[str, Any]) -> str:
    from markupsafe import Markup

    environment = page_environment("gati.evaluation")
    environment.filters["percent"] = lambda share: "-" if share is None else f"{100 * share:.2f} %"
    environment.filters["ms"] = lambda value: "-" if value is None else f"{value:.3f} ms"
    environment.filters["size"] = format_bytes
    charts = {name: Markup(svg) for name, svg in _charts(facts).items()}  # their labels are escaped
    return environment.get_template("report.html").render(**facts, charts=charts, headline=_headline(facts))


def _headline(facts: dict[str, Any]) -> dict[str, str]:
    """The figure that matters, from the best source there is."""
    own = _own_rows(facts)
    if own:
        gain = own["gati"]["gain_same"]
        note = f"{gain['min']:.2f} to {gain['max']:.2f} over the repetitions of gati bench"
        note = f"mean latency, against the same engine; {note}{_disturbed(facts['bench'])}"
        return {"value": f"{gain['median']:.2f}x", "note": note}
    if facts["evaluation"]:
        return {
            "value": f"{facts['evaluation']['gain']:.2f}x",
            "note": f"mean latency, measured by gati evaluate{_disturbed(facts['evaluation'])}",
        }
    gain = facts["composition"]["expected"]["gain"]
    return {"value": f"{gain:.2f}x", "note": "expected mean latency; not yet measured on unseen inputs"}


def _disturbed(measured: dict[str, Any]) -> str:
    """The warning next to figures that were measured on a busy machine."""
    return f"; not to be quoted: {measured['disturbance']}" if measured.get("disturbed") else ""


def _own_rows(facts: dict[str, Any]) -> dict[str, Any]:
    """Rows of base and Gati on the composition's backend, if both were measured."""
    rows = facts["bench"]["rows"] if facts["bench"] else []
    found = {row["kind"]: row for row in rows if row["kind"] != "peer" and row["backend"] == _backend(facts)}
    return found if {"base", "gati"} <= set(found) else {}


def _backend(facts: dict[str, Any]) -> str:
    return str(facts["composition"]["backend"])


def _charts(facts: dict[str, Any]) -> dict[str, str]:
    charts = dict.fromkeys(("latency", "peers", "exits", "frontier"), "")
    own = _own_rows(facts)
    if own:
        base, gati = own["base"], own["gati"]
        series = [(row["name"], row["kind"], row["histogram"]["counts"]) for row in (base, gati)]
        charts["latency"] = distribution(base["histogram"]["edges_ms"], series)
    if facts["bench"]:
        points = [
            Point(row["latency_ms"]["mean"], row["agreement"], row["name"], row["kind"])
            for row in facts["bench"]["rows"]
        ]
        charts["peers"] = scatter(points, "mean latency, ms", "Agreement")
    exits = facts["composition"]["exits"]
    if exits:
        rows = [(each["block"], each["expected_hit_rate"], "gati") for each in exits]
        rows.append(("runs to the end", 1.0 - sum(each["expected_hit_rate"] for each in exits), "base"))
        charts["exits"] = bars(rows)
    if facts["frontier"]:
        points = [
            Point(each["mean_latency_ms"], each["certified_agreement"], f"{each['gain']:.2f}x", "gati")
            for each in facts["frontier"]
        ]
        charts["frontier"] = scatter(points, "mean latency, ms", "Certified agreement")
    return charts
