"""`python -m atlas.launch.smoke`: the whole idea in a few seconds. Two emulated datacenters, two pipelines of two
stages, one Program: simulated, then executed by worker processes over real sockets, and the two Timelines laid
over each other; losses and weights against a single process that trains the same batches.

Exits with 1 when a loss or a weight differs, or when the prediction is off by more than it may be.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import numpy as np

from atlas.cost.table import Costs, kind_costs, uniform_costs
from atlas.errors import AtlasError
from atlas.ir.assemble import repeated, with_optimizer
from atlas.ir.program import Layout, Program
from atlas.ir.timeline import Timeline
from atlas.launch.emulate import Emulation, EmulationSettings, Weights, emulate
from atlas.runtime.assignment import stand_in
from atlas.runtime.reference import train_alone
from atlas.schedules.classic import one_f_one_b
from atlas.sim import simulate

MS = 1_000_000
MAX_PREDICTION_ERROR = 0.20
MAX_RELATIVE_DIFFERENCE = 1e-5
"""Of a loss, and of the norm of a parameter's difference: sums in float32 in another order."""
ATTEMPTS = 3
"""A machine that is busy with something else makes the host late, not the prediction wrong."""


NUM_STEPS = 3


def smoke_program(slower: int = 1) -> tuple[Program, Costs]:
    """One iteration of two pipelines across us-east and us-west, four microbatches each. `slower`: every op and every
    transfer takes this many times as long, so that what a busy host adds to each weighs less."""
    program, ms = with_optimizer(one_f_one_b(Layout(2, 2, 4, ("us-east", "us-west")))), slower * MS
    per_kind_ns = kind_costs(forward_ns=30 * ms, backward_ns=60 * ms, sync_ns=10 * ms, step_ns=10 * ms)
    return program, uniform_costs(2, 2, per_kind_ns, wan_boundaries=(0,), wan_ns=40 * ms, wan_latency_ns=20 * ms)


@dataclass(frozen=True)
class Comparison:
    """An emulated run against its prediction and against the single process."""

    predicted_s: float
    """Seconds per iteration, steady."""
    measured_s: float
    makespan_error: float
    """Of the whole run: predicted / measured - 1."""
    median_op_s: float
    """Median over all ops of how far measured and predicted ends lie apart."""
    worst_op_s: float
    loss_difference: float
    """Largest, relative."""
    weight_difference: float
    """Largest over the tensors, relative to the tensor's norm."""

    @property
    def prediction_error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def learns_the_same(self) -> bool:
        return max(self.loss_difference, self.weight_difference) <= MAX_RELATIVE_DIFFERENCE

    @property
    def is_predicted(self) -> bool:
        return max(abs(self.prediction_error), abs(self.makespan_error)) <= MAX_PREDICTION_ERROR


def compare(predicted: Timeline, run: Emulation, losses: list[float], weights: Weights) -> Comparison:
    measured = run.timeline
    apart_ns = np.abs(measured.op_end_ns - predicted.op_end_ns)
    loss_difference = max(abs(a - b) / abs(b) for a, b in zip(run.losses, losses, strict=True))
    if run.weights.keys() != weights.keys():
        raise AtlasError(f"the run trained {len(run.weights)} tensors, the single process {len(weights)}")
    weight_difference = max(
        float(np.linalg.norm(run.weights[name] - weights[name]) / np.linalg.norm(weights[name])) for name in weights
    )
    return Comparison(
        predicted.iteration_ns / 1e9,
        measured.iteration_ns / 1e9,
        predicted.makespan_ns / measured.makespan_ns - 1,
        float(np.median(apart_ns)) / 1e9,
        float(apart_ns.max()) / 1e9,
        loss_difference,
        weight_difference,
    )


def report(program: Program, result: Comparison, run: Emulation, seconds: float) -> str:
    where = ", ".join(dict.fromkeys(program.rank_dc))
    return "\n".join(
        [
            f"{program.name}: {program.num_pipelines} pipelines of {program.num_stages} stages in {where}; "
            f"{program.num_microbatches} microbatches, {len(run.losses)} iterations "
            "(emulated: paced devices, delayed loopback)",
            f"  iteration, simulated   {result.predicted_s * 1e3:9.1f} ms",
            f"  iteration, emulated    {result.measured_s * 1e3:9.1f} ms",
            f"  prediction error       {result.prediction_error * 100:+9.2f} %    "
            f"over the whole run {result.makespan_error * 100:+.2f} %",
            f"  op end times, diff.    {result.median_op_s * 1e3:9.2f} ms median   "
            f"{result.worst_op_s * 1e3:.2f} ms worst",
            f"  loss                   {run.losses[0]:9.4f}      -> {run.losses[-1]:.4f}",
            f"  loss, relative diff.   {result.loss_difference:9.1e}      to a single process",
            f"  weights, rel. diff.    {result.weight_difference:9.1e}      to a single process",
            f"  emulator late by       {run.late_s * 1e3:9.2f} ms   devices late by {run.overrun_s * 1e3:.2f} ms",
            f"  took                   {seconds:9.1f} s",
        ]
    )


def main() -> int:
    training = stand_in()
    program, costs = smoke_program()
    predicted = simulate(repeated(program, NUM_STEPS), costs)
    losses, weights = train_alone(training, program.num_pipelines, program.num_microbatches, NUM_STEPS)
    for attempt in range(1, ATTEMPTS + 1):
        began = time.monotonic()
        try:
            run = emulate(program, costs, training, EmulationSettings(NUM_STEPS))
            result = compare(predicted, run, losses, weights)
        except AtlasError as error:
            print(f"smoke: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
        print(report(program, result, run, time.monotonic() - began))
        if not result.learns_the_same:
            print(
                f"smoke: losses or weights differ from those of a single process ({MAX_RELATIVE_DIFFERENCE:g} allowed)"
            )
            return 1
        if result.is_predicted:
            return 0
        print(f"smoke: off by more than {MAX_PREDICTION_ERROR:.0%} in attempt {attempt} of {ATTEMPTS}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
