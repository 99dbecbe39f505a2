"""What `atlas simulate` says around its table, in words: what was simulated, what to beware of, and why.

Takes results and their rows; computes nothing but shares of what it is given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from atlas.cost.flops import model_params
from atlas.plan.evaluate import Result
from atlas.view.table import percent, seconds

Row = Mapping[str, Any]

SPENT_ON = {
    "compute": "compute",
    "wire": "bytes on the wire",
    "latency": "latency",
    "queue": "queues for a link",
    "sync": "gradient sync",
    "wait": "waiting",
}
"""A critical path's categories as a sentence names them."""


def headline(result: Result) -> str:
    """`three-dcs: gpt 13.0B, 48 GPUs: west 4 + central 4 + east 4 stages, 4 pipelines, 24 microbatches`."""
    job, frame = result.case.job, result.case.layout
    stages = " + ".join(f"{name} {count}" for name, count in Counter(frame.rank_dc).items())
    gpus = job.tp * job.pp * frame.num_pipelines * job.cells
    cells = f"{job.cells} cells of " if job.cells > 1 else ""
    tp = f" x tp {job.tp}" if job.tp > 1 else ""
    return (
        f"{job.name}: {job.model.family} {_billions(model_params(job.model))} on {gpus:,} GPUs: "
        f"stages {stages}{tp}, {cells}{frame.num_pipelines} pipelines, {job.num_microbatches} microbatches"
    )


def _billions(params: int) -> str:
    return f"{params / 1e9:.1f}B" if params >= 1e9 else f"{params / 1e6:.0f}M"


def called(row: Row) -> str:
    """`1f1b on one connection`."""
    return f"{row['schedule']} on {'one connection' if row['tcp'] == 'one' else 'many connections'}"


def notes(found: Sequence[Row]) -> list[str]:
    """What a reader of the table must know."""
    lines = ["All times are simulated."]
    if len(found) > 1:
        lines[0] += f" Speedup is over {called(max(found, key=lambda row: float(row['iteration_s'])))}."
    too_big = {row["schedule"]: row for row in found if not row["fits"]}
    lines += [
        f"! {name} would not run: it needs {row['peak_gib']:.1f} GiB of a GPU's {row['memory_gib']:.1f} GiB."
        for name, row in too_big.items()
    ]
    steady = [f"{called(row)} {seconds(row['steady_s'])}" for row in found if row["steady_s"] is not None]
    if steady:
        lines.append(f"From one iteration to the next: {', '.join(steady)}.")
    return lines


def why(results: Sequence[Result], found: Sequence[Row]) -> str:
    """What the fastest that fits spends its time on, and what is left to gain."""
    row = min(found, key=lambda row: (not row["fits"], float(row["iteration_s"])))
    path = {part: s for part, s in row["critical_path_s"].items() if s > 0.005 * row["iteration_s"]}
    parts = sorted(path, key=lambda part: -path[part])
    spent = ", ".join(f"{100 * path[part] / row['iteration_s']:.0f}\u00a0% {SPENT_ON[part]}" for part in parts)
    turns = ", pipelines taking turns on the WAN" if row["sharing"] else ""
    best = "" if len(found) == 1 else "Fastest: "
    return (
        f"\n{best}{called(row)}{turns}: {seconds(row['iteration_s'])} an iteration, {row['tokens_per_s']:,.0f} tokens/s, "
        f"{percent(row['mfu'])} MFU. Its critical path is {spent}. "
        f"No schedule can take less than {seconds(row['lower_bound_s'])}: {row['lower_bound_reason']}."
    )


def spread_table(found: Sequence[Row]) -> Table:
    """Percentiles of the runs with jitter."""
    runs = found[0]["spread"]["runs"]
    title = f"iteration time over {runs} runs with jitter"
    table = Table(title=title, title_justify="left", padding=(0, 1, 0, 0), box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("schedule", style="bold")
    table.add_column("TCP")
    for name in ("nominal", "5 %", "median", "95 %", "worst"):
        table.add_column(name, justify="right")
    for row in found:
        spread = row["spread"]
        times = [row["iteration_s"], *(spread[key] for key in ("p5_s", "p50_s", "p95_s", "worst_s"))]
        table.add_row(row["schedule"], row["tcp"], *(seconds(value) for value in times))
    return table
