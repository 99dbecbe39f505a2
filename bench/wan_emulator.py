"""Accuracy of the emulators, and of the probe on emulated paths.

    proxy      twelve worker processes, eight node pairs at their cap in both directions; round trips and one
               window-limited connection on paths without other traffic, rates on the others
    probe      twenty random set-ups, measured without knowing their settings
    namespace  real TCP (needs root; otherwise not measured)

If the emulator was late, the other figures of that run are void; there are three tries. Its lateness is a separate
figure, with a bar where the kernel grants real-time priority. `--quick` tries four set-ups.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from lab.lines import TRIES, Lines

from atlas.wan.congestion.tuning import window_bytes
from atlas.wan.emulator.lateness import P99_LIMIT_S, WORST_LIMIT_S, Lateness
from atlas.wan.emulator.namespace_net import NamespaceNet
from atlas.wan.emulator.paths import Paths, PathSpec, Trunk, nodes_of
from atlas.wan.emulator.proxy_net import ProxyNet
from atlas.wan.probe.agent import ProbeAgent
from atlas.wan.probe.survey import Survey, survey

TOKEN = "bench only, loopback only"
PORT = 7077
RTT_OFF_MS = 1.0
PROXY, PROBE, NAMESPACE = "proxy, 12 workers", "probe", "namespace"


# ---- the proxy, twelve workers -------------------------------------------------------------------------------
LATENCY_S, PAIR_BPS, WINDOW_BYTES = 0.02, 40e6, 100_000
NUM = 4
BUSY = [(a, b) for i in range(NUM) for a, b in ((f"west-{i}", f"mid-{i}"), (f"mid-{i}", f"east-{i}"))]
QUIET, SINGLE = ("west-0", "east-0"), ("west-1", "east-1")


@contextmanager
def agents(names: list[str]) -> Iterator[dict[str, tuple[str, int]]]:
    """A process per worker."""
    command = [sys.executable, "-m", "atlas.cli", "wan", "probe", "--listen", "127.0.0.1:0"]
    environment = {**os.environ, "ATLAS_PROBE_TOKEN": TOKEN}
    with ExitStack() as stack:
        found = {}
        for name in names:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert process.stdout is not None
            stack.callback(process.stdout.close)
            found[name] = process
        yield {name: tuple(json.loads(p.stdout.readline())["listening"]) for name, p in found.items()}  # type: ignore


class ProxyRun(NamedTuple):
    """The results of one run with twelve workers; errors are relative."""

    rtt_error_s: float
    worst_rate_error: float
    one_error: float
    cpu: float
    late: Lateness
    priority: str


def proxy_run(realtime: bool) -> ProxyRun:
    busy = PathSpec(LATENCY_S, window_bytes=None, pair_bps=PAIR_BPS)
    paths: dict[tuple[str, str], PathSpec] = dict.fromkeys(BUSY, busy)
    paths |= {QUIET: PathSpec(LATENCY_S), SINGLE: PathSpec(LATENCY_S, WINDOW_BYTES)}
    with ProxyNet(paths, realtime=realtime) as net, agents(nodes_of(paths)) as at, ThreadPoolExecutor(64) as pool:
        both = [*paths, *((b, a) for a, b in BUSY)]
        reach = {(src, dst): net.listen(src, dst, at[dst]) for src, dst in both}
        how = Survey(at, TOKEN, reach=lambda src, dst: reach[src, dst], pings=50)
        net.reset_lateness()
        before_s, began = net.stats.cpu_s, time.monotonic()
        rates = [pool.submit(how.goodput, *pair, 2, 4.0) for pair in both if pair not in (QUIET, SINGLE)]
        time.sleep(0.5)
        one = pool.submit(how.goodput, *SINGLE, 1, 3.0)
        rtt = how.rtt(*QUIET)
        worst_rate = max(abs(job.result().bps / PAIR_BPS - 1) for job in rates)
        limit_bps = WINDOW_BYTES * 8 / (2 * LATENCY_S)
        one_error = abs(one.result().bps / limit_bps - 1)
        stats = net.stats
        cpu = (stats.cpu_s - before_s) / (time.monotonic() - began)
    return ProxyRun(abs(rtt.median_s - 2 * LATENCY_S), worst_rate, one_error, cpu, stats.lateness, stats.priority)


def proxy_with_twelve_workers(lines: Lines, realtime: bool) -> None:
    """The first run in which the emulator was on time, and its lateness in the last run."""
    asked = "real-time asked" if realtime else "no priority asked"
    for _ in range(TRIES):
        run = proxy_run(realtime)
        if (reason := run.late.reason()) is None:
            break
        print(f"# {PROXY}, {asked}: {reason}", flush=True)
    kind = f"{PROXY}, {run.priority if realtime else 'no priority asked'}"
    late_ms = run.late.p99_s * 1e3
    if realtime and run.priority != "realtime":
        lines.skip(f"{PROXY}, realtime", f"the kernel refused real-time priority; it gave: {run.priority}")
    if realtime and run.priority == "realtime":
        lines.at_most(f"{kind}: late, p99", late_ms, "ms", P99_LIMIT_S * 1e3)
        lines.at_most(f"{kind}: late, worst", run.late.worst_s * 1e3, "ms", WORST_LIMIT_S * 1e3)
    else:
        lines.add(f"{kind}: late, p99", late_ms, "ms", "", None)
    if reason is not None:
        lines.skip(f"{kind}: worst of 16 rates off", f"void: {reason}, in {TRIES} of {TRIES} tries")
        return
    lines.at_most(f"{kind}: median RTT off", run.rtt_error_s * 1e3, "ms", 1 + 0.02 * 2e3 * LATENCY_S)
    lines.at_most(f"{kind}: worst of 16 rates off", 100 * run.worst_rate_error, "%", 3)
    lines.at_most(f"{kind}: one connection off", 100 * run.one_error, "%", 5)
    lines.add(f"{kind}: its core", 100 * run.cpu, "%", "", None)


# ---- the probe against the proxy -----------------------------------------------------------------------------
class Case(NamedTuple):
    seed: int
    rtt_ms: float
    pair_error: float
    window_error: float
    trunk_error: float
    right: bool


def random_paths(seed: int) -> Paths:
    """Two pairs; half of the set-ups have a limiting trunk, a quarter one that does not limit."""
    draw = random.Random(seed)
    latency_s, pair_bps = draw.uniform(0.004, 0.02), draw.uniform(20e6, 60e6)
    share = draw.choice([draw.uniform(0.6, 0.85), draw.uniform(0.6, 0.85), draw.uniform(1.3, 3.0), 0.0])
    trunk = Trunk("trunk", 2 * pair_bps * share) if share else None
    # One connection reaches a third to two thirds of the cap, so that the probe can find its window.
    window_bytes = round(pair_bps / 8 * 2 * latency_s * draw.uniform(0.35, 0.65))
    path = PathSpec(latency_s, window_bytes, pair_bps, trunk)
    return {(f"a-{i}", f"b-{i}"): path for i in range(2)}


def probed(seed: int) -> Case | None:
    """Results of the probe; None if the emulator was late each time."""
    return next((case for _ in range(TRIES) if (case := _probed(seed)) is not None), None)


def _probed(seed: int) -> Case | None:
    paths = random_paths(seed)
    truth = next(iter(paths.values()))
    with ExitStack() as stack:
        net = stack.enter_context(ProxyNet(paths))
        at = {name: stack.enter_context(ProbeAgent("127.0.0.1", 0, TOKEN)).address for name in nodes_of(paths)}
        ways = [way for src, dst in paths for way in ((src, dst), (dst, src))]
        reach = {(src, dst): net.listen(src, dst, at[dst]) for src, dst in ways}
        (found,) = survey(Survey(at, TOKEN, reach=lambda src, dst: reach[src, dst], pings=20, min_s=0.6, max_streams=8))
        if net.lateness.reason(worst_s=float("inf")) is not None:
            return None
    trunk_bps = truth.trunk_bps or 1e18
    binds = trunk_bps < 2 * (truth.pair_bps or 0)
    assert truth.pair_bps is not None
    assert truth.window_bytes is not None
    return Case(
        seed,
        abs(found.rtt.median_s - 2 * truth.latency_s) * 1e3,
        abs(found.pair_bps / min(truth.pair_bps, trunk_bps) - 1),
        abs(found.window_bytes / truth.window_bytes - 1),
        abs((found.trunk_bps or 0) / trunk_bps - 1) if binds else 0.0,
        found.cap == ("trunk" if binds else "pair"),
    )


def probe_set_ups(lines: Lines, num: int) -> None:
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(probed, range(num)))
    cases = [case for case in found if case is not None]
    name = f"{PROBE}, {num} set-ups"
    if len(cases) < 0.75 * num:
        lines.skip(name, f"void: the emulator was late in {num - len(cases)} of {num}, {TRIES} tries each")
        return
    more = {"void": num - len(cases)}
    lines.at_most(f"{name}: worst RTT off", max(c.rtt_ms for c in cases), "ms", RTT_OFF_MS, **more)
    lines.at_most(f"{name}: worst pair cap off", 100 * max(c.pair_error for c in cases), "%", 5)
    lines.at_most(f"{name}: worst trunk cap off", 100 * max(c.trunk_error for c in cases), "%", 5)
    lines.at_most(f"{name}: worst window off", 100 * max(c.window_error for c in cases), "%", 10)
    lines.at_most(f"{name}: pair or trunk wrong", sum(not c.right for c in cases), f"of {len(cases)}", 0)


# ---- namespaces ------------------------------------------------------------------------------------------------
def through_namespaces(path: PathSpec, streams: int, seconds: float) -> tuple[float, float]:
    """Median round trip (s) and goodput of `streams` (bit/s)."""
    with NamespaceNet({("a-0", "b-0"): path}) as net:
        at = {name: (net.address(name), PORT) for name in net.nodes}
        environment = {**os.environ, "ATLAS_PROBE_TOKEN": TOKEN}
        for name, (host, port) in at.items():
            command = [sys.executable, "-m", "atlas.cli", "wan", "probe", "--listen", f"{host}:{port}"]
            agent = net.node(name).popen(command, env=environment, stdout=subprocess.PIPE)
            assert agent.stdout is not None
            agent.stdout.readline()
            agent.stdout.close()
        how = Survey(at, TOKEN, max_bytes=4_000_000_000)
        node = net.node("a-0")
        net.reset_lateness()
        rtt = node.run(lambda: how.rtt("a-0", "b-0"))
        found = node.run(lambda: how.goodput("a-0", "b-0", streams, seconds))
        net.certify()
    return rtt.median_s, found.bps


def namespaces(lines: Lines) -> None:
    def uncapped() -> None:
        rtt_s, fast_bps = through_namespaces(PathSpec(0.01), 8, 2.0)
        lines.at_most(f"{NAMESPACE}: median RTT off", abs(rtt_s - 0.02) * 1e3, "ms", 1.4)
        lines.at_least(f"{NAMESPACE}: uncapped goodput, 8 streams", fast_bps / 1e9, "Gbit/s", 2.2)

    def shaped() -> None:
        _, shaped_bps = through_namespaces(PathSpec(0.01, pair_bps=500e6), 4, 3.0)
        lines.at_most(f"{NAMESPACE}: rate of 500 Mbit/s off", 100 * abs(shaped_bps / 500e6 - 1), "%", 3)

    def one() -> None:
        """An ordinary connection carries about one kernel window per round trip."""
        _, one_bps = through_namespaces(PathSpec(0.02), 1, 3.0)
        off = abs(one_bps / (window_bytes() * 8 / 0.04) - 1)
        name = f"{NAMESPACE}: one stock connection, 40 ms, off a window per round trip"
        lines.at_most(name, 100 * off, "%", 15, mbps=round(one_bps / 1e6))

    lines.attempt(f"{NAMESPACE}: uncapped", uncapped)
    lines.attempt(f"{NAMESPACE}: shaped", shaped)
    lines.attempt(f"{NAMESPACE}: one stock connection", one)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four set-ups for the probe: under two minutes")
    quick, lines = parser.parse_args().quick, Lines()
    proxy_with_twelve_workers(lines, realtime=True)
    if not quick:
        proxy_with_twelve_workers(lines, realtime=False)
    probe_set_ups(lines, 4 if quick else 20)
    if os.geteuid() == 0 and Path("/dev/net/tun").exists():
        namespaces(lines)
    else:
        lines.skip(NAMESPACE, "needs root and /dev/net/tun")
    return lines.table()


if __name__ == "__main__":
    sys.exit(main())
