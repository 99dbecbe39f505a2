"""A Timeline in a file. `save_timeline` writes it completely or not at all: numpy arrays and a JSON header in a zip,
without pickle, so untrusted files can be opened. `Journal` writes it during the run, one JSON line per step, so that a
kill or a full disk costs at most one line; a restarted run continues in the same file with a new head, and reading
returns the steps after the last head. `load_timeline` reads both.

Knows the formats and their versions, not what the numbers mean.
"""

from __future__ import annotations

import base64
import json
import os
import zipfile
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas.errors import AtlasError, ProgramError
from atlas.ir.assemble import repeated
from atlas.ir.program import NUM_KINDS, Ints, Memory, Program
from atlas.ir.replace import replacing
from atlas.ir.text import from_text, to_text
from atlas.ir.timeline import Timeline

FORMAT, VERSION = "atlas-timeline", 1

_PROGRAM_ARRAYS = ("worker_ptr", "kind", "stage", "microbatch", "turn")
_OP_ARRAYS = ("op_start_ns", "op_end_ns")
_TRANSFER_TIMES = ("transfer_ready_ns", "transfer_start_ns", "transfer_sent_ns", "transfer_arrive_ns")
_TIMELINE_ARRAYS = (*_OP_ARRAYS, *_TRANSFER_TIMES, "transfer_link")


def save_timeline(path: str | os.PathLike[str], timeline: Timeline) -> None:
    """Writes `timeline` with its Program to one file."""
    arrays: dict[str, NDArray[Any]] = {}
    program: dict[str, Any] = {}
    for field in fields(Program):
        value = getattr(timeline.program, field.name)
        if isinstance(value, np.ndarray):
            arrays[f"program.{field.name}"] = value
        else:
            program[field.name] = asdict(value) if isinstance(value, Memory) else value
    for name in _TIMELINE_ARRAYS:
        arrays[name] = getattr(timeline, name)
    header = {
        "format": FORMAT,
        "version": VERSION,
        "source": timeline.source,
        "links": timeline.links,
        "meta": timeline.meta,
        "program": program,
    }
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with replacing(path) as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def load_timeline(path: str | os.PathLike[str]) -> Timeline:
    """Reads a file of `save_timeline`, or a `journal` of a run. Raises AtlasError for any other file."""
    try:
        if is_journal(path):
            return load_journal(path)
        with zipfile.ZipFile(path) as archive:
            # The zip's directory is checked first, so that numpy does not unpack other zip files.
            if "header.npy" not in archive.namelist():
                raise AtlasError(_foreign(path, "it has no header"))
        with np.load(path, allow_pickle=False) as archive:
            header = json.loads(bytes(archive["header"]))
            _check_version(path, header)
            arrays = {name: archive[name] for name in archive.files if name != "header"}
        timeline = _timeline(header, arrays)
    except OSError as error:
        raise AtlasError(f"{path}: cannot be read: {error.strerror or error}. Check the path") from error
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise AtlasError(_foreign(path, f"{error}; it is truncated or of another format")) from error
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, MemoryError, ArithmeticError) as error:
        raise AtlasError(_foreign(path, f"{type(error).__name__}: {error}")) from error
    problem = _problem(timeline)
    if problem:
        raise AtlasError(_foreign(path, problem))
    return timeline


def _foreign(path: object, why: str) -> str:
    return f"{path}: not a complete timeline file: {why}. Write it again with `atlas simulate --save`"


def _check_version(path: object, header: Any) -> None:
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise AtlasError(_foreign(path, f"its header does not say {FORMAT!r}"))
    if header.get("version") != VERSION:
        raise AtlasError(
            f"{path}: timeline format {header.get('version')!r}, but this atlas reads version {VERSION}: "
            "open it with the atlas that wrote it, or upgrade"
        )


def _timeline(header: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> Timeline:
    parts: dict[str, Any] = dict(header["program"])
    parts.pop("recompute_on_arrival", None)  # of earlier versions, which wrote no other value than false
    parts["name"] = str(parts["name"])
    parts["stage_rank"] = tuple(int(rank) for rank in parts["stage_rank"])
    parts["rank_dc"] = tuple(str(dc) for dc in parts["rank_dc"])
    if parts["memory"] is not None:
        memory = parts["memory"]
        parts["memory"] = Memory(memory["cap"], tuple(memory["acquire"]), tuple(memory["release"]))
    for name in [name for name in arrays if name.startswith("program.")]:
        parts[name.removeprefix("program.")] = arrays.pop(name)
    return Timeline(
        program=Program(**parts),
        source=str(header["source"]),
        links=tuple(str(link) for link in header["links"]),
        meta=dict(header["meta"]),
        **arrays,
    )


def _problem(timeline: Timeline) -> str | None:
    """How the arrays contradict each other or the header; None if they do not."""
    program = timeline.program
    counts = (program.num_pipelines, program.num_stages, program.num_microbatches, program.num_iterations)
    if not all(isinstance(count, int) and count >= 1 for count in counts):
        return f"its numbers of pipelines, stages, microbatches, iterations are {counts}"
    arrays = [getattr(program, name) for name in _PROGRAM_ARRAYS]
    arrays += [getattr(timeline, name) for name in _TIMELINE_ARRAYS]
    if not all(isinstance(a, np.ndarray) and a.ndim == 1 and a.dtype.kind == "i" for a in arrays):
        return "an array is not a row of integers"
    if not program.rank_dc or len(program.worker_ptr) != program.num_workers + 1:
        return f"its ops are not those of {program.num_workers} workers"
    if program.worker_ptr[-1] != program.num_ops or (np.diff(program.worker_ptr, prepend=0) < 0).any():
        return f"its ops are not those of {program.num_workers} workers"
    by_op = (program.stage, program.microbatch, timeline.op_start_ns, timeline.op_end_ns)
    if any(len(array) != program.num_ops for array in by_op):
        return "its arrays of ops and of their times differ in length"
    by_transfer = (program.turn, *(getattr(timeline, name) for name in (*_TRANSFER_TIMES, "transfer_link")))
    if any(len(array) != program.num_transfers for array in by_transfer):
        return "its arrays of transfers differ in length"
    if program.num_pipelines * program.num_stages * program.num_slots > max(1, program.num_ops):
        return f"it has {program.num_ops} ops, fewer than one for each stage and microbatch"
    for array, limit in (
        (program.kind, NUM_KINDS),
        (program.stage, program.num_stages),
        (program.microbatch, program.num_slots),
        (timeline.transfer_link, len(timeline.links)),
    ):
        if len(array) and (array.min() < 0 or array.max() >= limit):
            return f"a value lies outside 0..{limit - 1}"
    if len(program.stage_rank) != program.num_stages or any(
        not 0 <= rank < program.num_ranks for rank in program.stage_rank
    ):
        return "its stages do not match its workers"
    return None


JOURNAL_FORMAT, JOURNAL_VERSION = "atlas-timeline-journal", 1
LAST_STEPS = 20
"""Steps that are read back: enough to look at, for a run of any length."""


# ---- the journal ---------------------------------------------------------------------------------------------------
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

    @property
    def size(self) -> int:
        return self._file.seek(0, os.SEEK_END)

    def clear(self) -> None:
        """Empty the file."""
        self._file.truncate(0)
        self._torn = False

    def close(self) -> None:
        self._file.close()


class Journal:
    """The Timelines of a run, step by step. Each is one pass of its Program. With `max_bytes`, a longer file is emptied
    first: for readers that need the last steps only."""

    def __init__(self, path: str | os.PathLike[str], max_bytes: int | None = None) -> None:
        self._lines, self._max_bytes = AppendedLines(path), max_bytes
        self._program: Program | None = None

    def append(self, step: int, timeline: Timeline) -> None:
        """`step`: the last step of the pass. Times are from the last start of the run."""
        if self._max_bytes is not None and self._lines.size > self._max_bytes:
            self._lines.clear()
            self._program = None
        if timeline.program is not self._program:  # the first one, or training continues with another plan
            self._lines.append(_head(timeline))
            self._program = timeline.program
        arrays = {name: _packed(getattr(timeline, name)) for name in (*_OP_ARRAYS, *_TRANSFER_TIMES)}
        self._lines.append({"step": step, **arrays})

    def close(self) -> None:
        self._lines.close()


def _head(timeline: Timeline) -> dict[str, Any]:
    return {
        "format": JOURNAL_FORMAT,
        "version": JOURNAL_VERSION,
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
    journal = JournalTail(path, last)
    with Path(path).open("rb") as file:
        for line in file:
            journal.feed(line)
    found = journal.timeline()
    if found is None:
        raise AtlasError(f"{path}: not the timeline of a run, or the run ended before its first step. Run it again")
    return found


class JournalTail:
    """The last passes of a journal that is read line by line, also while it grows."""

    def __init__(self, path: str | os.PathLike[str], last: int = LAST_STEPS) -> None:
        self.path = path
        self._head: dict[str, Any] | None = None
        self._steps: deque[dict[str, Any]] = deque(maxlen=last)
        self._program: Program | None = None

    def feed(self, line: bytes) -> None:
        """The next line. A partial one is ignored."""
        record = json_record(line)
        if record.get("format") == JOURNAL_FORMAT:
            self._head, self._program = record, None
            self._steps.clear()
        elif "step" in record:
            self._steps.append(record)

    def timeline(self, last: int | None = None) -> Timeline | None:
        """The last passes since the last start, joined; None before the first."""
        head = self._head
        steps = list(self._steps)[-last:] if last is not None else list(self._steps)
        if head is None or not steps:
            return None
        if head.get("version") != JOURNAL_VERSION:
            raise AtlasError(
                f"{self.path}: timeline of a run, version {head.get('version')!r}, but this atlas reads version "
                f"{JOURNAL_VERSION}: open it with the atlas that wrote it, or upgrade"
            )
        try:
            if self._program is None:
                self._program = from_text(str(head["program"]))
            program = self._program
            return joined([_pass(program, head, record) for record in steps])
        except (KeyError, TypeError, ValueError, zlib.error, ProgramError) as error:
            raise AtlasError(
                f"{self.path}: not a complete timeline of a run: {type(error).__name__}: {error}. Run it again"
            ) from error


def json_record(line: bytes) -> dict[str, Any]:
    """A JSON object, or an empty one where the line is not complete."""
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
        **{name: _unpacked(record[name], program.num_ops) for name in _OP_ARRAYS},
        **{name: _unpacked(record[name], program.num_transfers) for name in _TRANSFER_TIMES},
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
    zero_ns, ptr = first.start_ns, first.program.worker_ptr

    def by_op(name: str) -> Ints:
        rows = [getattr(timeline, name) for timeline in timelines]
        parts = [row[ptr[w] : ptr[w + 1]] for w in range(first.program.num_workers) for row in rows]
        return np.concatenate(parts) - zero_ns

    def by_transfer(name: str) -> Ints:
        rows = [getattr(timeline, name).reshape(first.program.transfer_shape) for timeline in timelines]
        return np.concatenate(rows, axis=3).ravel()

    times: dict[str, Any] = {name: by_op(name) for name in _OP_ARRAYS}
    times |= {name: by_transfer(name) - zero_ns for name in _TRANSFER_TIMES}
    links = by_transfer("transfer_link").astype(np.int32)
    return replace(timelines[-1], program=program, transfer_link=links, **times)
