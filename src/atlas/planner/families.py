"""The best plan of each family: one region alone, pipelines across regions, data parallelism across regions; and what
low-communication training would take.

Each family has its own search, because a common search simulates few plans of a family that cannot win. With many
datacenters this would take too long, and the best plan of the common search is used. Prints nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from atlas.errors import AtlasError
from atlas.evaluate import Progress
from atlas.planner.candidate import KINDS
from atlas.planner.judge import SimulatedCandidate
from atlas.planner.run import SearchResult, make_plan
from atlas.planner.search import FEW_TRIES
from atlas.spec import Job, Link
from atlas.spec.job import Wan

MANY_DCS = 8
"""From this many datacenters on, the best plans of families are taken from the common search."""
INNER_STEPS = 100
"""Iterations between two exchanges of low-communication training (H); DiLoCo reports 50 to 500 (arXiv 2311.08105)."""

ROUNDING = 1e-6
"""A family's own plan replaces the winner only if it scores lower by more than this share."""


@dataclass(frozen=True, eq=False)
class Families:
    """By kind of plan, the best of it; and the winner, which may have come out of a family's own search."""

    planned: SearchResult
    best: dict[str, SimulatedCandidate]
    refused: dict[str, str]
    """By kind without a plan: the reason."""
    low_communication: SimulatedCandidate | None
    """Data parallelism across regions that exchange gradients every `INNER_STEPS` iterations; None if they cannot."""

    @property
    def alone(self) -> SimulatedCandidate | None:
        return self.best.get("one")

    @property
    def together(self) -> SimulatedCandidate | None:
        """The best plan over several regions."""
        found = [judged for kind, judged in self.best.items() if kind != "one"]
        return min(found, key=lambda judged: score(self.planned, judged), default=None)


def score(planned: SearchResult, judged: SimulatedCandidate) -> float:
    figures = judged.figures
    return float(planned.objective.score(figures.iteration_s, figures.usd_per_iteration, figures.tokens))


def find_families(
    planned: SearchResult,
    *,
    keep: Collection[str] = (),
    global_batch: int | None = None,
    tries: int | None = None,
    progress: Progress | None = None,
) -> Families:
    """The families of a search that has ended. An interrupt leaves those found so far."""
    job, cluster = planned.job, planned.cluster
    best: dict[str, SimulatedCandidate] = {}
    refused: dict[str, str] = {}
    winner = planned
    own = planned.winner.candidate.kind
    everything = [planned.winner, *planned.rivals]
    for kind in KINDS:
        near = next((judged for judged in everything if judged.candidate.kind == kind), None)
        if near is not None:
            best[kind] = near
        if kind == own or not 1 < len(cluster.names) < MANY_DCS or planned.strategy != "ours" or winner.interrupted:
            continue
        try:
            found = make_plan(
                job,
                objective=planned.objective,
                keep=keep,
                global_batch=global_batch or planned.space.sequences,
                tcp=planned.space.tcp,
                tries=FEW_TRIES if tries is None else min(FEW_TRIES, tries),
                seed=planned.seed,
                progress=progress,
                kind=kind,
            )
        except AtlasError as error:
            refused[kind] = str(error)
            continue
        except KeyboardInterrupt:
            winner = replace(winner, interrupted=True)
            continue
        if near is None or score(planned, found.winner) <= score(planned, near):
            best[kind] = found.winner
        if score(planned, found.winner) < (1 - ROUNDING) * score(planned, winner.winner):
            rivals = tuple(sorted([winner.winner, *winner.rivals, *found.rivals], key=lambda j: score(planned, j)))
            winner = replace(found, space=planned.space, rivals=rivals)
    low = None if winner.interrupted else _low_communication(planned, global_batch, progress)
    return Families(winner, best, refused, low)


def _low_communication(
    planned: SearchResult, global_batch: int | None, progress: Progress | None
) -> SimulatedCandidate | None:
    """Every region trains alone for `INNER_STEPS` iterations, then they exchange once what they otherwise exchange in
    each: links that are this many times faster and cheaper give the mean iteration."""
    names = planned.cluster.names
    if not 1 < len(names) < MANY_DCS or planned.strategy != "ours":
        return None
    try:
        job = faster_links(planned.job, INNER_STEPS)
        sequences = global_batch or planned.space.sequences
        found = make_plan(
            job, objective=planned.objective, global_batch=sequences, tries=0, progress=progress, kind="data"
        )
    except (AtlasError, KeyboardInterrupt):
        return None
    every = [found.winner, *found.rivals]
    best = next((one for one in every if all(len(group.places) == 1 for group in one.candidate.groups)), None)
    if best is None:
        return None
    sent = {pair: n / INNER_STEPS for pair, n in best.figures.link_bytes.items()}
    figures = replace(best.figures, link_bytes=sent, wan_bytes=best.figures.wan_bytes / INNER_STEPS)
    return SimulatedCandidate(best.candidate, figures)


BETTER = {"latency_ms": -1, "pair_gbps": 1, "trunk_gbps": 1, "egress_usd_per_gb": -1}
"""Keys of a link, and whether more of each is better."""


def faster_links(job: Job, factor: float, only: Collection[str] = tuple(BETTER)) -> Job:
    """The job with every link this many times as fast, as near and as cheap, or some of these."""
    cluster = job.cluster

    def faster(old: Wan | Link) -> dict[str, float]:
        values = {key: getattr(old, key) for key in only}
        return {key: value * factor ** BETTER[key] for key, value in values.items() if value is not None}

    wan = cluster.wan.model_copy(update=faster(cluster.wan))
    links = None if cluster.links is None else tuple(one.model_copy(update=faster(one)) for one in cluster.links)
    return job.model_copy(update={"cluster": cluster.model_copy(update={"wan": wan, "links": links})})
