"""A Timeline as a Chrome trace, which ui.perfetto.dev and chrome://tracing open: a process per datacenter with a
track per worker, one for its photonic rails, and a process for the WAN with a track per link. Microseconds with three
decimals: no nanosecond is lost.

Half a million spans are written as one matrix of bytes, one row per span, padded with zero bytes where a number is
shorter than its field; the zero bytes are dropped at the end.
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

Chars = NDArray[np.uint8]
"""[span, column]; zero bytes are padding, dropped at the end."""

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
    names = json.dumps(_names(timeline, rows))[1:-1].encode()
    about = json.dumps({"source": timeline.source, "schedule": timeline.program.name}).encode()
    events = b",\n".join(part for part in (names, *parts) if part)
    return b'{"displayTimeUnit":"ms","otherData":' + about + b',"traceEvents":[\n' + events + b"\n]}\n"


# ---- the matrix of bytes ---------------------------------------------------------------------------------------


def _number(values: NDArray[Any]) -> Chars:
    """Non-negative integers in decimal, padded on the left to the length of the longest."""
    left = values.astype(np.int64)
    width = len(str(int(left.max(initial=0))))
    digits = np.empty((len(left), width), np.uint8)
    for column in range(width - 1, -1, -1):
        if column == width - 10 or (width > 9 and column == width - 1):
            # Nine digits at a time fit 32 bits, in which a division costs a third.
            left, low = np.divmod(left, 10**9)
            part = low.astype(np.uint32)
        elif column == width - 1:
            part = left.astype(np.uint32)
        tens = part // np.uint32(10)
        digits[:, column] = part - tens * np.uint32(10)
        part = tens
    leading = np.maximum.accumulate(digits, axis=1) == 0
    leading[:, -1] = False
    digits += np.uint8(ord("0"))
    digits[leading] = 0
    return digits


def _micros(values_ns: NDArray[Any]) -> Chars:
    """Nanoseconds as microseconds with three decimals; negative ones, from clocks that disagree, become 0."""
    whole, rest = np.divmod(np.maximum(values_ns.astype(np.int64), 0), 1000)
    decimals = np.empty((len(whole), 4), np.uint8)
    rest = rest.astype(np.uint16)
    decimals[:, 0] = ord(".")
    decimals[:, 1], decimals[:, 2], decimals[:, 3] = rest // 100 + 48, rest // 10 % 10 + 48, rest % 10 + 48
    return np.concatenate([_number(whole), decimals], axis=1)


def _choice(table: Sequence[str], index: NDArray[Any]) -> Chars:
    """One of a few strings per span."""
    encoded = [text.encode() for text in table]
    width = max(len(text) for text in encoded)
    letters = np.frombuffer(b"".join(text.ljust(width, b"\0") for text in encoded), np.uint8).reshape(-1, width)
    return np.asarray(letters[index], np.uint8)


def _joined(count: int, *columns: str | Chars) -> bytes:
    """The columns side by side, constants repeated, padding dropped, a comma between two spans."""
    if not count:
        return b""
    widths = [len(c.encode()) if isinstance(c, str) else c.shape[1] for c in columns]
    matrix = np.empty((count, sum(widths)), np.uint8)
    at = 0
    for column, width in zip(columns, widths, strict=True):
        matrix[:, at : at + width] = np.frombuffer(column.encode(), np.uint8) if isinstance(column, str) else column
        at += width
    return matrix.tobytes().translate(None, b"\0")[:-2]


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


def _rail_events(timeline: Timeline, rows: Sequence[RowGroup]) -> bytes:
    """Changes of circuits: few, so plain JSON."""
    zero, links = timeline.start_ns, _link_threads(timeline, rows)
    events = [
        {"ph": "X", "name": track.name, "cat": "fabric", "pid": number + 1, "tid": links[number] + k,
         "ts": (start - zero) / 1e3, "dur": (end - start) / 1e3}
        for number, group in enumerate(rows)
        for k, track in enumerate(group.rails)
        for start, end in track.spans_ns
    ]  # fmt: skip
    return json.dumps(events)[1:-1].encode()


def _op_events(timeline: Timeline, pid: NDArray[np.int64], tid: NDArray[np.int64]) -> bytes:
    program, zero = timeline.program, timeline.start_ns
    return _joined(
        program.num_ops,
        '{"ph":"X","name":"',
        _number(program.stage),
        _choice([kind.name for kind in Kind], program.kind),
        _number(program.microbatch),
        '","cat":"',
        _choice([kind.name for kind in Kind], program.kind),
        '","pid":',
        _number(pid[program.op_worker]),
        ',"tid":',
        _number(tid[program.op_worker]),
        ',"ts":',
        _micros(timeline.op_start_ns - zero),
        ',"dur":',
        _micros(timeline.op_end_ns - timeline.op_start_ns),
        "},\n",
    )


def _transfer_events(timeline: Timeline, rows: Sequence[RowGroup]) -> list[bytes]:
    program, zero = timeline.program, timeline.start_ns
    parts = []
    links = _link_threads(timeline, rows)
    for number, group in enumerate(rows):
        if not group.link_rows:
            continue
        of = np.concatenate([row.transfers for row in group.link_rows])
        counts = [len(row.transfers) for row in group.link_rows]
        track = links[number] + np.repeat(np.arange(len(counts)), counts)
        direction, pipeline, boundary, slot = np.unravel_index(of, program.transfer_shape)
        parts.append(
            _joined(
                len(of),
                '{"ph":"X","name":"p',
                _number(pipeline),
                " ",
                _number(boundary + (direction != FORWARD)),
                _choice(["SEND_F", "SEND_B"], direction),
                _number(slot),
                f'","cat":"wan","pid":{number + 1},"tid":',
                _number(track),
                ',"ts":',
                _micros(timeline.transfer_start_ns[of] - zero),
                ',"dur":',
                _micros(timeline.transfer_sent_ns[of] - timeline.transfer_start_ns[of]),
                ',"args":{"queued_us":',
                _micros(timeline.transfer_start_ns[of] - timeline.transfer_ready_ns[of]),
                ',"latency_us":',
                _micros(timeline.transfer_arrive_ns[of] - timeline.transfer_sent_ns[of]),
                "}},\n",
            )
        )
    return parts


def _arrow_events(
    timeline: Timeline, wan: NDArray[np.int64], pid: NDArray[np.int64], tid: NDArray[np.int64]
) -> list[bytes]:
    """A flow from the end of the op that produced a tensor to the start of the op that uses it."""
    program, zero = timeline.program, timeline.start_ns
    wan = wan[program.transfer_src[wan] >= 0]
    src, dst = program.transfer_src[wan], program.transfer_dst[wan]
    ends = (
        ('{"ph":"s","name":"wan","cat":"wan","id":', src, timeline.op_end_ns[src] - 1),
        ('{"ph":"f","bp":"e","name":"wan","cat":"wan","id":', dst, timeline.op_start_ns[dst]),
    )
    return [
        _joined(
            len(wan),
            opening,
            _number(np.arange(len(wan))),
            ',"pid":',
            _number(pid[program.op_worker[op]]),
            ',"tid":',
            _number(tid[program.op_worker[op]]),
            ',"ts":',
            _micros(at - zero),
            "},\n",
        )
        for opening, op, at in ends
    ]
