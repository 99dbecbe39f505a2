"""The public API, offered by `import atlas`: simulate, plan, what-if and train from Python, as the commands do. Each
function takes a job or plan file, or what `load_job` or `plan` made of it. The commands print what these functions
return. A result has a table (a list of dicts), and Jupyter shows it as a figure.

Prints nothing, and writes only where `save` is called.
"""

from __future__ import annotations

import html
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias

from atlas.cost.cluster_arrays import cluster_arrays
from atlas.cost.compute import pricing
from atlas.cost.price import Tcp
from atlas.evaluate import Progress, Result, choices_of, evaluate_all, require_arguments, rows
from atlas.ir.replace import write_whole
from atlas.ir.timeline import Timeline
from atlas.planner import report
from atlas.planner.breakeven import BreakEven, break_even
from atlas.planner.change import Sweep, parse_sweep
from atlas.planner.confidence import choose_by_percentile, require_weather
from atlas.planner.fabrics import FabricChoice, best_fabrics
from atlas.planner.families import Families, find_families
from atlas.planner.files import plan_of, several_groups_of
from atlas.planner.judge import SimulatedCandidate, as_dict
from atlas.planner.objective import objective_of
from atlas.planner.plan_simulation import PlanSimulation, slowest_group
from atlas.planner.run import SearchResult, make_plan
from atlas.planner.space import batch_of
from atlas.planner.verdict import family_rows, headline, origins, page_scene
from atlas.planner.whatif import Marginal, MonteCarlo, Point, WhatIfSimulator, marginals, spread, sweep
from atlas.spec import Job
from atlas.spec.plan import Plan, load_job_or_plan, one_of_groups, plan_text
from atlas.view.chart import curves_svg
from atlas.view.map import plan_page
from atlas.view.page import page_html
from atlas.view.svg import Figure
from atlas.view.table import groups_note, whole_s

if TYPE_CHECKING:
    from atlas.launch.rehearse import Rehearsal
    from atlas.launch.report.events import OnStep

JobSource: TypeAlias = "Job | Plan | PlanSearch | str | os.PathLike[str]"
"""A job, a plan, what `plan` returned, or the file of a job or plan."""
WAN_SIGMA = 0.2
"""Spread of bandwidth and latency in Monte-Carlo runs of a job whose `jitter` has none."""


def opened(job: JobSource, *, to_plan: bool = False) -> tuple[Job, Plan | None]:
    """The job, and the plan that it comes from, if any."""
    job = job.plan if isinstance(job, PlanSearch) else job
    if isinstance(job, Plan):
        return job.job, job
    return (job, None) if isinstance(job, Job) else load_job_or_plan(job, to_plan=to_plan)


# ---- simulate ----------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Simulation:
    """What `simulate` returns. In Jupyter it shows its timelines on one time axis."""

    results: tuple[Result, ...]
    """One for each schedule, in the order asked for."""
    skipped: dict[str, str]
    """The reason for each schedule that was not asked for by name and cannot run this job."""
    wholes: tuple[PlanSimulation, ...] = ()
    """For a plan with several groups of pipelines: the simulation of all groups, for each of `results`, which has the
    slowest group alone."""

    def table(self) -> list[dict[str, Any]]:
        """One dict for each schedule: iteration time, speedup, lower bound, utilization, memory and more. With several
        groups, `all_groups_s` is the iteration time of the plan, and `iteration_s` that of the slowest group alone."""
        found = rows(self.results)
        slowest_s = max((whole.iteration_s for whole in self.wholes), default=0.0)
        for row, whole in zip(found, self.wholes, strict=False):
            row |= {**whole.row(), "speedup": slowest_s / whole.iteration_s if whole.iteration_s else None}
        return found

    @property
    def best(self) -> Result:
        """The fastest result that fits in memory; its `timeline` has every op."""
        keys = [(not row["fits"], whole_s(row)) for row in self.table()]
        return self.results[keys.index(min(keys))]

    @property
    def drawn(self) -> list[Result]:
        """The results in a figure: those on many connections, if any; the others can take twenty times as long."""
        return [result for result in self.results if result.tcp == "many"] or list(self.results)

    def figure(self) -> Figure:
        return Figure(*self._timelines, title=self.title)

    def page(self) -> str:
        """The timelines as one HTML page to zoom and search in."""
        notes = groups_note(self.table()) if self.wholes else ()
        return page_html(self._timelines, title=self.title, notes=notes)

    @property
    def _timelines(self) -> list[Timeline]:
        return [result.timeline for result in self.drawn]

    @property
    def title(self) -> str:
        """The title of a page and of a figure: of which group they are, where there are several."""
        name = self.results[0].case.job.name
        return f"{name}: the slowest of {len(self.wholes[0].results)} groups of pipelines" if self.wholes else name

    def _repr_html_(self) -> str:
        return self.figure()._repr_html_()


def simulate(
    job: JobSource,
    schedule: str | Sequence[str] | None = None,
    *,
    tcp: Tcp | None = None,
    tries: int | None = None,
    seed: int = 0,
    iterations: int = 1,
    jitter_runs: int = 0,
    progress: Progress | None = None,
) -> Simulation:
    """Simulate one iteration of a job under one or more schedules: `atlas simulate`.

        >>> import atlas
        >>> found = atlas.simulate("examples/tiny.yaml", ["varuna", "atlas"])
        >>> [row["schedule"] for row in found.table()]
        ['varuna', 'atlas']
        >>> found.best.schedule
        'atlas'

    Without `schedule` and `tcp`, a job runs under gpipe, 1f1b and varuna on one TCP connection and under every schedule
    on many, and a plan runs as it was planned. The `job` of a plan with several groups of pipelines stands for all of
    them, as for `train`; `job.alone()` is its slowest group. `tries` and `seed` are those of the schedule search
    (default: the plan's, if there is one); `iterations` simulates several in a row; `jitter_runs` repeats the run with
    the job's `jitter`. `progress(what, done, total)` is called during a search.
    """
    asked = {"schedule": schedule, "tcp": tcp, "tries": tries, "iterations": iterations}
    require_arguments("simulate", **asked, seed=seed, jitter_runs=jitter_runs or None)
    job, plan = opened(job)
    names = [schedule] if isinstance(schedule, str) else schedule or None
    if plan is not None:
        tries, seed = plan.schedule.search(tries, seed)
    if plan is not None and names is None and tcp is None:
        choices, sharing = [(plan.schedule.name, plan.schedule.tcp)], plan.schedule.sharing
    else:
        choices, sharing = choices_of(names, tcp), True
    search: dict[str, Any] = {"sharing": sharing, "budget": tries, "seed": seed, "progress": progress}
    wholes: list[PlanSimulation] = []
    groups = several_groups_of(job, plan) if plan is not None or job.groups else None
    if groups is not None:
        search["run"] = partial(slowest_group, wholes, cluster_arrays(job), groups)
    results, skipped = evaluate_all(
        job, choices, skip=names is None, iterations=iterations, jitter_runs=jitter_runs, **search
    )
    return Simulation(tuple(results), skipped, tuple(wholes))


# ---- plan --------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class PlanSearch:
    """What `plan` returns. In Jupyter it shows the placement on a map, and the plans that were not chosen."""

    found: SearchResult
    """The best plan and the others that were simulated, as the planner has them."""
    families: Families
    """The best plan of each family."""
    ask_break_even: bool = True
    progress: Progress | None = None
    fabrics: tuple[FabricChoice, ...] = ()

    @cached_property
    def plan(self) -> Plan:
        """The best plan; `simulate`, `whatif` and `train` use it."""
        return plan_of(self.found)

    def table(self) -> list[dict[str, Any]]:
        """One dict for each plan that was simulated, the best first: placement, seconds, dollars, why not chosen."""
        return report.rows(self.found)

    def as_dict(self) -> dict[str, Any]:
        """All of it, JSON-able."""
        return {
            "plan": self.plan.model_dump(mode="json", exclude_none=True, exclude={"job"}),
            "candidates": self.table(),
            "pareto": [as_dict(judged) for judged in report.front(self.found)],
            "pricing": pricing(self.found.job),
            "runtime": self.found.job.runtime,
            "verdict": self.verdict,
            "families": family_rows(self.families),
            "break_even": [vars(one) for one in self.break_even],
            "origins": origins(self.found.job),
            "notes": report.notes(self.found),
            "confidence": self.found.percentile_choice and vars(self.found.percentile_choice),
            "fabrics": [one.row() for one in self.fabrics],
        }

    @cached_property
    def break_even(self) -> list[BreakEven]:
        """The bandwidth, latency, number of GPUs and egress price at which the verdict changes. Takes seconds."""
        return break_even(self.families, progress=self.progress) if self.ask_break_even else []

    @property
    def verdict(self) -> str:
        """Whether to train over several regions, in a sentence or two."""
        return headline(self.families, self.break_even)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the Plan file (YAML)."""
        write_whole(path, plan_text(self.plan).encode())

    def page(self) -> str:
        """The map and the tables as one HTML page."""
        found = self.found
        notes = [f"Objective: {found.objective.words()}.", *report.empty_slots(found), *origins(found.job)]
        return plan_page(page_scene(self.families, self.break_even), notes=notes)

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{html.escape(self.page())}" width="100%" height="700" frameborder="0"></iframe>'


def plan(
    job: JobSource,
    *,
    objective: str | None = None,
    budget: str | None = None,
    min_throughput: str | None = None,
    tokens: str | None = None,
    deadline: str | None = None,
    strategy: str = "ours",
    keep: Collection[str] = (),
    global_batch: int | None = None,
    tcp: Tcp = "many",
    tries: int | None = None,
    seed: int = 0,
    confidence: float | None = None,
    fabrics: str | None = None,
    break_even: bool = True,
    progress: Progress | None = None,
) -> PlanSearch:
    """Find which datacenters, which parallelism and which schedule to run a job with: `atlas plan`.

        >>> import atlas
        >>> found = atlas.plan("examples/tiny.yaml", tries=0)
        >>> found.plan.runnable
        'yes'
        >>> atlas.simulate(found.plan).best.row()["fits"]
        True

    `objective` is "throughput" or "cost"; the default is "cost" where `min_throughput` ("0.03it/s", "50000tok/s") or
    `tokens` with a `deadline` ("300B", "30d") is given, else "throughput". `budget` limits dollars ("500/h", "2.5/it").
    `keep` names the keys that stay as the job has them; `tries` are those of the winner's schedule search (0: none).
    `confidence` (0.95) chooses by that percentile of the iteration time with cross traffic of the links' models;
    `fabrics` ("rail,photonic") are tried in each datacenter; `break_even` also says when the verdict changes.
    """
    require_arguments("plan", global_batch=global_batch, tcp=tcp, tries=tries, seed=seed, confidence=confidence)
    job, _ = opened(job, to_plan=True)
    require_weather(job, confidence)
    batch = global_batch or batch_of(job)
    cheapest = min_throughput is not None or deadline is not None
    goal = objective_of(
        objective or ("cost" if cheapest else "throughput"), budget=budget, min_throughput=min_throughput,
        tokens=tokens, deadline=deadline, tokens_per_iteration=batch * job.model.seq_len,
    )  # fmt: skip
    job, choices = best_fabrics(job, fabrics, objective=goal, keep=keep, global_batch=batch, tcp=tcp, progress=progress)
    planned = make_plan(
        job, strategy=strategy, objective=goal, keep=keep, global_batch=batch, tcp=tcp, tries=tries, seed=seed,
        progress=progress,
    )  # fmt: skip
    families = find_families(planned, keep=keep, global_batch=batch, tries=tries, progress=progress)
    if confidence is not None:
        families = choose_by_percentile(families, confidence, keep=keep, tries=tries, seed=seed, progress=progress)
    return PlanSearch(families.planned, families, break_even, progress, choices)


# ---- what-if -----------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class WhatIf:
    """What `whatif` returns. In Jupyter it shows the curve of the first sweep over numbers."""

    job: Job
    now: SimulatedCandidate
    """The job as it is."""
    sweeps: tuple[tuple[Sweep, list[Point]], ...]
    marginals: tuple[Marginal, ...]
    """What a tenth more of each resource saves, the best first."""
    runs: MonteCarlo
    """The Monte-Carlo runs: `times_s` of their iterations, and the link whose cross traffic slows most (`tail`)."""
    wan_sigma: float

    def table(self) -> list[dict[str, Any]]:
        """One dict for each value of each sweep. Where the job cannot run, `iteration_s` is None and `note` has why."""
        return [{"key": one.key, **vars(point)} for one, points in self.sweeps for point in points]

    def as_dict(self) -> dict[str, Any]:
        """All of it, JSON-able."""
        more = self.marginals
        return {
            "pricing": pricing(self.job),
            "runtime": self.job.runtime,
            "now": as_dict(self.now),
            "sweeps": [{"key": one.key, "points": [vars(point) for point in points]} for one, points in self.sweeps],
            "marginals": [vars(one) for one in more],
            "bottleneck": more[0].resource if more and more[0].saves_s > 0 else None,
            "monte_carlo": self.runs.figures(),
        }

    @property
    def title(self) -> str:
        """The title of the curve."""
        return f"{self.job.name}: what if {self._numeric[0].key} changes"

    def curve(self) -> str:
        """The first sweep over numbers as an SVG chart."""
        one, points = self._numeric
        line = [(float(p.value), p.iteration_s) for p in points if p.iteration_s is not None]
        wide = len(line) > 2 and min(line)[0] > 0 and max(line)[0] / min(line)[0] >= 50
        return curves_svg({"iteration": line}, one.key, "seconds an iteration (simulated)", self.title, log_x=wide)

    @property
    def _numeric(self) -> tuple[Sweep, list[Point]]:
        return next((one, points) for one, points in self.sweeps if one.numeric)

    def _repr_html_(self) -> str | None:
        return self.curve() if any(one.numeric for one, _ in self.sweeps) else None


def whatif(
    job: JobSource,
    *sweeps: str,
    replan: bool = False,
    bottleneck: bool = True,
    monte_carlo: int = 0,
    wan_sigma: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> WhatIf:
    """Simulate a job or a plan with something changed: `atlas whatif`.

        >>> import atlas
        >>> found = atlas.whatif("examples/tiny.yaml", "cluster.wan.latency_ms=10,40", bottleneck=False)
        >>> [row["value"] for row in found.table()]
        [10, 40]

    A sweep is `KEY=VALUES`: values ("10,20,40"), a range ("10..100:10"), or a datacenter to lose or to add
    ("lose=east"). `replan` runs the planner at every value. `bottleneck` asks what a tenth more of each resource would
    save. `monte_carlo` repeats the run with random cross traffic on links that have a `model`, and with random
    bandwidths and latencies (spread: `wan_sigma`) on the others.
    """
    require_arguments("whatif", sweeps=sweeps, monte_carlo=monte_carlo or None, wan_sigma=wan_sigma, seed=seed)
    parsed = [parse_sweep(text) for text in sweeps]
    job, plan = opened(job)
    if plan is None and job.groups and not replan:
        raise one_of_groups(job)
    simulator = WhatIfSimulator(job, plan, replan=replan)
    now = simulator.judged(job)
    found = tuple((one, sweep(simulator, one, progress)) for one in parsed)
    more = marginals(simulator, progress)[1] if bottleneck and not replan else []
    sigma = wan_sigma if wan_sigma is not None else job.jitter.wan or WAN_SIGMA
    runs = MonteCarlo()
    if monte_carlo:
        runs = spread(simulator, monte_carlo, wan=sigma, compute=job.jitter.compute, seed=seed, progress=progress)
    return WhatIf(job, now, found, tuple(more), runs, sigma)


# ---- train -------------------------------------------------------------------------------------------------
def train(
    job: JobSource,
    schedule: str | None = None,
    *,
    tcp: Tcp | None = None,
    on_step: OnStep | None = None,
    **options: Any,
) -> Rehearsal:
    """Train on this machine: every worker is a process, and an emulated WAN is between the datacenters (`atlas train
    --emulate`).

        run = atlas.train("examples/tiny.yaml", "atlas", steps=3, slower=3)
        run.error                                   # predicted / measured iteration time - 1
        atlas.Figure(run.predicted, run.measured)   # the two timelines

    `options` are those of `atlas.launch.train_options.TrainOptions`: steps, slower, device, model, data, learning_rate,
    clip, checkpoints, save_every. `on_step` is called after every step with a `StepEvent` (step, loss, iteration_s,
    predicted_s, ...) and the timeline of the step. Needs the extra `runtime`. In a script, call it under
    `if __name__ == "__main__":`.
    """
    from atlas.launch.rehearse import rehearse  # 120 ms, and torch once it runs
    from atlas.launch.train_options import TrainOptions

    require_arguments("train", schedule=schedule, tcp=tcp, **options)
    job, plan = opened(job)
    return rehearse(job, TrainOptions.of(plan, schedule, tcp, **options), on_step=on_step)
