"""The page of a path: delay and rate, measured and modelled, the share of cross traffic over time, and the
distribution of iteration times. Takes plain series; knows no models.
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from atlas.ir.replace import write_whole
from atlas.view.chart import Points, curves_svg, page_text, theme

MAX_POINTS = 400
"""Of one curve: more are averaged."""


class PathChart(NamedTuple):
    """Curves, and a sentence on how to read them."""

    x_label: str
    y_label: str
    series: Mapping[str, Points]
    words: str


def thinned(points: Points) -> list[tuple[float, float]]:
    """At most `MAX_POINTS`: means of neighbours."""
    found = list(points)
    step = -(-len(found) // MAX_POINTS)
    parts = [found[k : k + step] for k in range(0, len(found), max(1, step))]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def write_path_page(
    path: str | os.PathLike[str],
    title: str,
    notes: Sequence[str],
    charts: Mapping[str, PathChart],
) -> None:
    """A page without scripts."""
    body = [f"<h1>{html.escape(title)}</h1>", *(f"<p>{html.escape(note)}</p>" for note in notes)]
    for name, chart in charts.items():
        thin = {label: thinned(points) for label, points in chart.series.items() if points}
        if thin:
            body += [curves_svg(thin, chart.x_label, chart.y_label, name), f"<p>{html.escape(chart.words)}</p>"]
    write_whole(path, page_text(title, theme(), "\n".join(body)).encode())
