"""The verdict on a search: is it worth training over several regions, by how much, at what cost; the families side by
side; which figures are priors and which are missing.

Makes sentences and rows from existing figures; computes no plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atlas.planner.breakeven import BreakEven
from atlas.planner.candidate import KINDS, Candidate
from atlas.planner.families import INNER_STEPS, Families
from atlas.planner.judge import SimulatedCandidate, as_dict
from atlas.planner.report import drawn_plan, has_prices, scene, why_lost
from atlas.planner.run import SearchResult
from atlas.spec import Job

LOW_COMMUNICATION = f"low communication (DiLoCo-style, {INNER_STEPS} inner steps)"
NOT_RUN = "changes training semantics; not run by Atlas"
NO_ROOM = "no region alone has room for this job"
SAME = 0.005
"""Costs within this share of each other are called the same."""


def names_of(candidate: Candidate) -> str:
    """`us-east-1 + europe-west4`."""
    return " + ".join(candidate.gpus)


def headline(families: Families, answers: Sequence[BreakEven] = ()) -> str:
    """The verdict in a sentence or two."""
    planned = families.planned
    winner, alone, together = planned.winner, families.alone, families.together
    priced = has_prices(planned.cluster)
    if len(planned.cluster.names) == 1:
        return f"{names_of(winner.candidate)}: {winner.figures.tokens_per_s:,.0f} tokens/s{_cost(winner, priced)}."
    if winner.candidate.kind == "one":
        if together is None:
            return f"{names_of(winner.candidate)} alone: no plan over several regions was found{_cost(winner, priced)}."
        return _not_worth(planned, winner, together, priced, answers)
    if alone is None:
        why = "no plan in one region fits and meets the limits" if planned.objective.has_limits else NO_ROOM
        text = f"Only together: {why}. {names_of(winner.candidate)} trains "
        return f"{text}{winner.figures.tokens_per_s:,.0f} tokens/s{_cost(winner, priced)}."
    speed = alone.figures.iteration_s / winner.figures.iteration_s
    faster = f"trains {speed:.2f}x faster than" if speed >= 1 else f"takes {1 / speed:.2f}x as long as"
    text = f"Worth it: {names_of(winner.candidate)} {faster} {names_of(alone.candidate)} alone"
    if priced:
        text += f" and {_costs(winner, alone)}{_cost(winner, priced)}"
    if missed := _missed(planned, alone):
        text += f"; {names_of(alone.candidate)} alone {missed}"
    return f"{text}."


def _not_worth(
    planned: SearchResult,
    winner: SimulatedCandidate,
    together: SimulatedCandidate,
    priced: bool,
    answers: Sequence[BreakEven],
) -> str:
    best = "cheapest" if planned.objective.minimise == "cost" else "fastest"
    within = " of the plans that meet the limits" if planned.objective.has_limits else ""
    slower = together.figures.iteration_s / winner.figures.iteration_s
    text = f"Not worth it: {names_of(winner.candidate)} alone is {best}{within}{_cost(winner, priced)}. "
    text += f"{names_of(together.candidate)} takes {slower:.2f}x as long"
    if priced:
        text += f" and {_costs(together, winner)}"
    if missed := _missed(planned, together):
        text += f", and {missed}"
    edge = next((one for one in answers if one.what == "bandwidth" and one.value is not None), None)
    if edge is not None and edge.value is not None:
        text += f"; it would be worth it from {edge.value:.2g} Gbit/s per node pair on"
    elif any(one.what == "bandwidth" and one.is_known for one in answers):
        text += "; more bandwidth would not change that"
    return f"{text}."


def _missed(planned: SearchResult, judged: SimulatedCandidate) -> str:
    """`misses the limit by 14 %`; empty for a plan that meets all limits."""
    figures = judged.figures
    missed = float(planned.objective.missed(figures.iteration_s, figures.usd_per_iteration, figures.tokens))
    return f"misses the limit by {100 * missed:.0f} %" if missed else ""


def _cost(judged: SimulatedCandidate, priced: bool) -> str:
    """` ($1.07M per trillion tokens, 30 % of it egress)`."""
    figures = judged.figures
    if not priced:
        return ""
    share = figures.egress_usd / figures.usd_per_iteration if figures.usd_per_iteration else 0.0
    egress = f", {100 * share:.0f} % of it egress" if share >= SAME else ""
    return f" ({dollars(figures.usd_per_tera_token)} per trillion tokens{egress})"


def _costs(one: SimulatedCandidate, than: SimulatedCandidate) -> str:
    """`costs 8 % more per token`."""
    ratio = one.figures.usd_per_tera_token / max(than.figures.usd_per_tera_token, 1e-12)
    if abs(ratio - 1) < SAME:
        return "costs the same per token"
    if ratio >= 2:
        return f"costs {ratio:.1f}x as much per token"
    return f"costs {100 * abs(ratio - 1):.0f} % {'more' if ratio > 1 else 'less'} per token"


def dollars(value: float) -> str:
    """`$1.07M`, `$250K`."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"${value / size:.3g}{letter}"
    return f"${value:.3g}"


def family_rows(families: Families) -> list[dict[str, Any]]:
    """One row for each family, and one for low-communication training."""
    planned = families.planned
    best = planned.winner
    rows: list[dict[str, Any]] = []
    for kind, words in KINDS.items():
        judged = families.best.get(kind)
        if judged is None:
            if len(planned.cluster.names) > 1:
                rows.append({"family": words, "kind": kind, "plan": None, "lost": "no plan fits and meets the limits"})
            continue
        wins = judged.candidate == best.candidate
        judged = best if wins else judged
        lost = "" if wins else why_lost(judged, best, planned.objective)
        rows.append({"family": words, "kind": kind, "plan": as_dict(judged), "lost": lost})
    if families.low_communication is not None:
        low = families.low_communication
        rows.append({"family": LOW_COMMUNICATION, "kind": "low", "plan": as_dict(low), "lost": NOT_RUN})
    return rows


def page_scene(families: Families, answers: Sequence[BreakEven]) -> dict[str, Any]:
    """What `view.map` draws: the scene of the plans, the verdict and the families."""
    found = scene(families.planned)
    cluster, priors = families.planned.cluster, prior_links(families.planned.job)
    for row in (one for one in family_rows(families) if one["plan"] is not None):
        judged = families.low_communication if row["kind"] == "low" else families.best[row["kind"]]
        assert judged is not None
        drawn = drawn_plan(cluster, judged, {**row["plan"], "kind": row["family"], "lost": row["lost"]})
        found.setdefault("families", []).append(drawn)
    for plan in [*found["plans"], *found.get("families", [])]:
        for link in plan["links"]:
            link["prior"] = frozenset((link["a"], link["b"])) in priors
    found["verdict"] = headline(families, answers)
    found["break_even"] = [one.text for one in answers]
    return found


# ---- where the figures come from ---------------------------------------------------------------------------
def origins(job: Job) -> list[str]:
    """Sentences on figures that are priors, and on figures that are unknown and therefore left out."""
    priors, unknown = [], []
    for dc in job.cluster.datacenters:
        if dc.prior.usd_per_gpu_hour == "unknown" and "usd_per_gpu_hour" not in dc.model_fields_set:
            unknown.append(f"the price of {dc.gpu} in {dc.name}")
        elif dc.prior.usd_per_gpu_hour is not None and dc.prior.usd_per_gpu_hour == dc.usd_per_gpu_hour:
            priors.append(f"GPU price of {dc.name}")
    some = any(dc.usd_per_gpu_hour for dc in job.cluster.datacenters)
    for dc in job.cluster.datacenters:
        if some and "usd_per_gpu_hour" not in dc.model_fields_set and dc.prior.usd_per_gpu_hour is None:
            unknown.append(f"the price of {dc.gpu} in {dc.name}")
    words = {"latency_ms": "latency", "pair_gbps": "bandwidth", "egress_usd_per_gb": "egress price"}
    for link in job.cluster.links or ():
        same = [word for key, word in words.items() if _is_prior(link, key)]
        if same:
            priors.append(f"{', '.join(same)} between {' and '.join(link.between)}")
        missing = [word for key, word in words.items() if getattr(link.prior, key) == "unknown"]
        missing = [word for word in missing if word != "egress price" or link.egress_usd_per_gb is None]
        unknown += [f"the {word} between {' and '.join(link.between)}" for word in missing]
    found = []
    if priors:
        found.append(f"Prior, not measured by you: {'; '.join(priors)}.")
    if unknown:
        found.append(f"Unknown and left out: {'; '.join(unknown)}.")
    return found


def _is_prior(link: Any, key: str) -> bool:
    value = getattr(link, key)
    return value is not None and value == getattr(link.prior, key)


def prior_links(job: Job) -> set[frozenset[str]]:
    """Pairs of datacenters whose latency or bandwidth is a prior."""
    return {
        frozenset(link.between)
        for link in job.cluster.links or ()
        if _is_prior(link, "latency_ms") or _is_prior(link, "pair_gbps")
    }
