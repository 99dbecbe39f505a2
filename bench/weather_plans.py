"""Iterations and plans under weather, simulated: do draws look like what comes next, and does `--confidence` help?

    draws    400 stretches of a minute of random cross traffic; a model is learnt from packets over every second one;
             iteration times under 200 draws against those under the 200 others (Kolmogorov-Smirnov distance)
    plans    random clusters with weather: the 95th percentile of the plan chosen with `--confidence 0.95` against that
             of the plan chosen by constants, under the same draws and under draws of another seed

All times are simulated. Clusters are computed side by side. `--quick`: one model, 4 clusters.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from lab.lines import Lines
from lab.senders import Jobs, random_cross

from atlas.api import plan
from atlas.cost.cluster_arrays import cluster_arrays
from atlas.cost.table import Trace
from atlas.evaluate import evaluate
from atlas.planner.confidence import DRAWS, plan_times_s
from atlas.planner.plan_simulation import simulate_plan
from atlas.planner.run import SearchResult
from atlas.sim.lower import trace_tables
from atlas.sim.simulate import run
from atlas.sim.weather import WeatherRuns
from atlas.spec import Job, load_job, override
from atlas.weather.cell import packet_rtts
from atlas.weather.draw import LEAST_SHARE
from atlas.weather.fit import learn
from atlas.weather.packets import PacketTable
from atlas.weather.path_model import WINDOW_NS, PathModel, save_model

JOB = Path(__file__).parents[1] / "examples" / "three-dcs.yaml"
STRETCHES, STRETCH_WINDOWS = 200, 600
OTHER_SEED = 1
DRAWS_SEED = 300


def mixed_cross(rng: random.Random, num: int) -> np.ndarray:
    """Cross traffic that changes its kind and its height every 10 to 30 s."""
    return np.concatenate([random_cross(rng, rng.randint(100, 300)) for _ in range(num // 100)])[:num]


def recorded(share: np.ndarray, capacity_bps: float) -> PathModel:
    """A model learnt from packets over this cross traffic: a block every 4 ms."""
    size = round(capacity_bps * 0.97 / 8 * 0.004)
    sent = 10**18 + np.arange(len(share) * 25) * 4_000_000
    sizes, cross = np.full(len(sent), size), share[(sent - sent[0]) // WINDOW_NS] * capacity_bps
    rtt = packet_rtts(sent, sizes, cross, capacity_bps=capacity_bps, rtt_ns=40e6, buffer_bytes=capacity_bps / 80)
    return learn(PacketTable("recorded", sent, sizes, rtt, len(sent))).model


def stormy(job: Job, model: PathModel, folder: str, *more: str) -> Job:
    path = Path(folder) / "a.path"
    save_model(path, model)
    return override(job, [f"cluster.wan.model={path}", *more])


# ---- draws ---------------------------------------------------------------------------------------------------------
class Weather(NamedTuple):
    """A recording of 400 stretches of a minute: every second one is held out, or the last half of them."""

    seed: int
    mixed: bool
    """Cross traffic changes its kind and its height every 10 to 30 s; otherwise it is of one kind."""
    last_half: bool = False


def draws(lines: Lines, jobs: Jobs, num_models: int) -> None:
    seeds = range(DRAWS_SEED, DRAWS_SEED + num_models)
    every = [Weather(seed, mixed, half) for half in (False, True) for mixed in (True, False) for seed in seeds]
    found = dict(zip(every, jobs.run(draw_distance, every), strict=True))
    said = {
        (mixed, half): ", ".join(f"{found[Weather(seed, mixed, half)]:.3f}" for seed in seeds)
        for mixed in (True, False)
        for half in (False, True)
    }
    judged, later = ([found[one] for one in every if one.last_half == half] for half in (False, True))
    name = "200 draws and 200 held-out stretches: distance of iteration times, worst"
    note = f"kinds that change: {said[True, False]}; one kind: {said[False, False]}"
    lines.at_most(name, max(judged), "KS", 0.15, note=note)
    note = f"kinds that change: {said[True, True]}; one kind: {said[False, True]}"
    lines.add("the same, the last half held out, worst", max(later), "KS", "", None, note=note)


def draw_distance(weather: Weather) -> float:
    rng, num, seen = random.Random(weather.seed), 2 * STRETCHES * STRETCH_WINDOWS, []
    cross = mixed_cross(rng, num) if weather.mixed else np.array(random_cross(rng, num))
    stretches = cross.reshape(2 * STRETCHES, STRETCH_WINDOWS)
    half = weather.last_half
    learnt, held_out = np.split(stretches, 2) if half else (stretches[::2], stretches[1::2])
    model = recorded(learnt.ravel(), 5e9)
    with tempfile.TemporaryDirectory() as folder:
        result = evaluate(stormy(load_job(JOB), model, folder), "1f1b")
        runs = WeatherRuns(result.single.program, result.costs, 0)
        drawn = [runs.time_s(k) for k in range(STRETCHES)]
    order = {path: rng.sample(range(STRETCHES), STRETCHES) for path in runs.paths}
    for k in range(STRETCHES):
        traces = {path: stretch(held_out[order[path][k]]) for path in runs.paths}
        links = [link.weather and traces[link.weather.path] for link in result.costs.links]
        events = run(runs.tables._replace(**trace_tables(links)))
        seen.append(int(events.op_end_ns.max() - events.op_start_ns.min()) / 1e9)
    return ks_distance(drawn, seen)


def stretch(share: np.ndarray) -> Trace:
    rate = np.maximum(1 - share, LEAST_SHARE)
    at_ns = tuple(range(0, STRETCH_WINDOWS * WINDOW_NS, WINDOW_NS))
    return Trace(at_ns, tuple(rate.tolist()), (0,) * STRETCH_WINDOWS)


def ks_distance(a: list[float], b: list[float]) -> float:
    at = np.sort(np.concatenate([a, b]))
    below = [np.searchsorted(np.sort(one), at, side="right") / len(one) for one in (a, b)]
    return float(np.abs(below[0] - below[1]).max())


# ---- plans ---------------------------------------------------------------------------------------------------------
def plans(lines: Lines, jobs: Jobs, num_clusters: int) -> None:
    same, other = zip(*jobs.run(compared, range(num_clusters)), strict=True)
    lines.at_most("p95 with --confidence 0.95 over that of constants, worst", max(same), "x", 1.0)
    name = f"clusters of {num_clusters} on which --confidence is better"
    lines.at_least(name, sum(ratio < 0.999 for ratio in same), "", 1, best=round(min(same), 3))
    lines.add("the same under draws of another seed, worst", max(other), "x", "", None, best=round(min(other), 3))


def compared(number: int) -> tuple[float, float]:
    """One cluster: p95 of the plan chosen with --confidence over that of the plan chosen by constants, under the draws
    by which it was chosen and under others."""
    rng = random.Random(number)
    gbps, latency_ms, factor = rng.uniform(0.5, 10), rng.uniform(5, 60), rng.uniform(1, 1.4)
    model = recorded(mixed_cross(rng, 2400)[:1200], gbps * 1e9)
    links = [f"cluster.links[{k}].latency_ms={latency_ms * (1 + k / 2):.3g}" for k in range(3)]
    plain = override(load_job(JOB), [f"cluster.wan.pair_gbps={gbps:.4g}", *links])
    with tempfile.TemporaryDirectory() as folder:
        job = stormy(plain, model, folder, f"cluster.wan.cross_traffic={factor:.3g}")
        constants = plan(plain, tries=0, break_even=False).found
        chosen = plan(job, tries=0, break_even=False, confidence=0.95).found
        p95 = [[p95_s(job, one, seed) for one in (chosen, constants)] for seed in (0, OTHER_SEED)]
    said = ", ".join(f"{a:.4g} s, by constants {b:.4g} s" for a, b in p95)
    print(f"# cluster {number}: p95 {said} (other draws)", file=sys.stderr, flush=True)
    return p95[0][0] / p95[0][1], p95[1][0] / p95[1][1]


def p95_s(job: Job, planned: SearchResult, seed: int) -> float:
    candidate = planned.winner.candidate
    whole = simulate_plan(job, cluster_arrays(job), candidate, planned.schedule, sharing=candidate.sharing)
    return float(np.percentile(plan_times_s(whole, DRAWS, seed), 95))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--clusters", type=int, default=20)
    parser.add_argument("--parallel", type=int, metavar="N", help="jobs at a time (default: one per two cores)")
    parser.add_argument("--part", choices=("draws", "plans"), action="append")
    args = parser.parse_args()
    lines, parts = Lines(), args.part or ["draws", "plans"]
    with Jobs(args.parallel) as jobs:
        if "draws" in parts:
            draws(lines, jobs, 1 if args.quick else 4)
        if "plans" in parts:
            plans(lines, jobs, 4 if args.quick else args.clusters)
    return lines.table()


if __name__ == "__main__":
    sys.exit(main())
