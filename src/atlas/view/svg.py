"""Timelines as one figure of fixed width for papers and slides: SVG, or PNG through resvg. Rows, colours and causes
are those of the page. At most `max_rows` workers are drawn.

Spans that are too thin to see are merged with their neighbours.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atlas.errors import AtlasError, MissingExtraError
from atlas.ir.analysis import Bubbles, bubbles
from atlas.ir.program import USEFUL
from atlas.ir.replace import write_whole
from atlas.ir.timeline import Timeline
from atlas.view.chart import FONT, SOFT, text
from atlas.view.page import CAUSES, SEND, STYLES, WAIT, LinkRow, RowGroup, groups, write_page

WIDTH, GUTTER, MARGIN, LEGEND_ROW = 1000, 120, 12, 18
"""Of a figure, in pixels; the gutter holds the names of rows."""
PNG_WIDTH = 2000
"""Pixels."""

Spans = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""Start, end and code (an index into STYLES) of the spans of one row."""


class Figure:
    """Timelines above each other on one time axis. Jupyter shows it; `save` writes it to a file.

    At most `max_rows` workers of each timeline are drawn.
    """

    def __init__(self, *timelines: Timeline, title: str = "", max_rows: int = 24) -> None:
        self.timelines, self.title = timelines, title
        self.svg = svg_text(timelines, title=title, max_rows=max_rows)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a page that can be zoomed (.html), a PNG (.png, needs the extra `png`) or an SVG (any other name)."""
        suffix = Path(path).suffix.lower()
        if suffix == ".html":
            write_page(path, self.timelines, title=self.title or "Atlas timeline")
        else:
            write_whole(path, self.png() if suffix == ".png" else self.svg.encode())

    def png(self) -> bytes:
        try:
            import resvg_py
        except ImportError as error:
            raise MissingExtraError("resvg-py", "png", "writing a PNG") from error
        return bytes(resvg_py.svg_to_bytes(svg_string=self.svg, width=PNG_WIDTH, background="white"))

    def _repr_html_(self) -> str:
        return f'<div style="overflow-x: auto">{self.svg}</div>'


class _Row(NamedTuple):
    name: str
    spans: Spans
    height: int


def svg_text(timelines: Sequence[Timeline], *, title: str = "", max_rows: int = 24) -> str:
    """The figure as text."""
    if not timelines or any(not timeline.program.num_ops for timeline in timelines):
        raise AtlasError("a figure needs at least one timeline, and each needs at least one op")
    extent = max(1, *(timeline.makespan_ns for timeline in timelines))  # 1 ns for an empty run
    scale = (WIDTH - GUTTER - MARGIN) / extent
    body: list[str] = []
    used: set[int] = set()
    y = MARGIN
    if title:
        body.append(text(MARGIN, y + 12, title, size=15, weight="bold"))
        y += 24
    for timeline in timelines:
        y = _draw(body, used, timeline, y, scale, max_rows) + 10
    y = _axis(body, y, extent, scale)
    y = _legend(body, used, y)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}" '
        f'font-family="{FONT}" font-size="10">'
    )
    return "\n".join([head, _patterns(used), f'<rect width="{WIDTH}" height="{y}" fill="white"/>', *body, "</svg>\n"])


def _draw(body: list[str], used: set[int], timeline: Timeline, y: int, scale: float, max_rows: int) -> int:
    """Draw one timeline; returns the y coordinate of its end."""
    figures = f"{timeline.iteration_ns / 1e9:.3f} s, {100 * timeline.utilization:.0f} % busy, {timeline.source}"
    body.append(text(MARGIN, y + 11, timeline.program.name, size=12, weight="bold"))
    body.append(text(WIDTH - MARGIN, y + 11, figures, size=10, anchor="end", fill=SOFT))
    y += 17
    found, waits = [group for group in groups(timeline) if not group.rails], bubbles(timeline)
    num_dcs = sum(bool(group.workers) for group in found)
    each = max(1, max_rows // max(1, num_dcs))
    zero, top = timeline.start_ns, y
    for group in found:
        body.append(text(GUTTER - 5, y + 9, group.name, size=9.5, anchor="end", weight="bold"))
        y += 12
        rows, left_out = _rows(timeline, waits, group, each)
        for row in rows:
            body.append(
                text(GUTTER - 5, y + row.height - 1.5, row.name, size=min(8, row.height), anchor="end", fill=SOFT)
            )
            _draw_row(body, used, row, y, zero, scale)
            y += row.height + 1
        if left_out:
            body.append(text(GUTTER, y + 8, f"… {left_out} more", size=8, fill=SOFT))
            y += 11
        y += 3
    end = GUTTER + timeline.makespan_ns * scale
    body.append(f'<path d="M{end:.2f} {top - 2}V{y - 2}" stroke="#1c2126" stroke-width="1.2"/>')
    return y


def _rows(timeline: Timeline, waits: Bubbles, group: RowGroup, each: int) -> tuple[list[_Row], int]:
    """The rows of a group that are drawn, and the number that is left out."""
    if group.workers:
        shown = group.workers[:each]
        rows = [_Row(timeline.program.worker_name(w), _worker_spans(timeline, waits, w), 11) for w in shown]
        return rows, len(group.workers) - len(shown)
    # Evenly spaced, so that both directions are shown.
    count = min(len(group.link_rows), max(2, each))
    drawn = [group.link_rows[k] for k in np.linspace(0, len(group.link_rows) - 1, count).round().astype(int)]
    names = [timeline.links[row.link] if row.number == 0 else "" for row in drawn]
    rows = [_Row(name, _link_spans(timeline, row), 7) for name, row in zip(names, drawn, strict=True)]
    return rows, len(group.link_rows) - count


def _worker_spans(timeline: Timeline, found: Bubbles, worker: int) -> Spans:
    program = timeline.program
    lo, hi = int(program.worker_ptr[worker]), int(program.worker_ptr[worker + 1])
    useful = lo + np.flatnonzero(np.isin(program.kind[lo:hi], np.array(USEFUL, np.int8)))
    a, b = np.searchsorted(found.worker, [worker, worker + 1])
    start = np.concatenate([timeline.op_start_ns[useful], found.start_ns[a:b]])
    end = np.concatenate([timeline.op_end_ns[useful], found.end_ns[a:b]])
    code = np.concatenate([program.kind[useful].astype(np.int64), found.cause[a:b].astype(np.int64) + WAIT])
    order = np.argsort(start, kind="stable")
    return start[order], end[order], code[order]


def _link_spans(timeline: Timeline, row: LinkRow) -> Spans:
    half = max(1, timeline.program.num_transfers // 2)
    code = SEND + row.transfers // half
    return timeline.transfer_start_ns[row.transfers], timeline.transfer_sent_ns[row.transfers], code


def _draw_row(body: list[str], used: set[int], row: _Row, y: int, zero: int, scale: float) -> None:
    start, end, code = _merged(row.spans, scale)
    paths: dict[int, list[str]] = {}
    for a, b, c in zip(start.tolist(), end.tolist(), code.tolist(), strict=True):
        x, width = GUTTER + (a - zero) * scale, (b - a) * scale
        solid = c < WAIT or c >= SEND
        width -= 0.35 if solid and width > 1.5 else 0  # a thin gap between two boxes
        paths.setdefault(c, []).append(f"M{x:.2f} {y}h{width:.2f}v{row.height}h{-width:.2f}z")
    used.update(paths)
    for c, path in sorted(paths.items()):
        fill = f"url(#wait{c - WAIT})" if WAIT <= c < SEND else STYLES[c].light
        body.append(f'<path fill="{fill}" d="{"".join(path)}"/>')


def _merged(spans: Spans, scale: float) -> Spans:
    """The spans, or where they are thinner than a pixel, what is at the middle of each half pixel."""
    start, end, code = spans
    keep = end > start
    start, end, code = start[keep], end[keep], code[keep]
    if not len(start) or np.median(end - start) * scale > 0.6:
        return start, end, code
    step = 0.5 / scale
    middle = np.arange(start[0] + step / 2, end[-1], step)
    at = np.maximum(np.searchsorted(start, middle, side="right") - 1, 0)
    inside = end[at] > middle
    value = np.where(inside, code[at], -1)
    edge = np.flatnonzero(np.diff(value, prepend=-2, append=-2))
    left, right = edge[:-1], edge[1:]
    seen = value[left] >= 0
    first = (middle[left] - step / 2).astype(np.int64)
    return first[seen], (first + ((right - left) * step).astype(np.int64))[seen], value[left][seen]


def _axis(body: list[str], y: int, extent_ns: int, scale: float) -> int:
    rough = extent_ns / 8
    power = 10 ** np.floor(np.log10(rough))
    step = float(next(m * power for m in (1, 2, 5, 10) if m * power >= rough))
    unit, name = next((u, n) for u, n in ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns")) if step >= u / 10)
    body.append(f'<path d="M{GUTTER} {y}H{WIDTH - MARGIN}" stroke="{SOFT}"/>')
    for tick in np.arange(0, extent_ns * 1.0001, step):
        x = GUTTER + tick * scale
        body.append(f'<path d="M{x:.2f} {y}v4" stroke="{SOFT}"/>')
        body.append(text(x, y + 14, f"{tick / unit:g} {name}", size=9, anchor="middle", fill=SOFT))
    return y + 24


def _legend(body: list[str], used: set[int], y: int) -> int:
    x = float(GUTTER)
    for code in sorted(used):
        wait = WAIT <= code < SEND
        label = ("waiting: " if wait else "") + STYLES[code].label
        width = 20 + 5.4 * len(label) + 12
        if x + width > WIDTH - MARGIN:
            x, y = float(GUTTER), y + LEGEND_ROW
        fill = f"url(#wait{code - WAIT})" if wait else STYLES[code].light
        body.append(f'<rect x="{x:.1f}" y="{y}" width="15" height="10" fill="{fill}"/>')
        body.append(text(x + 20, y + 9, label, size=9.5))
        x += width
    return y + LEGEND_ROW + 4


def _patterns(used: set[int]) -> str:
    """Waits are hatched, so that they differ from work in print and for colour-blind readers."""
    return (
        "<defs>"
        + "".join(
            f'<pattern id="wait{cause}" width="5" height="5" patternUnits="userSpaceOnUse" '
            f'patternTransform="rotate(45)"><rect width="5" height="5" fill="{style.light}"/>'
            f'<path d="M0 0V5" stroke="#000" stroke-opacity=".28" stroke-width="1"/></pattern>'
            for cause, style in CAUSES.items()
            if WAIT + cause in used
        )
        + "</defs>"
    )
