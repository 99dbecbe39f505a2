"""Three datacenters behind real NAT: one public, one with 1:1 NAT and a port range, one masqueraded with no way in.

    python bench/real_sites.py                    4 rounds; about 6 minutes on 16 cores
    python bench/real_sites.py --rounds 6         more rounds, for a host where iterations differ
    python bench/real_sites.py --quick | --check-only

Trains 50 steps over an emulated WAN (10 ms one way, 100 Mbit/s per pair) between network namespaces, with nftables in
the gateways; the same over the same paths without NAT; and on loopback. Launchers are `atlas train --dc` processes with
certificates, a range of ports, and checkpoints that are copied to the next datacenter. Two pipelines share the WAN, so
relays cross the NAT too. `ss` looks at the listening ports of every site during the run. In one more run the
masqueraded site is cut off for 7 s.

A round is four runs: without NAT, behind it, behind it, without; the next round begins behind it. So what changes
slowly on the host cancels in the ratio of a round, and the two runs without NAT show what the host itself does. The
ratio is judged only if its 95 % interval over the rounds is narrower than what it is to show.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "launch"))
from common.report import Report, not_measured
from free_ports import free_port
from lab.sites import DNAT, FILTERED, MASQUERADE, PORTS, PUBLIC, Site, Sites, certificates, is_local, missing
from multi_dc_runs import hashes
from process_trees import below

from atlas.wan.emulator.paths import PathSpec

KINDS = {"east": PUBLIC, "west": DNAT, "south": MASQUERADE}
PATH = PathSpec(latency_s=0.010, pair_bps=100e6, window_bytes=None)
NUM_STEPS, FIRST_COUNTED = 50, 5
RENDEZVOUS = 7700
LIMIT_S = 150.0
CHECK_S = 15.0
NAT_COSTS = 1.03
CUT_S = 7.0
"""Longer than a sender waits for answers (`TransportSettings.stall_s`): all streams are replaced, by the side that can
dial."""
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""The 97.5 % quantile of Student's t, from 1 degree of freedom on; the last also for more."""
ATLAS = [sys.executable, "-m", "atlas"]


def job_text(datacenters: Sequence[str]) -> str:
    return yaml.dump(
        {
            "name": "real-sites",
            "model": {"layers": 6, "hidden": 64, "heads": 2, "vocab": 300, "seq_len": 64},
            "cluster": {
                "wan": {"latency_ms": PATH.latency_s * 1e3, "pair_gbps": 0.1},
                "datacenters": [{"name": dc, "nodes": 2, "gpus_per_node": 1} for dc in datacenters],
            },
            "precision": "fp32",
            "microbatch": 2,
            "num_microbatches": 4,
            "pp": len(datacenters),
            "pipelines_per_cell": 2,
        }
    )


@dataclass
class Finished:
    """What one run of all launchers left."""

    iteration_s: float
    """The median of the steps."""
    weights: Mapping[str, str]
    listening: dict[str, set[tuple[str, int]]]
    """By site: the addresses and ports on which anything listened."""
    longest_s: float
    """The longest iteration."""
    restarts: int


def train(base: Path, sites: Mapping[str, Site] | None, num_steps: int, *, cut: bool = False) -> Finished:
    """Run to the end. Without sites: on loopback. `cut`: the masqueraded site is cut off for a while."""
    rendezvous = f"127.0.0.1:{free_port()}"
    if sites is not None:
        rendezvous = f"{sites['east'].gateway.address}:{RENDEZVOUS}"
    folders = {dc: base / dc for dc in KINDS}
    processes: dict[str, subprocess.Popen[Any]] = {}
    with contextlib.ExitStack() as stack:
        for dc, folder in folders.items():
            folder.mkdir(parents=True)
            (folder / "plan.yaml").write_text(job_text(list(KINDS)))
            command = [*ATLAS, "train", "plan.yaml", "--dc", dc, "--schedule", "atlas", "--no-bar", "--device", "cpu"]
            command += ["--data", "shipped", "--learning-rate", "0.003", "--steps", str(num_steps)]
            command += ["--save-every", "20", "--checkpoints", "saves", "--rendezvous", rendezvous, "--log", "steps"]
            if sites is not None:
                site = sites[dc]
                command += ["--listen", site.listen, "--advertise", site.advertise, "--certs", str(base.parent / "ca")]
                command += ["--ports", f"{PORTS[0]}-{PORTS[1]}"]
            log = stack.enter_context((folder / "log").open("w"))
            popen = subprocess.Popen if sites is None else sites[dc].popen
            processes[dc] = popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            stack.callback(_end, processes[dc])
        listening = _follow(processes, sites, folders, cut=cut)
    weights = hashes({dc: folder / "saves" for dc, folder in folders.items()}, num_steps)
    lines = map(json.loads, (folders["east"] / "steps").read_text().splitlines())
    took = [line["iteration_s"] for line in lines if line["step"] > FIRST_COUNTED]
    restarts = (folders["east"] / "log").read_text().count("Restart ")
    return Finished(statistics.median(took), weights, listening, max(took), restarts)


def _follow(
    processes: Mapping[str, subprocess.Popen[Any]],
    sites: Mapping[str, Site] | None,
    folders: Mapping[str, Path],
    *,
    cut: bool,
) -> dict[str, set[tuple[str, int]]]:
    """Wait for the end, and meanwhile note who listens where."""
    listening: dict[str, set[tuple[str, int]]] = {dc: set() for dc in processes}
    deadline = time.monotonic() + LIMIT_S
    while any(process.poll() is None for process in processes.values()):
        if time.monotonic() > deadline or any(process.poll() for process in processes.values()):
            break
        for dc, site in (sites or {}).items():
            listening[dc] |= site.listening()
        steps = folders["east"] / "steps"
        if cut and sites is not None and steps.exists() and len(steps.read_text().splitlines()) > FIRST_COUNTED:
            cut = False
            sites["south"].cut(CUT_S)
        time.sleep(0.5)
    if any(process.poll() != 0 for process in processes.values()):
        texts = "\n".join(f"{dc}: {(folder / 'log').read_text()[-2000:]}" for dc, folder in folders.items())
        raise RuntimeError(f"the launchers ended with {[p.poll() for p in processes.values()]}:\n{texts}")
    return listening


def _end(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


def measure_training(report: Report, base: Path, num_steps: int, rounds: int) -> None:
    certificates(base / "ca", list(KINDS))
    measured: list[Round] = []
    runs: list[Finished] = []
    for number in range(rounds):
        took: dict[bool, list[float]] = {True: [], False: []}
        begins = number % 2 == 1
        for place, nat in enumerate((begins, not begins, not begins, begins)):
            with Sites(KINDS, PATH, nat=nat) as sites:
                found = train(base / f"round-{number}-{place}", sites.sites, num_steps)
            took[nat].append(found.iteration_s)
            runs.append(found)
            print(f"# {'NAT' if nat else 'plain'}: iteration {found.iteration_s * 1e3:.1f} ms", flush=True)
        measured.append(Round(took[False], took[True]))
    with Sites(KINDS, PATH) as sites:
        cut = train(base / "cut", sites.sites, num_steps, cut=True)
    print(f"# cut for {CUT_S:g} s: longest iteration {cut.longest_s:.1f} s")
    report.figure("masqueraded site cut off for 7 s: restarts of workers", cut.restarts, "", at_most=0)
    report.figure("masqueraded site cut off for 7 s: longest iteration", cut.longest_s, "s", at_least=0.8 * CUT_S)
    runs.append(cut)
    alone = train(base / "loopback", None, num_steps)
    same = sum(run.weights == alone.weights for run in runs)
    report.figure("runs with weights equal to the bit to loopback", same, "runs", at_least=len(runs))
    found = [place for run in runs for places in run.listening.values() for place in places]
    inside = [port for host, port in found if PORTS[0] <= port <= PORTS[1]]
    outside = [(host, port) for host, port in found if port not in inside and port != RENDEZVOUS]
    local = [place for place in outside if is_local(place[0])]
    report.figure("listening ports seen inside the range", len(inside), "ports", at_least=len(runs) * 3 * len(KINDS))
    report.figure("listening ports outside the range", len(outside) - len(local), "ports", at_most=0)
    report.figure("ports outside the range on loopback only (sums over pipelines of one host)", len(local), "ports")
    report_ratio(report, measured)


@dataclass(frozen=True)
class Round:
    """Seconds of an iteration in the two runs without NAT and in the two behind it."""

    plain: Sequence[float]
    nat: Sequence[float]

    @property
    def ratio(self) -> float:
        return sum(self.nat) / sum(self.plain)

    @property
    def control(self) -> float:
        """The second run without NAT over the first."""
        return self.plain[1] / self.plain[0]


def report_ratio(report: Report, rounds: Sequence[Round]) -> None:
    """A ratio whose interval is wider than what it is to show is not measured, whatever the median says."""
    ratios = sorted(one.ratio for one in rounds)
    plain = [seconds for one in rounds for seconds in one.plain]
    half = half_interval(ratios)
    report.figure("iteration without NAT, median", statistics.median(plain) * 1e3, "ms")
    report.figure("longest over shortest iteration without NAT", max(plain) / min(plain), "x")
    controls = [abs(one.control - 1) for one in rounds]
    report.figure("two runs of a round without NAT differ by, median", 100 * statistics.median(controls), "%")
    report.figure("smallest ratio of a round", ratios[0], "x")
    report.figure("largest ratio of a round", ratios[-1], "x")
    name = "iteration behind NAT over the same paths without it, median of rounds"
    if half is None:
        report.void(name, "one round has no interval: give --rounds 4 or more")
        return
    report.figure("half of the 95 % interval of the ratio", half, "x")
    if half < NAT_COSTS - 1:
        report.figure(name, statistics.median(ratios), "x", at_most=NAT_COSTS)
    else:
        report.void(name, f"{len(rounds)} rounds on this host give it to within {half:.1%} only: give more --rounds")


def half_interval(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of the mean (Student's t). None: there is only one value."""
    if len(values) < 2:
        return None
    return STUDENT[min(len(values), len(STUDENT) + 1) - 2] * statistics.stdev(values) / math.sqrt(len(values))


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
            stack.callback(_end, processes[dc])
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
    parser.add_argument("--quick", action="store_true", help="20 steps, once")
    parser.add_argument("--rounds", type=int, default=4, help="of four runs each")
    parser.add_argument("--check-only", action="store_true", help="only `atlas wan check`")
    args = parser.parse_args()
    if reason := missing():
        return not_measured("real_sites", reason)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # processes and namespaces end on the way out
    report = Report("Datacenters behind NAT", "the same run on loopback and without NAT")
    with tempfile.TemporaryDirectory(prefix="atlas-sites-") as folder:
        check = Path(folder) / "check"
        check.mkdir()
        measure_check(report, check)
        if args.check_only:
            return report.finish()
        measure_training(report, Path(folder), 20 if args.quick else NUM_STEPS, 1 if args.quick else args.rounds)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
