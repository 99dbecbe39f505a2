"""Worker processes on one machine: clocks are aligned; a run can be stopped and resumed, also by another plan."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atlas.cost.table import Costs, kind_costs, uniform_costs
from atlas.errors import AtlasError
from atlas.ir.assemble import with_optimizer
from atlas.ir.program import Kind, Layout, Program
from atlas.ir.timeline import Timeline
from atlas.launch import clocks, run_monitor
from atlas.launch.checkpoint_folders import find_checkpoints, first_step
from atlas.launch.emulate import Emulation, EmulationSettings, emulate
from atlas.launch.measured import RunClock, WorkerRecords, with_norm
from atlas.launch.report.events import OnStep, StepEvent
from atlas.launch.smoke import smoke_program
from atlas.launch.worker_processes import WorkerGroup
from atlas.runtime.assignment import SHIPPED, DataChoice, ModelChoice, TrainingSetup, stand_in
from atlas.runtime.models.config import DecoderConfig
from atlas.runtime.recipe import LearningRate, OptimizerSettings
from atlas.schedules.classic import one_f_one_b

SMALL = stand_in(width=16, length=8, microbatch=2)
QWEN = DecoderConfig(
    "qwen3", num_layers=3, width=16, num_heads=4, num_kv_heads=2, head_width=8, ffn_width=24, vocabulary=256,
    max_length=8, qk_norm=True, tied=True,
)  # fmt: skip
TRAINING = TrainingSetup(
    ModelChoice(QWEN), DataChoice(8, 2, SHIPPED), OptimizerSettings(LearningRate(1e-3, "cosine", 1, 10)), 1.0
)

PATIENCE_S = 120.0
"""Workers of a busy host take long for their first step."""


# ---- clocks ----------------------------------------------------------------------------------------------------------
def test_clocks_that_differ_by_seconds_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As exactly as the round trips of the clock requests allow: they are longer on a busy host."""
    program, costs = smoke_program()
    skews_ns = {"p0.s0": 3_000_000_000, "p0.s1": -7_000_000_000, "p1.s1": 11_000_000_000}
    offsets, trip_ns = dict[str, int](), 0

    def timed(workers: WorkerGroup) -> dict[str, int]:
        nonlocal trip_ns
        began_ns = time.monotonic_ns()
        offsets.update(clocks.offsets_ns(workers))
        trip_ns = (time.monotonic_ns() - began_ns) // clocks.NUM_QUESTIONS  # the fastest one is at most this
        return offsets

    monkeypatch.setattr(run_monitor, "offsets_ns", timed)
    began_ns = list[int]()
    settings = EmulationSettings(1, skews_ns=skews_ns, patience_s=PATIENCE_S)
    run = emulate(program, costs, SMALL, settings, on_start=lambda pids: began_ns.append(time.monotonic_ns()))
    took_ns = time.monotonic_ns() - began_ns[0]
    for name, offset_ns in offsets.items():
        assert abs(offset_ns - skews_ns.get(name, 0)) <= trip_ns, (name, offset_ns, trip_ns)
    timeline, slack_ns = run.timeline, 2 * trip_ns  # each of two clocks is off by at most one
    assert timeline.makespan_ns < took_ns + slack_ns, "seconds of skew would show"
    ends_ns = timeline.op_end_ns[program.transfer_src]
    assert (timeline.transfer_ready_ns >= ends_ns - slack_ns).all()
    assert (timeline.transfer_arrive_ns >= timeline.transfer_ready_ns - slack_ns).all()
    assert (timeline.op_start_ns[program.transfer_dst] >= timeline.transfer_arrive_ns - slack_ns).all()


def test_the_work_of_a_filler_is_in_the_timeline_as_prefill() -> None:
    program, costs = smoke_program()
    records = WorkerRecords(program)
    for worker in range(program.num_workers):
        num_ops = len(program.ops(worker))
        empty = {"losses": [], "ready_ns": [], "start_ns": [], "arrive_ns": []}
        starts = [100 * (i + 1) for i in range(num_ops)]
        fills = [(1, 160, 190), (2, 260, 270), (2, 270, 280)] if worker == 1 else []
        spans = {"op_start_ns": starts, "op_end_ns": [at + 50 for at in starts], "fills": fills}
        records.add(program.worker_name(worker), {"step": 0, **empty, **spans})
    names = [program.worker_name(w) for w in range(program.num_workers)]
    timeline = records.timeline(RunClock(names, costs, 0, dict.fromkeys(names, 0)))
    assert timeline.program.num_ops == program.num_ops + 3
    mine = timeline.program.ops(1)
    assert [op.kind for op in mine[:5]] == [mine[0].kind, Kind.P, mine[2].kind, Kind.P, Kind.P]
    is_fill = timeline.program.kind == Kind.P
    assert timeline.op_start_ns[is_fill].tolist() == [160, 260, 270]
    assert timeline.busy_ns.sum() == program.num_ops * 50 - 4 * 50 + 50, "SYNC is no work, prefill is"


# ---- saved, stopped, resumed -----------------------------------------------------------------------------------------
def layout(num_pipelines: int, dcs: tuple[str, ...], num_microbatches: int) -> tuple[Program, Costs]:
    program = with_norm(with_optimizer(one_f_one_b(Layout(num_pipelines, len(dcs), num_microbatches, dcs))))
    return program, uniform_costs(num_pipelines, len(dcs), kind_costs(forward_ns=0))


def play(case: tuple[Program, Costs], folder: Path | None, steps: int, on_step: OnStep | None = None) -> Emulation:
    program, costs = case
    setup = EmulationSettings(steps, device="cpu", streams=1, paths={}, patience_s=PATIENCE_S)
    if folder is not None:
        saves = find_checkpoints(str(folder), program.rank_dc, every=2)
        setup = replace(setup, num_steps=steps - first_step(saves), save=saves)
    return emulate(program, costs, TRAINING, setup, on_step=on_step)


def interrupted_at(step: int) -> OnStep:
    def interrupt(event: StepEvent, timeline: Timeline) -> None:
        if event["step"] == step:
            raise KeyboardInterrupt

    return interrupt


@pytest.mark.slow
def test_a_stopped_run_resumes_to_the_same_bits_and_on_another_plan_to_the_same_losses(tmp_path: Path) -> None:
    case, num_steps = layout(2, ("a", "b"), 2), 30  # on a busy host, workers are steps ahead of the interrupt
    whole = play(case, None, num_steps)
    stopped = play(case, tmp_path / "run", num_steps, interrupted_at(2))
    assert stopped.stopped
    num_done = len(stopped.losses)
    assert 2 <= num_done < num_steps
    assert stopped.losses == whole.losses[:num_done]
    assert first_step(find_checkpoints(str(tmp_path / "run"), ("a", "b"))) == num_done
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["a", "b"], "each datacenter has its own"

    again = play(case, tmp_path / "run", num_steps)
    assert not again.stopped
    assert again.losses == whole.losses[num_done:]
    assert all(np.array_equal(again.weights[name], whole.weights[name]) for name in whole.weights)

    play(case, tmp_path / "other", 3)
    elsewhere = play(layout(1, ("b", "c", "d"), 4), tmp_path / "other", 6)
    assert elsewhere.losses == pytest.approx(whole.losses[3:6], rel=1e-5)


def test_a_run_that_keeps_no_timeline_has_the_same_losses_and_the_last_pass() -> None:
    program = with_norm(with_optimizer(one_f_one_b(Layout(1, 2, 2, ("us-east", "us-west")))))
    costs = uniform_costs(1, 2, kind_costs(forward_ns=1_000_000))
    steps, faults = list[int](), set[tuple[int, int]]()

    def note(event: StepEvent, timeline: Timeline) -> None:
        steps.append(event["step"])
        assert timeline.meta["compiled"] == {"p0.s0": "", "p0.s1": ""}, "layers ran eagerly"
        faults.add((event["wan_streams_replaced"], event["wan_chunks_resent"]))

    def run(*, keep: bool) -> Emulation:
        setup = EmulationSettings(5, device="cpu", keep_weights=False, keep_timeline=keep, patience_s=PATIENCE_S)
        return emulate(program, costs, TRAINING, setup, on_step=note)

    kept, forgot = run(keep=True), run(keep=False)
    assert steps == [1, 2, 3, 4, 5] * 2
    assert faults == {(0, 0)}, "no connection broke"
    assert (forgot.losses, forgot.norms) == (kept.losses, kept.norms)
    assert len(forgot.norms) == 5
    assert (kept.timeline.program.num_iterations, forgot.timeline.program.num_iterations) == (5, 1)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    play(layout(1, ("a", "b"), 2), tmp_path, 2)
    with pytest.raises(AtlasError, match="the checkpoint was saved with global_batch = 4, this run has 8"):
        play(layout(1, ("a", "b"), 4), tmp_path, 4)
