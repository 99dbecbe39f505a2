"""The result of a search as data: rows for tables and JSON, why a rival lost, the Pareto front, and the scene of a map.

Plain data out, so that `view` can draw it without knowing plans. Computes nothing that is not in the figures.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from atlas.cost.cluster_arrays import ClusterArrays, all_nodes_bps
from atlas.planner.candidate import KINDS, Candidate
from atlas.planner.fabrics import energy_of, energy_row
from atlas.planner.judge import PlanFigures, SimulatedCandidate, as_dict
from atlas.planner.objective import Objective
from atlas.planner.run import SearchResult
from atlas.spec import Job

SPENT_ON = {
    "compute": "compute",
    "wan": "WAN",
    "sync": "gradient sync",
    "wait": "waiting",
    "step": "optimizer",
}

"""Parts of the critical path (`PlanFigures.parts_s`), as tables call them."""
SAME = 0.0005
"""Plans whose times, or dollars, differ by less than this share are called equal."""
ROUNDING = 1e-9
"""Dollars, and shares of them, that may come from rounding."""


def rows(planned: SearchResult) -> list[dict[str, Any]]:
    """The winner, then its rivals; see `distinct`."""
    best = planned.winner
    found = []
    for k, judged in enumerate(distinct(planned)):
        lost = "" if k == 0 else why_lost(judged, best, planned.objective)
        energy = energy_row(planned.job.cluster, judged)
        found.append({**as_dict(judged), **energy, "kind": KINDS[judged.candidate.kind], "lost": lost})
    return found


def distinct(planned: SearchResult) -> list[SimulatedCandidate]:
    """The winner and its rivals without mirror images (the same stages with the datacenters in another order) and
    without plans that differ in microbatch size or cells only: the best of each is kept."""
    found: dict[tuple[object, ...], SimulatedCandidate] = {}
    for judged in (planned.winner, *planned.rivals):
        candidate = judged.candidate
        groups = sorted((group.replicas, *sorted(group.places)) for group in candidate.groups)
        found.setdefault((candidate.tp, *groups), judged)
    return list(found.values())


def why_lost(rival: SimulatedCandidate, best: SimulatedCandidate, objective: Objective) -> str:
    """`1.12x slower (+0.31 s WAN)`, in terms of what was asked for."""
    mine, its = best.figures, rival.figures
    missed = float(objective.missed(its.iteration_s, its.usd_per_iteration, its.tokens))
    if missed:
        return f"misses the limit by {100 * missed:.0f} %"
    if objective.minimise == "cost":
        ratio = its.usd_per_iteration / mine.usd_per_iteration if mine.usd_per_iteration else 1.0
        what = "egress" if its.egress_usd - mine.egress_usd > its.rent_usd - mine.rent_usd else "rent"
        if ratio < 1 + SAME:
            return "as cheap, slower" if its.iteration_s > (1 + SAME) * mine.iteration_s else "as cheap"
        return _times(ratio, "the dollars") + f", most of it {what}"
    ratio = its.iteration_s / mine.iteration_s
    if ratio < 1 - SAME:
        return "slower once its order is searched"
    if ratio < 1 + SAME:
        more = its.usd_per_iteration - mine.usd_per_iteration
        return "as fast, costs more" if more > ROUNDING else "as fast"
    part, more_s = max(_differences(its, mine).items(), key=lambda item: item[1])
    return f"{_times(ratio, 'slower')} (+{_seconds(more_s)} {SPENT_ON[part]})"


def _times(ratio: float, what: str) -> str:
    return f"{ratio:.2f}x {what}" if ratio < 10 else f"{ratio:,.0f}x {what}"


def _seconds(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}g} s" if value >= 1 else f"{1000 * value:.{digits}g} ms"


def _differences(its: PlanFigures, mine: PlanFigures) -> dict[str, float]:
    return {part: its.parts_s.get(part, 0.0) - mine.parts_s.get(part, 0.0) for part in SPENT_ON}


def notes(planned: SearchResult) -> list[str]:
    """On the winner, in sentences."""
    figures = planned.winner.figures
    part = max(SPENT_ON, key=lambda name: figures.parts_s.get(name, 0.0))
    share = figures.parts_s[part] / figures.iteration_s
    return [f"{100 * share:.0f} % of the critical path is {SPENT_ON[part]}.", *empty_slots(planned)]


def empty_slots(planned: SearchResult) -> list[str]:
    """One sentence if the winner's pipelines do not all have the same number of microbatches."""
    best = planned.winner.candidate
    empty = best.slots - planned.space.total_microbatches(best.microbatch)
    words = f"{empty} of the plan's {best.slots} microbatch slots stay empty: some pipelines have one microbatch fewer."
    return [words] if empty else []


def front(planned: SearchResult) -> list[SimulatedCandidate]:
    """Of the plans that are shown (`distinct`), the Pareto-optimal ones in time and dollars, and where power or fabrics
    are stated in joules and dollars of the fabric too. Fastest first."""
    found: list[tuple[SimulatedCandidate, tuple[float, ...]]] = []
    for judged in sorted(distinct(planned), key=lambda j: (j.figures.iteration_s, j.figures.usd_per_iteration)):
        goals: tuple[float, ...] = (judged.figures.usd_per_iteration,)
        if (energy := energy_of(planned.job.cluster, judged)) is not None:
            goals += (energy.watts * judged.figures.iteration_s, energy.fabric_usd)
        if not any(
            all(mine >= its * (1 - ROUNDING) for mine, its in zip(goals, others, strict=True)) for _, others in found
        ):
            found.append((judged, goals))
    return [judged for judged, _ in found]


def compared(planned: SearchResult) -> str:
    """How the figures of a table were computed."""
    text = f"{planned.num_estimated:,} candidates estimated, {planned.num_simulated} simulated"
    how = {0: "with 1f1b-eager", planned.num_simulated: "each under its own searched order"}
    some = f"{planned.num_searched} under searched orders, the others with 1f1b-eager"
    return f"{text}, {how.get(planned.num_searched, some)}. All times are simulated."


def has_prices(cluster: ClusterArrays) -> bool:
    return bool((cluster.usd_per_gpu_s > 0).any())


# ---- the scene of a map --------------------------------------------------------------------------------------
MOST_ON_MAP = 6
"""Plans whose placements a map shows."""


def scene(planned: SearchResult) -> dict[str, Any]:
    """Datacenters, links and the placements of the first few plans: what `view.map` draws."""
    cluster = planned.cluster
    shown = distinct(planned)[:MOST_ON_MAP]
    found = rows(planned)
    return {
        **places(planned.job, cluster),
        "plans": [drawn_plan(cluster, judged, row) for judged, row in zip(shown, found, strict=False)],
        "rows": found,
        "front": [as_dict(judged) for judged in front(planned)],
        "priced": has_prices(planned.cluster),
        "told": compared(planned),
    }


def places(job: Job, cluster: ClusterArrays) -> dict[str, Any]:
    """The part of a scene that all plans share: where the datacenters are."""
    return {
        "title": job.name,
        "datacenters": [
            {
                "name": dc.name,
                "gpus": dc.nodes * dc.gpus_per_node,
                "gpu": dc.gpu,
                "usd_per_gpu_hour": dc.usd_per_gpu_hour,
                "location": dc.location,
            }
            for dc in job.cluster.datacenters
        ],
        "latency_ms": (1000 * cluster.latency_s).tolist(),
        "joined": cluster.joined.tolist(),
    }


def drawn_plan(cluster: ClusterArrays, judged: SimulatedCandidate, row: dict[str, Any]) -> dict[str, Any]:
    """One plan of a scene."""
    return {
        "row": row,
        "gpus": dict(judged.candidate.gpus),
        "groups": [list(group.places) for group in judged.candidate.groups],
        "links": links(cluster, judged.candidate, judged.figures),
    }


def _capacity_bps(cluster: ClusterArrays, candidate: Candidate, i: int, j: int) -> float:
    """The rate of all communicating nodes together: a pair for each pipeline, or all nodes when groups sum
    gradients."""
    nodes = min(_nodes(cluster, candidate, i), _nodes(cluster, candidate, j))
    all_nodes = float(all_nodes_bps(cluster, i, j, nodes, candidate.tcp))
    for group in candidate.groups:
        names = [name for name, _ in group.places]
        if cluster.names[i] in names and cluster.names[j] in names:
            return min(all_nodes, group.replicas * float(cluster.pair_bps[i, j]))
    return all_nodes


def _nodes(cluster: ClusterArrays, candidate: Candidate, i: int) -> int:
    """Nodes that a candidate uses in a datacenter, filled one after the other."""
    per_node = int(cluster.gpus_per_node[i])
    per_node -= per_node % candidate.tp if per_node >= candidate.tp else 0
    return max(1, -(-candidate.gpus[cluster.names[i]] // per_node))


def links(cluster: ClusterArrays, candidate: Candidate, figures: PlanFigures) -> list[dict[str, Any]]:
    """Every pair of datacenters that exchanges something, with how busy the busier direction is."""
    at = cluster.index
    hops = [(a, b) for group in candidate.groups for (a, _), (b, _) in pairwise(group.places)]
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for (a, b), sent in figures.link_bytes.items():
        key = (a, b) if at[a] < at[b] else (b, a)
        capacity = _capacity_bps(cluster, candidate, at[a], at[b])
        load = sent * 8 / (capacity * figures.iteration_s)
        old = found.get(key, {"load": 0.0, "gb": 0.0})
        found[key] = {
            "a": key[0],
            "b": key[1],
            "load": max(old["load"], load),
            "gb": old["gb"] + sent / 1e9,
            "gbps": capacity / 1e9,
            "pipeline": any({a, b} == {one, two} for one, two in hops),
            "latency_ms": 1000 * float(cluster.latency_s[at[a], at[b]]),
            "usd_per_hour": old.get("usd_per_hour", 0.0)
            + sent * float(cluster.usd_per_byte[at[a], at[b]]) / figures.iteration_s * 3600,
        }
    return list(found.values())
