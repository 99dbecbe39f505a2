"""One job under one schedule, or under several: arrange, price, schedule, check, simulate; and the result's figures.

    evaluate(job, "atlas", tcp="many")     a Result: the Timeline, its figures, the lower bound
    evaluate_all(job, choices)             several, and why a schedule that was not named was left out

It makes no choices: datacenters and cells are the job's. Prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, cached_property, partial
from typing import Any, Literal, TypeAlias

from atlas.arguments import CHOICES, NUMBERS, OPTIONAL, TEXTS, WHOLE
from atlas.cost.arrange import Arrangement, arrange
from atlas.cost.cluster_arrays import GIB
from atlas.cost.compute import flops_per_token, pricing
from atlas.cost.memory import WorkerMemory, memory_rule, peak_memory, worker_memory
from atlas.cost.price import Tcp, can_share, layout_of, price
from atlas.cost.table import Costs
from atlas.errors import AtlasError, InfeasibleError, SpecError
from atlas.ir.analysis import summary
from atlas.ir.assemble import check, repeated, with_optimizer
from atlas.ir.program import Layout, Memory, Program
from atlas.ir.timeline import Timeline
from atlas.schedules import SCHEDULES, Bound, Schedule, Setting, lower_bound
from atlas.sim import simulate
from atlas.sim.weather import Spread, spread_of
from atlas.spec import Job, override

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, number done, number in all; 0 where nothing is counted)."""
Choice = tuple[str, Tcp]
"""A schedule's name and how many connections a node pair has."""
Known: TypeAlias = "dict[tuple[int, Tcp], Case]"
"""Cases of one job by stages on a worker and connections, so that several schedules share their prices."""

MAX_EVENTS = 10_000_000
"""Beyond this a Program no longer fits in a few GB."""
SEARCH_EVENTS = 20_000_000
"""Events that a search with the default budget simulates: a few seconds for any size of job."""
MIN_TRIES, MAX_TRIES = 24, 600
"""Least and most tries of the default budget, chosen by hand: a candidate of a plan gets the least
(`planner.search.FEW`); `bench/optimum.py` compares the most with the exact optimum."""


# ---- results -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Case:
    """A job with its open choices made and its prices known."""

    job: Job
    arrangement: Arrangement
    layout: Layout
    apart: Costs
    price_turns: Callable[[], Costs] | None
    """Prices turns on the WAN, once; None where nothing can be shared: one connection, pipeline or datacenter."""
    workers: tuple[WorkerMemory, ...]
    memory: Memory
    interleaved: Case | None = None
    """With several stages on each worker, where the schedule may choose that."""

    @property
    def turns(self) -> Costs | None:
        """What ops and transfers take where pipelines take turns on the WAN."""
        return None if self.price_turns is None else self.price_turns()

    @property
    def shapes(self) -> list[Case]:
        """What a Program of this case may be a Program of."""
        return [self] if self.interleaved is None else [self, self.interleaved]

    def of(self, program: Program) -> Case:
        """The case with as many stages on each worker as a Program has."""
        return next(case for case in self.shapes if case.layout.num_stages == program.num_stages)

    def costs_of(self, program: Program) -> Costs:
        """What a Program of this case is priced at: with turns on the WAN if it takes them."""
        case = self.of(program)
        return case.turns if program.sharing and case.turns is not None else case.apart


@dataclass(frozen=True, eq=False)
class Result:
    """A simulated job, with its figures."""

    schedule: str
    tcp: Tcp
    case: Case
    timeline: Timeline
    """The Timeline of all iterations that were asked for."""
    single: Timeline
    """The Timeline of one iteration: every figure but `steady_s` comes from it."""
    bound: Bound
    spread: Spread | None = None

    @property
    def costs(self) -> Costs:
        return self.case.costs_of(self.single.program)

    def row(self) -> dict[str, Any]:
        """The figures, JSON-able. Seconds are simulated; `engine_s` alone was measured."""
        return dict(self._row)

    @cached_property
    def _row(self) -> dict[str, Any]:
        figures, job = summary(self.single), self.case.job
        peak, cap = _tightest(self.case, self.single.program)
        tokens = job.microbatch * job.model.seq_len * job.num_microbatches * self.case.layout.num_pipelines * job.cells
        iteration_s = figures["iteration_s"]
        return {
            "job": job.name,
            "schedule": self.schedule,
            "tcp": self.tcp,
            "runtime": job.runtime,
            "pricing": pricing(job),
            **{k: figures[k] for k in ("source", "sharing", "iteration_s", "utilization")},
            "lower_bound_s": self.bound.ns / 1e9,
            "lower_bound_reason": self.bound.reason,
            "gap": iteration_s / (self.bound.ns / 1e9) if self.bound.ns else None,
            "steady_s": self.timeline.iteration_ns / 1e9 if self.timeline is not self.single else None,
            "tokens_per_s": tokens / iteration_s if iteration_s else None,
            "mfu": flops_per_token(job.model) * tokens / iteration_s / _peak_flops(self.case) if iteration_s else None,
            "fits": peak <= cap,
            "peak_gib": peak / GIB,
            "memory_gib": cap / GIB,
            **{k: figures[k] for k in ("peak_in_flight", "bubbles_s", "critical_path_s", "links", "num_workers")},
            "num_gpus": _num_gpus(self.case),
            "num_events": figures["num_events"],
            "engine_s": self.single.meta["engine_s"],
            "spread": None if self.spread is None else self.spread.row(),
        }


def rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Every result's row, with its speedup over the slowest of them."""
    found = [result.row() for result in results]
    slowest = max((row["iteration_s"] for row in found), default=0.0)
    return [{**row, "speedup": slowest / row["iteration_s"] if row["iteration_s"] else None} for row in found]


def _tightest(case: Case, program: Program) -> tuple[int, int]:
    """(need, cap) in bytes of the GPU that has least to spare."""
    needs = peak_memory(case.job, program, case.workers)
    worker, need = min(needs, key=lambda found: found[0].cap - found[1])
    return need, worker.cap


def _num_gpus(case: Case) -> int:
    return case.job.tp * case.job.pp * case.layout.num_pipelines * case.job.cells


def _peak_flops(case: Case) -> float:
    """FLOP/s that all GPUs of the job could do."""
    job = case.job
    kind: Literal["fp32_tflops", "bf16_tflops"] = "fp32_tflops" if job.precision == "fp32" else "bf16_tflops"
    one_pipeline = sum(float(getattr(job.cluster.gpu(dc), kind)) for dc in case.layout.rank_dc)
    return one_pipeline * 1e12 * job.tp * case.layout.num_pipelines * job.cells


# ---- one job, one schedule ---------------------------------------------------------------------------------
def prepare(
    job: Job,
    schedule: Schedule,
    tcp: Tcp = "many",
    iterations: int = 1,
    *,
    sharing: bool = True,
    known: Known | None = None,
) -> Case:
    """The job as this schedule needs it: one stage on each worker, or several where it interleaves.

    `sharing` is whether pipelines may take turns, where there is anything to take turns on. A schedule that may choose
    the number of stages keeps to the layers that the job states. `known`: those of the same job and arguments;
    new ones are added.
    """
    several, known = max(2, job.interleave), {} if known is None else known

    def prepared(interleave: int) -> Case:
        if (interleave, tcp) not in known:
            known[interleave, tcp] = _prepared(job, interleave, tcp, iterations, sharing=sharing)
        return known[interleave, tcp]

    case = prepared(several if schedule.virtual_stages else 1)
    is_open = job.interleave > 1 or job.layers_per_stage is None
    if schedule.may_interleave and is_open and job.pp > 1:
        with suppress(AtlasError):  # not enough layers, or no link from the last worker to the first
            case = replace(case, interleaved=prepared(several))
    return case


def _prepared(job: Job, interleave: int, tcp: Tcp, iterations: int, *, sharing: bool) -> Case:
    job, first = restaged(job, interleave)
    layout = layout_of(job, arrangement=first)
    _require_feasible_size(job, layout, iterations)
    may_share = sharing and tcp == "many" and can_share(job, layout)
    workers = worker_memory(job, first)
    return Case(
        job=job,
        arrangement=first,
        layout=layout,
        apart=price(job, tcp=tcp, arrangement=first),
        price_turns=cache(partial(price, job, sharing=True, arrangement=first)) if may_share else None,
        workers=workers,
        memory=memory_rule(job, first, workers),
    )


def restaged(job: Job, interleave: int) -> tuple[Job, Arrangement]:
    """The job with this many stages on each worker. Cells stay as they are, so that all schedules have the same
    pipelines."""
    first = arrange(job)
    if interleave == job.interleave:
        return job, first
    pipelines = f"pipelines_per_cell={first.num_pipelines}"
    job = override(job, [f"interleave={interleave}", "layers_per_stage=", pipelines])
    return job, arrange(job)


def evaluate(
    job: Job,
    schedule: str,
    *,
    tcp: Tcp = "many",
    sharing: bool = True,
    budget: int | None = None,
    seed: int = 0,
    iterations: int = 1,
    jitter_runs: int = 0,
    progress: Progress | None = None,
    known: Known | None = None,
) -> Result:
    """Simulate the job. `budget` is the number of orders that a searched schedule may try (default: by size); `known`
    is that of `prepare`."""
    chosen = find_schedule(schedule)
    case = prepare(job, chosen, tcp, iterations, sharing=sharing, known=known)
    program = build(case, chosen, budget=budget, seed=seed, progress=progress)
    case = case.of(program)
    costs = case.costs_of(program)
    bound = _bound(case, chosen, program)
    meta: dict[str, Any] = {"tcp": tcp, "job": job.name, "lower_bound_s": bound.ns / 1e9, "seed": seed}
    spread = spread_of(case.job, program, costs, jitter_runs) if jitter_runs else None
    if spread is not None:
        meta["spread"] = spread.row()
    single = simulate(program, costs, meta=meta)
    many = simulate(repeated(program, iterations), costs, meta=meta) if iterations > 1 else single
    return Result(chosen.name, tcp, case, many, single, bound, spread)


def repriced(case: Case, schedule: Schedule, tcp: Tcp, program: Program) -> Result:
    """A case under an order that is known already: nothing is searched. The order must have a shape of the case."""
    case = case.of(program)
    single = simulate(program, case.costs_of(program), meta={"tcp": tcp, "job": case.job.name})
    return Result(schedule.name, tcp, case, single, single, _bound(case, schedule, program))


def build(
    case: Case, schedule: Schedule, *, budget: int | None = None, seed: int = 0, progress: Progress | None = None
) -> Program:
    """The schedule's Program for a case, closed by SYNC and STEP, and checked."""
    tries = default_budget(case) if budget is None else budget
    turns = case.turns if schedule.shares else None
    again, other = case.job.recompute, case.interleaved
    several = None if other is None else Setting(other.layout, other.apart, None, other.memory, again)
    setting = Setting(case.layout, case.apart, turns, case.memory, again, tries, seed, several)
    report = None if progress is None else partial(progress, schedule.name)
    program = with_optimizer(schedule.build(setting, report))
    check(program)
    return program


def find_schedule(name: str, flag: str = "--schedule") -> Schedule:
    """The schedule of a name that a flag gives, or the error that names the nearest."""
    if name in SCHEDULES:
        return SCHEDULES[name]
    near = get_close_matches(name.lower().replace("_", "-"), SCHEDULES, n=1, cutoff=0.5)
    remedy = f"Did you mean {near[0]!r}? " if near else ""
    known = f"Known: {', '.join(SCHEDULES)}"
    raise SpecError(where=flag, key=flag.removeprefix("--"), value=name, rule="no such schedule", remedy=remedy + known)


def default_budget(case: Case) -> int:
    """Tries that a search gets: fewer for a larger job, so that all end in seconds. Independent of the clock."""
    return max(MIN_TRIES, min(MAX_TRIES, SEARCH_EVENTS // case.layout.about_events(split=True)))


# ---- several -----------------------------------------------------------------------------------------------
def default_choices() -> list[Choice]:
    """The default comparison: classic schedules on one connection, then every schedule on many."""
    one: list[Choice] = [(name, "one") for name in ("gpipe", "1f1b", "varuna")]
    return one + [(name, "many") for name in SCHEDULES]


def require_arguments(function: str, **given: object) -> None:
    """Raise SpecError for the first argument of an API function that is out of range or of another type."""

    def refuse(name: str, rule: str) -> SpecError:
        return SpecError(
            where=f"atlas.{function}", key=name, value=given[name], rule=f"must be {rule}", remedy="Change it"
        )

    for name, value in given.items():
        if value is None and name in OPTIONAL:
            continue
        if name in CHOICES and value not in CHOICES[name]:
            raise refuse(name, " or ".join(map(repr, CHOICES[name])))
        if name in TEXTS:
            texts = value if isinstance(value, Sequence) else [value]
            if not all(isinstance(text, str) for text in texts):
                raise refuse(name, "a string, or several")
        if name in NUMBERS:
            low, high = NUMBERS[name]
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise refuse(name, f"a number from {low:g} to {high:g}")
        if name in WHOLE:
            first, last = WHOLE.get(f"{function}.{name}", WHOLE[name])
            if isinstance(value, bool) or not isinstance(value, int) or not first <= value <= last:
                raise refuse(name, f"a whole number from {first:,} to {last:,}")


def choices_of(names: Sequence[str] | None, tcp: Tcp | None) -> list[tuple[str, Tcp]]:
    """What to simulate; each pair once, in the order given."""
    if names is None:
        return default_choices() if tcp is None else [(name, tcp) for name in SCHEDULES]
    return list(dict.fromkeys((find_schedule(name).name, tcp or "many") for name in names))


def evaluate_all(
    job: Job,
    choices: Iterable[Choice],
    *,
    skip: bool = True,
    run: Callable[..., Result] = evaluate,
    **options: Any,
) -> tuple[list[Result], dict[str, str]]:
    """The results, and by schedule why it was left out. Without `skip` what cannot be scheduled is an error.

    A job that no schedule could run is an error in any case. `run` simulates one choice.
    """
    results: list[Result] = []
    left_out: dict[str, str] = {}
    known: Known = {}
    for name, tcp in choices:
        if (progress := options.get("progress")) is not None:
            progress(name, 0, 0)
        try:
            results.append(run(job, name, tcp=tcp, known=known, **options))
        except AtlasError as error:
            if not (skip and find_schedule(name).virtual_stages):
                raise
            left_out[name] = error.rule if isinstance(error, SpecError) else str(error)
    return results, left_out


# ---- the bound -----------------------------------------------------------------------------------------------
def _bound(case: Case, schedule: Schedule, program: Program) -> Bound:
    """The lower bound for schedules of this kind, over the links that they may use and within their memory."""
    keeps = program.peak_held(case.memory) <= case.memory.cap
    links = [case.apart] + ([case.turns] if schedule.shares and case.turns is not None else [])
    bounds = [
        lower_bound(
            costs,
            case.layout.num_microbatches,
            case.memory if keeps else None,
            recompute=case.job.recompute,
            closing=True,
        )
        for costs in links
    ]
    return min(bounds, key=lambda bound: bound.ns)


# ---- size --------------------------------------------------------------------------------------------------
def _require_feasible_size(job: Job, layout: Layout, iterations: int) -> None:
    num_events = iterations * layout.about_events(split=False)
    if num_events > MAX_EVENTS:
        raise InfeasibleError(
            where=job.where,
            key="num_microbatches",
            value=job.num_microbatches,
            rule=f"with {layout.num_stages} stages and {layout.num_pipelines} pipelines, these are about "
            f"{num_events:,} events, more than the {MAX_EVENTS:,} that fit in memory",
            remedy="Use fewer microbatches, stages, pipelines_per_cell or --iterations; cells do not count",
        )
