"""End to end: write a Program, parse it, simulate it, execute it, and compare the two Timelines."""

from __future__ import annotations

import numpy as np

from atlas.ir.assemble import repeated
from atlas.ir.text import from_text, to_text
from atlas.launch.emulate import EmulationSettings, emulate
from atlas.launch.smoke import NUM_STEPS, compare, smoke_program
from atlas.runtime.assignment import stand_in
from atlas.runtime.reference import train_alone
from atlas.sim import simulate


def test_one_program_is_read_simulated_and_executed() -> None:
    # A Program says what every worker does, in order: two pipelines across two datacenters.
    program, costs = smoke_program()
    text = to_text(program)
    assert "p0-p1.s0 @us-east: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0" in text
    assert to_text(from_text(text)) == text

    # The simulator runs three iterations of it and returns a Timeline.
    whole = repeated(program, NUM_STEPS)
    predicted = simulate(whole, costs)
    assert predicted.source == "simulated"

    # Worker processes execute the same Program over real sockets and an emulated WAN, and return a Timeline.
    training = stand_in()
    losses, weights = train_alone(training, program.num_pipelines, program.num_microbatches, NUM_STEPS)
    for slower in (1, 2, 4, 8):  # on a busy host, ops that take longer: what the host adds to each weighs less
        _, costs = smoke_program(slower)
        predicted = simulate(whole, costs)
        run = emulate(program, costs, training, EmulationSettings(NUM_STEPS))
        assert run.timeline.source == "emulated"

        # The losses and weights are those of a single process ...
        result = compare(predicted, run, losses, weights)
        assert result.learns_the_same, result
        assert run.losses[-1] < run.losses[0]

        # ... every op took at least its cost and started after its input arrived ...
        measured = run.timeline
        assert measured.op_end_ns.shape == predicted.op_end_ns.shape
        costs_ns = costs.compute_ns[whole.op_worker // whole.num_ranks, whole.stage, whole.kind]
        assert (measured.op_end_ns - measured.op_start_ns >= costs_ns).all()
        assert (measured.op_start_ns[whole.transfer_dst] >= measured.transfer_arrive_ns).all()
        wire_ns = np.repeat((costs.work_ns + costs.latency_ns).ravel(), whole.num_slots)
        assert (measured.transfer_arrive_ns - measured.transfer_ready_ns >= 0.9 * wire_ns).all()

        # ... and the iteration took as long as predicted.
        if result.is_predicted:
            return
    raise AssertionError(f"the prediction was off each time: {result}")
