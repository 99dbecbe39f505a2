"""A Timeline that is written during the run: a file of JSON lines, one per step, readable after a kill at any time.
`load_timeline` reads it. `AppendedLines` appends lines so that a kill or a full disk costs at most one line.

A run that is restarted, or continues with another plan, continues in the same file with a new head. Reading returns the
last steps after the last head. Knows the format, not what the numbers mean.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from atlas.errors import AtlasError, ProgramError
from atlas.ir.assemble import repeated
from atlas.ir.parse import from_text
from atlas.ir.program import Ints, Program
from atlas.ir.text import to_text
from atlas.ir.timeline import Timeline

FORMAT, VERSION = "atlas-timeline-journal", 1
LAST_STEPS = 20
"""Steps that are read back: enough to look at, for a run of any length."""

_OPS = ("op_start_ns", "op_end_ns")
_TRANSFERS = ("transfer_ready_ns", "transfer_start_ns", "transfer_sent_ns", "transfer_arrive_ns")


# ---- writing -----------------------------------------------------------------------------------------------------
class AppendedLines:
    """A file of JSON lines that only grows. When `append` returns, the kernel has the line."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._file = self.path.open("a+b", buffering=0)
            size = self._file.seek(0, os.SEEK_END)
            self._file.seek(max(0, size - 1))
            self._torn = size > 0 and self._file.read(1) != b"\n"
        except OSError as error:
            raise AtlasError(f"{path}: cannot be written: {error.strerror}. Choose another place") from error

    def append(self, record: Mapping[str, Any]) -> None:
        """After an OSError the file ends in at most one partial line; the next `append` starts a new one."""
        line = (b"\n" if self._torn else b"") + json.dumps(record, separators=(",", ":")).encode() + b"\n"
        self._torn = True
        while line:
            line = line[self._file.write(line) :]
        self._torn = False

    def close(self) -> None:
        self._file.close()


class Journal:
    """The Timelines of a run, step by step. Each is one pass of its Program."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._lines = AppendedLines(path)
        self._program: Program | None = None

    def append(self, step: int, timeline: Timeline) -> None:
        """`step`: the last step of the pass. Times are from the last start of the run."""
        if timeline.program is not self._program:  # the first one, or training continues with another plan
            self._lines.append(_head(timeline))
            self._program = timeline.program
        arrays = {name: _packed(getattr(timeline, name)) for name in (*_OPS, *_TRANSFERS)}
        self._lines.append({"step": step, **arrays})

    def close(self) -> None:
        self._lines.close()


def _head(timeline: Timeline) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "source": timeline.source,
        "links": timeline.links,
        "transfer_link": _packed(timeline.transfer_link.astype(np.int64)),
        "meta": timeline.meta,
        "program": to_text(timeline.program),
    }


def _packed(array: Ints) -> str:
    return base64.b64encode(zlib.compress(array.astype("<i8").tobytes())).decode()


# ---- reading -----------------------------------------------------------------------------------------------------
def is_journal(path: str | os.PathLike[str]) -> bool:
    with Path(path).open("rb") as file:
        return file.read(1) == b"{"


def load_journal(path: str | os.PathLike[str], last: int = LAST_STEPS) -> Timeline:
    """The last `last` passes since the last start, as one Timeline that begins at 0. Partial lines are skipped."""
    head: dict[str, Any] | None = None
    steps: deque[dict[str, Any]] = deque(maxlen=last)
    with Path(path).open("rb") as file:
        for line in file:
            record = _record(line)
            if record.get("format") == FORMAT:
                head = record
                steps.clear()
            elif "step" in record:
                steps.append(record)
    if head is None or not steps:
        raise AtlasError(f"{path}: not a journal, or the run ended before its first step. Run it again")
    if head.get("version") != VERSION:
        raise AtlasError(f"{path}: journal version {head.get('version')!r}, but this atlas reads {VERSION}: upgrade")
    try:
        program = from_text(str(head["program"]))
        return joined([_pass(program, head, record) for record in steps])
    except (KeyError, TypeError, ValueError, zlib.error, ProgramError) as error:
        raise AtlasError(f"{path}: not a complete journal: {type(error).__name__}: {error}. Run it again") from error


def _record(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _pass(program: Program, head: dict[str, Any], record: dict[str, Any]) -> Timeline:
    links = _unpacked(head["transfer_link"], program.num_transfers).astype(np.int32)
    names = tuple(map(str, head["links"]))
    if len(links) and not 0 <= links.min() <= links.max() < len(names):
        raise ValueError("a transfer is on a link that does not exist")
    return Timeline(
        program=program,
        source=str(head["source"]),
        links=names,
        transfer_link=links,
        meta={**dict(head["meta"]), "last_step": int(record["step"])},
        **{name: _unpacked(record[name], program.num_ops) for name in _OPS},
        **{name: _unpacked(record[name], program.num_transfers) for name in _TRANSFERS},
    )


def _unpacked(text: str, length: int) -> Ints:
    # The file may be untrusted: no more is unpacked than the array needs.
    data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), 8 * length + 1)
    if len(data) != 8 * length:
        raise ValueError(f"an array does not have {length} numbers")
    return np.frombuffer(data, "<i8").astype(np.int64)


# ---- several into one --------------------------------------------------------------------------------------------
def joined(timelines: Sequence[Timeline]) -> Timeline:
    """Joins consecutive passes of one Program to the Timeline of one longer Program that begins at 0."""
    first = timelines[0]
    program = repeated(first.program, len(timelines))
    zero_ns = int(first.op_start_ns.min()) if first.program.num_ops else 0
    ptr = first.program.worker_ptr

    def by_op(name: str) -> Ints:
        rows = [getattr(timeline, name) for timeline in timelines]
        parts = [row[ptr[w] : ptr[w + 1]] for w in range(first.program.num_workers) for row in rows]
        return np.concatenate(parts) - zero_ns

    def by_transfer(name: str) -> Ints:
        rows = [getattr(timeline, name).reshape(first.program.transfer_shape) for timeline in timelines]
        return np.concatenate(rows, axis=3).ravel()

    times: dict[str, Any] = {name: by_op(name) for name in _OPS}
    times |= {name: by_transfer(name) - zero_ns for name in _TRANSFERS}
    links = by_transfer("transfer_link").astype(np.int32)
    return replace(timelines[-1], program=program, transfer_link=links, **times)
