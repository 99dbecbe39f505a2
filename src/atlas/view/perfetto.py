"""A Timeline as a Chrome trace, which ui.perfetto.dev and chrome://tracing open: a process per datacenter with a
track per worker, one for its photonic rails, and a process for the WAN with a track per link. Microseconds with three
decimals: no nanosecond is lost.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas.ir.program import FORWARD, Kind
from atlas.ir.replace import write_whole
from atlas.ir.timeline import Timeline
from atlas.view.page import RowGroup, groups

MAX_ARROWS = 20_000
"""With more WAN transfers than this, no arrows are drawn."""


def write_trace(path: str | os.PathLike[str], timeline: Timeline) -> None:
    """Write the trace; a name that ends in .gz is compressed."""
    body = trace_bytes(timeline)
    write_whole(path, gzip.compress(body, compresslevel=1, mtime=0) if os.fspath(path).endswith(".gz") else body)


def trace_bytes(timeline: Timeline) -> bytes:
    """The trace as JSON, with an arrow from sender to receiver over the WAN where there are not too many."""
    rows = groups(timeline)
    pid, tid = _places(timeline, rows)
    parts = [_op_events(timeline, pid, tid), *_transfer_events(timeline, rows), _rail_events(timeline, rows)]
    wan = np.flatnonzero(timeline.program.transfer_crosses & (timeline.program.transfer_dst >= 0))
    if len(wan) <= MAX_ARROWS:
        parts += _arrow_events(timeline, wan, pid, tid)
    names = json.dumps(_names(timeline, rows))[1:-1]
    about = json.dumps({"source": timeline.source, "schedule": timeline.program.name})
    events = ",\n".join(part for part in (names, *parts) if part)
    return f'{{"displayTimeUnit":"ms","otherData":{about},"traceEvents":[\n{events}\n]}}\n'.encode()


# ---- text ------------------------------------------------------------------------------------------------------
MICROS = "%d.%03d"
"""Of the two columns of `_micros`."""


def _micros(values_ns: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Whole microseconds and the nanoseconds beyond; negative times, from clocks that disagree, become 0."""
    return np.divmod(np.maximum(values_ns, 0), 1000)


def _lines(template: str, *columns: NDArray[Any]) -> str:
    """The template filled with each row of the columns. Twice as fast as `json.dumps` of a dict per span."""
    return ",\n".join(map(template.__mod__, zip(*(column.tolist() for column in columns), strict=True)))


def _chosen(table: Sequence[str], index: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(np.array(table, object)[index])


# ---- events ----------------------------------------------------------------------------------------------------


def _places(timeline: Timeline, rows: Sequence[RowGroup]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """By worker: its process (datacenter) and its thread.

    Process and thread numbers differ: Perfetto treats a thread with its process's number as the main one.
    """
    pid = np.zeros(timeline.program.num_workers, np.int64)
    for number, group in enumerate(rows):
        pid[list(group.workers)] = number + 1
    return pid, np.arange(timeline.program.num_workers) + len(rows) + 1


def _link_threads(timeline: Timeline, rows: Sequence[RowGroup]) -> list[int]:
    """By group: the thread of its first link row, after those of the workers and of the link rows before."""
    before = np.cumsum([0] + [group.num_rows - len(group.workers) for group in rows])
    return [len(rows) + timeline.program.num_workers + 1 + int(count) for count in before]


def _names(timeline: Timeline, rows: Sequence[RowGroup]) -> list[dict[str, Any]]:
    """Metadata: names and order of processes and threads."""
    events: list[dict[str, Any]] = []

    def say(what: str, pid: int, tid: int, **value: Any) -> None:
        events.append({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": value})

    _, thread = _places(timeline, rows)
    links = _link_threads(timeline, rows)
    for number, group in enumerate(rows):
        pid = number + 1
        say("process_name", pid, 0, name=group.name)
        say("process_sort_index", pid, 0, sort_index=number)
        tracks = [*(timeline.links[row.link] for row in group.link_rows), *(track.name for track in group.rails)]
        rows_of = [(int(thread[w]), timeline.program.worker_name(w), w) for w in group.workers]
        for tid, name, place in [*rows_of, *((links[number] + k, name, k) for k, name in enumerate(tracks))]:
            say("thread_name", pid, tid, name=name)
            say("thread_sort_index", pid, tid, sort_index=place)
    return events


def _rail_events(timeline: Timeline, rows: Sequence[RowGroup]) -> str:
    """Changes of circuits: few, so plain JSON."""
    zero, links = timeline.start_ns, _link_threads(timeline, rows)
    events = [
        {"ph": "X", "name": track.name, "cat": "fabric", "pid": number + 1, "tid": links[number] + k,
         "ts": (start - zero) / 1e3, "dur": (end - start) / 1e3}
        for number, group in enumerate(rows)
        for k, track in enumerate(group.rails)
        for start, end in track.spans_ns
    ]  # fmt: skip
    return json.dumps(events)[1:-1]


def _op_events(timeline: Timeline, pid: NDArray[np.int64], tid: NDArray[np.int64]) -> str:
    program, worker = timeline.program, timeline.program.op_worker
    kind = _chosen([kind.name for kind in Kind], program.kind)
    return _lines(
        f'{{"ph":"X","name":"%d%s%d","cat":"%s","pid":%d,"tid":%d,"ts":{MICROS},"dur":{MICROS}}}',
        *(program.stage, kind, program.microbatch, kind, pid[worker], tid[worker]),
        *_micros(timeline.op_start_ns - timeline.start_ns),
        *_micros(timeline.op_end_ns - timeline.op_start_ns),
    )


def _transfer_events(timeline: Timeline, rows: Sequence[RowGroup]) -> list[str]:
    parts = []
    links = _link_threads(timeline, rows)
    for number, group in enumerate(rows):
        if not group.link_rows:
            continue
        of = np.concatenate([row.transfers for row in group.link_rows])
        counts = [len(row.transfers) for row in group.link_rows]
        track = links[number] + np.repeat(np.arange(len(counts)), counts)
        direction, pipeline, boundary, slot = np.unravel_index(of, timeline.program.transfer_shape)
        sender, start_ns = boundary + (direction != FORWARD), timeline.transfer_start_ns[of]
        template = (
            f'{{"ph":"X","name":"p%d %d%s%d","cat":"wan","pid":{number + 1},"tid":%d,"ts":{MICROS},"dur":{MICROS},'
            f'"args":{{"queued_us":{MICROS},"latency_us":{MICROS}}}}}'
        )
        spans = (
            start_ns - timeline.start_ns,
            timeline.transfer_sent_ns[of] - start_ns,
            start_ns - timeline.transfer_ready_ns[of],
            timeline.transfer_arrive_ns[of] - timeline.transfer_sent_ns[of],
        )
        what = pipeline, sender, _chosen(["SEND_F", "SEND_B"], direction), slot, track
        parts.append(_lines(template, *what, *(column for span in spans for column in _micros(span))))
    return parts


def _arrow_events(
    timeline: Timeline, wan: NDArray[np.int64], pid: NDArray[np.int64], tid: NDArray[np.int64]
) -> list[str]:
    """A flow from the end of the op that produced a tensor to the start of the op that uses it."""
    program = timeline.program
    wan = wan[program.transfer_src[wan] >= 0]
    src, dst = program.transfer_src[wan], program.transfer_dst[wan]
    ends = (
        ('"ph":"s"', src, timeline.op_end_ns[src] - 1),
        ('"ph":"f","bp":"e"', dst, timeline.op_start_ns[dst]),
    )
    return [
        _lines(
            f'{{{phase},"name":"wan","cat":"wan","id":%d,"pid":%d,"tid":%d,"ts":{MICROS}}}',
            *(np.arange(len(wan)), pid[program.op_worker[op]], tid[program.op_worker[op]]),
            *_micros(at - timeline.start_ns),
        )
        for phase, op, at in ends
    ]
