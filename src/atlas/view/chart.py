"""What every chart is drawn on: a frame with axes, ticks and labels, a few shapes of markers, and the file around it.

Plain numbers in, SVG out, or an HTML page that holds it; no dependency, no script. Knows neither lines nor dots: those
are `curve` and `pareto`. `svg` borrows the letters.
"""

from __future__ import annotations

import html
import math
import os
import re
from collections.abc import Sequence
from importlib import resources
from typing import NamedTuple

from atlas.ir.replace import replacing

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 860, 460, 70, 54, 52
FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
INK, SOFT = "#1c2126", "#5c6670"
"""Of what is read first, and of what explains it; `assets/theme.css` knows them by these values."""
NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that no XML may hold: control characters, halves of a pair."""


class Axis(NamedTuple):
    """From values to pixels."""

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


def write_chart(path: str | os.PathLike[str], chart: str, title: str, *, as_page: bool | None = None) -> None:
    """Write an SVG, or a page around it; `as_page` None: a page where the name ends in .html."""
    if as_page is None:
        as_page = os.fspath(path).lower().endswith((".html", ".htm"))
    if as_page:
        style = f"{theme()}body {{ max-width: {WIDTH + 40}px; }}"
        chart = page_text(title, style, f'<div class="wide">{chart}</div>')
    with replacing(path) as file:
        file.write(chart.encode())


def theme() -> str:
    """The style that pages without scripts share: light and dark, and a chart in either."""
    return (resources.files("atlas.view") / "assets" / "theme.css").read_text(encoding="utf-8")


def page_text(title: str, style: str, body: str) -> str:
    """A page that runs nothing and asks nothing of the network."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width, initial-scale=1"><meta http-equiv="Content-Security-Policy" '
        f"content=\"default-src 'none'; style-src 'unsafe-inline'\"><title>{html.escape(title)}</title>"
        f"<style>{style}</style></head><body>{body}</body></html>\n"
    )


def chart_svg(title: str, note: str, body: Sequence[str]) -> str:
    """A title, a line of small print and what is drawn below them, as one SVG."""
    head = [text(LEFT, 24, title, size=16, weight="bold"), text(LEFT, 42, note, size=11, fill=SOFT)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="{FONT}">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n' + "\n".join([*head, *body]) + "\n</svg>\n"
    )


def axis(values: Sequence[float], log: bool, pixel_low: float, pixel_high: float) -> Axis:
    """An axis on which all values have room."""
    low, high = min(values), max(values)
    if log:
        if high / low < 1.01:
            low, high = low / 2, high * 2
        return Axis(low * 0.93, high * 1.07, True, pixel_low, pixel_high)
    if high == low:
        low, high = low - (abs(low) or 1), high + (abs(high) or 1)
    # A linear axis starts at zero when the data come near it: ratios are then read off rightly.
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


def frame(x: Axis, y: Axis, x_label: str, y_label: str) -> list[str]:
    """Ticks, their numbers, the lines of the grid and what the axes are called."""
    parts = []
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
    """A dot; other shapes for those whose colour is taken."""
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
    """A line of letters; those that XML has no room for are shown as a question mark."""
    letters = html.escape(NO_XML.sub("\ufffd", words))
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}" '
        f'font-weight="{weight}">{letters}</text>'
    )
