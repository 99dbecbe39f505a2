"""The definitions of CCL-Bench's metrics, read aloud: plain loops over events, one microsecond grid where it helps.
Slow and independent of `atlas.evidence`, which the tests compare with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

Event = dict[str, Any]
Spans = list[tuple[float, float]]
WORDS = ("nccl", "allreduce", "allgather", "reducescatter", "broadcast", "sendrecv", "all_reduce", "all_gather")
CROSS = ("cross_device", "cross-device", "crossdevice", "reduce_scatter")


def has(name: str, *words: str) -> bool:
    return any(word in name.lower() for word in words)


def is_comm(name: str) -> bool:
    return has(name, *WORDS, *CROSS, "send", "recv", "p2p", "communicate")


def is_comm_time(name: str) -> bool:
    return has(name, *WORDS, *CROSS)


def is_comm_overlap(name: str) -> bool:
    return has(name, *WORDS, *CROSS, "all_to_all", "all-to-all", "alltoall", "collective")


def kernels(events: Sequence[Event]) -> list[Event]:
    return [e for e in events if e.get("cat") == "kernel" and e["ph"] == "X"]


def inner(events: Sequence[Event]) -> list[Event]:
    steps = sorted(
        (e for e in events if "ProfilerStep#" in e.get("name", "")), key=lambda e: int(e["name"].split("#")[1])
    )
    return steps[1:-1] if len(steps) > 2 else steps


def length(spans: Spans) -> float:
    total, end = 0.0, float("-inf")
    for a, b in sorted(spans):
        total += max(0.0, b - max(a, end))
        end = max(end, b)
    return total


def cut(spans: Spans, low: float, high: float) -> Spans:
    return [(max(a, low), min(b, high)) for a, b in spans if max(a, low) < min(b, high)]


def spans_of(events: Sequence[Event], wanted: Callable[[str], bool]) -> Spans:
    return [(e["ts"], e["ts"] + e["dur"]) for e in kernels(events) if wanted(e["name"])]


def communication_fraction(events: Sequence[Event]) -> float:
    parts = []
    for mark in inner(events):
        low, high = mark["ts"], mark["ts"] + mark["dur"]
        touching = [e for e in kernels(events) if e["ts"] + e["dur"] > low and e["ts"] < high]
        total = sum(e["dur"] for e in touching)
        if total:
            parts.append(100 * sum(e["dur"] for e in touching if is_comm(e["name"])) / total)
    return mean(parts)


def total_communication_time(events: Sequence[Event]) -> float:
    marks = inner(events)
    low, high = marks[0]["ts"], marks[-1]["ts"] + marks[-1]["dur"]
    return length(cut(spans_of(events, is_comm_time), low, high)) / 1e6 / len(marks)


def compute_comm_overlap(events: Sequence[Event]) -> float:
    both = total = 0.0
    for mark in inner(events):
        low, high = mark["ts"], mark["ts"] + mark["dur"]
        comm = cut(spans_of(events, is_comm_overlap), low, high)
        rest = cut(spans_of(events, lambda name: not is_comm_overlap(name)), low, high)
        total += length(comm)
        both += length(comm) + length(rest) - length(comm + rest)
    return 100 * both / total


def memory_transfer_overhead(events: Sequence[Event]) -> float:
    def is_copy(name: str) -> bool:
        return has(name, "memcpy", "memset", "copy_kernel")

    used = [e for e in kernels(events) if e["dur"] > 0]
    copies = spans_of(used, is_copy)
    rest = spans_of(used, lambda name: not is_copy(name) and not is_comm_time(name))
    alone = length(copies + rest) - length(rest)
    span = max(e["ts"] + e["dur"] for e in used) - min(e["ts"] for e in used)
    return round(100 * alone / span, 4)


def mean_sm_coverage(events: Sequence[Event]) -> float:
    used = [(e["dur"], min(e["args"]["blocks per SM"], 1)) for e in kernels(events) if "blocks per SM" in e["args"]]
    return 100 * sum(d * c for d, c in used) / sum(d for d, _ in used)


def collective_vol_allreduce_gb(events: Sequence[Event]) -> float:
    return sum(4 * e["args"]["In msg nelems"] for e in kernels(events) if "AllReduce" in e["name"]) / 1e9
