"""The page of a path: delay and rate, measured and modelled, the share of cross traffic over time, and the
distribution of iteration times. Takes plain series; knows no models.
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence

from atlas.ir.replace import write_whole
from atlas.view.chart import Points, curves_svg, page_text, theme

MAX_POINTS = 400
"""Of one curve: more are averaged."""


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
    charts: Mapping[str, tuple[str, str, Mapping[str, Points]]],
) -> None:
    """A page without scripts. `charts`: by title, the names of the axes and the curves."""
    body = [f"<h1>{html.escape(title)}</h1>", *(f"<p>{html.escape(note)}</p>" for note in notes)]
    for name, (x_label, y_label, series) in charts.items():
        thin = {label: thinned(points) for label, points in series.items() if points}
        if thin:
            body.append(curves_svg(thin, x_label, y_label, name))
    write_whole(path, page_text(title, theme(), "\n".join(body)).encode())
