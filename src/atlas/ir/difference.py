"""How two Timelines differ, op by op: simulated against measured, or two schedules of one job.

Compares the ops that both have, by kind, with times from the start of each run. `analysis` has the reasons.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas.ir.program import BACKWARD, FORWARD, Ints, Kind, Program
from atlas.ir.timeline import Timeline


@dataclass(frozen=True)
class KindDifference:
    """How the ops of one kind that both Timelines have differ, the second against the first."""

    kind: str
    count: int
    duration_ratio: float
    """Median of second / first."""
    duration_error_p95: float
    """Of |second / first - 1|. The same for the worst below."""
    duration_error_worst: float
    worst_duration: str
    start_error_s: float
    """Median of second - first, with times from the start of each run."""
    start_error_p95_s: float
    """Of the absolute value. The same for the worst below."""
    start_error_worst_s: float
    worst_start: str


@dataclass(frozen=True)
class Difference:
    """The second Timeline against the first, op by op."""

    names: tuple[str, str]
    sources: tuple[str, str]
    iteration_s: tuple[float, float]
    ratio: float
    """Iteration time of the second / of the first."""
    num_common: int
    num_only: tuple[int, int]
    """Ops that only the first has, and that only the second has."""
    kinds: tuple[KindDifference, ...]
    first_divergence: str | None
    """The earliest op that ends more than `tolerance` of an iteration apart, with its worker and datacenter."""
    first_divergence_at_s: float | None


def difference(a: Timeline, b: Timeline, *, tolerance: float = 0.01) -> Difference:
    """Compares simulated with measured, or two schedules of one job: then only the ops that both have."""
    shape = tuple(np.maximum(_op_shape(a.program), _op_shape(b.program)))
    both, in_a, in_b = np.intersect1d(
        _op_keys(a.program, shape), _op_keys(b.program, shape), assume_unique=True, return_indices=True
    )
    zero_a, zero_b = a.start_ns, b.start_ns
    start = np.stack([a.op_start_ns[in_a] - zero_a, b.op_start_ns[in_b] - zero_b])
    end = np.stack([a.op_end_ns[in_a] - zero_a, b.op_end_ns[in_b] - zero_b])
    kinds = [
        _kind_difference(a.program, kind.name, in_a[of], start[:, of], (end - start)[:, of])
        for kind in Kind
        if len(of := np.flatnonzero(a.program.kind[in_a] == kind))
    ]
    late = np.flatnonzero(np.abs(end[1] - end[0]) > tolerance * a.iteration_ns)
    first = late[end[:, late].min(axis=0).argmin()] if len(late) else None
    seconds = (a.iteration_ns / 1e9, b.iteration_ns / 1e9)
    return Difference(
        names=(a.program.name, b.program.name),
        sources=(a.source, b.source),
        iteration_s=seconds,
        ratio=seconds[1] / seconds[0] if seconds[0] else float("nan"),
        num_common=len(both),
        num_only=(a.program.num_ops - len(both), b.program.num_ops - len(both)),
        kinds=tuple(kinds + _transfer_differences(a, b, zero_a, zero_b)),
        first_divergence=None if first is None else a.program.describe(int(in_a[first])),
        first_divergence_at_s=None if first is None else int(end[:, first].min()) / 1e9,
    )


def _op_shape(program: Program) -> tuple[int, int, int, int]:
    return len(Kind), program.num_pipelines, program.num_stages, max(1, program.num_slots)


def _op_keys(program: Program, shape: tuple[int, ...]) -> Ints:
    pipeline = program.op_worker // max(1, program.num_ranks)
    parts = (program.kind.astype(np.int64), pipeline, program.stage, program.microbatch)
    return np.asarray(np.ravel_multi_index(parts, shape), np.int64)


def _kind_difference(program: Program, kind: str, index: Ints, start: Ints, length: Ints) -> KindDifference:
    def name(i: int) -> str:
        if not kind.startswith("SEND"):
            return program.describe(i)
        return f"{program.transfer_name(i)} of p{program.transfer(i)[1]}"

    ratio = np.where(length[0] > 0, length[1] / np.maximum(length[0], 1), np.where(length[1] > 0, np.inf, 1.0))
    off, late = np.abs(ratio - 1), start[1] - start[0]
    return KindDifference(
        kind=kind,
        count=len(index),
        duration_ratio=float(np.median(ratio)),
        duration_error_p95=_p95(off),
        duration_error_worst=float(off.max()),
        worst_duration=name(int(index[off.argmax()])),
        start_error_s=float(np.median(late)) / 1e9,
        start_error_p95_s=_p95(np.abs(late)) / 1e9,
        start_error_worst_s=float(np.abs(late).max()) / 1e9,
        worst_start=name(int(index[np.abs(late).argmax()])),
    )


def _p95(values: NDArray[Any]) -> float:
    """The value that 95 % do not exceed. It is one of the values, so an infinite error stays infinite."""
    return float(np.percentile(values, 95, method="inverted_cdf"))


def _transfer_differences(a: Timeline, b: Timeline, zero_a: int, zero_b: int) -> list[KindDifference]:
    """WAN transfers, from the start of service to arrival, if both Programs have the same ones."""
    if _op_shape(a.program) != _op_shape(b.program) or not a.program.num_transfers:
        return []
    wan = a.program.transfer_crosses & b.program.transfer_crosses
    direction = np.arange(a.program.num_transfers) // (a.program.num_transfers // 2)
    rows = []
    for d, name in ((FORWARD, "SEND_F"), (BACKWARD, "SEND_B")):
        of = np.flatnonzero(wan & (direction == d))
        if len(of):
            start = np.stack([a.transfer_start_ns[of] - zero_a, b.transfer_start_ns[of] - zero_b])
            arrive = np.stack([a.transfer_arrive_ns[of] - zero_a, b.transfer_arrive_ns[of] - zero_b])
            rows.append(_kind_difference(a.program, name, of, start, arrive - start))
    return rows
