"""What another framework's habits do to a job's costs and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas.cost.arrange import arrange
from atlas.cost.cluster_arrays import ring_bps
from atlas.cost.memory import WorkerMemory, worker_memory
from atlas.cost.price import price
from atlas.errors import SpecError
from atlas.evaluate import evaluate
from atlas.ir.program import Kind
from atlas.launch.preflight import require_executable
from atlas.spec import parse_job
from atlas.spec.job import Job

RUNTIMES = ("atlas", "megatron", "torch")


def workers_of(job: Job) -> tuple[WorkerMemory, ...]:
    return worker_memory(job, arrange(job))


def job(runtime: str = "atlas", *, nodes: int = 4, gpu: str = "A100-80", **changes: Any) -> Job:
    data = {
        "model": {"layers": 8, "hidden": 4096, "heads": 32, "seq_len": 2048},
        "cluster": {"datacenters": [{"name": "a", "nodes": nodes, "gpu": gpu, "net_gbps": 800}]},
        "runtime": runtime,
        "num_microbatches": 8,
        "pp": 4,
        "cells": 2,
        "pipelines_per_cell": 1,
        "layers_per_stage": [2, 2, 2, 2],
    }
    return parse_job({**data, **changes})


def seconds(one: Job) -> float:
    return float(evaluate(one, "1f1b").row()["iteration_s"])


def test_megatron_recomputes_inside_the_backward_on_the_last_stage_too() -> None:
    ours, theirs = (price(job(runtime, calibrated=False, cells=4)).compute_ns[0] for runtime in ("atlas", "megatron"))
    assert (theirs[:, Kind.R] == 0).all()
    sends = price(job(calibrated=False, cells=4)).work_ns[1, 0]  # the gradient, which the sender waits for
    extra = theirs[:, Kind.B] - ours[:, Kind.B]
    assert extra.tolist() == pytest.approx((ours[:, Kind.R] + np.array([0, *sends])).tolist(), abs=2)


def test_without_recompute_only_the_transfers_differ() -> None:
    ours, theirs = (
        price(job(runtime, recompute=False, calibrated=False, cells=4)) for runtime in ("atlas", "megatron")
    )
    extra = (theirs.compute_ns - ours.compute_ns)[0][:, [Kind.F, Kind.B]]
    one = int(ours.work_ns[0, 0, 0])
    assert extra.tolist() == [[one, 0], [one, one], [one, one], [0, one]]
    assert not theirs.work_ns.any()


def test_receivers_of_torch_wait_as_well() -> None:
    sends, both = (price(job(runtime, tp=1, calibrated=False)) for runtime in ("megatron", "torch"))
    extra = (both.compute_ns - sends.compute_ns)[0][:, [Kind.F, Kind.B]].sum(axis=1)
    assert (extra > 0).all()
    assert extra[1] == pytest.approx(2 * extra[0])


def test_every_gpu_of_a_torch_group_sends_the_whole_activation() -> None:
    one, eight = (
        price(job("torch", tp=tp, nodes=8, cells=16 // tp, calibrated=False, recompute=False)) for tp in (1, 8)
    )
    waits = [costs.compute_ns[0, 1, Kind.F] - costs.compute_ns[0, 0, Kind.F] for costs in (one, eight)]
    assert waits[1] == pytest.approx(waits[0], rel=0.2)  # eight GPUs of a node send eight tensors either way


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_simulator_agrees_with_the_closed_form_of_1f1b(runtime: str) -> None:
    one = job(runtime, recompute=False)
    stages = price(one).compute_ns[0]
    busy = stages[:, [Kind.F, Kind.B]].sum(axis=1)
    closed_s = (busy.sum() + 7 * busy.max() + stages[:, [Kind.SYNC, Kind.STEP]].sum(axis=1).max()) / 1e9
    assert seconds(one) == pytest.approx(closed_s, rel=0.02)


def test_rings_of_packed_replicas_have_a_node_to_themselves_and_others_divide_it() -> None:
    ours, packed = (ring_bps(16, 4, 2, 8, 800e9, 2400e9, packed=packed)[0] for packed in (False, True))
    assert float(packed) == 4 * float(ours) == 800e9


def test_megatron_splits_layers_evenly_where_it_can() -> None:
    assert arrange(job("megatron", layers_per_stage=None)).layers_per_stage == (2, 2, 2, 2)


def test_no_runtime_but_ours_takes_turns_on_the_wan() -> None:
    cluster = {
        "wan": {"latency_ms": 20},
        "datacenters": [{"name": name, "nodes": 4, "gpus_per_node": 1} for name in ("a", "b")],
    }
    shape = {"cluster": cluster, "pipelines_per_cell": 2, "cells": 1}
    shared = [evaluate(job(runtime, **shape), "atlas", budget=24).row()["sharing"] for runtime in RUNTIMES]
    assert shared[1:] == [False, False]


# ---- tensor parallelism over several nodes -------------------------------------------------------------------
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_group_of_two_nodes_is_priced_over_their_network(runtime: str) -> None:
    wide = job(runtime, nodes=16, tp=16)
    slower = job(runtime, nodes=16, tp=16, cluster={"datacenters": [{"name": "a", "nodes": 16, "net_gbps": 100}]})
    narrow = job(runtime, nodes=8, tp=8)
    assert seconds(wide) > 0.5 * seconds(narrow), "twice the GPUs, and a network in between"
    assert seconds(slower) > seconds(wide)


def test_a_group_that_fills_one_and_a_half_nodes_is_refused() -> None:
    with pytest.raises(SpecError, match="a multiple of it"):
        arrange(job(tp=12, nodes=16, model={"layers": 8, "hidden": 3072, "heads": 24, "seq_len": 2048}))


# ---- memory --------------------------------------------------------------------------------------------------
def test_layer_by_layer_recompute_holds_one_layers_activations() -> None:
    ours, theirs = (workers_of(job(runtime, tp=1))[0] for runtime in ("atlas", "megatron"))
    assert theirs.stash == 2 * ours.stash  # the input of each of its two layers
    assert theirs.activations < theirs.kept
    assert theirs.overhead > 0 == ours.overhead
    assert theirs.cap > ours.cap


def test_the_loss_and_a_recomputed_layer_use_the_same_bytes() -> None:
    again, kept = (workers_of(job("megatron", recompute=recompute))[-1] for recompute in (True, False))
    assert again.logits == max(0, kept.logits - again.activations)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("recompute", [True, False])
def test_the_peak_is_within_what_the_workers_say(runtime: str, recompute: bool) -> None:
    one = job(runtime, recompute=recompute)
    row = evaluate(one, "1f1b").row()
    workers = workers_of(one)
    most = max(w.static + 4 * w.kept + 4 * w.stash + w.activations for w in workers)
    assert max(w.static for w in workers) < row["peak_gib"] * 2**30 <= most


# ---- mixed GPU types ------------------------------------------------------------------------------------------
def two(first: str, second: str, runtime: str) -> Job:
    cluster = {
        "wan": {"latency_ms": 1, "pair_gbps": 50},
        "datacenters": [
            {"name": "a", "nodes": 4, "gpu": first, "net_gbps": 100},
            {"name": "b", "nodes": 4, "gpu": second, "net_gbps": 100},
        ],
    }
    return job(runtime, cluster=cluster, efficiency=0.5, cells=8)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_slower_gpu_type_never_makes_it_faster(runtime: str) -> None:
    fast = seconds(two("H100", "H100", runtime))
    mixed, turned = seconds(two("H100", "A100-80", runtime)), seconds(two("A100-80", "H100", runtime))
    slow = seconds(two("A100-80", "A100-80", runtime))
    assert fast <= min(mixed, turned) * 1.0001
    assert max(mixed, turned) <= slow * 1.0001
    assert mixed == pytest.approx(turned, rel=0.15), "the order of the types matters little on equal networks"


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_default_split_on_mixed_gpu_types_is_faster_than_the_slow_type_alone(runtime: str) -> None:
    def by_default(first: str, second: str) -> Job:
        return two(first, second, runtime).model_copy(update={"layers_per_stage": None})

    mixed, slow = by_default("H100", "A100-80"), by_default("A100-80", "A100-80")
    split = arrange(mixed).layers_per_stage
    assert sum(split[:2]) > sum(split[2:])
    assert seconds(mixed) < 0.97 * seconds(slow)
    assert seconds(by_default("A100-80", "H100")) < 0.97 * seconds(slow)


# ---- executing -------------------------------------------------------------------------------------------------
def test_only_our_own_runtime_is_executed() -> None:
    require_executable(job())
    with pytest.raises(SpecError, match="another framework executes this job"):
        require_executable(job("megatron"))
    with pytest.raises(SpecError, match="inside one node"):
        require_executable(job(tp=16, nodes=16))


def test_train_refuses_a_job_of_another_runtime(capsys: pytest.CaptureFixture[str]) -> None:
    from atlas.cli import main

    tiny = Path(__file__).parents[2] / "examples" / "tiny.yaml"
    assert main(["train", str(tiny), "--emulate", "--set", "runtime=megatron"]) == 2
    assert "runtime = 'megatron'" in capsys.readouterr().err
