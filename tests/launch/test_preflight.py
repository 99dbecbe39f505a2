"""A launcher counts the memory that its workers will take before it starts them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from shipped_jobs import EXAMPLES

from atlas.cost.arrange import arrange
from atlas.cost.memory import peak_memory, worker_memory
from atlas.errors import AtlasError
from atlas.ir.assemble import with_optimizer
from atlas.ir.program import Layout
from atlas.launch import preflight
from atlas.launch.emulate import EmulationSettings
from atlas.launch.multi_dc import num_workers_of
from atlas.launch.preflight import (
    LauncherMemory,
    WorkerNeed,
    layers_of,
    require_memory,
    require_memory_together,
    state_of,
    worker_needs,
)
from atlas.launch.prepared_job import prepare_job
from atlas.launch.rehearse import rehearse
from atlas.launch.rendezvous import SPARE, AgentName
from atlas.launch.train_options import TrainOptions, compiler
from atlas.runtime.assignment import DataChoice, ModelChoice, TrainingSetup
from atlas.runtime.models.config import gpt
from atlas.runtime.models.decoder import Decoder, cuts
from atlas.runtime.models.sizes import layer_sizes
from atlas.runtime.recipe import LearningRate, OptimizerSettings
from atlas.runtime.topology import WorkerRole
from atlas.schedules.classic import one_f_one_b
from atlas.spec import load_job

GPT = gpt(num_layers=4, width=256, num_heads=4, vocabulary=1000, max_length=64)
PROGRAM = with_optimizer(one_f_one_b(Layout(1, 2, 2, ("a", "b"))))


def training(dtype: str, optimizer: str = "adamw") -> TrainingSetup:
    settings = OptimizerSettings(LearningRate(1e-3), name=optimizer)
    return TrainingSetup(ModelChoice(GPT, dtype=dtype), DataChoice(8, 2), settings)


@pytest.mark.parametrize(("dtype", "bytes_each"), [("fp32", 4 + 4 + 8), ("bf16", 2 + 4 + 8 + 4)])
def test_the_count_matches_the_modules_and_the_optimizer(dtype: str, bytes_each: int) -> None:
    for stage, cut in enumerate(cuts(GPT, (2, 2))):
        role = WorkerRole(PROGRAM, stage)
        found = state_of(training(dtype), layers_of(role, training(dtype))).total
        with torch.device("meta"):
            num_values = sum(parameter.numel() for parameter in Decoder(GPT, cut).parameters())
        assert found == num_values * bytes_each


def test_master_weights_of_a_bf16_model_count() -> None:
    """AdamW in bf16: 2 bytes of weight, 4 of gradient, 8 of moments, and 4 of master weight."""
    what, layers = training("bf16"), layers_of(WorkerRole(PROGRAM, 0), training("bf16"))
    num_params = sum(size.num_values for layer in layers for size in layer_sizes(GPT, layer).values())
    assert state_of(what, layers).total == 18 * num_params
    plain = replace(what, optimizer=replace(what.optimizer, name="sgd"))
    assert state_of(plain, layers).total == 6 * num_params
    assert state_of(what, layers, shards=4).total == (6 + 12 / 4) * num_params


def test_a_launcher_counts_as_the_planner_does() -> None:
    """State, activations at the peak, gradients that arrive, and what a save copies; with ZeRO-1 a share of it."""
    job = load_job(EXAMPLES / "tiny.yaml", ["pipelines_per_cell=2", "num_microbatches=2"])
    prepared = prepare_job(job, TrainOptions("1f1b", model="job", steps=1))
    sharded = prepare_job(
        load_job(EXAMPLES / "tiny.yaml", ["pipelines_per_cell=2", "num_microbatches=2", "zero=1"]),
        TrainOptions("1f1b", model="job", steps=1),
    )
    for case, shards in ((prepared, 1), (sharded, 2)):
        needs = worker_needs(case.roles, case.job, case.training, saves=True)
        for role, need in zip(case.roles, needs, strict=True):
            worker, most = peak_memory(case.job, case.program, worker_memory(case.job, arrange(case.job)))[role.rank]
            state = worker.weights + worker.gradients + worker.optimizer
            assert need.on_device == pytest.approx(max(most, state + worker.gradients), rel=0.01)
            assert need.snapshot == pytest.approx((worker.weights + shards * worker.optimizer) / 2, rel=0.01)


def test_host_memory_is_refused_before_a_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = [WorkerNeed(state=100, activations=50, received=60, snapshot=20)] * 2
    enough = 2 * (100 + 60 + 20 + preflight.WORKER_BYTES)
    monkeypatch.setattr(preflight, "free_bytes", lambda: enough)
    require_memory(needs, "cpu")
    monkeypatch.setattr(preflight, "free_bytes", lambda: enough - 1)
    with pytest.raises(AtlasError, match=r"the model does not fit: .* free on this host, for 2 worker"):
        require_memory(needs, "cpu")
    started = list[object]()
    monkeypatch.setattr("atlas.launch.rehearse.emulate", lambda *args, **kwargs: started.append(args))
    monkeypatch.setattr(preflight, "free_bytes", lambda: 1 << 30)
    with pytest.raises(AtlasError, match="the model does not fit"):
        rehearse(load_job(EXAMPLES / "tiny.yaml"), TrainOptions("1f1b", model="job", steps=1, device="cpu"))
    assert not started


def test_launchers_on_one_machine_are_added_up() -> None:
    needs = [WorkerNeed(state=100, activations=50, received=60, snapshot=20)]
    each = 100 + 60 + 20 + preflight.WORKER_BYTES
    east, west = (LauncherMemory(name, needs, "cpu", "boot/1", 2 * each - 1) for name in ("east", "west"))
    with pytest.raises(AtlasError, match=r"does not fit: .* free on the host of east, west, for 2 workers"):
        require_memory_together([east, west])
    require_memory_together([east, west._replace(free_bytes=2 * each)])
    require_memory_together([east, west._replace(memory="boot/2")])  # another machine, or a container of its own
    require_memory_together([east, west._replace(memory="")])
    require_memory_together([east, west._replace(needs=[])])  # it keeps copies of checkpoints only


def test_launchers_that_share_a_gpu_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = [WorkerNeed(state=100, activations=50, received=0, snapshot=0)]
    monkeypatch.setattr("atlas.runtime.hardware.smallest_gpu_bytes", lambda: 299)
    require_memory(needs, "cuda:0")
    with pytest.raises(AtlasError, match=r"of cuda:0 for 2 worker"):
        require_memory(needs, "cuda:0", beside=needs)
    east, west = (LauncherMemory(name, needs, "cuda:0", "boot/1", None) for name in ("east", "west"))
    assert east.shares_gpu(west)
    assert not east.shares_gpu(west._replace(device="cuda:1"))
    assert not east.shares_gpu(west._replace(memory="boot/2"))
    whole = east._replace(device="cuda"), west._replace(device="cuda")
    assert not whole[0].shares_gpu(whole[1])  # a GPU for each worker, by local rank


def test_the_limit_of_a_container_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit, used = tmp_path / "memory.max", tmp_path / "memory.current"
    monkeypatch.setattr(preflight, "CGROUP_FILES", [(str(limit), str(used))])
    without = preflight.free_bytes()
    assert without is not None
    limit.write_text("5000\n")
    used.write_text("1000\n")
    assert preflight.free_bytes() == 4000
    limit.write_text("max\n")
    assert preflight.free_bytes() == pytest.approx(without, rel=0.5)


def test_layers_are_compiled_where_all_workers_are_on_gpus() -> None:
    assert compiler(None, ["cuda", "cuda:0"]) == "inductor"
    assert compiler(None, ["cuda", "cpu"]) == ""
    assert (compiler(True, ["cpu"]), compiler(False, ["cuda"])) == ("inductor", "")


def test_a_spare_needs_the_gpus_of_any_host_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused when it registers, not when it is needed."""
    sets = ["cluster.datacenters.east.gpus_per_node=2", "cluster.datacenters.west.gpus_per_node=2"]
    job = load_job(EXAMPLES / "tiny.yaml", [*sets, "pipelines_per_cell=2"])
    need = num_workers_of(job, AgentName("east", SPARE))
    assert need == max(num_workers_of(job, AgentName("east", part, 2)) for part in range(2)) == 2
    monkeypatch.setattr("atlas.runtime.hardware.num_gpus", lambda: 1)
    with pytest.raises(AtlasError, match=r"2 worker\(s\) on this host of east.*it has 1 GPU"):
        preflight.devices_for(need, "cuda", "east")


def test_logs_of_an_emulated_run_are_kept_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = list[Path | None]()

    def emulated(program: object, costs: object, training: object, settings: EmulationSettings, **_: object) -> None:
        seen.append(settings.logs)
        if settings.logs is not None:
            settings.logs.mkdir(parents=True)

    monkeypatch.setattr("atlas.launch.rehearse.emulate", emulated)
    job = load_job(EXAMPLES / "tiny.yaml")
    for logs in (None, tmp_path, tmp_path):
        rehearse(job, TrainOptions("1f1b", steps=1, logs=logs))
    assert seen == [None, tmp_path / "attempt-1" / "emulated", tmp_path / "attempt-2" / "emulated"]


def test_a_run_of_a_million_steps_starts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def emulated(_program: object, _costs: object, _training: object, settings: EmulationSettings, **_: object) -> None:
        seen.append(settings.num_steps)
        raise InterruptedError

    monkeypatch.setattr("atlas.launch.rehearse.emulate", emulated)
    with pytest.raises(InterruptedError):
        rehearse(load_job(EXAMPLES / "tiny.yaml"), TrainOptions("1f1b", steps=1_000_000))
    assert seen == [1_000_000]


def test_a_job_in_fp16_is_not_trained_in_another_precision() -> None:
    job = load_job(EXAMPLES / "tiny.yaml").model_copy(update={"precision": "fp16"})
    prepare_job(job, TrainOptions("1f1b"))  # the stand-in has a precision of its own
    with pytest.raises(AtlasError, match=r"precision = 'fp16': workers train in bf16 or fp32.*--set precision=bf16"):
        prepare_job(job, TrainOptions("1f1b", model="job"))
