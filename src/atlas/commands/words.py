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
from atlas.evaluate.result import Result
from atlas.view.table import seconds

Row = Mapping[str, Any]

SPENT_ON = {
    "compute": "compute",
    "wire": "bytes on the wire",
    "latency": "latency",
    "queue": "waiting for busy links",
    "sync": "gradient sync",
    "wait": "other waiting",
}
"""A critical path's categories as a sentence names them."""


def headline(result: Result) -> str:
    """`three-dcs: gpt 13.1B on 48 GPUs: stages west 4 + central 4 + east 4, 4 pipelines, 24 microbatches`."""
    return f"{result.case.job.name}: {setup(result)}"


def setup(result: Result) -> str:
    """What runs where."""
    job, frame = result.case.job, result.case.layout
    stages = " + ".join(f"{name} {count}" for name, count in Counter(frame.rank_dc).items())
    gpus = job.tp * job.pp * frame.num_pipelines * job.cells
    cells = f"{job.cells} cells of " if job.cells > 1 else ""
    tp = f" x tp {job.tp}" if job.tp > 1 else ""
    return (
        f"{job.model.family} {_billions(model_params(job.model))} on {gpus:,} GPUs: "
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
    lines.append(priced(found[0]["pricing"], found[0]["runtime"]))
    return lines + _too_big(found)


def priced(pricing: str, runtime: str) -> str:
    """`Compute: calibrated constants.`"""
    other = "" if runtime == "atlas" else f" Runtime: {runtime}, which `atlas train` does not execute."
    return f"Compute: {pricing}.{other}"


def page_notes(results: Sequence[Result], drawn: Sequence[Result]) -> list[str]:
    """What a page says under its title: its own table has the rest."""
    left = [result.row() for result in results if result not in drawn]
    times = ", ".join(f"{row['schedule']} {seconds(row['iteration_s'])}" for row in left)
    beside = [f"Not drawn, on one TCP connection: {times}."] if left else []
    return [f"{setup(results[0])}.", *beside, *_too_big([result.row() for result in drawn])]


def _too_big(found: Sequence[Row]) -> list[str]:
    too_big = {row["schedule"]: row for row in found if not row["fits"]}
    return [
        f"! {name} would not run: it needs {row['peak_gib']:.1f} GiB of a GPU's {row['memory_gib']:.1f} GiB."
        for name, row in too_big.items()
    ]


def why(found: Sequence[Row]) -> str:
    """What the fastest that fits spends its time on, and what is left to gain."""
    row = min(found, key=lambda row: (not row["fits"], float(row["iteration_s"])))
    path = {part: s for part, s in row["critical_path_s"].items() if s > 0.005 * row["iteration_s"]}
    parts = sorted(path, key=lambda part: -path[part])
    spent = ", ".join(f"{100 * path[part] / row['iteration_s']:.0f}% {SPENT_ON[part]}" for part in parts)
    turns = ", pipelines taking turns on the WAN" if row["sharing"] else ""
    best = "" if len(found) == 1 else "Fastest: "
    return (
        f"\n{best}{called(row)}{turns}: {seconds(row['iteration_s'])} an iteration, "
        f"{row['tokens_per_s']:,.0f} tokens/s, MFU {100 * row['mfu']:.0f}%. "
        f"Its critical path is {spent}. No order of this work on these links can take less than "
        f"{seconds(row['lower_bound_s'])}: {row['lower_bound_reason']}."
    )


def more_table(found: Sequence[Row]) -> Table | None:
    """The steady period over several iterations and the percentiles of runs with jitter, where they were asked for."""
    columns: dict[str, list[float]] = {"one iteration": [row["iteration_s"] for row in found]}
    if found[0]["steady_s"] is not None:
        columns["steady"] = [row["steady_s"] for row in found]
    if found[0]["spread"] is not None:
        for name, key in (("5%", "p5_s"), ("median", "p50_s"), ("95%", "p95_s"), ("worst", "worst_s")):
            columns[name] = [row["spread"][key] for row in found]
    if len(columns) == 1:
        return None
    table = Table(padding=(0, 1, 0, 0), box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("schedule", style="bold")
    table.add_column("TCP")
    for name in columns:
        table.add_column(name, justify="right")
    for row, *times in zip(found, *columns.values(), strict=True):
        table.add_row(row["schedule"], row["tcp"], *(seconds(value) for value in times))
    if found[0]["spread"] is not None:
        table.caption = f"Percentiles are of {found[0]['spread']['runs']} runs with the job's jitter."
        table.caption_justify = "left"
    return table
