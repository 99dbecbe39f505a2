"""Speed of the simulation engines on the reference case, compared with simpy on the same case.

The reference case has 64 stages, 512 microbatches and four pipelines that share three WAN boundaries per direction
(520,192 events); a second case has sixteen pipelines. CPU seconds after a warm-up run, medians. The simpy model is
checked to give the same makespan.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import simpy
from common.host import median_s
from common.report import Report

from atlas.cost.table import TURNS, Costs, kind_costs, uniform_costs
from atlas.ir.circuit_phases import NONE
from atlas.ir.program import Layout, Program
from atlas.schedules import one_f_one_b
from atlas.sim import compiled, lower, simulate
from atlas.sim.extrapolate import extrapolate
from atlas.sim.lower import Tables
from atlas.sim.simulate import reference

MS = 1_000_000


def case(num_pipelines: int, num_stages: int = 64) -> tuple[Program, Costs]:
    program = one_f_one_b(Layout.even(num_pipelines, num_stages, 512, 4))
    costs = uniform_costs(
        num_pipelines,
        num_stages,
        kind_costs(forward_ns=10 * MS, backward_ns=20 * MS),
        lan_ns=MS // 10,
        lan_latency_ns=MS // 50,
        wan_boundaries=tuple(np.flatnonzero(program.boundary_crosses).tolist()),
        wan_ns=10 * num_pipelines * MS,
        wan_latency_ns=20 * MS,
        sharing=True,
        quantum_ns=0,  # whole transfers: simpy's resources cannot switch between chunks
    )
    return program, costs


def with_simpy(t: Tables) -> int:
    """The same rules in simpy: a process per worker, a process per transfer, a priority resource per shared link."""
    env = simpy.Environment()
    arrived = [env.event() for _ in range(len(t.transfer_dst))]
    links: list[Any] = [
        simpy.PriorityResource(env) if policy == TURNS else simpy.Resource(env) for policy in t.link_policy
    ]
    op_ns, needs, emits = t.op_ns.tolist(), t.op_input.tolist(), t.op_output.tolist()
    work, latency, turn = t.transfer_work_ns.tolist(), t.transfer_latency_ns.tolist(), t.transfer_turn.tolist()
    link_of = t.channel_link[t.transfer_channel].tolist()
    shared = (t.link_policy == TURNS).tolist()

    def send(transfer: int) -> Any:
        link = link_of[transfer]
        request = links[link].request(priority=turn[transfer]) if shared[link] else links[link].request()
        with request as held:
            yield held
            yield env.timeout(work[transfer])
        yield env.timeout(latency[transfer])
        arrived[transfer].succeed()

    def worker(first: int, last: int) -> Any:
        for op in range(first, last):
            if needs[op] != NONE:
                yield arrived[needs[op]]
            yield env.timeout(op_ns[op])
            if emits[op] != NONE:
                env.process(send(emits[op]))

    for first, last in zip(t.worker_ptr[:-1].tolist(), t.worker_ptr[1:].tolist(), strict=True):
        env.process(worker(first, last))
    env.run()
    return int(env.now)


def main() -> int:
    report = Report("Engine speed, reference case (CPU seconds)", "simpy 4, same case, same run")
    program, costs = case(4)
    tables = lower(program, costs)
    events = compiled.run(tables)

    report.figure("events", program.num_events, "events")
    ours = median_s(lambda: compiled.run(tables), 15)
    report.figure("compiled engine", ours, "s", at_most=0.080)
    plain = median_s(lambda: simulate(program, costs, engine="reference"), 3)
    report.figure("reference engine with its Timeline", plain, "s", at_most=2.5)

    began = time.process_time()
    their_makespan = with_simpy(tables)
    theirs = time.process_time() - began
    report.figure("simpy", theirs, "s")
    report.figure("compiled engine against simpy", theirs / ours, "x", at_least=40)
    report.figure("reference engine against simpy", theirs / plain, "x")
    report.figure("makespan apart from simpy's", abs(their_makespan - int(events.op_end_ns.max())), "ns", at_most=0)
    same = all(np.array_equal(a, b) for a, b in zip(reference(tables), events, strict=True))
    report.figure("events on which the engines differ", 0 if same else 1, "", at_most=0)

    def long(num_microbatches: int) -> Program:
        return one_f_one_b(Layout.even(4, 16, num_microbatches, 4))

    _, costs_16 = case(4, num_stages=16)
    found = extrapolate(long, costs_16, 4_000)
    assert found is not None
    few = found.timeline.program.num_microbatches
    report.figure("1F1B of 4,000 microbatches: simulated of them", few, "mb", at_most=400)
    full = simulate(long(4_000), costs_16).makespan_ns
    report.figure("the same, apart from all of them simulated", abs(found.makespan_ns - full), "ns", at_most=0)

    big = lower(*case(16))
    compiled.run(big)
    report.figure("compiled engine, 16 pipelines (8,192 GPUs at TP 8)", median_s(lambda: compiled.run(big), 5), "s",
                  at_most=0.4)  # fmt: skip
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
