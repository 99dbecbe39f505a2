"""Runs under weather against their prediction: the same draw of cross traffic in the emulator and in the simulator.

    train    `atlas train --emulate`, three datacenters, two pipelines: the iteration. Beside it the prediction with
             constants: the model's mean rate. Losses must be those of the run without weather, bit for bit
    bursts   64 MB of our transport between two namespaces (root), real TCP beside cross traffic: the time of arrival.
             Path and draw come from a seed; the code that predicts is the simulator's, as are the rates of the link

A prediction under constants has no percentiles: all bursts take equally long. `--quick`: one draw, 6 bursts.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, cast

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from common.host import Others
from lab.lines import OTHERS_CORES, HostBusyError, Lines
from lab.net import Lab, Move
from lab.senders import random_cross

from atlas.cost.table import LinkWeather, Trace
from atlas.cost.weather import drawn_trace, emulated_cross, mean_trace
from atlas.ir.assemble import repeated
from atlas.launch.prepared_job import prepare_job
from atlas.launch.rehearse import rehearse
from atlas.launch.train_options import TrainOptions
from atlas.sim import simulate
from atlas.sim.lower import Pace, Tables, trace_tables
from atlas.spec import Job, load_job, override
from atlas.wan.emulator.paths import PathSpec
from atlas.weather.path_model import PathModel, save_model

JOB = """
name: three-small
model: { family: gpt, layers: 6, hidden: 2048, heads: 16, vocab: 32_000, seq_len: 2048 }
cluster:
  wan: { latency_ms: 20, pair_gbps: 5 }
  datacenters:
    - { name: east, nodes: 2, gpus_per_node: 1, gpu: A100-40, net_gbps: 100 }
    - { name: central, nodes: 2, gpus_per_node: 1, gpu: A100-40, net_gbps: 100 }
    - { name: west, nodes: 2, gpus_per_node: 1, gpu: A100-40, net_gbps: 100 }
microbatch: 1
num_microbatches: 8
pp: 3
pipelines_per_cell: 2
"""
STEPS, SLOWER = 12, 2
"""Slower than the job, so that six workers on a small host are on time."""
BURST_BYTES, BURST_BPS, LATENCY_S = 64_000_000, 400e6, 0.02
BURST_BARS, HORIZON_NS = {50: 5, 95: 10}, 600 * 10**9
TRIES = 3
"""A burst during which other processes used the cores is repeated: the emulator comes first on them, the sender does
not."""


def random_model(seed: int, capacity_bps: float) -> PathModel:
    cross = np.array(random_cross(random.Random(seed), 600)) * capacity_bps
    return PathModel(capacity_bps, 2e9 * LATENCY_S, capacity_bps * LATENCY_S / 4, cross, cross >= 0)


# ---- train ---------------------------------------------------------------------------------------------------------
def train(lines: Lines, num_draws: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.yaml").write_text(JOB)
        plain = load_job(Path(folder) / "job.yaml")
        calm = rehearse(plain, TrainOptions("1f1b", steps=STEPS, slower=SLOWER))
        print(f"# without weather: prediction off by {calm.error:+.2%}", file=sys.stderr)
        off: dict[str, list[float]] = {"weather": [], "mean": [], "nominal": []}
        for seed in range(num_draws):
            path = Path(folder) / f"{seed}.path"
            save_model(path, random_model(seed, 5e9))
            job = override(plain, [f"cluster.wan.model={path}"])
            found = rehearse(job, TrainOptions("1f1b", steps=STEPS, slower=SLOWER, weather_seed=seed))
            assert found.run.losses == calm.run.losses, "weather changed the bits"
            measured = found.measured.iteration_ns
            off["weather"].append(abs(found.error))
            off["mean"].append(abs(_constant_ns(job) / measured - 1))
            off["nominal"].append(abs(_constant_ns(plain) / measured - 1))
            print(f"# draw {seed}: " + ", ".join(f"{k} {100 * v[-1]:.1f} %" for k, v in off.items()), file=sys.stderr)
    error, mean, nominal = (100 * statistics.fmean(values) for values in off.values())
    note = f"mean of {num_draws} draws; at the mean rate {mean:.1f} %, without cross traffic {nominal:.1f} %"
    lines.at_most("train --emulate under weather: iteration off by", error, "%", 5, note=note)
    lines.at_most("the same over the error at the mean rate", error / mean, "x", 0.5)


def _constant_ns(job: Job) -> int:
    """The iteration without draws: of links with a model, at its mean rate."""
    prepared = prepare_job(job, TrainOptions("1f1b"))
    return simulate(repeated(prepared.program, STEPS), prepared.costs.scaled(SLOWER)).iteration_ns


# ---- bursts --------------------------------------------------------------------------------------------------------
class Errors(NamedTuple):
    """Of one percentile of the completion under one draw, in percent of the measured one; negative: predicted too
    short."""

    weather: float
    constant: float


def bursts(lines: Lines, seeds: Sequence[int], num_bursts: int, most_cores: float) -> None:
    if os.geteuid() != 0:
        lines.skip("64 MB bursts under weather", "namespaces need root")
        return
    found: dict[int, list[Errors]] = {share: [] for share in BURST_BARS}

    def measure(seed: int) -> None:
        took, said, constant_s = burst_times(seed, num_bursts, most_cores)
        for share, errors in found.items():
            true, guess = np.percentile(took, share), np.percentile(said, share)
            errors.append(Errors(100 * float(guess / true - 1), 100 * float(constant_s / true - 1)))
            print(f"# draw {seed}, p{share}: {true:.3f} s, off by {errors[-1].weather:+.1f} %", file=sys.stderr)

    measured = [lines.attempt(f"64 MB bursts, draw {seed}", lambda seed=seed: measure(seed)) for seed in seeds]
    for share, bar in BURST_BARS.items() if any(measured) else ():
        each, constant = (", ".join(f"{error:+.1f}" for error in errors) for errors in zip(*found[share], strict=True))
        note = f"{num_bursts} bursts under each draw: {each} %; at the mean rate {constant} %"
        worst = max(abs(error.weather) for error in found[share])
        line = f"64 MB bursts under weather: p{share} of completion off by, worst draw"
        lines.at_most(line, worst, "%", bar, note=note)


def burst_times(seed: int, num: int, most_cores: float) -> tuple[list[float], list[float], float]:
    """Of bursts at random moments of a draw: seconds until they arrived, and as predicted; and the prediction at the
    mean rate. Other processes may use `most_cores`."""
    took: list[float] = []
    said: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.path"
        save_model(path, random_model(seed, BURST_BPS))
        weather = LinkWeather("a>b", str(path))
        cross = emulated_cross(weather, seed)
        drawn, mean = drawn_trace(weather, seed, 0, HORIZON_NS), mean_trace(weather)
    with Lab({("a", "b"): PathSpec(LATENCY_S, None, BURST_BPS, cross=cross)}, ["a", "b"]) as lab:
        lab.open()
        lab.connect([("a", "b")])
        move, rng = Move(lab, "a", "b"), random.Random(seed)
        assert lab.net is not None
        move.run(1, BURST_BYTES)
        zero_ns = time.monotonic_ns()
        lab.net.restart_weather()
        lab.net.reset_lateness()
        for _ in range(TRIES * num):
            time.sleep(rng.uniform(0, 1))
            others = Others()
            begin_ns, arrived, _ = move.run(1, BURST_BYTES)
            burst_s, ideal_s = (arrived[0] - begin_ns) / 1e9, predicted_s(drawn, begin_ns - zero_ns)
            if (cores := others.cores) > most_cores:
                print(f"# burst: {burst_s:.3f} s, void: other processes used {cores:.2f} cores", file=sys.stderr)
                continue
            took.append(burst_s)
            said.append(ideal_s)
            print(f"# burst: {burst_s:.3f} s, predicted {ideal_s:.3f} s", file=sys.stderr)
            if len(took) == num:
                break
        else:
            raise HostBusyError(f"{len(took)} of {num} bursts beside a quiet host")
        lab.net.certify()
    return took, said, predicted_s(mean, 0)


def predicted_s(trace: Trace, begin_ns: int) -> float:
    """Until a burst that starts at `begin_ns` of the weather has arrived, by the simulator's rule for a link."""
    pace = Pace(cast(Tables, SimpleNamespace(**trace_tables([trace]))), 0)
    sent_ns = pace.finish(begin_ns, BURST_BYTES * 8e9 / BURST_BPS, 1.0)
    return (sent_ns - begin_ns + pace.latency(begin_ns)) / 1e9 + LATENCY_S


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--part", choices=("train", "bursts"), action="append")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--seed", type=int, default=22, help="of the first draw of bursts (default 22)")
    parser.add_argument("--bursts", type=int, default=20, help="under each draw (default 20)")
    parser.add_argument(
        "--others", type=float, default=OTHERS_CORES, metavar="CORES",
        help="repeat a burst during which other processes used more cores; allow more if they are in the idle class",
    )  # fmt: skip
    args = parser.parse_args()
    parts, lines = args.part or ["train", "bursts"], Lines()
    num_draws = 1 if args.quick else args.draws
    if "train" in parts:
        train(lines, num_draws)
    if "bursts" in parts:
        seeds = range(args.seed, args.seed + num_draws)
        bursts(lines, seeds, 6 if args.quick else args.bursts, args.others)
    return lines.table()


if __name__ == "__main__":
    sys.exit(main())
