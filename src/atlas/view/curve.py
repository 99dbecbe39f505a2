"""Line charts as SVG, or as an HTML page around it, from plain numbers: what-if curves, sweeps, accuracy plots.
Lines are labelled where they end, so that nobody matches colours with a legend; no dependency, no script.

Knows nothing of Timelines.
"""

from __future__ import annotations

import html
import math
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from atlas.errors import AtlasError
from atlas.ir.store import replacing
from atlas.view.palette import SERIES

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 860, 460, 70, 54, 52
FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
MARKERS = ("circle", "square", "diamond", "triangle")

Points = Sequence[tuple[float, float]]


class _Axis(NamedTuple):
    low: float
    high: float
    log: bool
    pixel_low: float
    pixel_high: float

    def at(self, value: float) -> float:
        low, high, v = (
            (math.log10(x) for x in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        return self.pixel_low + (v - low) / (high - low) * (self.pixel_high - self.pixel_low)


def write_curves(
    path: str | os.PathLike[str],
    series: Mapping[str, Points],
    x_label: str,
    y_label: str,
    title: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    note: str = "",
) -> None:
    """Write the chart: a name that ends in .html gives a page, any other an SVG."""
    chart = curves_svg(series, x_label, y_label, title, log_x=log_x, log_y=log_y, note=note)
    if os.fspath(path).endswith((".html", ".htm")):
        chart = (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
            f'<body style="margin:24px auto;max-width:{WIDTH}px">{chart}</body></html>\n'
        )
    with replacing(path) as file:
        file.write(chart.encode())


def curves_svg(
    series: Mapping[str, Points],
    x_label: str,
    y_label: str,
    title: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    note: str = "",
) -> str:
    """The chart as text. Points that are not finite, or not positive on a log axis, leave a gap."""
    lines = {name: [_shown(p, log_x, log_y) for p in points] for name, points in series.items()}
    known = [p for points in lines.values() for p in points if p is not None]
    if not known:
        raise AtlasError(f"chart {title!r} has no point to draw: give at least one finite value per axis")
    right = WIDTH - 24 - min(230, max(7 * len(name) for name in lines) + 14)
    x = _axis([p[0] for p in known], log_x, LEFT, right)
    y = _axis([p[1] for p in known], log_y, HEIGHT - BOTTOM, TOP)
    body = [_text(LEFT, 24, title, size=16, weight="bold"), _text(LEFT, 42, note, size=11, fill="#5c6670")]
    body += _frame(x, y, x_label, y_label)
    for k, points in enumerate(lines.values()):
        body += _line(points, x, y, SERIES[k % len(SERIES)], MARKERS[k // len(SERIES) % len(MARKERS)])
    body += _names(lines, x, y, right)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="{FONT}">\n<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _shown(point: tuple[float, float], log_x: bool, log_y: bool) -> tuple[float, float] | None:
    x, y = float(point[0]), float(point[1])
    usable = math.isfinite(x) and math.isfinite(y) and (x > 0 or not log_x) and (y > 0 or not log_y)
    return (x, y) if usable else None


def _axis(values: Sequence[float], log: bool, pixel_low: float, pixel_high: float) -> _Axis:
    low, high = min(values), max(values)
    if log:
        if high / low < 1.01:
            low, high = low / 2, high * 2
        return _Axis(low * 0.93, high * 1.07, True, pixel_low, pixel_high)
    if high == low:
        low, high = low - (abs(low) or 1), high + (abs(high) or 1)
    # A linear axis starts at zero when the data come near it: ratios are then read off rightly.
    low = 0.0 if 0 <= low < 0.6 * high else low - 0.05 * (high - low)
    return _Axis(low, high + 0.05 * (high - low), False, pixel_low, pixel_high)


def _ticks(axis: _Axis) -> list[float]:
    if axis.log:
        powers = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)) + 1)
        for marks in ((1,), (1, 2, 5), (1, 2, 3, 4, 5, 6, 8)):
            found = [m * 10.0**p for p in powers for m in marks if axis.low <= m * 10.0**p <= axis.high]
            if len(found) >= 4:
                break
        return found
    rough = (axis.high - axis.low) / 6
    power = 10 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough)
    return [k * step for k in range(math.ceil(axis.low / step), math.floor(axis.high / step) + 1)]


def _frame(x: _Axis, y: _Axis, x_label: str, y_label: str) -> list[str]:
    parts = []
    for tick in _ticks(y):
        at = y.at(tick)
        parts.append(f'<path d="M{x.pixel_low} {at:.1f}H{x.pixel_high:.1f}" stroke="#e3e6e9"/>')
        parts.append(_text(LEFT - 8, at + 4, f"{tick:g}", size=11, anchor="end", fill="#5c6670"))
    for tick in _ticks(x):
        at = x.at(tick)
        parts.append(f'<path d="M{at:.1f} {y.pixel_low}v5" stroke="#5c6670"/>')
        parts.append(_text(at, y.pixel_low + 18, f"{tick:g}", size=11, anchor="middle", fill="#5c6670"))
    parts.append(f'<path d="M{x.pixel_low} {y.pixel_low}H{x.pixel_high:.1f}" stroke="#5c6670"/>')
    middle = (x.pixel_low + x.pixel_high) / 2
    parts.append(_text(middle, HEIGHT - 12, x_label, size=12.5, anchor="middle"))
    centre = (y.pixel_low + y.pixel_high) / 2
    turned = _text(0, 0, y_label, size=12.5, anchor="middle")
    parts.append(f'<g transform="translate(18 {centre:.1f}) rotate(-90)">{turned}</g>')
    return parts


def _line(points: Sequence[tuple[float, float] | None], x: _Axis, y: _Axis, color: str, marker: str) -> list[str]:
    path, pen, marks = "", "M", []
    for point in points:
        if point is None:
            pen = "M"
            continue
        px, py = x.at(point[0]), y.at(point[1])
        path, pen = path + f"{pen}{px:.1f} {py:.1f}", "L"
        marks.append(_marker(px, py, marker, color))
    return [f'<path d="{path}" fill="none" stroke="{color}" stroke-width="2.2" stroke-linejoin="round"/>', *marks]


def _marker(x: float, y: float, shape: str, color: str) -> str:
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{color}"/>'
    path = {
        "square": f"M{x - 3:.1f} {y - 3:.1f}h6v6h-6z",
        "diamond": f"M{x:.1f} {y - 4:.1f}l4 4l-4 4l-4 -4z",
        "triangle": f"M{x:.1f} {y - 4:.1f}l4 7h-8z",
    }[shape]
    return f'<path d="{path}" fill="{color}"/>'


def _names(lines: Mapping[str, Sequence[tuple[float, float] | None]], x: _Axis, y: _Axis, right: float) -> list[str]:
    """Each line's name at the height of its last point, pushed apart where two would overlap."""
    wanted: list[tuple[float, float, int, str]] = []
    for k, (name, points) in enumerate(lines.items()):
        last = next((p for p in reversed(points) if p is not None), None)
        if last is not None:
            wanted.append((y.at(last[1]), x.at(last[0]), k, name))
    wanted.sort()
    floor, parts = TOP - 4.0, []
    for position, (py, px, k, name) in enumerate(wanted):
        room = HEIGHT - BOTTOM - 14 * (len(wanted) - 1 - position)
        at = min(max(py, floor), max(room, floor))
        floor = at + 14
        color = SERIES[k % len(SERIES)]
        parts.append(
            f'<path d="M{px + 4:.1f} {py:.1f}L{right + 6:.1f} {at:.1f}" stroke="{color}" stroke-opacity=".45"/>'
        )
        parts.append(_text(right + 10, at + 4, name, size=12, fill=color, weight="bold"))
    return parts


def _text(
    x: float, y: float, text: str, *, size: float, anchor: str = "start", fill: str = "#1c2126", weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}" '
        f'font-weight="{weight}">{html.escape(text)}</text>'
    )
