"""Time against cost, one dot for every plan that was simulated, the front of those that nobody beats in both.

Takes plain rows; knows nothing of plans. The frame and the axes are those of `chart`.
"""

from __future__ import annotations

import html
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from atlas.errors import AtlasError
from atlas.view.chart import BOTTOM, HEIGHT, LEFT, TOP, WIDTH, Axis, axis, chart_svg, frame, marker, text, write_chart
from atlas.view.palette import SERIES

Row = Mapping[str, Any]


def write_front(path: str | os.PathLike[str], rows: Sequence[Row], front: Sequence[Row], *, title: str) -> None:
    """Write the plot: a name that ends in .html gives a page, any other an SVG."""
    write_chart(path, front_svg(rows, front, title=title), title)


def front_svg(rows: Sequence[Row], front: Sequence[Row], *, title: str) -> str:
    """Dots and a stepped line."""
    points = [(float(row["iteration_s"]), float(row["usd_per_iteration"])) for row in rows]
    if not any(usd > 0 for _, usd in points):
        raise AtlasError("the front of time and cost needs prices: write usd_per_gpu_hour in the cluster")
    right = WIDTH - 40
    wide = max(s for s, _ in points) / min(s for s, _ in points) > 20
    x = axis([s for s, _ in points], wide, LEFT, right)
    low, high = min(usd for _, usd in points), max(usd for _, usd in points)
    y = axis([usd for _, usd in points], low > 0 and high / low > 5, HEIGHT - BOTTOM, TOP)
    note = f"{len(rows)} simulated plans; the line joins those that nobody beats in both"
    body = frame(x, y, "seconds an iteration", "US dollars an iteration")
    on_front = {(float(row["iteration_s"]), float(row["usd_per_iteration"])) for row in front}
    path = ""
    for k, (s, usd) in enumerate(sorted(on_front)):
        px, py = x.at(s), y.at(usd)
        path += f"M{px:.1f} {py:.1f}" if k == 0 else f"H{px:.1f}V{py:.1f}"
    body.append(f'<path d="{path}" fill="none" stroke="{SERIES[0]}" stroke-width="2"/>')
    for row, (s, usd) in zip(rows, points, strict=True):
        color = SERIES[0] if (s, usd) in on_front else "#9aa3ab"
        told = html.escape(f"{row['where']}: {row['how']}, {s:.4g} s, ${usd:.4g}")
        body.append(f"<g><title>{told}</title>{marker(x.at(s), y.at(usd), 'circle', color)}</g>")
    return chart_svg(title, note, body + _names(sorted(on_front), rows, x, y, right))


def _names(front: Sequence[tuple[float, float]], rows: Sequence[Row], x: Axis, y: Axis, right: float) -> list[str]:
    """What lies on the front, named where there is room."""
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
