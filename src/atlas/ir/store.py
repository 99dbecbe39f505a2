"""A Timeline in one file: numpy arrays and a JSON header in a zip. Without pickle, so untrusted files can be opened.
Written completely or not at all.

Knows the format and its version, not what the numbers mean.
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from dataclasses import asdict, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas.errors import AtlasError
from atlas.ir.journal import is_journal, load_journal
from atlas.ir.ops import NUM_KINDS
from atlas.ir.program import Memory, Program
from atlas.ir.replace import replacing
from atlas.ir.timeline import Timeline

FORMAT, VERSION = "atlas-timeline", 1

_PROGRAM_ARRAYS = ("worker_ptr", "kind", "stage", "microbatch", "turn")
_OP_ARRAYS = ("op_start_ns", "op_end_ns")
_TRANSFER_ARRAYS = (
    "transfer_ready_ns",
    "transfer_start_ns",
    "transfer_sent_ns",
    "transfer_arrive_ns",
    "transfer_link",
)


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
    for name in (*_OP_ARRAYS, *_TRANSFER_ARRAYS):
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
    arrays += [getattr(timeline, name) for name in (*_OP_ARRAYS, *_TRANSFER_ARRAYS)]
    if not all(isinstance(a, np.ndarray) and a.ndim == 1 and a.dtype.kind == "i" for a in arrays):
        return "an array is not a row of integers"
    if not program.rank_dc or len(program.worker_ptr) != program.num_workers + 1:
        return f"its ops are not those of {program.num_workers} workers"
    if program.worker_ptr[-1] != program.num_ops or (np.diff(program.worker_ptr, prepend=0) < 0).any():
        return f"its ops are not those of {program.num_workers} workers"
    by_op = (program.stage, program.microbatch, timeline.op_start_ns, timeline.op_end_ns)
    if any(len(array) != program.num_ops for array in by_op):
        return "its arrays of ops and of their times differ in length"
    by_transfer = (program.turn, *(getattr(timeline, name) for name in _TRANSFER_ARRAYS))
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
        return "its stages and its workers disagree"
    return None
