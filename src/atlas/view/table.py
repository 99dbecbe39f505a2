"""Tables for the terminal: the results of several schedules, and the difference of two timelines. Takes plain
dicts and a Difference, and computes only ratios of their figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Column, Table
from rich.text import Text

from atlas.ir.difference import Difference

WAITS = {"wan": ("wan",), "peer": ("peer", "fabric"), "sync": ("sync",), "ends": ("fill", "drain")}
"""By column of the table: the causes of idle time that it adds up."""
SPENT_ON = {"wire": "on the wire", "queue": "busy links", "wait": "other waiting"}
"""Categories of the critical path that have another name in a table."""
GROUP_KEYS = ("all_groups_s", "group", "num_groups")
"""Of the slowest group of a plan with several: what its row and its Timeline's `meta` have of all groups."""


def seconds(value: float | None) -> str:
    """Four significant figures, or all whole seconds, with a fitting unit."""
    if value is None:
        return "–"
    value = float(f"{value:.4g}") if abs(value) < 1000 else value  # 999.96 ms is a second
    if abs(value) >= 1000:
        return f"{value:,.0f} s"
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value) >= unit:
            return f"{value / unit:#.4g} {name}"
    return f"{value / 1e-9:.4g} ns" if value else "0 s"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


# ---- a table and its columns -----------------------------------------------------------------------------------------
def plain_table(*columns: Column | str, title: str = "", caption: str = "", gap: int = 1) -> Table:
    """An empty table without a frame; `gap` is the number of blanks between columns."""
    return Table(
        *columns,
        title=Text(title) if title else None,
        caption=Text(caption) if caption else None,
        title_justify="left",
        caption_justify="left",
        padding=(0, gap, 0, 0),
        show_edge=False,
        box=box.SIMPLE_HEAD,
    )


def right(*names: str) -> list[Column]:
    """Columns of numbers."""
    return [Column(name, justify="right", no_wrap=True) for name in names]


def whole_words(*names: str, style: str = "") -> list[Column]:
    """Columns of names that are not broken into lines."""
    return [Column(name, no_wrap=True, style=style) for name in names]


def folded(*names: str, ratio: int | None = None) -> list[Column]:
    """Columns of text that takes as many lines as it needs; with a `ratio`, a share of the table's width."""
    return [Column(name, overflow="fold", ratio=ratio) for name in names]


# ---- results and differences -----------------------------------------------------------------------------------------
def results_table(rows: Sequence[Mapping[str, Any]], *, title: str = "", source: str = "simulated") -> Table:
    """One line per schedule, as `atlas simulate` prints it. Keys that a row lacks are shown as a dash.

    `busy` and the waits are shares of all accelerators' time and add up to 100 %; `ends` is fill and drain. A `!`
    marks what does not fit in memory. The table fits 80 columns. Of a plan with several groups it has the time of all
    groups; the other figures are those of the slowest group.
    """
    several = any("all_groups_s" in row for row in rows)
    times = ("all\ngroups", "slowest\ngroup") if several else ("iter-\nation",)
    figures = right(*times, "speed-\nup", "lower\nbound", *([] if several else ["gap"]), "in\nflight", "busy\n%")
    waits = right(*(f"{name}\n%" for name in WAITS))
    names = [Column("schedule", style="bold"), *whole_words("TCP")]
    table = plain_table(*names, *figures, *waits, title=title, caption=source, gap=0)
    fitting = [row for row in rows if row.get("iteration_s") and row.get("fits", True)]
    fastest = min((whole_s(row) for row in fitting), default=None)
    for row in rows:
        speedup, peak, best = row.get("speedup"), row.get("peak_in_flight"), whole_s(row) == fastest
        gap = "–" if row.get("gap") is None else f"{row['gap']:.2f}x"
        table.add_row(
            Text(str(row.get("schedule", "?")) + (" (turns)" if row.get("sharing") else "")),
            Text(str(row.get("tcp") or "–")),
            *([seconds(row.get("all_groups_s"))] if several else []),
            seconds(row.get("iteration_s")),
            "–" if speedup is None else f"{speedup:.2f}x",
            seconds(row.get("lower_bound_s")),
            *([] if several else [gap]),
            "–" if peak is None else f"{'' if row.get('fits', True) else '! '}{peak}",
            *_shares(row),
            style="green" if best and len(rows) > 1 else None,
        )
    return table


def whole_s(row: Mapping[str, Any]) -> float:
    """The iteration: of all groups where there are several."""
    return float(row.get("all_groups_s") or row.get("iteration_s") or 0.0)


def groups_note(rows: Sequence[Mapping[str, Any]], *, times: bool = True) -> list[str]:
    """Which group of a plan the rows and their timelines are of, and the time of all groups (without `times`: a column
    has it). Nothing where there is one group."""
    rows = [row for row in rows if "all_groups_s" in row]
    if not rows:
        return []
    shown = " or ".join(dict.fromkeys(f"group {row['group']}" for row in rows))
    first = f"The plan has {rows[0]['num_groups']} groups of pipelines. This is the slowest ({shown})"
    if not times:
        return [f"{first}; `all groups` includes the all-reduce between groups over the WAN."]
    each = ", ".join(dict.fromkeys(f"{row['schedule']} ({row['tcp']}) {seconds(whole_s(row))}" for row in rows))
    return [f"{first}. An iteration of all groups, with the all-reduce between them over the WAN: {each}."]


def _shares(row: Mapping[str, Any]) -> list[str]:
    """Shares of the accelerators' time, in whole per cent."""
    busy, idle = row.get("utilization"), dict(row.get("bubbles_s") or {})
    total = sum(idle.values())
    if busy is None:
        return ["–"] * (1 + len(WAITS))
    waits = [sum(idle.get(cause, 0.0) for cause in causes) / total if total else 0.0 for causes in WAITS.values()]
    return [f"{100 * share:.0f}" for share in (busy, *((1 - busy) * wait for wait in waits))]


def side_by_side(a: Mapping[str, Any], b: Mapping[str, Any]) -> Table:
    """Two summaries: where the time of each goes, and what changed. Waits are seconds per worker."""
    table = plain_table(Column(style="bold"))
    for summary in (a, b):
        turns = " (turns)" if summary["sharing"] else ""
        table.add_column(Text(f"{summary['schedule']}{turns}, {summary['source']}"), justify="right")
    table.add_column("change", justify="right")
    lines = [("iteration", a["iteration_s"], b["iteration_s"])]
    if "all_groups_s" in a and "all_groups_s" in b:
        lines.insert(0, ("iteration, all groups", a["all_groups_s"], b["all_groups_s"]))
        lines[1] = ("iteration, slowest group", *lines[1][1:])
    for cause in {**a["bubbles_s"], **b["bubbles_s"]}:
        waits = [summary["bubbles_s"].get(cause, 0.0) / summary["num_workers"] for summary in (a, b)]
        lines.append((f"idle per worker, {cause}", *waits))
    lines += [
        (f"critical path, {SPENT_ON.get(part, part)}", spent, b["critical_path_s"].get(part, 0.0))
        for part, spent in a["critical_path_s"].items()
    ]
    for name, first, second in lines:
        if first or second:
            change = f"{second / first:.3f}x" if first else "new"
            table.add_row(name, seconds(first), seconds(second), change)
    table.add_row("busy", percent(a["utilization"]), percent(b["utilization"]), "")
    table.add_row("microbatches in flight", str(a["peak_in_flight"]), str(b["peak_in_flight"]), "")
    return table


def compare_table(difference: Difference) -> Table:
    """The second timeline against the first, kind by kind, with the worst op of each named. Fits 80 columns."""
    (name_a, name_b), (source_a, source_b) = difference.names, difference.sources
    title = f"{name_b} ({source_b}) against {name_a} ({source_a}), op by op"
    figures = right("ops", "dura-\ntion", "off by\n(p95)", "\nworst", "starts\nlater by", "\nworst")
    names = whole_words("kind", style="bold")
    table = plain_table(*names, *figures, "worst op", title=title, caption=_verdict(difference), gap=0)
    for kind in difference.kinds:
        table.add_row(
            kind.kind,
            str(kind.count),
            f"{kind.duration_ratio:.3f}x",
            percent(kind.duration_error_p95),
            percent(kind.duration_error_worst),
            seconds(kind.start_error_s),
            seconds(kind.start_error_worst_s),
            Text(kind.worst_duration if kind.duration_error_worst > 1e-9 else kind.worst_start),
        )
    return table


def _verdict(difference: Difference) -> str:
    common = f"{difference.num_common} ops in common"
    only_a, only_b = difference.num_only
    if only_a or only_b:
        common += f", {only_a} only in the first, {only_b} only in the second"
    if difference.first_divergence is None:
        return f"{common}; every one of them ends at the same time in both"
    return f"{common}; first difference at {seconds(difference.first_divergence_at_s)}: {difference.first_divergence}"
