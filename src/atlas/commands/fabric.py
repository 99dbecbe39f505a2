"""Compare the networks that a datacenter could be built with: ports, watts and dollars, and the nodes its power allows.

Prices each datacenter of JOB with rail, fat-tree, flat-rail and photonic fabrics. Fibre, NICs, cooling and control are
not counted. With --circuits it lists the circuit changes of one iteration on photonic rails; with --rehearse it makes
these changes in real time on emulated switches, without a model. See docs/fabric.md.
"""

from __future__ import annotations

import argparse
from typing import Any

from atlas.console import job_flags, number, print_json, remark, show
from atlas.cost.table import Costs
from atlas.errors import AtlasError
from atlas.evaluate import build, find_schedule, prepare
from atlas.fabric.circuit_plan import CircuitChange, circuit_plan
from atlas.fabric.controller import DEADLINE_S, DELAYS
from atlas.fabric.rehearsal import FabricRehearsal, rehearse_fabric
from atlas.fabric.switch import EmulatedSwitch
from atlas.ir.program import Program
from atlas.spec.fabric import KINDS, Fabric
from atlas.spec.job import Cluster, DataCenter, Job
from atlas.spec.plan import load_job_or_plan
from atlas.spec.power import bill_in, it_watts, keeps_ring, nodes_allowed, parts_in, server_watts
from atlas.view.table import plain_table, right, seconds, whole_words

COUNTED = ("switch_ports", "optical_ports", "transceivers", "watts", "watts_per_gpu", "usd", "usd_per_gpu")
"""Figures of a fabric's bill."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="a job file or a plan")
    job_flags(parser)
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON instead of tables")
    add("--circuits", action="store_true", help="list the circuit changes of an iteration, and what triggers each")
    add(
        "--rehearse",
        type=number(0.01, 1000),
        metavar="SLOWER",
        help="make these changes in real time on emulated switches, all times multiplied by SLOWER",
    )
    add(
        "--fault",
        choices=("late", "refuses", "no-change"),
        help="how the emulated switches fail after their first change; no-change: acknowledge a change without making "
        "it",
    )
    add("--schedule", default="1f1b", metavar="NAME", help="the schedule of --circuits and --rehearse")


def run(args: argparse.Namespace) -> int:
    if args.fault is not None and args.rehearse is None:
        raise AtlasError(f"--fault {args.fault}: needs --rehearse SLOWER. Give it, or leave out --fault")
    job, _ = load_job_or_plan(args.job, args.set, to_plan=not (args.circuits or args.rehearse))
    if args.circuits or args.rehearse is not None:
        return _circuits(job, args)
    found = [_datacenter(job, dc) for dc in job.cluster.datacenters]
    if args.json:
        print_json({"datacenters": found})
        return 0
    for k, one in enumerate(found):
        show(*([""] if k else []), _verdict(one), *_table(one))
    return 0


def _circuits(job: Job, args: argparse.Namespace) -> int:
    schedule = find_schedule(args.schedule)
    if job.groups:
        remark(f"this is one of the plan's {len(job.groups)} groups of pipelines")
    case = prepare(job, schedule)
    program = build(case, schedule)
    costs = case.costs_of(program)
    plan = circuit_plan(program, costs.circuits)
    found: dict[str, Any] = {"changes": [change.row() for change in plan]}
    has_rails = any(dc.fabric is not None and dc.fabric.kind == "photonic" for dc in job.cluster.datacenters)
    why = "every photonic rail has enough circuits for this job" if has_rails else "the job has no photonic rails"
    text = [] if plan else [f"No circuits change: {why}."]
    if args.circuits:
        text += map(_words, plan)
    if args.rehearse is not None:
        ran = _rehearsed(job, program, costs, args)
        found["rehearsal"] = {"predicted_s": ran.predicted_s, "measured_s": ran.measured_s, "error": ran.error}
        text.append(
            f"{ran.num_changes} circuit changes: predicted {seconds(ran.predicted_s)}, measured "
            f"{seconds(ran.measured_s)} ({ran.error:+.1%})."
        )
        text += [f"The circuits were not changed: {ran.failed}"] if ran.failed else []
    if args.json:
        print_json(found)
    else:
        show(*text)
    return 0


def _words(change: CircuitChange) -> str:
    pairs = ", ".join(" - ".join(pair) for pair in change.circuits)
    after = ", ".join(change.after) or "the previous iteration"
    return f"{change.dc}: change {change.number} to {change.what.to}: {pairs}; after {after}"


def _rehearsed(job: Job, program: Program, costs: Costs, args: argparse.Namespace) -> FabricRehearsal:
    fabrics = {dc.name: dc.fabric or Fabric() for dc in job.cluster.datacenters}
    slower = args.rehearse
    switches = {
        name: EmulatedSwitch(fabric.reconfigure_ms / 1e3 * slower, fault=args.fault or "none", fails_at=1)
        for name, fabric in fabrics.items()
    }
    slowest_s = max(fabric.reconfigure_ms for fabric in fabrics.values()) / 1e3 * slower
    deadline_s, fallback = DEADLINE_S + DELAYS * slowest_s, keeps_ring(job.cluster)
    return rehearse_fabric(program, costs, switches, slower=slower, deadline_s=deadline_s, fallback=fallback)


def _datacenter(job: Job, dc: DataCenter) -> dict[str, Any]:
    cluster, parts = job.cluster, parts_in(job.cluster, dc)
    return {
        "name": dc.name,
        "gpu": dc.gpu,
        "nodes": dc.nodes,
        "gpus_per_node": dc.gpus_per_node,
        "nodes_from_power": dc.name in job.powered,
        "power_kw": dc.power_kw,
        "pue": dc.pue,
        "kind": dc.fabric.kind if dc.fabric else None,
        "server_watts_per_gpu": cluster.gpu_type(dc.gpu).server_watts,
        "server_watts_source": cluster.gpu_type(dc.gpu).server_watts_source,
        "parts": parts.model_dump(),
        "fabrics": [_fabric(cluster, dc, kind, parts.switch_ports) for kind in KINDS],
    }


def _fabric(cluster: Cluster, dc: DataCenter, kind: Any, switch_ports: int) -> dict[str, Any]:
    bill = bill_in(cluster, dc, kind)
    powered = dc.power_kw is not None and server_watts(cluster, dc) is not None
    return {
        "kind": kind,
        "fits": kind != "flat-rail" or dc.nodes <= switch_ports,
        **{name: getattr(bill, name) for name in COUNTED},
        "it_watts": it_watts(cluster, dc, kind),
        "nodes_allowed": nodes_allowed(cluster, dc, kind) if powered else None,
    }


# ---- text ----------------------------------------------------------------------------------------------------------
def _verdict(one: dict[str, Any]) -> str:
    """The sentence that comes first."""
    name, gpus = one["name"], one["nodes"] * one["gpus_per_node"]
    if one["nodes"] == 1:
        return f"{name}: one node needs no fabric: 0 W, $0."
    light = next(row for row in one["fabrics"] if row["kind"] == "photonic")
    rest = [row for row in one["fabrics"] if row["kind"] != "photonic" and row["fits"]]
    best = min(rest, key=lambda row: row["watts"])
    text = (
        f"{name}: for {gpus:,} {one['gpu']}, photonic rails need {light['watts_per_gpu']:.2f} W a GPU; {best['kind']}, "
        f"the electrical fabric with the lowest power, needs {best['watts_per_gpu']:.2f} W "
        f"({_ratio(best, light, 'watts')}) and costs ${best['usd_per_gpu']:,.0f} a GPU instead of "
        f"${light['usd_per_gpu']:,.0f} ({_ratio(best, light, 'usd')})."
    )
    if light["nodes_allowed"] is not None:
        per_node = one["gpus_per_node"]
        text += (
            f" {one['power_kw']:,g} kW are enough for {light['nodes_allowed'] * per_node:,} GPUs with photonic rails"
        )
        text += f" and {best['nodes_allowed'] * per_node:,} with {best['kind']}."
    return text


def _ratio(a: dict[str, Any], b: dict[str, Any], key: str) -> str:
    return f"{a[key] / b[key]:.2f}x" if b[key] else "infinitely more"


def _table(one: dict[str, Any]) -> list[Any]:
    if one["nodes"] == 1:
        return []
    parts = one["parts"]
    watts = one["server_watts_per_gpu"]
    servers = f" Servers: {watts:,g} W a GPU ({one['server_watts_source'] or 'of the job'})." if watts else ""
    few = (
        ""
        if all(row["fits"] for row in one["fabrics"])
        else f" > {parts['switch_ports']}: more nodes than a switch has ports."
    )
    caption = f"Parts: {parts['source']}, {parts['date']}.{servers}{few}{' * in the job' if one['kind'] else ''}"
    powered = one["power_kw"] is not None
    figures = right("ports", "optics", "kW", "W/GPU", "$", "$/GPU", *(["GPUs fit"] if powered else []))
    table = plain_table(*whole_words("fabric"), *figures, caption=caption)
    for row in one["fabrics"]:
        ports = row["switch_ports"] or row["optical_ports"]
        fit = row["nodes_allowed"]
        allowed = [f"{fit * one['gpus_per_node']:,}" if fit is not None else "-"] if powered else []
        name = row["kind"] + (" *" if row["kind"] == one["kind"] else "")
        if not row["fits"]:
            table.add_row(name, f"> {parts['switch_ports']}", *["-"] * 5, *allowed)
            continue
        cells = [f"{ports:,}", f"{row['transceivers']:,}", f"{row['watts'] / 1e3:,.1f}", f"{row['watts_per_gpu']:.2f}"]
        table.add_row(name, *cells, f"{row['usd']:,.0f}", f"{row['usd_per_gpu']:,.0f}", *allowed)
    return [table]
