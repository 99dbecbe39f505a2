"""A worker's stages divided over two processes of its node: it trains as one process does, and dies as one does."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from multi_dc_runs import Run, losses_alone, run_datacenters, train_options, write_job

from atlas.cost.table import Costs, kind_costs, uniform_costs
from atlas.errors import AtlasError, SpecError, WorkerError
from atlas.ir.assemble import with_optimizer
from atlas.ir.program import Kind, Layout, Memory, Program
from atlas.launch.checkpoint_folders import find_checkpoints, first_step
from atlas.launch.emulate import Emulation, EmulationSettings, Weights, emulate
from atlas.launch.preflight import devices_for
from atlas.launch.rehearse import rehearse
from atlas.launch.train_options import TrainOptions
from atlas.runtime.assignment import DataChoice, ModelChoice, TrainingSetup
from atlas.runtime.models.config import DecoderConfig, gpt
from atlas.runtime.recipe import LearningRate, OptimizerSettings
from atlas.runtime.reference import train_alone
from atlas.schedules.classic import one_f_one_b
from atlas.schedules.setting import Setting
from atlas.schedules.zero_bubble import zero_bubble
from atlas.spec import load_job

TINY = Path(__file__).parents[2] / "examples" / "tiny.yaml"
GPT = gpt(num_layers=2, width=16, num_heads=2, vocabulary=32, max_length=8, dropout=0.1)
QWEN = DecoderConfig(
    "qwen3", num_layers=3, width=16, num_heads=4, num_kv_heads=2, head_width=8, ffn_width=24, vocabulary=32,
    max_length=8, qk_norm=True, tied=True,
)  # fmt: skip
CLOSE = 1e-5
TWO = ("east", "west")


def training(config: DecoderConfig) -> TrainingSetup:
    settings = OptimizerSettings(LearningRate(1e-3))
    return TrainingSetup(ModelChoice(config), DataChoice(8, 2), settings, max_norm=0.5)


def case(num_pipelines: int, num_stages: int, *, splits: bool = False) -> tuple[Program, Costs]:
    layout = Layout(num_pipelines, num_stages, 3, ("a", "b", "c")[:num_stages])
    costs = uniform_costs(num_pipelines, num_stages, kind_costs(forward_ns=1000))
    plain = zero_bubble(Setting(layout, costs, None, Memory(3))) if splits else one_f_one_b(layout)
    return with_optimizer(plain, norm=True), costs


def play(what: tuple[Program, Costs], config: DecoderConfig, tp: int, steps: int = 3, **setup: object) -> Emulation:
    return emulate(*what, training(config), replace(small_run(steps, tp), **setup))  # type: ignore[arg-type]


def small_run(steps: int, tp: int) -> EmulationSettings:
    """Patient: on a busy host, processes take long for their first step."""
    return EmulationSettings(steps, device="cpu", streams=1, paths={}, tp=tp, patience_s=120.0)


def assert_close(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        # The keys' bias has no gradient but rounding's without rotation, and AdamW makes a step of it.
        assert "k.bias" in name or np.allclose(found[name], weight, rtol=1e-3, atol=1e-4), name


def test_two_processes_a_worker_train_as_one_process_does() -> None:
    """Inputs over the network, the norm of all parts, dropout."""
    losses, weights = train_alone(training(GPT), 1, 3, 3)
    run = play(case(1, 2), GPT, 2)
    assert run.losses == pytest.approx(losses, rel=CLOSE)
    assert_close(run.weights, weights)


@pytest.mark.slow
@pytest.mark.parametrize(("pipelines", "stages"), [(2, 2), (2, 1)])
def test_split_backwards_and_tied_ends_train_as_one_process_does(pipelines: int, stages: int) -> None:
    what = case(pipelines, stages, splits=True)
    assert any(op.kind == Kind.I for op in what[0].ops(0))
    one, two = play(what, QWEN, 1), play(what, QWEN, 2)
    assert two.losses == pytest.approx(one.losses, rel=CLOSE)
    assert two.norms == pytest.approx(one.norms, rel=CLOSE)
    assert_close(two.weights, one.weights)


def saved(folder: Path, steps: int, program: Program) -> dict[str, object]:
    saves = find_checkpoints(folder, program.rank_dc, every=1)
    return {"steps": steps - first_step(saves), "save": saves}


@pytest.mark.slow
def test_a_checkpoint_is_whole_and_resumes_with_any_number_of_processes(tmp_path: Path) -> None:
    what = case(1, 2)
    straight = play(what, QWEN, 1, 4)
    for number, (before, after) in enumerate([(2, 1), (1, 2)]):
        folder = tmp_path / str(number)
        first = play(what, QWEN, before, **saved(folder, 2, what[0]))  # type: ignore[arg-type]
        second = play(what, QWEN, after, **saved(folder, 4, what[0]))  # type: ignore[arg-type]
        assert [*first.losses, *second.losses] == pytest.approx(straight.losses, rel=CLOSE)


def kill_follower(leader: int, how: signal.Signals = signal.SIGKILL) -> None:
    (follower,) = Path(f"/proc/{leader}/task/{leader}/children").read_text().split()
    os.kill(int(follower), how)


def test_a_killed_follower_is_a_killed_worker() -> None:
    program, costs = case(1, 1)
    setup = small_run(200, 2)
    with pytest.raises(WorkerError, match=r"tensor-parallel rank 1 of p0\.s0 was killed by SIGKILL"):
        emulate(program, costs, training(GPT), setup, on_start=lambda pids: kill_follower(pids["p0.s0"]))


def test_what_an_aborted_follower_wrote_is_in_the_error() -> None:
    program, costs = case(1, 1)
    setup = small_run(200, 2)
    with pytest.raises(WorkerError, match=r"rank 1 of p0\.s0 was killed by SIGABRT; the end of its log:") as raised:
        emulate(program, costs, training(GPT), setup, on_start=lambda p: kill_follower(p["p0.s0"], signal.SIGABRT))
    assert "Fatal Python error: Aborted" in str(raised.value)
    assert "in follow" in str(raised.value)


@pytest.mark.slow
def test_over_datacenters_a_killed_follower_is_started_again_with_all_others(tmp_path: Path) -> None:
    write_job(tmp_path, *TWO)
    sets = ["tp=2", *(f"cluster.datacenters.{dc}.gpus_per_node=2" for dc in TWO)]
    job, pids, struck = load_job(tmp_path / "job.yaml", sets), dict[str, int](), list[int]()

    def started(run: Run, found: Mapping[str, int]) -> None:
        pids.update(found)

    def strike(run: Run, step: int) -> None:
        if step == 3 and not struck:
            struck.append(pids["p0.s1"])
            kill_follower(pids["p0.s1"])

    options = train_options(6, save_every=2, grace_s=1.5, patience_s=60)
    run = run_datacenters(job, {dc: tmp_path / dc for dc in TWO}, options, on_start=started, on_step=strike)
    assert run.codes == dict.fromkeys(TWO, 0), run.errors
    assert run.starts == 2
    assert "tensor-parallel rank 1 of p0.s1 was killed by SIGKILL" in run.said[0]
    assert run.losses == pytest.approx(losses_alone(job, 6), rel=CLOSE)


# ---- what is asked before anything starts ----------------------------------------------------------------------------
def test_an_indivisible_model_is_refused() -> None:
    with pytest.raises(SpecError, match="num_heads = 2: cannot be divided among 4 tensor-parallel GPUs"):
        play(case(1, 1), GPT, 4)


def test_more_processes_than_a_machine_rehearses_are_refused() -> None:
    job = load_job(TINY, ["tp=8", *(f"cluster.datacenters.{dc}.gpus_per_node=8" for dc in TWO)])
    with pytest.raises(AtlasError, match="workers of 8 processes each are more than the 16"):
        rehearse(job, TrainOptions("1f1b"))


def test_each_worker_gets_neighbouring_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atlas.runtime.hardware.num_gpus", lambda: 8)
    assert devices_for(2, "cuda", "east", tp=4) == ["cuda:0", "cuda:4"]
    assert devices_for(1, "cuda", "east", 1, tp=4) == ["cuda:4"]
    with pytest.raises(AtlasError, match=r"3 worker\(s\) of 4 GPUs each on this host of east"):
        devices_for(3, "cuda", "east", tp=4)
