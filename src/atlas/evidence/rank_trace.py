"""One rank's trace, reduced while it is read: kernels as arrays of start, length and traits; step marks; sums over
collectives, copies and kernel names.

Knows which names CCL-Bench counts as communication or copies (its JSON tools, 2026), not the metrics.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atlas.errors import AtlasError
from atlas.evidence.events import TraceFile
from atlas.evidence.intervals import Floats

MAX_NAMES = 200_000
"""Different kernel names whose time is summed; with more, the dominant one is not known."""
MAX_NUMBER = 1e18
"""Of a time or a size in a trace; a larger one counts as missing."""
BANDWIDTH_SAMPLES = 1_000_000
"""Collectives of one type whose bandwidth is kept for the median."""

_COLLECTIVE_WORDS = r"all_?reduce|all_?gather|reduce_?scatter|broadcast|cross[_\-]?device|sendrecv"
TRAITS: dict[str, tuple[int, str]] = {
    "comm": (1, rf"nccl|{_COLLECTIVE_WORDS}|send|recv|p2p|communicate"),
    "comm_time": (2, rf"^nccl|nccl(dev)?kernel|{_COLLECTIVE_WORDS}"),
    "comm_overlap": (
        4,
        r"nccl|all[_\-]?reduce|all[_\-]?gather|reduce[_\-]?scatter|all[_\-]?to[_\-]?all|broadcast|"
        r"cross[_\-]?device|sendrecv|collective",
    ),
    "comm_copy": (8, rf"nccl|{_COLLECTIVE_WORDS}"),
    "copy": (16, r"memcpy|memset|copy_kernel|copy\.|copy-start|copy-done|\bdma\b"),
    "moe": (32, r"moe|expert|routing|gating|gate_|topk|dispatch|combine|grouped_gemm"),
}
"""By trait: its bit, and the words in a kernel's name. CCL-Bench's metrics each have their own list."""
BIT = {name: bit for name, (bit, _) in TRAITS.items()}
_PATTERNS = [(bit, re.compile(words, re.IGNORECASE)) for bit, words in TRAITS.values()]
_RANK_FILE = re.compile(r"(?:rank(\d{1,9})_trace|kineto_trace_(\d{1,9}))\.json(?:\.gz)?$")
_STEP = re.compile(r"ProfilerStep#(\d{1,18})$")
_SGLANG = re.compile(r"\brun_batch\b")
_INSIDE_DEVICE = re.compile(r"Memset|Memcpy DtoD", re.IGNORECASE)
_COPY_CATEGORIES = ("Op", "gpu_op", "device_op", None)
COLLECTIVES = ("allreduce", "allgather", "reducescatter", "alltoall")
_BY_KERNEL = {"AllReduce": "allreduce", "AllGather": "allgather", "ReduceScatter": "reducescatter"}
_KERNEL = re.compile(r"nccl(?:Dev)?Kernel_(AllReduce|AllGather|ReduceScatter|SendRecv)")
_BY_NAME = {
    "all_reduce": "allreduce",
    "allreduce": "allreduce",
    "all_gather": "allgather",
    "allgather": "allgather",
    "reduce_scatter": "reducescatter",
    "reducescatter": "reducescatter",
}
_ALL_TO_ALL = ("all_to_allv", "all_to_all", "alltoall")
WIDTH_BYTES = {
    **dict.fromkeys(("Float", "Float32", "Int", "Int32"), 4),
    **dict.fromkeys(("Double", "Float64", "Int64", "Long"), 8),
    **dict.fromkeys(("Half", "Float16", "BFloat16", "BF16", "Int16", "Short"), 2),
    **dict.fromkeys(("Int8", "Byte"), 1),
}
"""By NCCL's name of a type."""


class StepMark(NamedTuple):
    """One step of a rank."""

    number: int
    start_us: float
    length_us: float | None


class Collective(NamedTuple):
    """One collective kernel with its arguments."""

    kind: str
    num_bytes: int
    group_size: float
    start_us: float
    length_us: float


@dataclass
class RankTrace:
    """What was read of one file. Times are microseconds on the file's own clock."""

    path: Path
    info: dict[str, Any] = field(default_factory=dict)
    num_events: int = 0
    damage: str = ""
    start_us: Floats = field(default_factory=lambda: np.zeros(0))
    """Of every kernel, in file order."""
    length_us: Floats = field(default_factory=lambda: np.zeros(0))
    traits: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    memory_start_us: Floats = field(default_factory=lambda: np.zeros(0))
    """Of every fill and copy inside the device's memory, which torch uses in place of a kernel where it can."""
    memory_length_us: Floats = field(default_factory=lambda: np.zeros(0))
    other_start_us: Floats = field(default_factory=lambda: np.zeros(0))
    """Of device events in other categories, which only the copy metric counts."""
    other_length_us: Floats = field(default_factory=lambda: np.zeros(0))
    other_traits: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    steps: list[StepMark] = field(default_factory=list)
    engine_steps: list[StepMark] = field(default_factory=list)
    """vLLM's `execute_context_*`, or SGLang's `run_batch`: steps of inference traces."""
    by_name_us: dict[str, float] = field(default_factory=dict)
    too_many_names: bool = False
    collectives: list[Collective] = field(default_factory=list)
    covered: tuple[float, float] = (0.0, 0.0)
    """Sum of min(blocks per SM, 1) x time, and of that time."""
    copied: tuple[float, float] = (0.0, 0.0)
    """Bytes of copies, and their time."""
    nccl_us: dict[str, float] = field(default_factory=dict)
    """By process: time of kernels named `ncclDevKernel_*`."""
    bubbles_us: list[tuple[str, float, float]] = field(default_factory=list)
    """Cause, start and length, where Atlas wrote the trace."""
    num_unusable: int = 0
    """Kernels and steps without a valid start or length."""
    num_capital: int = 0
    """Kernels in the category `Kernel`, as old profilers write it."""

    @property
    def end_us(self) -> Floats:
        return np.asarray(self.start_us + self.length_us, np.float64)

    def having(self, trait: str) -> NDArray[np.bool_]:
        return np.asarray((self.traits & BIT[trait]) != 0, np.bool_)

    @property
    def world_size(self) -> int | None:
        return _whole(_dict(self.info.get("distributedInfo")).get("world_size"))

    @property
    def stated_rank(self) -> int | None:
        return _whole(_dict(self.info.get("distributedInfo")).get("rank"))


def rank_of(path: Path) -> int | None:
    """The rank in a file's name."""
    match = _RANK_FILE.match(path.name)
    return None if match is None else int(match[1] or match[2])


def read_rank(path: Path, *, salvage: bool = False) -> RankTrace:
    """Read a trace file in one pass."""
    file = TraceFile(path, salvage=salvage)
    trace = RankTrace(path)
    reader = _EventSums(trace)
    handlers: dict[Any, Callable[[dict[str, Any]], None]] = {
        "kernel": reader.kernel,
        "Kernel": reader.kernel,
        "user_annotation": reader.annotation,
        "python_function": reader.python_function,
        "atlas_bubble": reader.bubble,
        "gpu_memcpy": reader.device_memory,
        "gpu_memset": reader.device_memory,
        **dict.fromkeys(_COPY_CATEGORIES, reader.other),
    }
    for event in file:
        if event.get("ph") != "X":
            continue
        try:
            handle = handlers.get(event.get("cat"), reader.copy)
            handle(event)
        except TypeError:  # a category, name or argument of an odd type
            trace.num_unusable += 1
    if file.num_odd and not file.num_events:
        raise AtlasError(f"{path}: none of its {file.num_odd:,} entries is an event. Name a file of torch.profiler")
    reader.finish()
    trace.info, trace.num_events, trace.damage = file.info, file.num_events, file.damage
    return trace


class _EventSums:
    """Adds events to a trace."""

    def __init__(self, trace: RankTrace) -> None:
        self.trace = trace
        self._start, self._length, self._traits = array("d"), array("d"), array("B")
        self._memory = (array("d"), array("d"))
        self._other = (array("d"), array("d"), array("B"))
        self._known: dict[str, int] = {}
        self._covered = [0.0, 0.0]
        self._copied = [0.0, 0.0]

    def finish(self) -> None:
        trace = self.trace
        trace.start_us, trace.length_us, trace.traits = _columns(self._start, self._length, self._traits)
        trace.memory_start_us, trace.memory_length_us = (np.frombuffer(column, np.float64) for column in self._memory)
        trace.other_start_us, trace.other_length_us, trace.other_traits = _columns(*self._other)
        trace.covered = (self._covered[0], self._covered[1])
        trace.copied = (self._copied[0], self._copied[1])
        trace.steps.sort(key=lambda mark: mark.number)
        trace.engine_steps.sort(key=lambda mark: mark.start_us)

    def traits_of(self, name: str) -> int:
        traits = self._known.get(name)
        if traits is None:
            if len(self._known) > MAX_NAMES:
                self._known.clear()
            traits = self._known[name] = sum(bit for bit, words in _PATTERNS if words.search(name))
        return traits

    # ---- by category -----------------------------------------------------------------------------------------
    def kernel(self, event: dict[str, Any]) -> None:
        trace, name = self.trace, str(event.get("name", ""))
        start, length = _number(event.get("ts")), _number(event.get("dur"))
        if start is None or length is None or length < 0:
            trace.num_unusable += 1
            return
        traits = self.traits_of(name)
        self._start.append(start)
        self._length.append(length)
        self._traits.append(traits)
        trace.num_capital += event["cat"] == "Kernel"
        names = trace.by_name_us
        if name in names:
            names[name] += length
        elif len(names) < MAX_NAMES:
            names[name] = length
        else:
            trace.too_many_names = True
        if traits & BIT["comm"] and name.lower().startswith("nccldevkernel_"):
            process = str(event.get("pid"))
            trace.nccl_us[process] = trace.nccl_us.get(process, 0.0) + length
        args = event.get("args")
        if type(args) is not dict:
            return
        blocks = _number(args.get("blocks per SM"))
        if blocks is not None:
            self._covered[0] += min(blocks, 1.0) * length
            self._covered[1] += length
        if traits & (BIT["comm"] | BIT["comm_overlap"]) or "Collective name" in args:
            self._collective(name, args, start, length)
        if traits & BIT["copy"]:
            self._copy(args, length)

    def _collective(self, name: str, args: Mapping[str, Any], start: float, length: float) -> None:
        trace = self.trace
        kind = _collective(name, args.get("Collective name"))
        elements, width = _whole(args.get("In msg nelems")), WIDTH_BYTES.get(str(args.get("dtype")))
        if kind is None or elements is None or width is None or len(trace.collectives) >= BANDWIDTH_SAMPLES:
            return
        size = _number(args.get("Group size"))
        trace.collectives.append(Collective(kind, elements * width, math.nan if size is None else size, start, length))

    def annotation(self, event: dict[str, Any]) -> None:
        name = str(event.get("name", ""))
        step = _STEP.match(name)
        if step is None and not name.startswith("execute_context_"):
            return self.copy(event)
        start, length = _number(event.get("ts")), _number(event.get("dur"))
        if start is None or (length is not None and length < 0):
            self.trace.num_unusable += 1
        elif step is not None:
            self.trace.num_unusable += length is None
            self.trace.steps.append(StepMark(int(step[1]), start, length))
        else:
            self.trace.engine_steps.append(StepMark(len(self.trace.engine_steps), start, length))
        return None

    def python_function(self, event: dict[str, Any]) -> None:
        if _SGLANG.search(str(event.get("name", ""))):
            start, length = _number(event.get("ts")), _number(event.get("dur"))
            if start is not None and length is not None:
                self.trace.engine_steps.append(StepMark(len(self.trace.engine_steps), start, length))

    def bubble(self, event: dict[str, Any]) -> None:
        start, length = _number(event.get("ts")), _number(event.get("dur"))
        if start is not None and length is not None and length >= 0:
            self.trace.bubbles_us.append((str(event.get("name", "")).removeprefix("bubble "), start, length))

    def device_memory(self, event: dict[str, Any]) -> None:
        if _INSIDE_DEVICE.match(str(event.get("name", ""))):
            start, length = _number(event.get("ts")), _number(event.get("dur"))
            if start is not None and length is not None and length > 0:
                self._memory[0].append(start)
                self._memory[1].append(length)
        self.copy(event)

    def other(self, event: dict[str, Any]) -> None:
        start, length = _number(event.get("ts")), _number(event.get("dur"))
        if start is not None and length is not None and length > 0:
            for column, value in zip(self._other[:2], (start, length), strict=True):
                column.append(value)
            self._other[2].append(self.traits_of(str(event.get("name", ""))))
        self.copy(event)

    def copy(self, event: dict[str, Any]) -> None:
        """Count the bytes of an event of any category whose name is that of a copy."""
        name = event.get("name", "")
        traits = self._known.get(name)
        if (self.traits_of(str(name)) if traits is None else traits) & BIT["copy"]:
            length = _number(event.get("dur"))
            if length is not None and length > 0:
                self._copy(_dict(event.get("args")), length)

    def _copy(self, args: Mapping[str, Any], length: float) -> None:
        num_bytes = _number(args.get("bytes") or args.get("bytes_accessed") or args.get("raw_bytes_accessed"))
        if num_bytes is not None and num_bytes > 0 and length > 0:
            self._copied[0] += num_bytes
            self._copied[1] += length


def _collective(name: str, stated: object) -> str | None:
    """Which collective a kernel is, by its name or by what the profiler recorded."""
    kernel = _KERNEL.match(name)
    word = kernel[1] if kernel else ""
    if word in _BY_KERNEL:
        return _BY_KERNEL[word]
    if stated in _ALL_TO_ALL:
        return "alltoall" if word == "SendRecv" else None
    return _BY_NAME.get(str(stated))


def _columns(start: array[float], length: array[float], traits: array[int]) -> tuple[Floats, Floats, NDArray[np.uint8]]:
    return np.frombuffer(start, np.float64), np.frombuffer(length, np.float64), np.frombuffer(traits, np.uint8)


def _number(value: Any) -> float | None:
    """A finite number, also one written as text; None for anything else."""
    kind = type(value)
    if kind is int or kind is float:
        return float(value) if abs(value) < MAX_NUMBER else None
    if kind is str and len(value) < 40:
        try:
            number = float(value)
        except ValueError:
            return None
        return number if abs(number) < MAX_NUMBER else None
    return None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return None if number is None or number < 0 else int(number)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
