"""Watts, joules and the price of the fabric of a plan; and the choice of a fabric for each site.

A plan is charged for the GPUs that it uses: their servers, and their part of their datacenter's fabric, times its PUE.
Other fabrics are tried by planning again: every kind everywhere, then other kinds site by site.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from atlas.errors import AtlasError, InfeasibleError, SpecError
from atlas.planner.judge import SimulatedCandidate
from atlas.planner.run import SearchResult, make_plan
from atlas.spec import Cluster, Job, override
from atlas.spec.document import nearest
from atlas.spec.fabric import KINDS, Kind
from atlas.spec.power import bill_in, server_watts

CLOSE = 1.005
"""Plans within this factor are equally good; the one that needs less power is chosen."""


@dataclass(frozen=True)
class Energy:
    """What the GPUs of a plan and their network need."""

    watts: float
    """Of the sites: servers and fabric, times the PUE."""
    fabric_watts: float
    """Of that, the fabric."""
    fabric_usd: float
    """To buy, not to rent."""
    tokens_per_joule: float


def energy_of(cluster: Cluster, judged: SimulatedCandidate) -> Energy | None:
    """None where no datacenter states power or a fabric, or where the watts of a server are not known."""
    if all(dc.power_kw is None and dc.fabric is None for dc in cluster.datacenters):
        return None
    watts = fabric_watts = usd = 0.0
    for name, gpus in judged.candidate.gpus.items():
        dc = cluster.dc(name)
        server, bill = server_watts(cluster, dc), bill_in(cluster, dc)
        if server is None:
            return None
        watts += dc.pue * gpus * (server / dc.gpus_per_node + bill.watts_per_gpu)
        fabric_watts += dc.pue * gpus * bill.watts_per_gpu
        usd += gpus * bill.usd_per_gpu
    return Energy(watts, fabric_watts, usd, judged.figures.tokens_per_s / watts)


def energy_row(cluster: Cluster, judged: SimulatedCandidate) -> dict[str, Any]:
    """JSON-able; nothing where there is nothing to say."""
    found = energy_of(cluster, judged)
    return {} if found is None else dict(vars(found))


# ---- the choice ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class FabricChoice:
    """One fabric for each site, and the best plan with it."""

    kinds: tuple[tuple[str, Kind], ...]
    """By datacenter."""
    job: Job
    planned: SearchResult | None
    """None where it cannot be built, or no plan fits."""
    note: str = ""

    @property
    def words(self) -> str:
        used = dict.fromkeys(kind for _, kind in self.kinds)
        return next(iter(used)) if len(used) == 1 else ", ".join(f"{name} {kind}" for name, kind in self.kinds)

    def row(self) -> dict[str, Any]:
        found: dict[str, Any] = {"fabrics": dict(self.kinds), "note": self.note}
        if self.planned is None:
            return found
        best = self.planned.winner
        found |= {"sites": list(best.candidate.gpus), "num_gpus": best.candidate.num_gpus}
        found |= {"iteration_s": best.figures.iteration_s, "tokens_per_s": best.figures.tokens_per_s}
        return found | {"usd_per_iteration": best.figures.usd_per_iteration} | energy_row(self.job.cluster, best)


def parse_kinds(text: str) -> list[Kind]:
    """`rail,photonic`."""
    found: list[Kind] = []
    for word in text.split(","):
        kind = next((kind for kind in KINDS if kind == word.strip()), None)
        if kind is None:
            raise SpecError(
                where="--fabrics", key="fabrics", value=word, rule="no such fabric", remedy=nearest(word, KINDS)
            )
        found.append(kind)
    return found


def best_fabrics(job: Job, text: str | None, **options: Any) -> tuple[Job, tuple[FabricChoice, ...]]:
    """The job with the best of the named kinds of fabric in each site, and all that were tried; the job itself where no
    kinds are named. `options` are those of `make_plan`; orders are not searched."""
    if text is None:
        return job, ()
    choices = choose_fabrics(job, parse_kinds(text), lambda one: make_plan(one, tries=0, **options))
    return choices[0].job, tuple(choices)


def choose_fabrics(job: Job, kinds: Sequence[Kind], plan: Callable[[Job], SearchResult]) -> list[FabricChoice]:
    """The best first. `plan` finds the best plan of a job."""
    names = [dc.name for dc in job.cluster.datacenters if dc.nodes > 1]
    known: dict[tuple[Kind, ...], FabricChoice] = {}

    def tried(wanted: tuple[Kind, ...]) -> FabricChoice:
        if wanted not in known:
            known[wanted] = _planned(job, tuple(zip(names, wanted, strict=True)), plan)
        return known[wanted]

    best = _best(tried((kind,) * len(names)) for kind in kinds)
    for i in range(len(names)):
        now = tuple(kind for _, kind in best.kinds)
        best = _best([best, *(tried((*now[:i], kind, *now[i + 1 :])) for kind in kinds)])
    if best.planned is None:
        raise InfeasibleError(
            where=job.where,
            key="fabrics",
            value=",".join(kinds),
            rule=f"no plan fits: {best.note}",
            remedy="Raise power_kw",
        )
    rest = sorted((one for one in known.values() if one is not best), key=_score)
    return [best, *rest]


def _planned(job: Job, kinds: tuple[tuple[str, Kind], ...], plan: Callable[[Job], SearchResult]) -> FabricChoice:
    try:
        changed = override(job, [f"cluster.datacenters.{name}.fabric.kind={kind}" for name, kind in kinds])
        return FabricChoice(kinds, changed, plan(changed))
    except AtlasError as error:
        return FabricChoice(kinds, job, None, error.rule if isinstance(error, SpecError) else str(error))


def _score(one: FabricChoice) -> tuple[float, float]:
    """(what was asked for, watts); smaller is better."""
    if one.planned is None:
        return float("inf"), float("inf")
    figures = one.planned.winner.figures
    per_token = figures.usd_per_iteration if one.planned.objective.minimise == "cost" else figures.iteration_s
    energy = energy_of(one.job.cluster, one.planned.winner)
    return per_token / figures.tokens, energy.watts if energy else float("inf")


def _best(choices: Iterable[FabricChoice]) -> FabricChoice:
    every = list(choices)
    least = min(_score(one)[0] for one in every)
    return min((one for one in every if _score(one)[0] <= CLOSE * least), key=lambda one: _score(one)[1])
