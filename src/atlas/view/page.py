"""Timelines as one self-contained HTML page: workers by datacenter, WAN links between them, waits coloured by
cause, several schedules above each other on one time axis. The page makes no network requests.

This module packs the data: spans become typed arrays, deflated and in base64, next to a JSON header; `assets/*.js` draw
them. Spans are written as gap and length instead of start and end: these deflate to a few bytes per span. The other
pictures (`svg`, `perfetto`) share its rows, colours and words. Hues follow Okabe and Ito, so that they stay apart for
every common kind of colour blindness; waits are pale and hatched, work is solid.
"""

from __future__ import annotations

import base64
import html
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atlas.errors import AtlasError
from atlas.ir.analysis import Cause, best_first, bubbles, critical_path, running_end, summary, verdict, wan_links
from atlas.ir.program import COLLECTIVES, Ints, Kind
from atlas.ir.replace import write_whole
from atlas.ir.timeline import Timeline, computed_once
from atlas.view.rails import RailTrack, rail_tracks

MAX_PATH = 20_000
"""A critical path of more segments than this is not drawn."""


def write_page(
    path: str | os.PathLike[str],
    timelines: Sequence[Timeline],
    *,
    title: str = "Atlas timeline",
    notes: Sequence[str] = (),
    chart: str = "",
) -> None:
    """Write one page that shows `timelines` above each other; `notes` are sentences put under the title, `chart` is an
    SVG below their table."""
    page = page_html(timelines, title=title, notes=notes, chart=chart)
    write_whole(path, page.encode(errors="replace"))  # a name from a file may have a single surrogate


def page_html(
    timelines: Sequence[Timeline], *, title: str = "Atlas timeline", notes: Sequence[str] = (), chart: str = ""
) -> str:
    """The page as text."""
    header, spans = page_data(timelines, title=title, notes=notes)
    data = "\n".join(f'<script type="text/plain" id="spans-{k}">{text}</script>' for k, text in enumerate(spans))
    parts = {
        "TITLE": html.escape(title),
        "STYLE": asset("page.css"),
        "CHART": f"<details><summary>Iteration times of all runs</summary>{chart}</details>" if chart else "",
        "HEADER": json_element(header),
        "DATA": data,
        "SCRIPT": page_script() + asset("start.js"),
    }
    return filled(asset("page.html"), parts)


def page_data(
    timelines: Sequence[Timeline], *, title: str = "", notes: Sequence[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """What the page's script draws: a JSON-able header, and the spans of each timeline, packed."""
    if not timelines or any(not timeline.program.num_ops for timeline in timelines):
        raise AtlasError("a timeline page needs at least one timeline, and each needs at least one op")
    timelines = best_first(timelines)
    described = [_describe(timeline) for timeline in timelines]
    header = {**empty_header(title), "verdict": verdict(timelines), "notes": list(notes), "schedules": described}
    return header, [_packed(timeline) for timeline in timelines]


def empty_header(title: str) -> dict[str, Any]:
    """The header of a page that has no timeline yet."""
    return {
        "title": title,
        "verdict": "",
        "notes": [],
        "styles": [style._asdict() for style in STYLES],
        "causes": [cause.name.lower() for cause in CAUSES],
        "kinds": [kind.name for kind in Kind],
        "schedules": [],
    }


def page_script() -> str:
    """What draws timelines; the page that includes it calls `openRun`."""
    names = ("data.js", "draw.js", "text.js", "main.js", "inspect.js", "move.js")
    return "".join(asset(name) + "\n" for name in names)


def json_element(data: Any) -> str:
    """JSON for a script element: "<" never appears in it, so that no name can close the element."""
    return json.dumps(data).replace("<", "\\u003c")


def filled(template: str, parts: Mapping[str, str]) -> str:
    """A template with each `%%NAME%%` replaced."""
    pieces = template.split("%%")
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def asset(name: str, package: str = "atlas.view") -> str:
    """A file of the package's folder `assets`."""
    return (resources.files(package) / "assets" / name).read_text(encoding="utf-8")


# ---- header ----------------------------------------------------------------------------------------------------


def _describe(timeline: Timeline) -> dict[str, Any]:
    figures = summary(timeline)
    zero = timeline.start_ns
    path = critical_path(timeline)
    drawn = path if len(path) <= MAX_PATH else []
    return {
        "name": timeline.program.name,
        "source": timeline.source,
        "tcp": str(timeline.meta["tcp"]) if "tcp" in timeline.meta else None,
        "figures": figures,
        "makespan": timeline.makespan_ns,
        "steps": (timeline.iteration_ends_ns - zero).tolist(),
        "firstStep": _first_step(timeline),
        "stages": timeline.program.num_stages,
        "groups": [_group(timeline, group) for group in groups(timeline)],
        "path": [[s.start_ns - zero, s.end_ns - zero, s.category, s.worker] for s in drawn],
    }


def _first_step(timeline: Timeline) -> int:
    """The number of the first step: of a run that journals its steps, not 1."""
    last = timeline.meta.get("last_step")
    return max(1, last - timeline.program.num_iterations + 1) if isinstance(last, int) else 1


def _group(timeline: Timeline, group: RowGroup) -> dict[str, Any]:
    program = timeline.program
    if group.workers:
        names = [program.worker_name(worker) for worker in group.workers]
        pipelines = [worker // program.num_ranks for worker in group.workers]
        where = {"pipelines": pipelines, "workers": group.workers}
        return {"name": group.name, "links": False, "what": "workers", "rows": names, **where}
    if group.rails:
        names = [track.name for track in group.rails]
        return {"name": group.name, "links": True, "what": "circuits: changes", "rows": names}
    names = [timeline.links[row.link].removeprefix("wan ") if row.number == 0 else "" for row in group.link_rows]
    return {"name": group.name, "links": True, "what": "link tracks", "rows": names}


# ---- spans -----------------------------------------------------------------------------------------------------


class _Spans(NamedTuple):
    """Spans of many rows. The last two fields are for transfers; their `stage` is the sender's."""

    row: NDArray[np.int64]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    code: NDArray[np.int64]
    stage: NDArray[np.int64]
    microbatch: NDArray[np.int64]
    pipeline: NDArray[np.int64]
    queued_ns: NDArray[np.int64]
    latency_ns: NDArray[np.int64]


def _packed(timeline: Timeline) -> str:
    """All spans in base64, sorted by row and start."""
    rows = groups(timeline)
    num_rows = sum(group.num_rows for group in rows)
    spans = _Spans(*(np.concatenate(parts) for parts in zip(*_all_spans(timeline, rows), strict=True)))
    keep = np.flatnonzero(spans.end_ns > spans.start_ns)
    keep = keep[np.lexsort((spans.start_ns[keep], spans.row[keep]))]
    spans = _Spans(*(part[keep] for part in spans))
    zero = timeline.start_ns
    first = np.diff(spans.row, prepend=-1) != 0
    before = np.where(first, zero, np.concatenate([[zero], spans.end_ns[:-1]]))
    count = np.bincount(spans.row, minlength=num_rows)
    arrays = (
        (spans.start_ns - before, "<f8"),
        (spans.end_ns - spans.start_ns, "<f8"),
        (spans.queued_ns, "<f8"),
        (spans.latency_ns, "<f8"),
        (count, "<u4"),
        (spans.microbatch, "<u4"),
        (spans.stage, "<u2"),
        (spans.pipeline, "<u2"),
        (spans.code, "<u1"),
    )
    raw = np.array([len(keep), num_rows], "<f8").tobytes() + b"".join(a.astype(kind).tobytes() for a, kind in arrays)
    return base64.b64encode(zlib.compress(raw, 3)).decode()


def _all_spans(timeline: Timeline, rows: Sequence[RowGroup]) -> list[_Spans]:
    row_of_worker = np.zeros(timeline.program.num_workers, np.int64)
    parts: list[_Spans] = []
    row = 0
    for group in rows:
        for worker in group.workers:
            row_of_worker[worker] = row
            row += 1
        for link_row in group.link_rows:
            parts.append(_transfer_spans(timeline, link_row.transfers, row))
            row += 1
        for track in group.rails:
            parts.append(_rail_spans(track, row))
            row += 1
    return [_op_spans(timeline, row_of_worker), _wait_spans(timeline, row_of_worker), *parts]


def _op_spans(timeline: Timeline, row_of_worker: NDArray[np.int64]) -> _Spans:
    program, worker = timeline.program, timeline.program.op_worker
    times = timeline.op_start_ns, timeline.op_end_ns
    what = program.kind, program.stage, program.microbatch
    return _spans(row_of_worker[worker], *times, *what, worker // program.num_ranks)


def _wait_spans(timeline: Timeline, row_of_worker: NDArray[np.int64]) -> _Spans:
    """The bubbles, without the spans of collectives, which are drawn as ops."""
    program, found = timeline.program, bubbles(timeline)
    collective = np.isin(program.kind[found.op], np.array(COLLECTIVES, np.int8)) & (found.op >= 0)
    own = collective & (found.start_ns >= timeline.op_start_ns[found.op])
    of = np.flatnonzero(~own)
    worker, code = found.worker[of], found.cause[of].astype(np.int64) + WAIT
    times = found.start_ns[of], found.end_ns[of]
    return _spans(row_of_worker[worker], *times, code, 0, 0, worker // program.num_ranks)


def _transfer_spans(timeline: Timeline, of: NDArray[np.int64], row: int) -> _Spans:
    direction, pipeline, boundary, slot = np.unravel_index(of, timeline.program.transfer_shape)
    start, sent = timeline.transfer_start_ns[of], timeline.transfer_sent_ns[of]
    queued, latency = start - timeline.transfer_ready_ns[of], timeline.transfer_arrive_ns[of] - sent
    return _spans(row, start, sent, direction + SEND, boundary + direction, slot, pipeline, queued, latency)


def _rail_spans(track: RailTrack, row: int) -> _Spans:
    start, end = np.array(track.spans_ns, np.int64).T
    return _spans(row, start, end, WAIT + Cause.FABRIC)


def _spans(*columns: NDArray[Any] | int) -> _Spans:
    """The fields of spans, each an array or one number for all of them; 0 for those that are left out."""
    left_out = [0] * (len(_Spans._fields) - len(columns))
    return _Spans(*(np.asarray(column, np.int64) for column in np.broadcast_arrays(*columns, *left_out)))


# ---- rows ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class LinkRow:
    """Transfers of one link that do not overlap, by start. A link that serves several at once has several rows."""

    link: int
    number: int
    """Among the rows of this link."""
    transfers: Ints


@dataclass(frozen=True, eq=False)
class RowGroup:
    """Rows under one heading: the workers of a datacenter, its photonic rails, or the links between two."""

    name: str
    workers: tuple[int, ...] = ()
    link_rows: tuple[LinkRow, ...] = ()
    rails: tuple[RailTrack, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.workers) + len(self.link_rows) + len(self.rails)


@computed_once
def groups(timeline: Timeline) -> list[RowGroup]:
    """Datacenters in the order of the pipeline, each followed by the WAN links to those before it."""
    program = timeline.program
    dcs = list(dict.fromkeys(program.rank_dc))
    joined: dict[tuple[str, str], list[int]] = {}
    for link in wan_links(timeline).tolist():
        joined.setdefault(_ends(timeline, link, dcs), []).append(link)
    by_link, rails = _link_rows(timeline), rail_tracks(timeline) if timeline.meta.get("fabric") else {}
    found: list[RowGroup] = []
    for dc in dcs:
        for ends, links in joined.items():
            if ends[1] == dc:
                rows = tuple(row for link in links for row in by_link[link])
                found.append(RowGroup(f"WAN {ends[0]} ↔ {ends[1]}", link_rows=rows))
        workers = tuple(w for w in range(program.num_workers) if program.worker_dc(w) == dc)
        found.append(RowGroup(dc, workers=workers))
        if dc in rails:
            found.append(RowGroup(f"rails of {dc}", rails=rails[dc]))
    return found


def _ends(timeline: Timeline, link: int, dcs: list[str]) -> tuple[str, str]:
    """The two datacenters that a WAN link joins, in the order of the pipeline."""
    program = timeline.program
    crossing = np.flatnonzero((timeline.transfer_link == link) & program.transfer_crosses)
    boundary = program.transfer(int(crossing[0]))[2]
    pair = {program.rank_dc[program.stage_rank[boundary]], program.rank_dc[program.stage_rank[boundary + 1]]}
    first, second = sorted(pair, key=dcs.index)
    return first, second


def _link_rows(timeline: Timeline) -> dict[int, list[LinkRow]]:
    """By WAN link: its transfers, on as few rows as keep them from overlapping."""
    start, sent = timeline.transfer_start_ns, timeline.transfer_sent_ns
    wanted = np.isin(timeline.transfer_link, wan_links(timeline))
    known = np.flatnonzero(wanted & (timeline.program.transfer_src >= 0))
    order = known[np.lexsort((start[known], timeline.transfer_link[known]))]
    link = timeline.transfer_link[order].astype(np.int64)
    overlaps = np.zeros(len(order), np.bool_)
    if len(order):
        overlaps = start[order] < running_end(link, sent[order], int(start[order].min()))
    found: dict[int, list[LinkRow]] = {}
    bounds = np.flatnonzero(np.diff(link, prepend=-1, append=-1))
    for lo, hi in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        of, number = order[lo:hi], int(link[lo])
        row = _first_free(start[of], sent[of]) if overlaps[lo:hi].any() else np.zeros(hi - lo, np.int64)
        found[number] = [LinkRow(number, k, of[row == k]) for k in range(int(row.max()) + 1)]
    return found


def _first_free(start: Ints, end: Ints) -> Ints:
    """By span, sorted by start: the first row that is free."""
    free: list[int] = []
    rows = np.zeros(len(start), np.int64)
    for i, (begin, until) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        row = next((k for k, busy_until in enumerate(free) if busy_until <= begin), len(free))
        if row == len(free):
            free.append(until)
        else:
            free[row] = until
        rows[i] = row
    return rows


# ---- colours and words ---------------------------------------------------------------------------------------
class SpanStyle(NamedTuple):
    light: str
    dark: str
    label: str
    meaning: str


OPS: dict[Kind, SpanStyle] = {
    Kind.F: SpanStyle("#0072b2", "#3d9bd6", "F forward", "forward of one microbatch through one stage"),
    Kind.R: SpanStyle("#7fc4ea", "#8fd0f2", "R recompute", "recompute of activations that the forward did not keep"),
    Kind.B: SpanStyle("#e08a00", "#f0a53a", "B backward", "backward: gradients of the input and of the weights"),
    Kind.I: SpanStyle(
        "#f2b23a", "#f5c46b", "I input gradient", "the half of the backward that the previous stage waits for"
    ),
    Kind.W: SpanStyle(
        "#8c6d1f", "#b8963f", "W weight gradient", "the half of the backward that no other stage waits for"
    ),
    Kind.SYNC: SpanStyle("#9a86c4", "#8d78ba", "SYNC all-reduce", "gradients are summed over all pipelines"),
    Kind.NORM: SpanStyle("#b7a8d6", "#75639f", "NORM", "the global gradient norm, over all workers"),
    Kind.STEP: SpanStyle("#3a3f44", "#d5dade", "STEP optimizer", "the weights are updated"),
    Kind.P: SpanStyle("#009e73", "#2bbd93", "P prefill", "a slice of prefill, run inside a bubble"),
}

CAUSES: dict[Cause, SpanStyle] = {
    Cause.FILL: SpanStyle("#e3e6e9", "#343a41", "fill", "the run has begun, this worker's first op has not"),
    Cause.DRAIN: SpanStyle("#d3d8dc", "#424a53", "drain", "this worker is done, the run is not"),
    Cause.WAN: SpanStyle("#f7b8a4", "#8a3d26", "WAN", "its input is queued for, or on, a link between datacenters"),
    Cause.PEER: SpanStyle(
        "#f4edcb", "#4b4629", "peer", "its input is not computed yet, or moves inside the datacenter"
    ),
    Cause.SYNC: SpanStyle(
        "#d9cff0", "#453a66", "sync", "all-reduce, and the wait until all its workers have reached it"
    ),
    Cause.FABRIC: SpanStyle("#bfe3d6", "#1f5a48", "fabric", "circuits of a photonic rail are being set up"),
}

WIRE: tuple[SpanStyle, SpanStyle] = (
    SpanStyle("#4f9bc9", "#5fa9d6", "activation on the WAN", "output of a forward, on its way to the next stage"),
    SpanStyle("#c48a3a", "#c9923f", "gradient on the WAN", "gradient, on its way back to the previous stage"),
)
"""By direction of traffic."""

STYLES: tuple[SpanStyle, ...] = (*OPS.values(), *CAUSES.values(), *WIRE)
"""By the code of a span."""
WAIT, SEND = len(OPS), len(OPS) + len(CAUSES)
"""Codes of spans: a Kind, WAIT + cause, or SEND + direction."""
