"""Three datacenters behind real NAT: one public, one with 1:1 NAT and a port range, one masqueraded with no way in.

    python bench/real_sites.py                            6 spans; about 12 minutes on 2 cores
    python bench/real_sites.py --only cost --spans 2 --keep FILE     in pieces: the verdict is over all spans in FILE
    python bench/real_sites.py --only cost --control      two runs without NAT in place of one with: what the host adds
    python bench/real_sites.py --only cost --control --longer 3     the second over paths that are 3 ms longer one way:
                                                          whether the estimate shows a cost that is known
    python bench/real_sites.py --quick | --only check

Trains 50 steps over an emulated WAN (40 ms one way, 100 Mbit/s per pair) between network namespaces, with nftables in
the gateways, and on loopback. Launchers are `atlas train --dc` processes with certificates, a range of ports, and
checkpoints that are copied to the next datacenter. Two pipelines share the WAN, so relays cross the NAT too. `ss` looks
at the listening ports of every site during the run. In one more run the masqueraded site is cut off for 7 s.

What NAT costs is estimated from pairs of runs that train at the same time, one behind NAT and one over the same paths
without it, each with its own namespaces and its own emulator: what the host does to one it does to the other.

1. Devices are paced and paths are long, so that a step waits for the WAN and not for a core (`lab.site_runs`).
2. A pair, from its start to its end, is a span. The time in which both train is cut into blocks of 5 s. A block counts
   if both emulators were in time (`certify`) and both runs did at least 6 steps in it, the first 10 of a run left out.
3. The ratio of a block is the median iteration behind NAT over the median iteration without it; the ratio of a span is
   the median over its blocks.
4. The estimate is the geometric mean over spans. Its 95 % interval is Student's, of the logarithms of the spans'
   ratios: the unit is a span and not a step, because connections are made anew for each run.
5. The bar holds if the whole interval is below it, and is missed if the whole interval is above it. Otherwise there is
   no verdict.

And `atlas wan check` on four sites, of which one gives a port range that its NAT does not forward, one has a
certificate of another CA, and one is filtered by its firewall.

Needs root, network namespaces, `ip` and `ss` (package iproute2) and `nft` (nftables); exits 77 elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "launch"))
from common.host import Others
from common.report import Report, not_measured
from lab.site_runs import (
    ATLAS,
    BLOCK_S,
    CUT_S,
    KINDS,
    LIMIT_S,
    PATH,
    RENDEZVOUS,
    SAVE_EVERY,
    SiteRun,
    end,
    job_text,
    train,
)
from lab.sites import DNAT, FILTERED, PORTS, PUBLIC, Sites, certificates, is_local, missing
from process_trees import below

NUM_STEPS = 150
"""Of each run of a span."""
MIN_STEPS = 6
"""Of each run, in a block that counts."""
CHECK_S = 15.0
NAT_COSTS = 1.03
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""The 97.5 % quantile of Student's t, from 1 degree of freedom on; the last also for more."""


# ---- training behind NAT ---------------------------------------------------------------------------------------------
def measure_training(report: Report, base: Path, *, quick: bool) -> list[SiteRun]:
    """One run behind NAT, and one in which a site is cut off (`quick`: only this one); all, for `compare`."""
    runs = []
    for name in ("cut",) if quick else ("nat", "cut"):
        with Sites(KINDS, PATH) as sites:
            runs.append(SiteRun(base / name, sites, SAVE_EVERY))
            train(runs[-1], cut=name == "cut")
    longest_s = max(runs[-1].counted())
    report.figure("masqueraded site cut off for 7 s: restarts of workers", runs[-1].restarts, "", at_most=0)
    report.figure("masqueraded site cut off for 7 s: longest iteration", longest_s, "s", at_least=0.8 * CUT_S)
    return runs


def compare(report: Report, base: Path, runs: Sequence[SiteRun]) -> None:
    """Weights with those on loopback, and ports with the range."""
    alone = SiteRun(base / "loopback", None, SAVE_EVERY)
    train(alone)
    same = sum(run.weights == alone.weights for run in runs)
    report.figure("runs with weights equal to the bit to loopback", same, "runs", at_least=len(runs))
    found = [place for run in runs for place in run.listening]
    inside = [port for host, port in found if PORTS[0] <= port <= PORTS[1]]
    outside = [(host, port) for host, port in found if port not in inside and port != RENDEZVOUS]
    local = [place for place in outside if is_local(place[0])]
    report.figure("listening ports seen inside the range", len(inside), "ports", at_least=len(runs) * 3 * len(KINDS))
    report.figure("listening ports outside the range", len(outside) - len(local), "ports", at_most=0)
    report.figure("ports outside the range on loopback only (sums over pipelines of one host)", len(local), "ports")


# ---- what NAT costs --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Span:
    """Two runs at the same time: seconds of an iteration, by block that counts."""

    control: bool
    """Whether the second is without NAT too."""
    plain_s: Sequence[float]
    nat_s: Sequence[float]
    num_late: int
    """Blocks that do not count because an emulator was late."""
    others_cores: float
    longer_ms: float = 0.0
    """The paths of the second are so much longer, one way; in a control only."""

    @property
    def ratio(self) -> float:
        return statistics.median(nat / plain for nat, plain in zip(self.nat_s, self.plain_s, strict=True))


def span_of(plain: SiteRun, nat: SiteRun, *, control: bool, others_cores: float) -> Span:
    plain_s, nat_s, num_late = [], [], 0
    for one, other in zip(plain.blocks, nat.blocks, strict=True):
        took = [run.counted(one.began, one.ended) for run in (plain, nat)]
        if min(map(len, took)) < MIN_STEPS:
            continue
        if one.late or other.late:
            num_late += 1
            continue
        plain_s.append(statistics.median(took[0]))
        nat_s.append(statistics.median(took[1]))
    return Span(control, plain_s, nat_s, num_late, others_cores)


def measure_span(
    base: Path, num_steps: int, *, number: int, control: bool, longer_ms: float
) -> tuple[Span, list[SiteRun]]:
    longer = replace(PATH, latency_s=PATH.latency_s + longer_ms / 1e3)
    kinds = [("plain", PATH, False), ("nat", longer, not control)]
    runs: dict[str, SiteRun] = {}
    with contextlib.ExitStack() as stack:
        for name, path, nat in kinds if number % 2 else reversed(kinds):  # neither is always the first
            sites = stack.enter_context(Sites(KINDS, path, nat=nat))
            runs[name] = SiteRun(base / f"{number}-{name}", sites, num_steps)
        others = Others()
        train(*runs.values())
        span = span_of(runs["plain"], runs["nat"], control=control, others_cores=others.cores)
    span = replace(span, longer_ms=longer_ms)
    took = [f"{run.iteration_s * 1e3:.1f} ms" for run in (runs["plain"], runs["nat"])]
    blocks = f"{len(span.plain_s)} blocks, {span.num_late} more with a late emulator"
    ratio = f"ratio {span.ratio:.4f}" if span.plain_s else "no ratio"
    print(f"# without NAT {took[0]}, {'control' if control else 'behind it'} {took[1]}: {ratio}, {blocks}", flush=True)
    return span, list(runs.values())


def measure_cost(report: Report, base: Path, args: argparse.Namespace) -> list[SiteRun]:
    """All runs, for `compare`."""
    spans, runs = [], list[SiteRun]()
    if args.keep is not None and args.keep.exists():
        spans = [Span(**json.loads(line)) for line in args.keep.read_text().splitlines()]
    for number in range(args.spans):
        span, pair = measure_span(base, args.steps, number=number, control=args.control, longer_ms=args.longer)
        spans.append(span)
        runs += pair
        if args.keep is not None:
            with args.keep.open("a") as file:
                file.write(json.dumps(asdict(span)) + "\n")
    for kind in sorted({(span.longer_ms, not span.control) for span in spans}):
        report_ratio(report, [span for span in spans if (span.longer_ms, not span.control) == kind])
    return runs


def report_ratio(report: Report, spans: Sequence[Span]) -> None:
    """Of spans of one kind: the estimate and its interval. There is no verdict if the bar lies in the interval."""
    control, longer_ms = spans[0].control, spans[0].longer_ms
    kind = "control, both without NAT" if control else "behind NAT over without"
    kind += f", one over paths {longer_ms:g} ms longer" if longer_ms else ""
    name = f"{kind}: iteration, geometric mean of spans"
    spans = [span for span in spans if span.plain_s]
    if not spans:
        report.void(name, f"no block of {BLOCK_S:g} s has {MIN_STEPS} steps of both runs. Stop other processes")
        return
    ratios = [span.ratio for span in spans]
    plain_s = [statistics.median(span.plain_s) for span in spans]
    report.figure(f"{kind}: spans", len(spans), "")
    report.figure(f"{kind}: blocks that count", sum(len(span.plain_s) for span in spans), "")
    report.figure(f"{kind}: blocks with a late emulator", sum(span.num_late for span in spans), "")
    report.figure(f"{kind}: cores of other processes, median", statistics.median(s.others_cores for s in spans), "")
    report.figure(f"{kind}: iteration without NAT, median", statistics.median(plain_s) * 1e3, "ms")
    report.figure(f"{kind}: smallest ratio of a span", min(ratios), "x")
    report.figure(f"{kind}: largest ratio of a span", max(ratios), "x")
    found = interval(ratios)
    if found is None:
        report.void(name, "one span has no interval: give --spans 2 or more")
        return
    (low, high), mean = found, statistics.geometric_mean(ratios)
    report.figure(f"{kind}: low end of the 95 % interval", low, "x")
    report.figure(f"{kind}: high end of the 95 % interval", high, "x")
    if control:
        report.figure(name, mean, "x")
    elif low <= NAT_COSTS < high:
        report.void(name, f"{mean:.4f}, and its 95 % interval has {NAT_COSTS} in it: give more --spans")
    else:
        report.figure(name, mean, "x", at_most=NAT_COSTS)


def interval(ratios: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of the geometric mean (Student's t). None: there is only one value."""
    if len(ratios) < 2:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    half = STUDENT[min(len(logs), len(STUDENT) + 1) - 2] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(statistics.mean(logs) - half), math.exp(statistics.mean(logs) + half)


# ---- atlas wan check -------------------------------------------------------------------------------------------------
FOUR = {"east": PUBLIC, "west": DNAT, "south": PUBLIC, "north": FILTERED}
WRONG_PORTS = (7720, 7729)
"""Of west: its NAT forwards 7710 to 7719."""


def check_sites(base: Path) -> tuple[float, dict[str, int], dict[str, str], int]:
    """Seconds from the start to the last end, exit codes, outputs, and processes that the checks have started."""
    certificates(base / "ca", [dc for dc in FOUR if dc != "south"])
    certificates(base / "foreign", ["south"])
    (base / "plan.yaml").write_text(job_text(list(FOUR)))
    processes: dict[str, subprocess.Popen[Any]] = {}
    started: set[int] = set()
    with Sites(FOUR, PATH) as sites, contextlib.ExitStack() as stack:
        begun = time.monotonic()
        for dc, site in sites.sites.items():
            command = [*ATLAS, "wan", "check", "plan.yaml", "--dc", dc, "--listen", site.listen]
            command += ["--advertise", site.advertise, "--certs", "foreign" if dc == "south" else "ca"]
            command += ["--ports", "{}-{}".format(*(WRONG_PORTS if dc == "west" else PORTS))]
            command += ["--rendezvous", f"{sites.sites['east'].gateway.address}:{RENDEZVOUS}"]
            log = stack.enter_context((base / f"{dc}.log").open("w"))
            processes[dc] = site.popen(command, cwd=base, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            stack.callback(end, processes[dc])
        while any(process.poll() is None for process in processes.values()) and time.monotonic() < begun + LIMIT_S:
            started |= {pid for process in processes.values() for pid in below(process.pid)}
            time.sleep(0.05)
        took_s = time.monotonic() - begun
    codes = {dc: int(process.returncode) for dc, process in processes.items()}
    return took_s, codes, {dc: (base / f"{dc}.log").read_text() for dc in FOUR}, len(started)


def measure_check(report: Report, base: Path) -> None:
    took_s, codes, said, num_started = check_sites(base)
    east = said["east"]
    print("\n".join(f"# {line}" for line in east.splitlines()))
    address = r"[0-9.]+"
    wanted = {
        "wrong port": rf"west/0 is not reached at {address}, port 7720-7722, from east/0, north/0: refused",
        "wrong certificate": rf"refused a connection from {address}: .*(ca|certificate).*",
        "filtered": rf"north/0 is not reached at {address}, port 7710-7712, from east/0, west/0: no answer",
    }
    named = sum(re.search(pattern, east) is not None for pattern in wanted.values())
    named += "south did not join" in east
    named += "TLS refused: CERTIFICATE_VERIFY_FAILED" in said["south"]
    report.figure("wan check, faults named: port, certificate (there too), site, filter", named, "of 5", at_least=5)
    report.figure("wan check, all three named within", took_s, "s", at_most=CHECK_S)
    report.figure("wan check, sites that end with exit code 2", list(codes.values()).count(2), "of 4", at_least=4)
    report.figure("wan check, processes started", num_started, "", at_most=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one run behind NAT, one span of 60 steps")
    parser.add_argument("--spans", type=int, default=6, help="pairs of runs, for the cost of NAT")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="of each run of a span")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="append spans to it, and judge all that are in it")
    parser.add_argument("--control", action="store_true", help="both runs of a span without NAT")
    parser.add_argument(
        "--longer", type=float, default=0.0, metavar="MS", help="with --control: of the second run's paths"
    )
    parser.add_argument("--only", choices=("check", "training", "cost"), help="one part")
    args = parser.parse_args()
    if args.longer and not args.control:
        parser.error("--longer: both runs of a control are without NAT; give --control too")
    if args.quick:
        args.spans, args.steps = 1, 60
    if reason := missing():
        return not_measured("real_sites", reason)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # processes and namespaces end on the way out
    report = Report("Datacenters behind NAT", "the same run on loopback and without NAT")
    with tempfile.TemporaryDirectory(prefix="atlas-sites-") as folder:
        base, runs = Path(folder), list[SiteRun]()
        if args.only in (None, "check"):
            (base / "check").mkdir()
            measure_check(report, base / "check")
        certificates(base / "ca", list(KINDS))
        if args.only in (None, "training"):
            runs += measure_training(report, base, quick=args.quick)
        if args.only in (None, "cost"):
            runs += measure_cost(report, base, args)
        if runs:
            compare(report, base, runs)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
