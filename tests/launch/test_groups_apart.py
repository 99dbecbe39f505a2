"""Data parallelism across two emulated regions whose pipelines are placed differently."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from multi_dc_runs import run_datacenters

from atlas.errors import SpecError
from atlas.launch.preflight import require_executable
from atlas.launch.prepared_job import prepare_job
from atlas.launch.rehearse import rehearse
from atlas.launch.train_options import TrainOptions
from atlas.planner.files import plan_of
from atlas.planner.run import make_plan
from atlas.runtime.assignment import SumsKind
from atlas.runtime.reference import train_groups_alone
from atlas.sim import simulate
from atlas.spec import Job, parse_job
from atlas.spec.job import Place
from atlas.spec.plan import PlanGroup, group_jobs, load_job_or_plan, plan_text

OPTIONS = TrainOptions("1f1b", device="paced", model="job", data="shipped", learning_rate=3e-3, clip=0.5)


def regions_job(*groups: PlanGroup, tp: int = 1, tied: bool = False) -> Job:
    """West has more nodes than east."""
    job = parse_job(
        {
            "name": "two regions",
            "model": {
                "family": "llama", "layers": 3, "hidden": 32, "heads": 2, "vocab": 300, "seq_len": 16,
                "tied_embeddings": tied,
            },
            "cluster": {
                "wan": {"latency_ms": 20, "pair_gbps": 0.05},
                "datacenters": [
                    {"name": "west", "nodes": 4, "gpus_per_node": 2},
                    {"name": "east", "nodes": 4, "gpus_per_node": 2},
                ],
            },
            "precision": "fp32",
            "microbatch": 2,
            "num_microbatches": 3,
            "pp": 2,
            "tp": tp,
        }
    )  # fmt: skip
    job._groups = group_jobs(job, groups) if groups else ()
    return job


def group(dc: str, layers: tuple[int, ...], pipelines: int, microbatches: int) -> PlanGroup:
    places = (Place(dc=dc, stages=len(layers)),)
    return PlanGroup(
        placement=places, layers_per_stage=layers, cells=1, pipelines_per_cell=pipelines, num_microbatches=microbatches
    )


def losses_apart(job: Job, options: TrainOptions) -> list[float]:
    """How far each loss of a rehearsal is from that of one process."""
    result = rehearse(job, options)
    sizes = [(part.pipelines_per_cell or 1, part.num_microbatches) for part in job.parts]
    losses, _ = train_groups_alone(prepare_job(job, options).training, sizes, options.steps)
    assert len(result.run.norms) == options.steps
    return [abs(ours / theirs - 1) for ours, theirs in zip(result.run.losses, losses, strict=True)]


def test_two_regions_of_different_shape_learn_what_one_process_learns() -> None:
    job = regions_job(group("west", (1, 2), 1, 4), group("east", (3,), 2, 2), tied=True)
    assert max(losses_apart(job, replace(OPTIONS, steps=3, zero=1))) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("sums", ["ordered", "transport"])
def test_tensor_parallel_ranks_sum_over_regions(sums: SumsKind) -> None:
    job = regions_job(group("west", (1, 2), 1, 2), group("east", (3,), 2, 1), tp=2)
    assert max(losses_apart(job, replace(OPTIONS, steps=3, sums=sums))) < 1e-6


@pytest.mark.slow
def test_three_groups_sum_in_a_ring() -> None:
    groups = [group("west", (1, 2), 1, 2), group("east", (3,), 2, 1), group("west", (2, 1), 1, 3)]
    assert max(losses_apart(regions_job(*groups), replace(OPTIONS, steps=3))) < 1e-6


def test_launchers_of_two_regions_train_save_and_resume(tmp_path: Path) -> None:
    job = regions_job(group("west", (1, 2), 1, 4), group("east", (3,), 2, 2))
    folders = {name: tmp_path / name for name in ("west", "east")}
    options = replace(OPTIONS, device="cpu", save_every=2)
    first = run_datacenters(job, folders, replace(options, steps=2))
    again = run_datacenters(job, folders, replace(options, steps=4))
    assert (first.errors, again.errors) == ({}, {})
    losses, _ = train_groups_alone(prepare_job(job, options).training, [(1, 4), (2, 2)], 4)
    assert {**first.losses, **again.losses} == pytest.approx(dict(enumerate(losses, 1)), rel=1e-6)


def test_every_group_is_predicted_to_take_as_long_as_the_slowest() -> None:
    job = regions_job(group("west", (1, 2), 1, 4), group("east", (3,), 2, 9))
    prepared = prepare_job(job, OPTIONS)
    found = [simulate(one.program, one.predicted).iteration_ns / 1e9 for one in prepared.groups]
    assert found == pytest.approx([prepared.predicted_s] * 2, rel=1e-6)


def test_a_stand_in_needs_no_room_for_the_activations_of_the_job() -> None:
    job = regions_job(group("west", (1, 2), 1, 4), group("east", (3,), 2, 9))
    prepared = prepare_job(job, replace(OPTIONS, model="", data=""))
    assert {need.activations for need in prepared.needs_of(prepared.roles, saves=False)} == {0}


def test_the_best_plan_that_spans_regions_is_prepared_as_it_was_planned(tmp_path: Path) -> None:
    job = regions_job()
    planned = plan_of(make_plan(job, tries=0, kind="data"))
    assert planned.runnable == "yes"
    (tmp_path / "plan.yaml").write_text(plan_text(planned))
    read, plan = load_job_or_plan(tmp_path / "plan.yaml")
    assert plan is not None
    assert len(plan.groups) > 1
    prepared = prepare_job(read, TrainOptions.of(plan, model="job"))
    nodes = [role.node for role in prepared.roles]
    assert len(set(nodes)) == len(nodes) == plan.predicted.num_gpus // read.tp
    slots = prepared.global_batch // read.microbatch - plan.predicted.empty_slots
    assert slots * read.microbatch * job.model.seq_len == plan.predicted.tokens_per_iteration
    assert prepared.predicted_s == pytest.approx(plan.predicted.iteration_s, rel=1e-6)
    assert prepared.peers


def test_a_plan_with_groups_refuses_another_shape(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(plan_text(plan_of(make_plan(regions_job(), tries=0, kind="data"))))
    with pytest.raises(SpecError, match="num_microbatches"):
        load_job_or_plan(tmp_path / "plan.yaml", ["num_microbatches=77"])


def test_nodes_of_a_datacenter_without_workers_do_not_limit_tensor_parallelism() -> None:
    wide = regions_job(tp=2).alone(placement=(Place(dc="west", stages=2),))
    narrow = [
        dc.model_copy(update={"gpus_per_node": 1}) if dc.name == "east" else dc for dc in wide.cluster.datacenters
    ]
    cluster = wide.cluster.model_copy(update={"datacenters": tuple(narrow)})
    require_executable(wide.alone(cluster=cluster))
    with pytest.raises(SpecError, match="nodes of east"):
        require_executable(wide.alone(cluster=cluster, placement=None))
