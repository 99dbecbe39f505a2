"""Figures of replays as a table and as curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from atlas.view.table import percent, plain_table, right, seconds, whole_words
from bubbletea.sim.simulated_cluster import TOOL_WAITS, SimulatedCluster


def table(rows: Sequence[Mapping[str, Any]], cluster: SimulatedCluster, trace: str) -> Table:
    """One line for each policy and load. Fits 80 columns."""
    title = f"{cluster.name} ({cluster.schedule}), {cluster.pattern.num_workers} accelerators; {trace}"
    key, name, _ = varied(rows)
    heads = (name, "busy\n%", "filled\n%", "tokens\n/s", "TTFT\np50", "\np95", "\np99", "refu-\nsed %", "slow-\ndown %")
    made = plain_table(*whole_words("policy", style="bold"), *right(*heads), title=title, gap=0)
    for row in rows:
        slow = row.get("slowdown")
        made.add_row(
            row["policy"],
            f"{row[key]:g}",
            f"{100 * row['utilization']:.1f}",
            f"{100 * row['fill']:.1f}",
            f"{row['tokens_per_s']:,.0f}",
            *(seconds(row[f"ttft_p{q}_s"]) for q in (50, 95, 99)),
            f"{100 * row['refused']:.1f}",
            "–" if slow is None else f"{100 * slow['mean']:.2f}",
        )
    return made


def notes(cluster: SimulatedCluster) -> str:
    """Notes below the table: the assumptions."""
    left = cluster.residual.share(cluster.some_costs.nic_bytes_per_s)
    if cluster.schedule == TOOL_WAITS:
        alone = f"Rollouts alone: {percent(1 - cluster.idle_share)} busy; the rest of the time they wait for tools."
    else:
        alone = (
            f"Training alone: {seconds(cluster.pattern.period_ns / 1e9)} an iteration, "
            f"{percent(1 - cluster.idle_share)} busy; {percent(left)} of the network is left for KV."
        )
        if cluster.num_groups > 1:
            alone += f" This is one of the plan's {cluster.num_groups} groups, without the all-reduce between groups."
    return (
        f"{alone}\n"
        "A load of 1 would fill the bubbles completely. TTFT: from arrival until the KV is delivered.\n"
        "dedicated: accelerators that only prefill; together they have as much time as the bubbles.\n"
        "All times are simulated."
    )


def varied(rows: Sequence[Mapping[str, Any]]) -> tuple[str, str, str]:
    """(key, column head, axis name) of the quantity that differs between rows: the load, or the prompt length."""
    if len({row["load"] for row in rows}) == 1 and len({row["prompt_tokens"] for row in rows}) > 1:
        return "prompt_tokens", "prompt", "prompt, tokens on average"
    return "load", "load", "load, share of the bubbles"


def by_load(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, list[tuple[float, float]]], str, bool]:
    """(series, name of x, whether y needs a log axis): p95 TTFT over load, or over the prompt length."""
    key, _, name = varied(rows)
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["ttft_p95_s"] is not None:
            series.setdefault(row["policy"], []).append((float(row[key]), row["ttft_p95_s"]))
    values = [y for points in series.values() for _, y in points]
    return series, name, bool(values) and max(values) > 10 * min(values)
