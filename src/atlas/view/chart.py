"""Charts as SVG, or as an HTML page around it, from plain numbers: lines for sweeps and accuracy plots, and time
against cost with the Pareto front. No dependency, no script.

Knows nothing of Timelines and plans. `svg` draws its text with `text`.
"""

from __future__ import annotations

import html
import math
import os
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from atlas.errors import AtlasError
from atlas.ir.replace import write_whole

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 860, 460, 70, 54, 52
"""Of a chart and its margins, in pixels."""
FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
INK, SOFT = "#1c2126", "#5c6670"
"""Colours of main and of secondary text; `assets/theme.css` has rules for these values."""
NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML does not allow: control characters and single surrogates."""
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d1f", "#56b4e9", "#3a3f44", "#e69f00")
"""Lines of a chart, in this order."""
MARKERS = ("circle", "square", "diamond", "triangle")
MAX_MARKED = 100
"""Points of a line that has markers: more of them would cover the line."""

Points = Sequence[tuple[float, float]]
Row = Mapping[str, Any]


# ---- the axes --------------------------------------------------------------------------------------------------
class Axis(NamedTuple):
    """Maps values to pixels."""

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


def write_chart(
    path: str | os.PathLike[str], chart: str, title: str, *, as_page: bool | None = None, below: str = ""
) -> None:
    """Write an SVG, or a page around it; `as_page` None: a page where the name ends in .html. `below` is HTML that a
    page has below the chart."""
    if as_page is None:
        as_page = os.fspath(path).lower().endswith((".html", ".htm"))
    if as_page:
        style = f"{theme()}body {{ max-width: {WIDTH + 40}px; }}"
        chart = page_text(title, style, f'<div class="wide">{chart}</div>{below}')
    write_whole(path, chart.encode())


def theme() -> str:
    """The style of pages without scripts, for light and dark."""
    return (resources.files("atlas.view") / "assets" / "theme.css").read_text(encoding="utf-8")


def page_text(title: str, style: str, body: str) -> str:
    """A page without scripts and without network requests."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width, initial-scale=1"><meta http-equiv="Content-Security-Policy" '
        f"content=\"default-src 'none'; style-src 'unsafe-inline'\"><title>{html.escape(title)}</title>"
        f"<style>{style}</style></head><body><main>{body}</main></body></html>\n"
    )


def chart_svg(title: str, note: str, body: Sequence[str]) -> str:
    """A title, a note and what is drawn below them, as one SVG."""
    head = [text(LEFT, 24, title, size=16, weight="bold"), text(LEFT, 42, note, size=11, fill=SOFT)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="{FONT}">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n' + "\n".join([*head, *body]) + "\n</svg>\n"
    )


def axis(values: Sequence[float], log: bool, pixel_low: float, pixel_high: float) -> Axis:
    """An axis that spans all values."""
    low, high = min(values), max(values)
    if log:
        if high / low < 1.01:
            low, high = low / 2, high * 2
        return Axis(low * 0.93, high * 1.07, True, pixel_low, pixel_high)
    if high == low:
        low, high = low - (abs(low) or 1), high + (abs(high) or 1)
    # A linear axis starts at zero when the data come near it: ratios can then be read from lengths.
    low = 0.0 if 0 <= low < 0.6 * high else low - 0.05 * (high - low)
    return Axis(low, high + 0.05 * (high - low), False, pixel_low, pixel_high)


def _ticks(along: Axis) -> list[float]:
    if along.log:
        powers = range(math.floor(math.log10(along.low)), math.ceil(math.log10(along.high)) + 1)
        for marks in ((1,), (1, 2, 5), (1, 2, 3, 4, 5, 6, 8)):
            found = [m * 10.0**p for p in powers for m in marks if along.low <= m * 10.0**p <= along.high]
            if len(found) >= 4:
                break
        return found
    rough = (along.high - along.low) / 6
    power = 10 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough)
    return [k * step for k in range(math.ceil(along.low / step), math.floor(along.high / step) + 1)]


def axes(x: Axis, y: Axis, x_label: str, y_label: str) -> list[str]:
    """Ticks with their numbers, grid lines and the names of the axes."""
    parts = []
    x_label, y_label = (f"{label} (log scale)" if at.log else label for at, label in ((x, x_label), (y, y_label)))
    for tick in _ticks(y):
        at = y.at(tick)
        parts.append(f'<path class="grid" d="M{x.pixel_low} {at:.1f}H{x.pixel_high:.1f}" stroke="#e3e6e9"/>')
        parts.append(text(LEFT - 8, at + 4, f"{tick:g}", size=11, anchor="end", fill=SOFT))
    for tick in _ticks(x):
        at = x.at(tick)
        parts.append(f'<path d="M{at:.1f} {y.pixel_low}v5" stroke="{SOFT}"/>')
        parts.append(text(at, y.pixel_low + 18, f"{tick:g}", size=11, anchor="middle", fill=SOFT))
    parts.append(f'<path d="M{x.pixel_low} {y.pixel_low}H{x.pixel_high:.1f}" stroke="{SOFT}"/>')
    middle = (x.pixel_low + x.pixel_high) / 2
    parts.append(text(middle, HEIGHT - 12, x_label, size=12.5, anchor="middle"))
    centre = (y.pixel_low + y.pixel_high) / 2
    turned = text(0, 0, y_label, size=12.5, anchor="middle")
    parts.append(f'<g transform="translate(18 {centre:.1f}) rotate(-90)">{turned}</g>')
    return parts


def marker(x: float, y: float, shape: str, color: str) -> str:
    """A dot, or another shape for lines that share a colour."""
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{color}"/>'
    path = {
        "square": f"M{x - 3:.1f} {y - 3:.1f}h6v6h-6z",
        "diamond": f"M{x:.1f} {y - 4:.1f}l4 4l-4 4l-4 -4z",
        "triangle": f"M{x:.1f} {y - 4:.1f}l4 7h-8z",
    }[shape]
    return f'<path d="{path}" fill="{color}"/>'


def text(
    x: float, y: float, words: str, *, size: float, anchor: str = "start", fill: str = INK, weight: str = "normal"
) -> str:
    """A line of text; characters that XML does not allow are shown as a question mark."""
    letters = html.escape(NO_XML.sub("\ufffd", words))
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}" '
        f'font-weight="{weight}">{letters}</text>'
    )


# ---- lines -----------------------------------------------------------------------------------------------------
def write_curves(
    path: str | os.PathLike[str], series: Mapping[str, Points], x_label: str, y_label: str, title: str, **scales: bool
) -> None:
    """Write a line chart; `scales` are `log_x` and `log_y`."""
    write_chart(path, curves_svg(series, x_label, y_label, title, **scales), title)


def curves_svg(
    series: Mapping[str, Points],
    x_label: str,
    y_label: str,
    title: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """The chart as text. Points that are not finite, or not positive on a log axis, leave a gap."""
    lines = {name: [_shown(p, log_x, log_y) for p in points] for name, points in series.items()}
    known = [p for points in lines.values() for p in points if p is not None]
    if not known:
        raise AtlasError(f"chart {title!r} has no point to draw: give at least one finite value per axis")
    right = WIDTH - 24 - min(230, max(7 * len(name) for name in lines) + 14)
    x = axis([p[0] for p in known], log_x, LEFT, right)
    y = axis([p[1] for p in known], log_y, HEIGHT - BOTTOM, TOP)
    starts = "" if log_y or y.low == 0 else f" (the axis starts at {y.low:.3g})"
    body = axes(x, y, x_label, y_label + starts)
    for k, (name, points) in enumerate(lines.items()):
        hints = [f"{name}: {p[1]:.4g} at {x_label} = {p[0]:g}" if p is not None else "" for p in points]
        body += _line(points, x, y, SERIES[k % len(SERIES)], MARKERS[k // len(SERIES) % len(MARKERS)], hints)
    return chart_svg(title, "", body + _names(lines, x, y, right))


def _shown(point: tuple[float, float], log_x: bool, log_y: bool) -> tuple[float, float] | None:
    x, y = float(point[0]), float(point[1])
    usable = math.isfinite(x) and math.isfinite(y) and (x > 0 or not log_x) and (y > 0 or not log_y)
    return (x, y) if usable else None


def _line(
    points: Sequence[tuple[float, float] | None], x: Axis, y: Axis, color: str, shape: str, hints: Sequence[str]
) -> list[str]:
    path, pen, marks = "", "M", []
    for point, hint in zip(points, hints, strict=True):
        if point is None:
            pen = "M"
            continue
        px, py = x.at(point[0]), y.at(point[1])
        path, pen = path + f"{pen}{px:.1f} {py:.1f}", "L"
        if len(points) > MAX_MARKED:
            continue
        marks.append(f"<g><title>{html.escape(NO_XML.sub('', hint))}</title>{marker(px, py, shape, color)}</g>")
    return [f'<path d="{path}" fill="none" stroke="{color}" stroke-width="2.2" stroke-linejoin="round"/>', *marks]


def _names(lines: Mapping[str, Sequence[tuple[float, float] | None]], x: Axis, y: Axis, right: float) -> list[str]:
    """Each line's name at the height of its last point, moved where two would overlap."""
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


# ---- time and cost ---------------------------------------------------------------------------------------------
def front_svg(rows: Sequence[Row], front: Sequence[Row], *, title: str) -> str:
    """One dot for each plan, and the Pareto front as a stepped line."""
    points = [(float(row["iteration_s"]), float(row["usd_per_iteration"])) for row in rows]
    if not any(usd > 0 for _, usd in points):
        raise AtlasError("the Pareto front needs prices: write usd_per_gpu_hour in the cluster")
    right = WIDTH - 40
    wide = max(s for s, _ in points) / min(s for s, _ in points) > 20
    x = axis([s for s, _ in points], wide, LEFT, right)
    low, high = min(usd for _, usd in points), max(usd for _, usd in points)
    y = axis([usd for _, usd in points], low > 0 and high / low > 5, HEIGHT - BOTTOM, TOP)
    note = f"{len(rows)} simulated plans; the line joins the Pareto-optimal ones"
    body = axes(x, y, "seconds an iteration", "US dollars an iteration")
    on_front = {(float(row["iteration_s"]), float(row["usd_per_iteration"])) for row in front}
    path = ""
    for k, (s, usd) in enumerate(sorted(on_front)):
        px, py = x.at(s), y.at(usd)
        path += f"M{px:.1f} {py:.1f}" if k == 0 else f"H{px:.1f}V{py:.1f}"
    body.append(f'<path d="{path}" fill="none" stroke="{SERIES[0]}" stroke-width="2"/>')
    for row, (s, usd) in zip(rows, points, strict=True):
        color = SERIES[0] if (s, usd) in on_front else "#9aa3ab"
        hint = html.escape(f"{row['where']}: {row['how']}, {s:.4g} s, ${usd:.4g}")
        body.append(f"<g><title>{hint}</title>{marker(x.at(s), y.at(usd), 'circle', color)}</g>")
    return chart_svg(title, note, body + _front_names(sorted(on_front), rows, x, y, right))


def _front_names(
    front: Sequence[tuple[float, float]], rows: Sequence[Row], x: Axis, y: Axis, right: float
) -> list[str]:
    """Names of the plans on the front, where there is room."""
    parts, last = [], -math.inf
    for s, usd in front:
        row = next(r for r in rows if (float(r["iteration_s"]), float(r["usd_per_iteration"])) == (s, usd))
        px, py = x.at(s), y.at(usd)
        if py - last < 13:
            continue
        last = py
        words = str(row["how"])
        anchor = "end" if px + 6.2 * len(words) > right else "start"
        parts.append(text(px + (8 if anchor == "start" else -8), py - 9, words, size=10.5, anchor=anchor))
    return parts
