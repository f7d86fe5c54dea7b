"""Charts as inline SVG, coloured by the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from gati.units import percent

_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 16, 16, 46


class Point(NamedTuple):
    """A mark; `kind` is base, gati or peer and sets its colour and shape."""

    x: float
    y: float
    label: str
    kind: str


class _Scale(NamedTuple):
    low: float
    factor: float
    start: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) * self.factor


def distribution(edges: Sequence[float], series: Sequence[tuple[str, str, Sequence[float]]]) -> str:
    """Draw histograms over shared edges as stepped areas; each series is (name, kind, counts)."""
    totals = [sum(counts) or 1.0 for _, _, counts in series]
    top = max(max(counts) / total for (_, _, counts), total in zip(series, totals, strict=True)) or 1.0
    x = _scale(edges[0], edges[-1], _LEFT, _WIDTH - _RIGHT)
    y = _scale(0.0, 1.1 * top, _HEIGHT - _BOTTOM, _TOP)
    parts = []
    for (name, kind, counts), total in zip(series, totals, strict=True):
        path = [f"M{x(edges[0]):.1f},{y(0):.1f}"]
        for left, right, count in zip(edges[:-1], edges[1:], counts, strict=True):
            path.append(f"L{x(left):.1f},{y(count / total):.1f}L{x(right):.1f},{y(count / total):.1f}")
        path.append(f"L{x(edges[-1]):.1f},{y(0):.1f}Z")
        title = f"<title>{escape(name)}</title>"
        parts.append(f'<path class="area {escape(kind)}" d="{"".join(path)}">{title}</path>')
    parts += _x_axis(_ticks(edges[0], edges[-1]), x, "latency of a request, ms")
    return _svg("Share of requests by latency", parts)


def scatter(points: Sequence[Point], x_label: str, y_label: str) -> str:
    """Draw labelled points; x starts at zero, y is in percent."""
    highest = max(point.x for point in points) * 1.15
    low = max(0.0, min(point.y for point in points))
    pad = max(0.002, (1.0 - low) * 0.15)
    x = _scale(0.0, highest, _LEFT, _WIDTH - _RIGHT)
    y = _scale(low - pad, 1.0 + pad, _HEIGHT - _BOTTOM, _TOP)
    parts = []
    for value in _ticks(low, 1.0):
        at = y(value)
        parts.append(f'<path class="grid" d="M{_LEFT},{at:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{_percent(value)}</text>')
    for number, point in enumerate(points, start=1):
        at_x, at_y = x(point.x), y(point.y)
        title = f"<title>{escape(point.label)}: {point.x:.3f} ms, {100 * point.y:.2f} %</title>"
        place = f'cx="{at_x:.1f}" cy="{at_y:.1f}"'
        parts.append(f'<circle class="mark {escape(point.kind)}" {place} r="11">{title}</circle>')
        place = f'x="{at_x:.1f}" y="{at_y + 4:.1f}"'
        parts.append(f'<text class="number" {place} text-anchor="middle">{number}</text>')
    parts += _x_axis(_ticks(0.0, highest), x, x_label)
    return _svg(f"{y_label} against {x_label}", parts)


def bars(rows: Sequence[tuple[str, float, str]]) -> str:
    """Draw horizontal bars; each row is (label, share in 0..1, kind)."""
    step = 34
    height = step * len(rows) + 8
    widest = max(share for _, share, _ in rows) or 1.0
    parts = []
    for index, (label, share, kind) in enumerate(rows):
        top = 4 + index * step
        length = max(2.0, share / widest * (_WIDTH - 300))
        parts.append(f'<text x="176" y="{top + 19}" text-anchor="end">{escape(label)}</text>')
        place = f'x="188" y="{top + 3}" width="{length:.1f}" height="24"'
        parts.append(f'<rect class="area {escape(kind)}" {place} rx="3"/>')
        parts.append(f'<text x="{196 + length:.1f}" y="{top + 19}">{percent(share)}</text>')
    return _svg("Share of requests that leave at each exit", parts, height)


def _svg(title: str, parts: Sequence[str], height: int = _HEIGHT) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title)}" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{escape(title)}</title>{"".join(parts)}</svg>'
    )


def _x_axis(ticks: Sequence[float], x: _Scale, label: str) -> list[str]:
    base = _HEIGHT - _BOTTOM
    parts = [f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>']
    parts += [
        f'<text class="tick" x="{x(value):.1f}" y="{base + 18}" text-anchor="middle">{value:g}</text>'
        for value in ticks
    ]
    place = f'x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 6}"'
    parts.append(f'<text {place} text-anchor="middle">{escape(label)}</text>')
    return parts


def _scale(low: float, high: float, start: float, end: float) -> _Scale:
    return _Scale(low, (end - start) / ((high - low) or 1.0), start)


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round values between low and high."""
    rough = ((high - low) or 1.0) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(k * step, 9) for k in range(first, last + 1)]


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"


class ChartLine(NamedTuple):
    """A line through points sorted by x; `name` is its title, `kind` its colour as in `Point`."""

    name: str
    kind: str
    points: Sequence[tuple[float, float]]


def lines(series: Sequence[ChartLine], title: str, x_label: str, *, share: bool = True) -> str:
    """Draw lines over shared axes; y is in percent if `share`. Each line ends with its number."""
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points]
    low, high = min(0.0, *ys), max(ys) * 1.08 or 1.0
    x = _scale(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT - 24)
    y = _scale(low, high, _HEIGHT - _BOTTOM, _TOP)
    parts = []
    for value in _ticks(low, high):
        at = y(value)
        text = _percent(value) if share else f"{value:g}"
        parts.append(f'<path class="grid" d="M{_LEFT},{at:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
    for number, line in enumerate(series, start=1):
        path = "L".join(f"{x(at):.1f},{y(value):.1f}" for at, value in line.points)
        name = f"<title>{escape(line.name)}</title>"
        parts.append(f'<path class="line {escape(line.kind)}" fill="none" d="M{path}">{name}</path>')
        last_x, last_y = line.points[-1]
        parts.append(f'<text x="{x(last_x) + 5:.1f}" y="{y(last_y) + 4:.1f}">{number}</text>')
    parts += _x_axis(_ticks(min(xs), max(xs)), x, x_label)
    return _svg(title, parts)
