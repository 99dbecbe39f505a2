"""Run every bench, one after another, and print one table: what `make bench`, `bench-quick` and `bench-full` call.

    python bench/run.py [--quick | --full] [--only NAME ...] [--out FILE] [--resume]
    python bench/run.py --list

Most benches have two forms. The quick one takes seconds to five minutes and prints the same lines for fewer cases; the
full one has the number of cases that the docs state. Without a flag every bench runs in its quick form, or in its only
one: about an hour on two cores without a GPU, an hour and a half where every bench finds what it needs. `--quick` stops
after 15 minutes, with the figures of the README first. `--full` takes hours.

A bench prints one JSON line per figure (bench/common/report.py). This script collects the lines, shows which bars were
missed and what could not be measured here, and checks that every line named in docs/claims.md was printed. The exit
status is 1 if a bar was missed, a bench crashed or a claim has no line.

`--list` gives the time of each form. The full one: as measured in FILE (default out/bench-full.jsonl) or in an earlier
run on two cores, or, after `~`, an estimate: half of its time limit. The last line has the sums. FILE gets the lines of
each bench as it ends, so an interrupted run continues with --resume: it skips the benches that FILE has results of,
from the same commit and in the same form.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.claims import Claim, read_claims
from common.report import MISSED, NOT_MEASURED, OK, shown

HERE = Path(__file__).parent
ROOT = HERE.parent


QUICK_S = 900.0
"""`make bench-quick` starts no bench that would end later than this, by its expected time, and cuts off one that is
slower."""
README = ("accuracy_a100", "accuracy_sailor", "testbed", "schedules", "wan", "gpu_fill")
"""The benches behind the figures of the README: the quick run starts with them."""


@dataclass(frozen=True)
class Bench:
    """The arguments and times of one script."""

    minutes: float
    """Time limit of the full form: about twice its time on two idle cores."""
    quick_s: float
    """Expected time of the quick form on two idle cores; its limit is three times that, at least a minute."""
    quick: tuple[str, ...] | None = ("--quick",)
    """Arguments of the quick form; None: the script has one form, and `--quick` leaves it out."""
    measured_s: float | None = None
    """Time of the full form in a run on two cores."""

    def arguments(self, full: bool) -> tuple[str, ...]:
        return () if full or self.quick is None else self.quick

    def limit_min(self, full: bool) -> float:
        return self.minutes if full or self.quick is None else max(1.0, self.quick_s / 20)


BENCHES: dict[str, Bench] = {
    "accuracy_a100": Bench(8, 5, ("--shipped",)),
    "accuracy_sailor": Bench(3, 2, ()),
    "calibrate_gpu": Bench(6, 0, None),
    "admission": Bench(4, 45, ()),
    "batching": Bench(1, 5),
    "bits": Bench(8, 40),
    "capacity": Bench(40, 40),
    "bubbletea_sim": Bench(30, 150, ("--case", "c4", "--case", "slowdown")),
    "checkpoint_fetch": Bench(4, 60),
    "control_plane": Bench(6, 50),
    "engine": Bench(4, 30, ()),
    "evidence": Bench(8, 20, measured_s=28),
    "evidence_gpu": Bench(8, 90, ()),
    "fabric": Bench(6, 80, measured_s=99),
    "faults": Bench(20, 80),
    "first_job": Bench(20, 90, measured_s=350),
    "groups": Bench(20, 120),
    "gpu_fill": Bench(15, 300, ()),
    "handoff_parts": Bench(4, 40),
    "host_losses": Bench(40, 150),
    "hostile_ports": Bench(10, 90, measured_s=160),
    "join": Bench(20, 150),
    "launch_files": Bench(60, 60, ("--only", "shell", "torchrun")),
    "live_page": Bench(12, 60),
    "load_generator": Bench(12, 0, None),
    "loss_curves": Bench(10, 25),
    "monotone": Bench(40, 120),
    "one_gpu": Bench(10, 120, ()),
    "optimum": Bench(15, 20),
    "plain_torch": Bench(10, 280, ()),
    "planner": Bench(18, 140),
    "planner_geo": Bench(20, 20),
    "planner_sailor": Bench(6, 10),
    "regions": Bench(2, 5, ()),
    "real_sites": Bench(25, 160),
    "s3_kills": Bench(8, 90),
    "schedules": Bench(12, 30),
    "serve_emulated": Bench(8, 50),
    "serve_kills": Bench(60, 60),
    "serve_slowdown": Bench(16, 120),
    "slurm_clusters": Bench(20, 150, measured_s=570),
    "sums": Bench(25, 60),
    "testbed": Bench(45, 70),
    "testbed_sim": Bench(5, 15),
    "torch_pipelining": Bench(8, 90),
    "trace_export": Bench(2, 10, ()),
    "tvcache_adapters": Bench(2, 5),
    "tvcache_histories": Bench(8, 5),
    "tvcache_kills": Bench(8, 25),
    "tvcache_server": Bench(8, 10),
    "tvcache_sites": Bench(3, 5),
    "tvcache_snapshots": Bench(8, 50),
    "tvcache_tau": Bench(5, 10),
    "vllm_handoff": Bench(15, 0, None),
    "weather": Bench(100, 150),
    "weather_plans": Bench(20, 140),
    "weather_runs": Bench(12, 110),
    "wan": Bench(30, 110),
    "wan_emulator": Bench(10, 110),
    "wan_faults": Bench(15, 100),
}


@dataclass
class Outcome:
    """The lines and the exit status of one bench."""

    name: str
    status: int
    seconds: float
    lines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        return {OK: "ok", MISSED: "MISSED", NOT_MEASURED: "not measured"}.get(self.status, f"FAILED ({self.status})")

    def count(self, ok: bool) -> int:
        return sum(line.get("ok") is ok for line in self.lines)


def run(name: str, arguments: tuple[str, ...], minutes: float) -> Outcome:
    """Run one bench in its own process group, which ends with it."""
    began = time.monotonic()
    command = [sys.executable, str(HERE / f"{name}.py"), *arguments]
    outcome = Outcome(name, OK, 0.0)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    timer = threading.Timer(60 * minutes, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    assert process.stdout is not None
    try:
        for line in process.stdout:
            print(f"  {line}", end="", flush=True)
            if (row := _row(line)) is not None:
                outcome.lines.append(row)
        outcome.status = process.wait()
    finally:
        timer.cancel()
        process.stdout.close()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    outcome.seconds = time.monotonic() - began
    return outcome


def _row(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "name" in row and "ok" in row else None


def table(outcomes: list[Outcome]) -> None:
    print(f"\n{'bench':<18} {'time':>7} {'held':>5} {'missed':>6}  verdict")
    for one in outcomes:
        print(f"{one.name:<18} {one.seconds:>5.0f} s {one.count(True):>5} {one.count(False):>6}  {one.verdict}")
        for line in one.lines:
            if line["ok"] is False or "skipped" in line:
                print(f"{'':<18} {line['name']}: {shown(line).strip()}")
    total_s = sum(one.seconds for one in outcomes)
    print(f"{len(outcomes)} benches, {total_s / 60:.0f} min")


def without_line(claims: list[Claim], outcomes: list[Outcome]) -> list[Claim]:
    """Claims whose bench ran but did not print the line."""
    printed = {one.name: [str(line["name"]) for line in one.lines] for one in outcomes if one.status in (OK, MISSED)}
    return [c for c in claims if c.bench in printed and not any(c.line in name for name in printed[c.bench])]


class ResultFile:
    """The results of benches as JSON lines: those of the file, if it is to be continued, and those added."""

    def __init__(self, path: Path, resume: bool, full: bool) -> None:
        self.path, self.full, self.known = path, full, dict[str, Outcome]()
        git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
        self.commit = git.stdout.strip() or "unknown"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not resume:
            path.write_text("")
        for line in path.read_text().splitlines() if path.exists() else []:
            row = json.loads(line)
            if (row.get("commit"), row.get("full")) == (self.commit, full) and "status" in row:
                self.known[row["bench"]] = Outcome(row["bench"], row["status"], row["seconds"], row["lines"])

    def add(self, one: Outcome) -> None:
        row = {"bench": one.name, "commit": self.commit, "full": self.full, "status": one.status}
        row["seconds"] = one.seconds
        with self.path.open("a") as file:
            file.write(json.dumps(row | {"lines": one.lines}) + "\n")


def last_times(path: Path) -> dict[str, float]:
    """Seconds of full forms by bench, as the last run wrote them, whatever its commit."""
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {row["bench"]: row["seconds"] for row in rows if row.get("full")}


def list_benches(measured_s: dict[str, float]) -> None:
    """One line per bench: the times of its full and quick form, and the first sentence of its docstring."""
    total_s = known_s = quick_s = 0.0
    print(f"{'bench':<18} {'full':>8} {'quick':>6}")
    for name, bench in BENCHES.items():
        summary = (ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text())) or "").split("\n\n")[0]
        first = " ".join(summary.split()).split(". ")[0].rstrip(".:")
        found_s = measured_s.get(name, bench.measured_s)
        seconds = 30 * bench.minutes if found_s is None else found_s
        total_s, known_s = total_s + seconds, known_s + (found_s or 0.0)
        quick_s += seconds if bench.quick is None else bench.quick_s
        full = f"{'~' if found_s is None else ''}{seconds / 60:.1f} min"
        quick = "-" if bench.quick is None else f"{bench.quick_s:.0f} s"
        print(f"{name:<18} {full:>8} {quick:>6}  {first}")
    print(f"all quick forms, and the benches that have one form: {quick_s / 60:.0f} min")
    print(f"all full forms: {total_s / 3600:.1f} h, of which {known_s / 3600:.1f} h were measured, the rest estimated")


def quick_order() -> list[str]:
    """Benches with a quick form: those of the README first, then the shortest."""
    names = [name for name, bench in BENCHES.items() if bench.quick is not None]
    return sorted(names, key=lambda name: (name not in README, BENCHES[name].quick_s))


def run_all(names: list[str], full: bool, budget_s: float, out: ResultFile | None = None) -> list[Outcome]:
    """Run benches in order. A quick form that would end after the budget is left out, a slower one is cut off at its
    end, and both are named."""
    began, outcomes, left_out = time.monotonic(), list[Outcome](), list[str]()
    for number, name in enumerate(names, 1):
        if out is not None and name in out.known:
            print(f"[{number}/{len(names)}] bench/{name}.py: its results are in {out.path}")
            outcomes.append(out.known[name])
            continue
        bench = BENCHES[name]
        left_s = float("inf") if full else budget_s - (time.monotonic() - began)
        if bench.quick_s > left_s:
            left_out.append(name)
            continue
        arguments = bench.arguments(full)
        print(f"[{number}/{len(names)}] bench/{name}.py {' '.join(arguments)}", flush=True)
        outcome = run(name, arguments, min(bench.limit_min(full), left_s / 60))
        if outcome.status == -signal.SIGKILL and outcome.seconds >= left_s and not outcome.count(False):
            left_out.append(name)
            continue
        outcomes.append(outcome)
        if out is not None:
            out.add(outcomes[-1])
    table(outcomes)
    if left_out:
        print(f"left out or cut off, no time within {budget_s / 60:.0f} minutes: {', '.join(left_out)}")
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="run quick forms for at most 15 minutes")
    size.add_argument("--full", action="store_true", help="run full forms: all cases that the docs state")
    parser.add_argument("--only", nargs="+", choices=tuple(BENCHES), help="run only these benches")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write results to FILE as benches end, as JSON lines")
    parser.add_argument("--resume", action="store_true", help="skip benches that FILE has results of, from this commit")
    parser.add_argument("--list", action="store_true", help="list the benches and exit")
    args = parser.parse_args()
    if args.list:
        list_benches(last_times(args.out or ROOT / "out" / "bench-full.jsonl"))
        return 0
    if args.resume and args.out is None:
        parser.error("--resume needs --out: the file that has the results so far")
    names = args.only or (quick_order() if args.quick else list(BENCHES))
    out = None if args.out is None else ResultFile(args.out, args.resume, args.full)
    outcomes = run_all(names, args.full, QUICK_S if args.quick and not args.only else float("inf"), out)
    silent = without_line(read_claims(ROOT / "docs" / "claims.md"), outcomes)
    for claim in silent:
        print(f"docs/claims.md: bench/{claim.bench}.py printed no line {claim.line!r}")
    failed = [one.name for one in outcomes if one.status not in (OK, NOT_MEASURED)]
    return 1 if failed or silent else 0


if __name__ == "__main__":
    sys.exit(main())
