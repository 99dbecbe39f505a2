"""Replay requests against the bubbles of a training job, and compare admission policies.

JOB is a job or a plan file; its training is simulated. TRACE is an Azure LLM inference CSV, a Mooncake JSON-lines file,
or `synthetic`. With --waits, requests are replayed against the times in which rollouts wait for tools, instead of
training's bubbles, on the same number of accelerators. A load of 1 would fill the bubbles completely; the trace
is compressed or stretched in time to reach each --load. All times are simulated except those of decisions, which are
measured.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from atlas.console import Meter, job_flags, positive, print_json, require_drawable, require_outputs, say, show, whole
from atlas.cost.weather import paths_with_weather
from atlas.errors import AtlasError
from atlas.evaluate import Result
from atlas.view import write_curves
from atlas.view.table import seconds
from bubbletea.admit.aims import LATE_TOKENS, Aims
from bubbletea.constants import SLOWDOWN_BUDGET
from bubbletea.flags import aim_flags
from bubbletea.sim.capacity import P50_RATIO, JudgedLoad, find_capacity
from bubbletea.sim.figures import by_load, notes, table
from bubbletea.sim.noise import Noise
from bubbletea.sim.paper_policy import PaperPolicy
from bubbletea.sim.replay import ReplayResult, ServicePolicy, play
from bubbletea.sim.simulated_cluster import SimulatedCluster, dedicated, simulated_cluster
from bubbletea.sim.traces import RequestTrace, load_trace, synthetic
from bubbletea.sim.waits import load_waits, waiting
from bubbletea.windows.bubbles import Forecast

POLICIES = ("ours", "paper", "dedicated")
PATIENCE_S, RELAXED_S = 10.0, 20.0
"""Deadlines: the default, and that of dedicated accelerators to which --capacity compares."""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("job", type=Path, metavar="JOB.yaml", help="a job or a plan file")
    add("--requests", required=True, metavar="TRACE", help="a trace file, or `synthetic`")
    add("--schedule", metavar="NAME", help="training's schedule (default: the plan's, else atlas)")
    add(
        "--policy",
        choices=POLICIES,
        action="append",
        help="admission: ours; paper: the BubbleTea paper's; dedicated: ours, on accelerators that only prefill; may "
        "be repeated (default: all)",
    )
    add(
        "--load",
        type=positive,
        action="append",
        metavar="X",
        help="share of the bubbles that the requests would fill; may be repeated (default 0.6)",
    )
    add("--prompt", type=whole(1, 1_000_000), action="append", metavar="N", help="scale prompts to N tokens on average")
    add(
        "--capacity",
        action="store_true",
        help="find the largest load at which time to first token (p50, p95) and refusals are within their limits "
        "(docs/bubbletea.md)",
    )
    add("--offline", action="store_true", help="requests have no deadline: fill all bubbles")
    add("--patience", type=positive, default=PATIENCE_S, metavar="S", help="deadline of a request, in seconds")
    aim_flags(parser)
    add("--split", type=whole(1, 64), action="append", metavar="N", help="workers that share one copy of the model")
    add(
        "--chunk",
        type=whole(16, 65_536),
        action="append",
        metavar="N",
        help="tokens of a prompt that a worker prefills at once",
    )
    add("--cells", type=whole(1, 100_000), default=1, metavar="N", help="DP-cells to replay")
    add("--periods", type=positive, default=4.0, metavar="N", help="training iterations to measure")
    add(
        "--tenants",
        type=whole(1, 1000),
        default=1,
        metavar="N",
        help="number of tenants, to which requests are assigned in turn",
    )
    window_flags(parser)
    job_flags(parser)
    add("--json", action="store_true", help="print the figures as JSON")
    add(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a chart of time to first token over load or prompt length (.html or .svg)",
    )


def window_flags(parser: argparse.ArgumentParser) -> None:
    """Where the windows come from, and how well they are known."""
    add = parser.add_argument
    add(
        "--jitter",
        type=positive,
        metavar="X",
        help="multiply op and WAN times by log-normal factors of sigma X; bubbles are then predicted from earlier "
        "iterations, and the slowdown of training is reported",
    )
    add(
        "--slowdown",
        type=positive,
        default=SLOWDOWN_BUDGET,
        metavar="X",
        help="largest slowdown of training by prefill, as a share",
    )
    add("--waits", type=Path, metavar="FILE", help="tool waits of rollouts, from `tvcache replay --waits`")
    add("--without-cache", action="store_true", help="with --waits: the waits without a cache")


def run(args: argparse.Namespace) -> int:
    require_outputs({"--html": args.html}, [args.job, args.requests])
    require_drawable(args.html, "--html")
    if args.waits is not None and args.jitter is not None:
        raise AtlasError("--jitter and --waits exclude each other: jitter applies to training's ops. Leave one out")
    waits = None if args.waits is None else load_waits(args.waits, cached=not args.without_cache)
    trace = synthetic() if args.requests == "synthetic" else load_trace(args.requests)
    with Meter() as meter:
        cluster = simulated_cluster(
            args.job,
            schedule=args.schedule,
            changes=args.set,
            cells=args.cells,
            steady=args.jitter is None,
            progress=meter,
        )
        if waits is not None:
            cluster = waiting(cluster, waits)
        if args.capacity:
            return _print_capacity(cluster, trace, args, meter)
        found, traces = [], [trace.resized(tokens) for tokens in args.prompt or ()] or [trace]
        for one, load, policy in product(traces, args.load or [0.6], args.policy or POLICIES):
            meter(f"{policy} at {load:g}", 0, 0)
            row = simulated(cluster, policy, one, load * cluster.capacity_tokens_per_s(one), args)
            found.append(row | {"load": load, "prompt_tokens": round(float(one.tokens.mean()))})
    if args.json:
        print_json({**cluster.figures(), "trace": trace.name, "rows": found})
    else:
        show(table(found, cluster, trace.name), notes(cluster))
    if args.html is not None:
        series, x, log = by_load(found)
        write_curves(args.html, series, x, "TTFT p95, seconds (simulated)", f"{cluster.name}: {trace.name}", log_y=log)
        say(f"wrote {args.html}")
    return 0


def _print_capacity(cluster: SimulatedCluster, trace: RequestTrace, args: argparse.Namespace, meter: Meter) -> int:
    def judge(load: float) -> JudgedLoad:
        meter(f"load {load:g}", 0, 0)
        rate = load * cluster.capacity_tokens_per_s(trace)
        theirs = simulated(
            cluster, "dedicated", trace, rate, argparse.Namespace(**{**vars(args), "patience": RELAXED_S})
        )
        p50_s, p95_s = P50_RATIO * theirs["ttft_p50_s"], theirs["ttft_p95_s"] + cluster.longest_op_ns / 1e9
        mine = {"patience": p95_s, "goal": p50_s if args.late else args.goal}
        ours = simulated(cluster, "ours", trace, rate, argparse.Namespace(**{**vars(args), **mine}))
        return JudgedLoad(load, ours["ttft_p50_s"], ours["ttft_p95_s"], ours["refused"], p50_s, p95_s)

    found = find_capacity(judge)
    if args.json:
        print_json({**cluster.figures(), "trace": trace.name, **asdict(found)})
        return 0
    for name, one in (("within the limits", found.best), ("too much", found.worse)):
        if one is not None:
            goal = f" --goal {one.p50_limit_s!r} --late {args.late:g}" if args.late else ""
            show(
                f"{name}: load {one.load:.2f}: p50 {seconds(one.p50_s)} (limit {seconds(one.p50_limit_s)}), p95 "
                f"{seconds(one.p95_s)} (limit {seconds(one.p95_limit_s)}), {100 * one.refused:.1f} % refused"
                + (f"; misses {', '.join(one.misses)}" if one.misses else "")
                + f"\n  --load {one.load:.2f} --patience {one.p95_limit_s!r}{goal}"
            )
    return 0


def simulated(
    cluster: SimulatedCluster, policy: str, trace: RequestTrace, tokens_per_s: float, args: argparse.Namespace
) -> dict[str, Any]:
    """One policy at one load."""
    chunks = tuple(args.chunk or [cluster.some_costs.efficient_tokens])
    noise, stage, split = None, cluster, args.split
    if policy == "dedicated":
        stage, split = dedicated(cluster), [1]
    elif policy == "paper" and split:
        split = split[-1:]
    lanes = stage.lanes(split, max(chunks))
    slice_ns = stage.some_costs.layer(max(chunks), 0)
    forecast = Forecast(stage.pattern, budget=args.slowdown, slice_ns=slice_ns)
    if policy == "ours" and cluster.result is not None and _varies(args, cluster.result):
        jitter = args.jitter or 0.0
        noise = Noise(cluster.result, jitter, jitter)
        forecast = noise.learnt(stage.pattern, args.slowdown, slice_ns)
    aims = Aims(args.goal, args.late, LATE_TOKENS) if policy == "ours" else None
    state = stage.state(forecast, lanes, chunks, aims=aims)
    played = play(
        stage,
        PaperPolicy(state) if policy == "paper" else ServicePolicy(state),
        policy,
        trace,
        tokens_per_s=tokens_per_s,
        periods=args.periods,
        warm_up=max(1.0, args.periods / 4),
        kind="offline" if args.offline and policy != "paper" else "online",
        patience_s=None if args.offline else args.patience,
        tenants=args.tenants,
        cool_down=1.0 if args.late else 0.0,
    )
    return played.figures() | {"slowdown": _slowdown(noise, forecast, played, args)}


def _varies(args: argparse.Namespace, result: Result) -> bool:
    """Whether training's durations vary: by --jitter, or by weather on links that have a model."""
    return args.jitter is not None or bool(paths_with_weather(result.costs))


def _slowdown(noise: Noise | None, forecast: Forecast, played: ReplayResult, args: argparse.Namespace) -> Any:
    if noise is None:
        return None
    periods = int(args.periods + max(1.0, args.periods / 4))
    return vars(noise.slowdown(forecast, played.placed.values(), periods))
