"""Photonic rails: prediction of Opus's measurements on Perlmutter and of its simulated cases, random Programs in both
engines, engine speed, and the control plane, also in training.

    python bench/fabric.py             everything, several minutes
    python bench/fabric.py --quick     500 random Programs

Perlmutter: mean step seconds with an injected reconfiguration delay, in ../shared/data/opus. The base is the row at
0 ms. The number of changes that are waited for in an iteration is that of the pipeline phases which Opus's published
communication patterns list for it (evaluation/*/comm_pattern*_pp_1.txt): 5 for Llama, 4 for DeepSeek. Nothing is fitted
above 0 ms. Provisioned, the gaps behind each phase in these patterns are the windows that hide a delay. Where the
pattern has a phase that ends before it starts, the gap is counted from its start; the published list counts such gaps
from the wrong end (100 and 544 ms instead of 1 ms). The figures without windows and with the list as published are
printed beside it.

Opus's simulated cases: bench/common/opus.py.

Random Programs: any order, any costs, any delay; both engines must agree to the nanosecond, no circuit may be removed
with bytes on it, and a worker has hops or a ring, never both.

The control plane: a Program in real time against an emulated switch, without a model, compared with the simulation.

Training: worker processes train a stand-in over two emulated datacenters with photonic rails, compared with the
simulation, and with the same training without rails, bit by bit. A run on a host that was too busy (devices more than
2 % late) is repeated up to three times and then void.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from common.opus import (
    LLAMA_128,
    LLAMA_128_ON_DEMAND,
    LLAMA_128_PROVISIONED,
    SMOKE,
    SMOKE_PROVISIONED,
    OpusCase,
)
from common.report import Report

from atlas.cost.table import Circuits, Costs, kind_costs, uniform_costs
from atlas.fabric.rehearsal import rehearse_fabric
from atlas.fabric.switch import EmulatedSwitch
from atlas.ir.assemble import repeated, with_optimizer
from atlas.ir.program import Kind, Layout, Program
from atlas.ir.timeline import Timeline
from atlas.launch.emulate import Emulation, EmulationSettings, emulate
from atlas.runtime.assignment import stand_in
from atlas.schedules import one_f_one_b
from atlas.schedules.classic import gpipe
from atlas.sim import compiled, lower, simulate
from atlas.sim.lower import Events
from atlas.sim.simulate import reference

DATA = Path(__file__).parents[2] / "shared" / "data" / "opus" / "perlmutter_seconds.csv"
PHASES = {"llama16": 5, "llama64": 5, "deepseek3d16": 4}
WINDOWS_MS = (18, 22, 31, 1, 1)
"""Of Llama, one for each phase: medians of the gap over the published iterations."""
LISTED_WINDOWS_MS = (18, 22, 31, 100, 544)
"""The same as the published list has them."""
MS = 1_000_000
TRAIN_STEPS, TRAIN_TRIES, MAX_OVERRUN = 4, 3, 0.02


# ---- Perlmutter ------------------------------------------------------------------------------------------------------
def perlmutter(report: Report) -> None:
    if not DATA.exists():
        for how in ("on demand", "provisioned"):
            report.void(f"Perlmutter {how}, mean error", "no ../shared/data/opus")
        return
    with DATA.open() as file:
        rows = [row for row in csv.DictReader(file) if row["delay_ms"] != "none"]
    demand = errors(rows, "on_demand", ("llama16", "llama64", "deepseek3d16"), ())
    report.figure("Perlmutter on demand, mean error", 100 * float(np.mean(demand)), "%", at_most=2.5)
    report.figure("Perlmutter on demand, worst error", 100 * max(demand), "%", at_most=7)
    llama = ("llama16", "llama64")
    hidden, plain, listed = (errors(rows, "provisioned", llama, w) for w in (WINDOWS_MS, (), LISTED_WINDOWS_MS))
    report.figure("Perlmutter provisioned, mean error", 100 * float(np.mean(hidden)), "%", at_most=2.5)
    report.figure("Perlmutter provisioned, no window, mean error", 100 * float(np.mean(plain)), "%")
    report.figure("Perlmutter provisioned, windows as listed, mean error", 100 * float(np.mean(listed)), "%")


def errors(rows: list[dict[str, str]], how: str, runs: tuple[str, ...], windows_ms: tuple[float, ...]) -> list[float]:
    """Relative errors above 0 ms."""
    found = []
    for run in runs:
        key = f"{run}_{how}"
        base = next(float(row[key]) for row in rows if float(row["delay_ms"]) == 0)
        for row in rows:
            delay_ms = float(row["delay_ms"])
            if delay_ms == 0 or not row[key]:
                continue
            windows = windows_ms or (0,) * PHASES[run]
            predicted = base + sum(max(0.0, delay_ms - window) for window in windows) / 1e3
            found.append(abs(predicted / float(row[key]) - 1))
    return found


# ---- Opus's simulated cases ------------------------------------------------------------------------------------------
def simulated_cases(report: Report) -> None:
    for provision, published in ((False, LLAMA_128_ON_DEMAND), (True, LLAMA_128_PROVISIONED)):
        for delay_ms, percent in published.items():
            found = 100 * LLAMA_128.overhead(delay_ms, provision=provision)
            name = f"128 H200, Llama, {delay_ms} ms, {'provisioned' if provision else 'on demand'}: points off"
            report.figure(name, abs(found - percent), "%", at_most=1.5)
    found = 100 * LLAMA_128.overhead(0, provision=False)
    report.figure("128 H200, Llama, 0 ms: points off (published 2.2)", abs(found - 2.196), "%")
    for delay_ms, added_ms in SMOKE_PROVISIONED.items():
        demand, early = (
            1e3 * (SMOKE.photonic_s(delay_ms, provision=p) - SMOKE.photonic_s(0, provision=p)) for p in (False, True)
        )
        error = abs(demand / (2 * delay_ms) - 1)
        report.figure(f"smoke case, {delay_ms} ms, on demand: off two delays by", 100 * error, "%", at_most=1)
        report.figure(f"smoke case, {delay_ms} ms, provisioned: off by", abs(early - added_ms), "ms", at_most=2)


# ---- random Programs -------------------------------------------------------------------------------------------------
def random_case(seed: int) -> tuple[Program, Costs]:
    rng = random.Random(seed)
    stages, pipelines = rng.randint(1, 6), rng.randint(1, 4)
    layout = Layout.even(pipelines, stages, rng.randint(1, 8), rng.randint(1, min(2, stages)))
    make = rng.choice([one_f_one_b, gpipe, None])
    if make is None:  # sums stage by stage
        program = repeated(OpusCase(pipelines, stages, 1, stages * rng.randint(1, 4), 1, 1, 1).program(), 2)
        stages = program.num_stages
    else:
        program = repeated(with_optimizer(make(layout), norm=rng.random() < 0.5), rng.randint(1, 3))
    kinds = kind_costs(
        forward_ns=rng.randint(1, 2000), backward_ns=rng.randint(1, 4000), sync_ns=rng.randint(0, 3000),
        norm_ns=rng.randint(0, 100), step_ns=rng.randint(0, 1000),
    )  # fmt: skip
    wan = tuple(np.flatnonzero(program.boundary_crosses).tolist())
    costs = uniform_costs(
        pipelines, stages, kinds, lan_ns=rng.randint(0, 1500), lan_latency_ns=rng.randint(0, 300), wan_boundaries=wan,
        wan_ns=rng.randint(1, 4000), wan_latency_ns=rng.randint(0, 4000), sharing=rng.random() < 0.5,
    )  # fmt: skip
    compute = costs.compute_ns + np.random.default_rng(seed).integers(0, 500, costs.compute_ns.shape)
    delays = tuple(rng.choice([0, 1, 100, 5000]) for _ in range(2))
    same_dc = [program.rank_dc[r] == program.rank_dc[0] for r in range(program.num_ranks)]
    delay_ns = tuple(delays[0 if same else 1] for same in same_dc)
    provision = tuple([rng.random() < 0.5, rng.random() < 0.5][0 if same else 1] for same in same_dc)
    circuits = Circuits((True,) * len(delay_ns), delay_ns, provision, until_step=rng.random() < 0.25)
    return program, replace(costs, compute_ns=compute, circuits=circuits)


def broken_rules(program: Program, costs: Costs, events: Events) -> int:
    """Circuits that were removed with bytes on them, or used before they were there: seen from each rank alone, uses of
    its hops and of its ring with less than a change between them."""
    assert costs.circuits is not None
    start, arrive = (times.reshape(program.transfer_shape) for times in (events.start_ns, events.arrive_ns))
    rank, ring = program.op_worker % program.num_ranks, [Kind.SYNC]
    ring += [Kind.STEP] if costs.circuits.until_step else []
    ends = [(program.stage_rank[b], program.stage_rank[b + 1]) for b in range(program.num_stages - 1)]
    broken = 0
    for own in range(program.num_ranks):
        touching = [b for b, (x, y) in enumerate(ends) if own in (x, y) and x != y and not program.boundary_crosses[b]]
        if not touching:
            continue
        sums = np.isin(program.kind, ring) & (rank == own)
        begins = np.concatenate([start[:, :, touching].ravel(), events.op_start_ns[sums]])
        until = np.concatenate([arrive[:, :, touching].ravel(), events.op_end_ns[sums]])
        is_ring = np.arange(len(begins)) >= len(begins) - int(sums.sum())
        order = np.lexsort((until, begins))
        last = [-(10**18), -(10**18)]
        for k in order.tolist():
            broken += int(begins[k]) < last[1 - is_ring[k]] + costs.circuits.delay_ns[own]
            last[int(is_ring[k])] = max(last[int(is_ring[k])], int(until[k]))
    return broken


def random_programs(report: Report, count: int) -> None:
    differ = broken = unfinished = changes = 0
    for seed in range(count):
        program, costs = random_case(seed)
        tables = lower(program, costs)
        plain, fast = reference(tables), compiled.run(tables)
        differ += any(not np.array_equal(a, b) for a, b in zip(plain, fast, strict=True))
        unfinished += int((plain.op_end_ns < 0).any())
        broken += broken_rules(program, costs, plain)
        changes += len(plain.gate_ns)
    report.figure("random Programs", count, "")
    report.figure("reconfigurations in them", changes, "")
    report.figure("Programs on which engines differ", differ, "", at_most=0)
    report.figure("Programs that do not finish", unfinished, "", at_most=0)
    report.figure("circuits removed with bytes on them, or used too early", broken, "", at_most=0)


# ---- engine speed ----------------------------------------------------------------------------------------------------
def engine(report: Report) -> None:
    """The same Program with and without reconfigurations of 0 ms, and with enough circuits."""
    program = with_optimizer(one_f_one_b(Layout.even(8, 32, 256, 1)))
    kinds = kind_costs(forward_ns=10 * MS, backward_ns=20 * MS, sync_ns=50 * MS, step_ns=MS)
    costs = uniform_costs(8, 32, kinds, lan_ns=MS // 10, lan_latency_ns=MS // 50)
    ranks = program.num_ranks
    changing = replace(costs, circuits=Circuits((True,) * ranks, (0,) * ranks, (True,) * ranks))
    still = replace(costs, circuits=Circuits((False,) * ranks, (0,) * ranks, (True,) * ranks))
    tables = {name: lower(program, one) for name, one in (("plain", costs), ("gates", changing), ("still", still))}
    pair = zip(compiled.run(tables["plain"]), compiled.run(tables["still"]), strict=True)
    apart = sum(int((a != b).sum()) for a, b in pair)
    report.figure("0 ms and enough ports: times that differ from electrical", apart, "", at_most=0)
    best = dict.fromkeys(tables, float("inf"))
    for _ in range(7):
        for name, one in tables.items():
            began = time.process_time()
            compiled.run(one)
            best[name] = min(best[name], time.process_time() - began)
    report.figure("engine with enough ports / electrical", best["still"] / best["plain"], "x", at_most=1.3)
    report.figure("engine with reconfigurations of 0 ms / electrical", best["gates"] / best["plain"], "x")


# ---- the control plane -----------------------------------------------------------------------------------------------
def rehearsals(report: Report) -> None:
    """Three iterations of two pipelines of four stages, in real time against an emulated switch."""
    program = repeated(with_optimizer(one_f_one_b(Layout.even(2, 4, 6, 1))), 3)
    kinds = kind_costs(forward_ns=20 * MS, backward_ns=40 * MS, sync_ns=60 * MS, step_ns=10 * MS)
    plain = uniform_costs(2, 4, kinds, lan_ns=4 * MS, lan_latency_ns=MS // 50)
    for delay_ms in (0, 50, 200):
        for provision in (True, False):
            circuits = Circuits((True,) * 4, (delay_ms * MS,) * 4, (provision,) * 4)
            switches = {"dc0": EmulatedSwitch(delay_ms / 1e3)}
            found = rehearse_fabric(program, replace(plain, circuits=circuits), switches)
            how = "provisioned" if provision else "on demand"
            name = f"emulated switch, {delay_ms} ms, {how}: prediction off by"
            report.figure(name, 100 * abs(found.error), "%", at_most=5)


# ---- training --------------------------------------------------------------------------------------------------------
def trained(delay_ms: float | None, *, provision: bool = True) -> tuple[Timeline, Emulation]:
    """Prediction and measurement. Two pipelines of four stages in two datacenters; None: no photonic rails."""
    program = with_optimizer(one_f_one_b(Layout(2, 4, 6, ("east", "east", "west", "west"))))
    kinds = kind_costs(forward_ns=20 * MS, backward_ns=40 * MS, sync_ns=60 * MS, step_ns=10 * MS)
    costs = uniform_costs(2, 4, kinds, lan_ns=4 * MS, lan_latency_ns=MS // 50, wan_boundaries=(1,),
                          wan_ns=6 * MS, wan_latency_ns=10 * MS)  # fmt: skip
    if delay_ms is not None:
        circuits = Circuits((True,) * 4, (round(delay_ms * MS),) * 4, (provision,) * 4)
        costs = replace(costs, circuits=circuits)
    settings = EmulationSettings(TRAIN_STEPS)
    training = stand_in(width=16, length=8, microbatch=2)
    return simulate(repeated(program, TRAIN_STEPS), costs), emulate(program, costs, training, settings)


def training(report: Report) -> None:
    predicted, plain = trained(None)
    error = predicted.iteration_ns / plain.timeline.iteration_ns - 1
    report.figure("training without rails: prediction off by", 100 * abs(error), "%")
    differ = 0
    for delay_ms in (0, 50, 200):
        for provision in (True, False):
            name = f"training, {delay_ms} ms, {'provisioned' if provision else 'on demand'}: prediction off by"
            for _ in range(TRAIN_TRIES):
                predicted, run = trained(delay_ms, provision=provision)
                differ += run.losses != plain.losses
                differ += sum(not np.array_equal(run.weights[key], plain.weights[key]) for key in plain.weights)
                if run.overrun_s <= MAX_OVERRUN * run.timeline.makespan_ns / 1e9:
                    error = predicted.iteration_ns / run.timeline.iteration_ns - 1
                    report.figure(name, 100 * abs(error), "%", at_most=5)
                    break
            else:
                report.void(name, f"the host was too busy: devices were {run.overrun_s:.2f} s late")
    report.figure("training with circuits: losses and tensors that differ from without", differ, "", at_most=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only-training", action="store_true", help="only training")
    parser.add_argument("--quick", action="store_true", help="500 random Programs instead of 10,000")
    args = parser.parse_args()
    report = Report("photonic rails", "Opus's measurements; the other engine; an electrical network")
    if args.only_training:
        training(report)
        return report.finish()
    perlmutter(report)
    simulated_cases(report)
    engine(report)
    rehearsals(report)
    training(report)
    random_programs(report, 500 if args.quick else 10_000)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
