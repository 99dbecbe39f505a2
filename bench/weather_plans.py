"""Iterations and plans under weather, simulated: do draws look like what comes next, and does `--confidence` help?

    draws    a model is learnt from packets over the first half of random cross traffic; iteration times under 200 draws
             against 200 stretches of the second half (Kolmogorov-Smirnov distance)
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

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from lab.lines import Lines
from lab.senders import Jobs, random_cross

from atlas.api import plan
from atlas.cost.cluster_arrays import cluster_arrays
from atlas.cost.table import Trace
from atlas.evaluate import evaluate
from atlas.planner.confidence import DRAWS, whole_times_s
from atlas.planner.run import Planned
from atlas.planner.whole import simulate_whole
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
DRAWS_SEED, RECORDED_WINDOWS = 300, 24_000


def mixed_cross(rng: random.Random, num: int) -> np.ndarray:
    """Cross traffic that changes its kind and its height every 10 to 30 s."""
    return np.concatenate([random_cross(rng, rng.randint(100, 300)) for _ in range(num // 100)])[:num]


def recorded(share: np.ndarray, capacity_bps: float) -> tuple[PathModel, np.ndarray]:
    """A model learnt from packets over the first half of cross traffic, and the second half as shares."""
    half = len(share) // 2
    size = round(capacity_bps * 0.97 / 8 * 0.001)  # a block each millisecond
    sent = 10**18 + np.arange(half * 100) * 1_000_000
    sizes, cross = np.full(len(sent), size), share[:half][(sent - sent[0]) // WINDOW_NS] * capacity_bps
    rtt = packet_rtts(sent, sizes, cross, capacity_bps=capacity_bps, rtt_ns=40e6, buffer_bytes=capacity_bps / 80)
    return learn(PacketTable("recorded", sent, sizes, rtt, len(sent))).model, share[half:]


def stormy(job: Job, model: PathModel, folder: str, *more: str) -> Job:
    path = Path(folder) / "a.path"
    save_model(path, model)
    return override(job, [f"cluster.wan.model={path}", *more])


# ---- draws ---------------------------------------------------------------------------------------------------------
def draws(lines: Lines, jobs: Jobs, num_models: int) -> None:
    seeds = range(DRAWS_SEED, DRAWS_SEED + num_models)
    found = jobs.run(draw_distance, [(seed, mixed) for mixed in (False, True) for seed in seeds])
    one, mixed = found[:num_models], found[num_models:]
    name = "200 draws and 200 held-out stretches: distance of iteration times, worst"
    lines.at_most(name, max(one), "KS", 0.15, note=f"{num_models} recordings of 40 minutes: {_said(one)}")
    note = f"the halves of a recording differ more: {_said(mixed)}"
    lines.add("the same, cross traffic of changing kinds, worst", max(mixed), "KS", "", None, note=note)


def _said(distances: list[float]) -> str:
    return ", ".join(f"{one:.3f}" for one in distances)


def draw_distance(which: tuple[int, bool]) -> float:
    """Of the recording of a seed, with cross traffic of one kind or of changing kinds."""
    seed, mixed = which
    rng, seen = random.Random(seed), []
    cross = mixed_cross(rng, RECORDED_WINDOWS) if mixed else np.array(random_cross(rng, RECORDED_WINDOWS))
    model, held_out = recorded(cross, 5e9)
    with tempfile.TemporaryDirectory() as folder:
        result = evaluate(stormy(load_job(JOB), model, folder), "1f1b")
        runs = WeatherRuns(result.single.program, result.costs, 0)
        drawn = [runs.time_s(k) for k in range(STRETCHES)]
    for _ in range(STRETCHES):
        traces = {name: stretch(held_out, rng) for name in runs.paths}
        links = [link.weather and traces[link.weather.path] for link in result.costs.links]
        events = run(runs.tables._replace(**trace_tables(links)))
        seen.append(int(events.op_end_ns.max() - events.op_start_ns.min()) / 1e9)
    return ks_distance(drawn, seen)


def stretch(held_out: np.ndarray, rng: random.Random) -> Trace:
    start = rng.randrange(len(held_out) - STRETCH_WINDOWS)
    rate = np.maximum(1 - held_out[start : start + STRETCH_WINDOWS], LEAST_SHARE)
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
    model, _ = recorded(mixed_cross(rng, 2400), gbps * 1e9)
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


def p95_s(job: Job, planned: Planned, seed: int) -> float:
    candidate = planned.winner.candidate
    whole = simulate_whole(job, cluster_arrays(job), candidate, planned.schedule, sharing=candidate.sharing)
    return float(np.percentile(whole_times_s(whole, DRAWS, seed), 95))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--clusters", type=int, default=20)
    parser.add_argument("--parallel", type=int, metavar="N", help="jobs at a time (default: one per two cores)")
    args = parser.parse_args()
    lines = Lines()
    with Jobs(args.parallel) as jobs:
        draws(lines, jobs, 1 if args.quick else 4)
        plans(lines, jobs, 4 if args.quick else args.clusters)
    return lines.table()


if __name__ == "__main__":
    sys.exit(main())
