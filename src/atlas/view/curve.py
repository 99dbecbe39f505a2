"""Line charts as SVG, or as an HTML page around it, from plain numbers: what-if curves, sweeps, accuracy plots.
Lines are labelled where they end, so that nobody matches colours with a legend; no dependency, no script.

Knows nothing of Timelines.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence

from atlas.errors import AtlasError
from atlas.view.chart import BOTTOM, HEIGHT, LEFT, TOP, WIDTH, Axis, axis, chart_svg, frame, marker, text, write_chart
from atlas.view.palette import SERIES

MARKERS = ("circle", "square", "diamond", "triangle")

Points = Sequence[tuple[float, float]]


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
    as_page: bool | None = None,
) -> None:
    """Write the chart: a name that ends in .html gives a page, any other an SVG, unless `as_page` says which."""
    chart = curves_svg(series, x_label, y_label, title, log_x=log_x, log_y=log_y, note=note)
    write_chart(path, chart, title, as_page=as_page)


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
    x = axis([p[0] for p in known], log_x, LEFT, right)
    y = axis([p[1] for p in known], log_y, HEIGHT - BOTTOM, TOP)
    body = frame(x, y, x_label, y_label)
    for k, points in enumerate(lines.values()):
        body += _line(points, x, y, SERIES[k % len(SERIES)], MARKERS[k // len(SERIES) % len(MARKERS)])
    return chart_svg(title, note, body + _names(lines, x, y, right))


def _shown(point: tuple[float, float], log_x: bool, log_y: bool) -> tuple[float, float] | None:
    x, y = float(point[0]), float(point[1])
    usable = math.isfinite(x) and math.isfinite(y) and (x > 0 or not log_x) and (y > 0 or not log_y)
    return (x, y) if usable else None


def _line(points: Sequence[tuple[float, float] | None], x: Axis, y: Axis, color: str, shape: str) -> list[str]:
    path, pen, marks = "", "M", []
    for point in points:
        if point is None:
            pen = "M"
            continue
        px, py = x.at(point[0]), y.at(point[1])
        path, pen = path + f"{pen}{px:.1f} {py:.1f}", "L"
        marks.append(marker(px, py, shape, color))
    return [f'<path d="{path}" fill="none" stroke="{color}" stroke-width="2.2" stroke-linejoin="round"/>', *marks]


def _names(lines: Mapping[str, Sequence[tuple[float, float] | None]], x: Axis, y: Axis, right: float) -> list[str]:
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
        parts.append(text(right + 10, at + 4, name, size=12, fill=color, weight="bold"))
    return parts
