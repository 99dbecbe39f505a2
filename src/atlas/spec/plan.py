"""The Plan file: a job with every choice made, the groups of pipelines that share the work, what they are predicted to
do and where all of it came from. The one file that passes between commands.

`load_job_or_plan` reads it, or a job file. Knows shapes and rules; `atlas.planner` makes plans, `atlas.launch` runs
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field

from atlas.errors import AtlasError, SpecError
from atlas.spec.document import YAML_WIDTH, Document, Keys, as_path, read_yaml
from atlas.spec.fields import Count, Flag, Frozen, Name, NonNegative, Text
from atlas.spec.job import MAX_RANKS, Job, Place
from atlas.spec.load import finished, job_of
from atlas.spec.refusal import Where, bad, validated

VERSION: Literal[1] = 1
"""Of the plan file's format."""
REMEDY = "Make the plan again"
Quantity = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]


class PlanGroup(Frozen):
    """Cells that share one placement. Several groups: data parallelism across regions."""

    placement: Annotated[tuple[Place, ...], Field(min_length=1, max_length=MAX_RANKS)]
    """Which datacenter holds which run of the pipeline, first stage first."""
    layers_per_stage: tuple[Annotated[int, Field(strict=True, ge=1, le=512)], ...]
    """First stage to last."""
    cells: Count
    """DP-cells (D)."""
    pipelines_per_cell: Count
    """Pipelines of a cell (C)."""
    num_microbatches: Count
    """Per pipeline and iteration; the most that any of the group has."""


class PlanSchedule(Frozen):
    """How the work is ordered."""

    name: Name
    """One of `atlas schedules`."""
    tcp: Literal["one", "many"] = "many"
    """Connections between two nodes."""
    sharing: Flag = False
    """Whether the pipelines of a cell may take turns on the WAN."""
    tries: Annotated[int, Field(strict=True, ge=0, le=1_000_000)] = 0
    """Orders that the search tried; the same number and seed find the same order."""
    seed: Annotated[int, Field(strict=True, ge=0, le=2**32 - 1)] = 0

    def search(self, tries: int | None, seed: int) -> tuple[int | None, int]:
        """Tries and seed of a search for this plan: the plan's own, unless others are given."""
        return tries or self.tries or None, seed or self.seed


class Predicted(Frozen):
    """The simulator's figures of the plan."""

    iteration_s: Quantity
    tokens_per_s: Quantity
    tokens_per_iteration: Annotated[int, Field(ge=1)]
    empty_slots: Annotated[int, Field(strict=True, ge=0)] = 0
    """Microbatches that stay empty where pipelines do not divide the global batch: some have one less to do."""
    num_gpus: Count
    usd_per_iteration: Quantity
    """Rent of GPUs and egress."""
    usd_per_hour: Quantity
    usd_per_trillion_tokens: Quantity
    egress_usd_per_iteration: Quantity
    wan_gb_per_iteration: Quantity
    """10^9 bytes that leave a datacenter."""
    peak_gib: NonNegative
    """Of the fullest GPU, under the order that candidates are compared by."""
    memory_gib: NonNegative
    """That the job may use of it."""
    between_groups_s: Quantity = 0.0
    """Part of the iteration in which groups exchange gradients over the WAN."""


class Origin(Frozen):
    """Where the plan came from."""

    job: Text
    """The file that was planned."""
    strategy: Name
    objective: Text
    estimated: int
    """Candidates priced in closed form."""
    simulated: int
    """Candidates simulated event by event."""
    interrupted: Flag = False
    atlas: Text = ""
    """Version of Atlas."""


class Plan(Frozen):
    """A job with every choice made."""

    plan: Literal[1]
    """Version of this format."""
    job: Job
    """The job with its choices made; of the slowest group where there are several."""
    groups: Annotated[tuple[PlanGroup, ...], Field(min_length=1, max_length=1000)]
    """All pipelines. Several groups pass sums of gradients on in this order, in a ring."""
    schedule: PlanSchedule
    predicted: Predicted
    origin: Origin
    runnable: Annotated[str, Field(pattern=r"^(yes|no, because .+)$", max_length=4096)]
    """Whether the runtime can execute it: `yes`, or `no, because ...`."""


# ---- reading -----------------------------------------------------------------------------------------------
def require_runnable(plan: Plan) -> None:
    """Raise AtlasError for a plan that `atlas train` cannot execute."""
    if plan.runnable != "yes":
        why = plan.runnable.removeprefix("no, because ")
        raise AtlasError(f"{plan.job.where}: `atlas train` cannot execute this plan: {why}. Change that and plan again")


def load_job_or_plan(
    path: str | PathLike[str], overrides: Sequence[str] = (), *, to_plan: bool = False
) -> tuple[Job, Plan | None]:
    """A job file, or the job of a Plan file and the Plan. `--set` changes the job and so invalidates the predictions.
    A job `to_plan` may leave out what the planner chooses."""
    path = as_path(path, "job or plan")
    document = read_yaml(path, key="job file")
    if not isinstance(document.data, dict) or "plan" not in document.data:
        return job_of(document, path, overrides, to_plan=to_plan), None
    plan = _plan(document, path, overrides)
    return plan.job, plan


def _plan(document: Document, path: Path, overrides: Sequence[str]) -> Plan:
    def where(keys: Keys) -> str:
        return document.origin(keys, str(path))

    inside = {keys[1:]: at for keys, at in document.origins.items() if keys[:1] == ("job",)}
    if not isinstance(document.data.get("job"), dict):
        raise bad(where, ("job",), None, "a plan must contain its job", REMEDY)
    job = finished(Document(document.data["job"], inside), overrides, str(path))
    rest = {key: value for key, value in document.data.items() if key != "job"}
    plan = validated(Plan, {**rest, "job": job}, where, "Change it, or make the plan again")
    _check_groups(plan, where)
    if len(plan.groups) > 1:
        _require_one_of(plan, where)
        plan.job._groups = group_jobs(job, plan.groups)
    return plan


SHAPE = ("pp", "interleave", "num_microbatches", "cells", "pipelines_per_cell", "placement", "layers_per_stage")
"""Keys of a job in which groups differ."""


def group_jobs(job: Job, groups: Sequence[PlanGroup]) -> tuple[Job, ...]:
    """The job of each group."""
    return tuple(
        job.alone(
            pp=len(group.layers_per_stage),
            interleave=1,
            num_microbatches=group.num_microbatches,
            cells=group.cells,
            pipelines_per_cell=group.pipelines_per_cell,
            placement=group.placement,
            layers_per_stage=group.layers_per_stage,
        )
        for group in groups
    )


def require_group_shape(job: Job) -> None:
    """The job of a plan with several groups has the shape of one of them: each group keeps its own."""
    if _shape(job) not in map(_shape, job.groups):
        rule = f"the job has another shape ({', '.join(SHAPE)}) than each of its plan's groups"
        remedy = "Leave these keys as they are, or use job.alone(), which has no groups"
        raise SpecError(where=job.where, key="groups", value=len(job.groups), rule=rule, remedy=remedy)


def one_of_groups(job: Job) -> SpecError:
    """The error for the job of a plan with several groups, where the plan is needed."""
    rule = "this is the job of a plan with so many groups of pipelines, and the groups are changed together"
    remedy = "Give the plan instead of its job, or job.alone() for the slowest group"
    return SpecError(where=job.where, key="groups", value=len(job.groups), rule=rule, remedy=remedy)


def _shape(job: Job) -> list[Any]:
    return [getattr(job, key) for key in SHAPE]


def _require_one_of(plan: Plan, where: Where) -> None:
    """`--set` may not change what each group has of its own."""
    if _shape(plan.job) not in map(_shape, group_jobs(plan.job, plan.groups)):
        rule = f"the job has another shape ({', '.join(SHAPE)}) than each of the plan's groups"
        raise bad(where, ("groups",), len(plan.groups), rule, "Leave these keys as they are, or plan again")


def _check_groups(plan: Plan, where: Where) -> None:
    names = [dc.name for dc in plan.job.cluster.datacenters]
    for k, group in enumerate(plan.groups):
        placement: Keys = ("groups", k, "placement")
        for place in group.placement:
            if place.dc not in names:
                raise bad(where, placement, place.dc, f"no such datacenter ({', '.join(names)})", REMEDY)
        stages, layers = sum(place.stages for place in group.placement), group.layers_per_stage
        if stages != len(layers):
            raise bad(where, placement, stages, f"stages do not match the {len(layers)} layers_per_stage", REMEDY)
        if sum(layers) != plan.job.model.layers:
            rule = f"the model has {plan.job.model.layers} layers"
            raise bad(where, ("groups", k, "layers_per_stage"), sum(layers), rule, REMEDY)


# ---- writing -----------------------------------------------------------------------------------------------
HEADER = """\
# A plan made by `atlas plan`. `atlas simulate`, `atlas whatif` and `atlas train` take it as it is.
# Every second below is simulated. docs/planner.md explains the keys.
"""


def plan_text(plan: Plan) -> str:
    """The Plan as YAML: only the keys of the job's file and the choices."""
    data: dict[str, Any] = plan.model_dump(mode="json", exclude_none=True, exclude={"job"})
    ordered = {"plan": data.pop("plan"), "runnable": data.pop("runnable"), **data, "job": _job_data(plan.job)}
    return HEADER + yaml.dump(ordered, Dumper=_Dumper, sort_keys=False, width=YAML_WIDTH)


def job_text(job: Job) -> str:
    """The job as one file, without `base`, `cluster: FILE` and `model.config`."""
    return yaml.dump(_job_data(job), Dumper=_Dumper, sort_keys=False, width=YAML_WIDTH)


def _job_data(job: Job) -> dict[str, Any]:
    data: dict[str, Any] = job.model_dump(mode="json", exclude_none=True, exclude_unset=True)
    data["model"].pop("config", None)
    return data


class _Dumper(yaml.SafeDumper):
    """Small mappings and lists on one line, as people write them."""

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        plain = all(not isinstance(item, dict | list) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=plain)

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        small = len(mapping) <= 8 and all(not isinstance(value, dict | list) for value in mapping.values())
        return super().represent_mapping(tag, mapping, flow_style=small)

    def ignore_aliases(self, data: Any) -> bool:
        return True
