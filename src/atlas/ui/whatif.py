"""Interactive what-if: a job with other bandwidth, latency, GPUs, cells, microbatches or schedule.

    quick     at once: the order that is known for this shape, re-priced; or an order without a search
    search    the figures of `atlas simulate`, with the command that prints them

A setting becomes `--set` overrides, so that page, command and job file are one job. Knows no HTTP.
"""

from __future__ import annotations

import math
import shlex
import threading
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from atlas.errors import AtlasError
from atlas.evaluate import Case, Result, build, evaluate, find_schedule, prepare, repriced, rows
from atlas.ir.assemble import with_optimizer
from atlas.ir.program import Program
from atlas.planner.judge import SimulatedCandidate
from atlas.planner.plan_simulation import judged_result
from atlas.schedules import SCHEDULES
from atlas.schedules.eager import eager
from atlas.spec import Job, override
from atlas.spec.fields import Frozen, Text
from atlas.spec.plan import job_text
from atlas.spec.refusal import validated
from atlas.ui.run_model import RunModel, shape_of
from atlas.view.page import page_data

QUICK_EVENTS = 30_000
"""Beyond this a new shape is first shown under eager 1F1B, whose order is written down without trying others."""
FROZEN = "re-priced: same order of ops, new durations"
UNSEARCHED = "not searched yet: the first order of {}, before the search for a faster one"
STAND_IN = "not searched yet: shown with the order of eager 1F1B"
SEARCHED = "searched: these are the figures of `atlas simulate`"
"""Where an answer comes from, as the page says it."""
SAME = 0.0005
"""Throughputs within this share of each other are called equal."""

SliderFactor = Annotated[float, Field(strict=True, ge=0.01, le=100)]
SliderCount = Annotated[int, Field(strict=True, ge=1, le=4096)]
"""Ranges of the sliders; a request beyond them is refused."""


class SliderValues(Frozen):
    """The sliders. `bandwidth` and `latency` are factors on every link of the job."""

    bandwidth: SliderFactor = 1.0
    latency: Annotated[float, Field(strict=True, ge=0, le=100)] = 1.0
    pipelines: Annotated[int, Field(strict=True, ge=1, le=1024)] = 1
    """Of a cell: with the cells, they set the number of GPUs."""
    cells: SliderCount = 1
    microbatches: SliderCount = 1
    schedule: Text = "1f1b"

    def changed(self, data: Mapping[str, Any]) -> SliderValues:
        """These values with those of a request. AtlasError for one that is unknown or out of range."""
        found = validated(SliderValues, data, lambda keys: "what-if", "Change it").model_dump(exclude_unset=True)
        if "schedule" in found:
            find_schedule(found["schedule"])
        return self.model_copy(update=found)


class WhatIfDesk:
    """Answers questions about one job. One search runs at a time: a new one ends the one before it."""

    def __init__(self, model: RunModel, file: str = "job.yaml") -> None:
        self.job: Job = model.case.job
        self.file, self.tcp = file, model.result.tcp
        case = model.case
        self.base = SliderValues.model_construct(  # a job may lie beyond the sliders
            pipelines=case.layout.num_pipelines,
            cells=self.job.cells,
            microbatches=self.job.num_microbatches,
            schedule=model.chosen.name,
        )
        self._orders: dict[tuple[Any, ...], Program] = {(model.chosen.name, *shape_of(case)): model.program}
        self._stages = {name: case.layout.rank_dc.count(name) for name in dict.fromkeys(case.layout.rank_dc)}
        self._now: Result = model.result
        self._now_drawn: tuple[Result, dict[str, Any], list[str]] | None = None
        self._lock, self._number = threading.Lock(), 0

    def set_now(self, model: RunModel) -> None:
        """Compare with a better order of the same job from here on."""
        self._orders[(model.chosen.name, *shape_of(model.case))] = model.program
        self._now = model.result

    # ---- questions ---------------------------------------------------------------------------------------------------
    def sliders(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """What the page needs to draw its sliders."""
        rates, delays = ([*_links(self.job, key).values()] or [0.0] for key in ("pair_gbps", "latency_ms"))
        return {
            "base": vars(self.base),
            "gbps": [min(rates), max(rates)],
            "latency_ms": [min(delays), max(delays)],
            "gpus_per_pipeline": self.job.tp * self.job.pp,
            "schedules": {name: schedule.summary for name, schedule in SCHEDULES.items()},
        }

    def quick(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """At once, from an order that is known."""
        values = self.base.changed(data)
        with self._lock:
            self._number += 1  # ends a search: its question is not the last one any more
        job = self.changed_job(values)
        chosen = find_schedule(values.schedule)
        case = prepare(job, chosen, self.tcp)
        known = [self._orders.get((values.schedule, *shape_of(one))) for one in case.shapes]
        if not any(known):
            program, label = self._plain(case, values.schedule)
            return self._answer(repriced(case, chosen, self.tcp, program), values, label, "unsearched")
        results = [repriced(case, chosen, self.tcp, program) for program in known if program]
        best = min(results, key=lambda result: result.single.makespan_ns)
        return self._answer(best, values, FROZEN, "frozen")

    def search(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """The figures of `atlas simulate`; takes seconds. `superseded` where another question came meanwhile."""
        values = self.base.changed(data)
        with self._lock:
            self._number += 1
            number = self._number

        def progress(what: str, done: int, total: int) -> None:
            if self._number != number:
                raise SupersededError

        try:
            result = evaluate(self.changed_job(values), values.schedule, tcp=self.tcp, progress=progress)
        except SupersededError:
            return {"superseded": True}
        self._orders[(values.schedule, *shape_of(result.case))] = result.single.program
        if values == self.base:
            self._now = result
        return self._answer(result, values, SEARCHED, "searched")

    def job_file(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """The changed job as YAML."""
        values = self.base.changed(data)
        head = f"# {self.job.name}, changed on the page of `atlas ui`. Simulate it with --schedule {values.schedule}\n"
        return {"name": f"{self.job.name}-what-if.yaml", "text": head + job_text(self.changed_job(values))}

    # ---- one job -----------------------------------------------------------------------------------------------------
    def changed_job(self, values: SliderValues) -> Job:
        changes = self.overrides(values)
        return override(self.job, changes) if changes else self.job

    def overrides(self, values: SliderValues) -> list[str]:
        """The `--set` of these sliders; empty where nothing is changed."""
        factors = {"pair_gbps": values.bandwidth, "trunk_gbps": values.bandwidth, "latency_ms": values.latency}
        changed = [(key, factor) for key, factor in factors.items() if factor != 1.0]
        found = [f"{path}={now * factor:.8g}" for key, factor in changed for path, now in _links(self.job, key).items()]
        if values.microbatches != self.base.microbatches:
            found.append(f"num_microbatches={values.microbatches}")
        if (values.pipelines, values.cells) != (self.base.pipelines, self.base.cells):
            found += [f"pipelines_per_cell={values.pipelines}", f"cells={values.cells}"]
            for name, stages in self._stages.items():
                dc = self.job.cluster.dc(name)
                nodes = math.ceil(stages * self.job.tp * values.pipelines * values.cells / dc.gpus_per_node)
                if nodes > dc.nodes:
                    found.append(f"cluster.datacenters.{name}.nodes={nodes}")
        return found

    def command(self, values: SliderValues) -> str:
        words = ["atlas", "simulate", self.file, "--schedule", values.schedule, "--tcp", self.tcp]
        for change in self.overrides(values):
            words += ["--set", change]
        return shlex.join([*words, "--json"])

    def _plain(self, case: Case, schedule: str) -> tuple[Program, str]:
        """An order for a shape that was not searched yet."""
        small = case.layout.about_events(split=True) <= QUICK_EVENTS
        if small or SCHEDULES[schedule].virtual_stages:
            return build(case, SCHEDULES[schedule], budget=0), UNSEARCHED.format(schedule)
        shared = SCHEDULES[schedule].shares and case.turns is not None
        costs = case.turns if shared and case.turns is not None else case.apart
        order = eager(case.layout, costs, case.memory, recompute=case.job.recompute, sharing=shared)
        return with_optimizer(order), STAND_IN

    def _answer(self, result: Result, values: SliderValues, label: str, kind: str) -> dict[str, Any]:
        row, now = rows([result])[0], self._now.row()
        judged: SimulatedCandidate = judged_result(result)
        figures = judged.figures
        header, spans = page_data([result.single], title=f"{self.job.name}: what if")
        if self._now_drawn is None or self._now_drawn[0] is not self._now:
            self._now_drawn = (self._now, *page_data([self._now.single]))
        _, before, before_spans = self._now_drawn
        header["schedules"] = [_named(header, "what if"), _named(before, "now")]
        return {
            "kind": kind,
            "label": label,
            "row": row,
            "now_s": now["iteration_s"],
            "usd_per_iteration": figures.usd_per_iteration,
            "usd_per_hour": figures.usd_per_hour,
            "wan_gb": figures.wan_bytes / 1e9,
            "verdict": _sentence(row, now, header["verdict"]),
            "command": self.command(values),
            "header": header,
            "spans": [*spans, *before_spans],
        }


class SupersededError(AtlasError):
    """A newer question has replaced this one."""


def _sentence(row: Mapping[str, Any], now: Mapping[str, Any], spent: str) -> str:
    """Faster or slower than now, whether it fits, and where the time goes."""
    ratio = row["tokens_per_s"] / now["tokens_per_s"]
    if abs(ratio - 1) < SAME:
        first = "As many tokens a second as now."
    else:
        first = f"{ratio:.2f}x as many tokens a second as now."
    if not row["fits"]:
        need, cap = row["peak_gib"], row["memory_gib"]
        first = f"Does not fit: it needs {need:.1f} GiB, and a GPU has {cap:.1f} GiB. {first}"
    return f"{first} {spent}"


def _named(header: Mapping[str, Any], words: str) -> dict[str, Any]:
    (described,) = header["schedules"]
    return {**described, "name": f"{words}: {described['name']}"}


def _links(job: Job, key: str) -> dict[str, float]:
    """One figure of every link that has it, by the key that `--set` changes."""
    wan, links = job.cluster.wan, job.cluster.links
    found = {f"cluster.links[{k}].{key}": getattr(link, key) for k, link in enumerate(links or ())}
    own = found if links is not None else {f"cluster.wan.{key}": None}
    filled = {path: getattr(wan, key) if value is None else value for path, value in own.items()}
    return {path: value for path, value in filled.items() if value is not None}
