"""What the simulator says of a run: its predicted timeline and figures, and the map with the loads of its links.

Made from the job and from the Program that runs, so that prediction and measurement have the same ops. Reads no files.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from atlas.cost.cluster_arrays import cluster_arrays
from atlas.cost.price import Tcp
from atlas.evaluate import Case, Progress, Result, build, find_schedule, prepare, repriced
from atlas.ir.assemble import repeated
from atlas.ir.program import Kind, Program
from atlas.ir.timeline import Timeline
from atlas.planner.judge import SimulatedCandidate
from atlas.planner.plan_simulation import judged_result
from atlas.planner.report import drawn_plan, places
from atlas.sim import simulate
from atlas.sim.simulate import SMALL
from atlas.spec import Job
from atlas.view.map import load_color, map_svg
from atlas.view.places import PANEL, MapPlaces, map_places

MAX_ITERATIONS = 3
"""The page draws as many iterations as have no more than `SMALL` events, at least one and at most these."""


def shape_of(case_or_program: Case | Program) -> tuple[Any, ...]:
    """Two Programs of one shape can exchange their costs."""
    one = case_or_program.layout if isinstance(case_or_program, Case) else case_or_program
    return (one.num_pipelines, one.num_stages, one.num_microbatches, tuple(one.rank_dc), tuple(one.stage_rank))


class RunModel:
    """A job under one schedule. `program`: the one that runs, if it is known and is of the job's shape.

    Without it, the order that `atlas train` starts with: `searched` takes seconds, which a first look need not."""

    def __init__(
        self, job: Job, schedule: str, tcp: Tcp = "many", *, slower: int = 1, program: Program | None = None
    ) -> None:
        self.slower, self.chosen, self._job = slower, find_schedule(schedule), job
        self.case = prepare(job, self.chosen, tcp)
        if program is None or not self._can_price(program):
            program = build(self.case, self.chosen, budget=0)
        self.case, self.program = self.case.of(program), program
        self.result: Result = repriced(self.case, self.chosen, tcp, self.program)
        self.cluster = cluster_arrays(self.case.job)
        self.judged: SimulatedCandidate = judged_result(self.result, self.cluster)
        self.row: dict[str, Any] = self.result.row()

    def searched(self, progress: Progress | None = None) -> RunModel:
        """With the order, and so the figures, of `atlas simulate`."""
        program = build(prepare(self._job, self.chosen, self.result.tcp), self.chosen, progress=progress)
        return RunModel(self._job, self.chosen.name, self.result.tcp, slower=self.slower, program=program)

    def _can_price(self, program: Program) -> bool:
        """Whether a Program is one iteration of the job and nothing else."""
        is_shape = program.num_iterations == 1 and shape_of(program) in map(shape_of, self.case.shapes)
        return is_shape and not bool((program.kind == Kind.P).any())

    @property
    def iteration_s(self) -> float:
        """Predicted, slowed down as the run is."""
        return float(self.row["iteration_s"]) * self.slower

    def predicted(self, iterations: int = 1, last_step: int | None = None) -> Timeline:
        """The run as it was predicted, up to `last_step`."""
        costs = self.case.costs_of(self.program).scaled(self.slower)
        program = repeated(self.program, iterations) if iterations > 1 else self.program
        meta = {} if last_step is None else {"last_step": last_step}
        return simulate(program, costs, meta=meta)

    @cached_property
    def _scene(self) -> tuple[dict[str, Any], MapPlaces]:
        scene = places(self.case.job, self.cluster)
        return scene, map_places(scene, PANEL)

    @property
    def coast(self) -> str:
        """The outline of land behind the map. Apart from it, because it does not change from step to step."""
        return self._scene[1].coast

    def links(self, iteration_s: float | None = None, transfers_ms: dict[str, float] | None = None) -> list[Any]:
        """Every pair of datacenters that exchanges something, at the measured iteration time. Rates and times are the
        job's own, without the slowing down."""
        figures = self.judged.figures
        if iteration_s:
            figures = replace(figures, iteration_s=iteration_s / self.slower)
        judged = replace(self.judged, figures=figures)
        found: list[Any] = drawn_plan(self.cluster, judged, {})["links"]
        for link in found:
            link["gbit_s"], link["color"] = link["load"] * link["gbps"], load_color(link["load"])
            took = (transfers_ms or {}).get(f"{link['a']}|{link['b']}")
            link["transfer_ms"] = None if took is None else took / self.slower
        return found

    def map(self, links: list[Any]) -> str:
        """The map as SVG."""
        scene, at = self._scene
        plan = {**drawn_plan(self.cluster, self.judged, {}), "links": links}
        return map_svg(scene, plan, at._replace(coast=""), PANEL)


def transfer_times_ms(timeline: Timeline) -> dict[str, float]:
    """By pair of datacenters ("a|b", as the Program orders them and reversed): median time of a transfer, from its
    first byte to its arrival."""
    program = timeline.program
    known = np.flatnonzero(program.transfer_crosses & (program.transfer_src >= 0))
    if not len(known):
        return {}
    boundary = np.unravel_index(known, program.transfer_shape)[2]
    took = timeline.transfer_arrive_ns[known] - timeline.transfer_start_ns[known]
    dc = [program.rank_dc[rank] for rank in program.stage_rank]
    pairs: dict[str, list[Any]] = {}
    for number in np.unique(boundary).tolist():
        values = took[boundary == number]
        for pair in (f"{dc[number]}|{dc[number + 1]}", f"{dc[number + 1]}|{dc[number]}"):
            pairs.setdefault(pair, []).append(values)
    return {pair: float(np.median(np.concatenate(values))) / 1e6 for pair, values in pairs.items()}


def shown_iterations(program: Program) -> int:
    """How many iterations the page shows: at least one, and no more than the plain engine simulates."""
    return max(1, min(MAX_ITERATIONS, SMALL // max(1, program.num_events)))
