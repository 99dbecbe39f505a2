"""Plans on Sailor's inputs, scored by Sailor's formula: 14 cases, ten regions, and the cost objective.

Each case is a fresh process with cold caches (no bytecode); CPU is its user + system time, including imports. Every
plan written is read back, checked (GPUs of each zone, nodes, memory, layers, replicas) and scored again here. Reads
../shared/data/sailor, or the folder in SAILOR_DATA; without it nothing is measured.

Ten regions: r0 to r9 with 32 A100-40 each. Even ones have us-central1-a's bandwidth inside, odd ones us-west1-b's;
between any two is the measured pair us-central1-a / us-west1-b, with its egress price. `--quick`: five cases.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common.report import Report, not_measured

from atlas.sailor.check import check
from atlas.sailor.inputs import read_inputs
from atlas.sailor.judge import judge
from atlas.sailor.money import money
from atlas.sailor.plan_file import read_plan

DATA = Path(os.environ.get("SAILOR_DATA", Path(__file__).parents[2] / "shared" / "data" / "sailor"))
TRACES = ("2r_16", "2r_32", "2r_64", "2r_256", "2r_96_32", "5z_32", "5z_80")
BARS_S = {
    "OPT-350": (9.42, 5.48, 3.41, 1.40, 3.20, 2.42, 1.38),
    "GPT-Neo-2.7": (52.4, 30.0, 17.7, 6.32, 16.9, 13.61, 6.73),
}
SAILOR_S = {
    "OPT-350": (12.13, 6.40, 3.56, 1.43, 3.19, 2.41, 1.37),
    "GPT-Neo-2.7": (63.0, 33.3, 18.6, 7.01, 17.5, 13.6, 6.84),
}
"""Sailor's own plans; several of them use more GPUs than a zone has."""
REGIONS = 10
NEAR, FAR = "us-central1-a", "us-west1-b"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two traces of each model, and the cost objective")
    quick = parser.parse_args().quick
    if not DATA.is_dir():
        return not_measured("planner_sailor", f"{DATA} is missing")
    report = Report("Plans on Sailor's inputs, by Sailor's formula", "the plans of Sailor's own planner on these files")
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for model, bars in BARS_S.items():
            cases = list(zip(TRACES, bars, SAILOR_S[model], strict=True))
            for trace, bar, theirs in cases[:2] if quick else cases:
                ours = measure(DATA, DATA / "traces" / f"{trace}.csv", model, Path(folder))
                report.figure(f"{model} {trace}", ours["seconds"], "s", at_most=bar)
                report.figure(f"{model} {trace} CPU", ours["cpu_s"], "s CPU", at_most=5.0)
                lines.append(f"{model:12} {trace:9} {row_text(ours)}   Sailor {theirs:6.2f} s {bar:6.2f} bar")
        wide = ten_regions(Path(folder))
        for model in () if quick else BARS_S:
            ours = measure(wide, wide / "trace.csv", model, Path(folder))
            report.figure(f"{model} {REGIONS} regions CPU", ours["cpu_s"], "s CPU", at_most=5.0)
            report.figure(f"{model} {REGIONS} regions memory", ours["rss_gb"], "GB", at_most=1.0)
            lines.append(f"{model:12} 10x32     {row_text(ours)}   Sailor 515 s CPU, 4.8 GB")
        flags = ("--objective", "cost", "--min-throughput", "0.03")
        ours = measure(DATA, DATA / "traces" / "2r_32.csv", "GPT-Neo-2.7", Path(folder), *flags)
        report.figure("cheapest at 0.03 it/s: throughput", 1 / ours["seconds"], "it/s", at_least=0.03)
        report.figure("cheapest at 0.03 it/s: cost", ours["usd"], "USD/it")
        report.figure("cheapest at 0.03 it/s: CPU", ours["cpu_s"], "s CPU", at_most=5.0)
        lines.append(f"GPT-Neo-2.7  2r_32 $   {row_text(ours)}   Sailor finds none")
    print("\n" + "\n".join(lines))
    return report.finish()


def row_text(ours: dict[str, float]) -> str:
    figures = f"{ours['seconds']:7.3f} s  simulated {ours['simulated_s']:7.3f} s  {ours['usd']:6.3f} USD"
    return f"{figures}  {ours['num_gpus']:3.0f} GPUs  {ours['cpu_s']:.2f} s CPU  {ours['rss_gb'] * 1000:3.0f} MB"


def measure(data: Path, trace: Path, model: str, folder: Path, *flags: str) -> dict[str, float]:
    """Plan in a fresh process, then read the plan back, check and score it here."""
    out = folder / "plan.json"
    words = ["--from-sailor", str(data), "--trace", str(trace), "--model", model, "--gpu", "A100-40", *flags]
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-X", f"pycache_prefix={cache}", "-m", "atlas.commands.plan_sailor", *words]
        shown = [*command, "--cost", "sailor", "--json", "--out-sailor", str(out)]
        process = subprocess.Popen(shown, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    inputs = read_inputs(data, trace, model, ["A100-40"])
    plan = read_plan(out)
    check(inputs, plan)
    verdict = judge(inputs, plan)
    return {
        "seconds": verdict.iteration_s,
        "usd": money(inputs, plan, verdict).total_usd,
        "num_gpus": float(plan.num_gpus),
        "simulated_s": json.loads(printed)["simulated"]["iteration_s"],
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "rss_gb": usage.ru_maxrss * resource_unit() / 1e9,
    }


def resource_unit() -> int:
    """The unit of ru_maxrss: kilobytes on Linux, bytes on macOS."""
    return 1 if sys.platform == "darwin" else 1024


def ten_regions(folder: Path) -> Path:
    """Sailor's files with the two bandwidth and price tables rewritten for r0..r9."""
    wide = folder / "wide"
    wide.mkdir()
    for name in ("profiles_tmp.json", "llm_info.json", "basic_cluster_config.json"):
        (wide / name).symlink_to(DATA / name)
    for path in DATA.glob("training_config_*.json"):
        (wide / path.name).symlink_to(path)
    measured = json.loads((DATA / "multizone_bandwidths_het.json").read_text())
    names = [f"r{k}" for k in range(REGIONS)]
    like = {name: (NEAR, FAR)[k % 2] for k, name in enumerate(names)}
    table: dict[str, object] = {}
    for a in names:
        rows = measured[like[a]]["A100-40"]
        other = FAR if like[a] == NEAR else NEAR
        table[a] = {
            "A100-40": {
                count: {b: {"A100-40": row[like[a] if a == b else other]["A100-40"]} for b in names}
                for count, row in rows.items()
            }
        }
    egress = json.loads((DATA / "egress_usd_per_gb.json").read_text())[NEAR][FAR]
    (wide / "multizone_bandwidths_het.json").write_text(json.dumps(table))
    prices = {a: {b: 0.0 if a == b else egress for b in names} for a in names}
    (wide / "egress_usd_per_gb.json").write_text(json.dumps(prices))
    header = ",".join(["", "Timestamp", *(f"A100-40_{name}" for name in names)])
    (wide / "trace.csv").write_text(f"{header}\n0,0.0{',32' * REGIONS}\n")
    return wide


if __name__ == "__main__":
    sys.exit(main())
