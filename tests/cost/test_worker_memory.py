"""Bytes per worker, the rule that schedules keep, and what is said when a job does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from shipped_jobs import EXAMPLES, SHIPPED

from atlas.cost.arrange import arrange
from atlas.cost.cluster_arrays import GIB
from atlas.cost.memory import WorkerMemory, memory_rule, peak_memory, worker_memory
from atlas.errors import InfeasibleError
from atlas.ir.assemble import assemble
from atlas.ir.program import Kind, Layout, Memory, Op
from atlas.spec import Job, load_job

TINY = EXAMPLES / "tiny.yaml"
LAYER = 12 * 2048**2 + 13 * 2048
STASH = 2048 * 2048 * 2


def workers_of(job: Job) -> tuple[WorkerMemory, ...]:
    return worker_memory(job, arrange(job))


def rule_of(job: Job) -> Memory:
    return memory_rule(job, arrange(job))


def held_at_once(job: Job) -> int:
    rule = rule_of(job)
    return (rule.cap - rule.acquire[Kind.R]) // rule.acquire[Kind.F]


def test_bytes_of_a_middle_stage_by_hand() -> None:
    worker = workers_of(load_job(TINY))[1]
    assert (worker.weights, worker.gradients, worker.optimizer) == (2 * LAYER * 2, 2 * LAYER * 4, 2 * LAYER * 12)
    assert worker.stash == STASH
    assert worker.activations == 2 * 2048 * 16 * 2048 * 2  # two layers, 16 H elements a token
    assert (worker.logits, worker.reserved) == (0, 0)
    assert worker.cap == int(0.92 * 40 * GIB)


def test_the_ends_hold_embedding_head_and_logits() -> None:
    first, _, _, last = workers_of(load_job(TINY))
    assert first.weights == 2 * (2 * LAYER + 32_000 * 2048 + 2048 * 2048)
    assert last.weights == 2 * (2 * LAYER + 32_000 * 2048 + 2 * 2048)
    assert last.logits == 2048 * 32_000 * 4  # in bf16, and their gradient


def test_what_is_reserved_for_others_counts_against_the_cap() -> None:
    plain, reserved = (workers_of(load_job(TINY, [f"reserved_gib={r}"]))[0] for r in (0, 10))
    assert plain.free - reserved.free == 10 * GIB


def sharded(tp: int) -> Job:
    sets = ["cluster.datacenters.east.gpus_per_node=4", "cluster.datacenters.west.gpus_per_node=4", "reserved_gib=1"]
    return load_job(TINY, [*sets, f"tp={tp}"])


def test_tensor_parallelism_divides_state_and_the_inside_of_attention_and_mlp() -> None:
    one, two = (workers_of(sharded(tp))[3] for tp in (1, 2))
    for part in ("weights", "gradients", "optimizer"):
        assert getattr(two, part) == getattr(one, part) // 2
    assert (two.stash, two.logits, two.reserved) == (one.stash, one.logits, one.reserved)
    assert one.activations == 2 * 2048 * 16 * 2048 * 2
    assert two.activations == 2 * 2048 * (4 + 12 // 2) * 2048 * 2


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_the_rule_is_safe_on_every_worker_of_the_shipped_jobs(path: Path, recompute: bool) -> None:
    job = load_job(path, [f"recompute={str(recompute).lower()}"])
    rule = rule_of(job)
    most = held_at_once(job)
    assert most >= 1
    assert most * rule.acquire[Kind.F] + rule.acquire[Kind.R] <= rule.cap
    assert rule.release[Kind.B] == rule.release[Kind.W] == rule.acquire[Kind.F] + rule.acquire[Kind.R]
    for worker in workers_of(job):
        forward, again = worker.per_microbatch(recompute)
        assert worker.static + most * forward + again <= worker.cap


def test_the_rule_allows_one_microbatch_where_exactly_one_fits() -> None:
    need = max(w.static + w.stash + w.activations for w in workers_of(load_job(TINY)))
    job = load_job(TINY, [f"memory_gib={need / GIB + 1e-9:.12f}"])
    rule = rule_of(job)
    assert rule.acquire[Kind.F] + rule.acquire[Kind.R] <= rule.cap
    assert held_at_once(job) == 1


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["memory_gib=2"], r"worker 0 of each pipeline \(east\) needs 3.1 GiB per GPU, which has 2.0 .*Raise pp or tp"),
        (["memory_gib=3.2", "recompute=false", "microbatch=8"], "Set recompute: true"),
        (["memory_gib=12", "reserved_gib=10"], "Lower reserved_gib"),
        (["memory_gib=5", "microbatch=8"], "Lower microbatch"),
    ],
)
def test_a_job_that_does_not_fit_says_where_and_what_to_change(sets: list[str], words: str) -> None:
    with pytest.raises(InfeasibleError, match=words):
        rule_of(load_job(TINY, sets))


def test_tied_embeddings_on_one_worker_are_held_once() -> None:
    sets = ["pp=1", "pipelines_per_cell=1", "placement=[{dc: east, stages: 1}]"]
    free, tied = (workers_of(load_job(TINY, [*sets, f"model.tied_embeddings={t}"]))[0] for t in ("false", "true"))
    assert free.weights - tied.weights == 2 * 32_000 * 2048


def test_peak_memory_counts_what_a_program_really_holds() -> None:
    job = load_job(TINY, ["pp=2", "num_microbatches=2"])
    frame = Layout(2, 2, 2, ("east", "west"))
    F, R, B, I, W = Kind.F, Kind.R, Kind.B, Kind.I, Kind.W  # noqa: E741
    first = [Op(F, 0, 0), Op(F, 0, 1), Op(R, 0, 0), Op(B, 0, 0), Op(R, 0, 1), Op(I, 0, 1), Op(W, 0, 1)]
    last = [Op(F, 1, 0), Op(B, 1, 0), Op(F, 1, 1), Op(B, 1, 1)]
    (front, front_need), (back, back_need) = peak_memory(
        job, assemble("by hand", frame, [first, last]), workers_of(job)
    )
    assert front_need == front.static + 2 * front.stash + front.activations
    assert back_need == back.static + back.activations
