"""Calibrated times, the fit that yields them, and what the measured runs say of both where they are at hand."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from atlas.cost.calibration.fit import Sample, fit, predict
from atlas.cost.calibration.footprint import Overheads, StageSize, fit_overheads, peak_bytes
from atlas.cost.calibration.runs import Machine, Run, blocking_costs, iteration_s, rates_by_tp, stage_seconds
from atlas.cost.compute import analytic, calibrated
from atlas.cost.kernels import layer_pass, rates
from atlas.errors import SpecError
from atlas.ir.assemble import with_optimizer
from atlas.ir.ops import Kind
from atlas.ir.program import Layout
from atlas.schedules.classic import one_f_one_b
from atlas.sim import simulate
from atlas.spec import GPUS, Calibration, Model, parse_job
from atlas.spec.job import Job

BENCH = Path(__file__).parents[2] / "bench"
SHARED = Path(__file__).parents[3] / "shared" / "data"
GPU = GPUS["A100-80"]
MACHINE = Machine(GPU, gpus_per_node=8, net_bytes_per_s=100e9)
TRUTH = Calibration(
    matrix_efficiency=0.8, memory_efficiency=0.6, peer_efficiency=0.7, layer_floor_us=700, fused_attention=False
)


def model(hidden: int = 4096, layers: int = 32) -> Model:
    return Model(layers=layers, hidden=hidden, heads=32, seq_len=2048)


def job(**changes: object) -> Job:
    data = {
        "model": {"layers": 8, "hidden": 4096, "heads": 32, "seq_len": 2048},
        "cluster": {"datacenters": [{"name": "a", "nodes": 4, "gpu": "A100-80"}]},
        "num_microbatches": 8,
        "pp": 2,
    }
    return parse_job({**data, **changes})


@pytest.fixture
def load_bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A script of bench/, which finds its neighbours as it does when it is run."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


def runs() -> list[Run]:
    shapes = [(1, 8, 1), (8, 4, 1), (4, 4, 2), (2, 2, 8), (8, 2, 4), (1, 1, 4), (2, 1, 2), (8, 1, 1), (4, 1, 2)]
    small = [Run(model(1024, 8), b, 8, *shape) for shape in shapes for b in (1, 4)]
    return small + [Run(model(), b, 16, *shape) for shape in shapes for b in (1, 2, 8)]


# ---- kernels -----------------------------------------------------------------------------------------------
def test_wide_products_reach_a_larger_share_of_the_peak_than_narrow_ones() -> None:
    def share(hidden: int) -> float:
        one = Model(layers=1, hidden=hidden, heads=32, seq_len=512)
        at = rates(GPU, TRUTH.model_copy(update={"layer_floor_us": 0.0}))
        return hidden**2 / layer_pass(one, 1, 1, 2, at).forward_s

    assert share(1024) < share(4096) < share(16384)


def test_a_wider_group_is_faster_but_less_than_in_proportion() -> None:
    at = rates(GPU, TRUTH)
    one, eight = (layer_pass(model(), 4, tp, 2, at).forward_s for tp in (1, 8))
    assert one / 8 < eight < one


def test_no_layer_is_faster_than_its_launch() -> None:
    tiny = Model(layers=1, hidden=64, heads=1, seq_len=16)
    one = layer_pass(tiny, 1, 1, 2, rates(GPU, TRUTH))
    assert (one.forward_s, one.backward_s) == pytest.approx((700e-6, 1400e-6))


def test_fused_attention_is_faster() -> None:
    fused = TRUTH.model_copy(update={"fused_attention": True})
    apart_s, fused_s = (layer_pass(model(), 4, 1, 2, rates(GPU, c)).forward_s for c in (TRUTH, fused))
    assert fused_s < apart_s


# ---- a whole iteration ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("run", [Run(model(), 2, 12, 2, 4, pp) for pp in (1, 2, 4, 8)], ids=lambda run: run.key)
def test_closed_form_equals_the_event_simulator(run: Run) -> None:
    rates_of = rates_by_tp(MACHINE, TRUTH)
    stages, transfer_s = stage_seconds(run, MACHINE, rates_of)
    program = with_optimizer(one_f_one_b(Layout.even(1, run.pp, run.num_microbatches, 1)))
    timeline = simulate(program, blocking_costs(stages, transfer_s, receiver_waits=False))
    assert timeline.op_end_ns.max() / 1e9 == pytest.approx(iteration_s(run, MACHINE, rates_of), rel=1e-3)


def test_a_receiver_that_waits_makes_the_middle_of_a_pipeline_slower() -> None:
    stages, transfer_s = stage_seconds(Run(model(), 2, 12, 2, 4, 4), MACHINE, rates_by_tp(MACHINE, TRUTH))
    paired, alone = (blocking_costs(stages, transfer_s, receiver_waits=waits) for waits in (False, True))
    extra = (alone.compute_ns - paired.compute_ns)[0][:, [Kind.F, Kind.B]].sum(axis=1) / (transfer_s * 1e9)
    assert extra.tolist() == pytest.approx([1, 2, 2, 1], rel=1e-6)


def test_the_fit_finds_the_constants_that_made_the_times_despite_a_slowed_run() -> None:
    measured_s = predict(runs(), MACHINE, TRUTH)
    measured_s[3] *= 1.5
    found = fit([Sample(runs(), measured_s)], MACHINE)
    for name in ("matrix_efficiency", "memory_efficiency", "peer_efficiency", "layer_floor_us"):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=0.03), name


def test_shares_stay_shares_whatever_the_times() -> None:
    found = fit([Sample(runs(), predict(runs(), MACHINE, TRUTH) / 10)], MACHINE)
    assert max(found.matrix_efficiency, found.memory_efficiency, found.peer_efficiency) <= 1


# ---- memory --------------------------------------------------------------------------------------------------
def test_overheads_are_found_from_the_peaks_they_made() -> None:
    truth = Overheads(fixed_bytes=4e9, layer_copies=2.0, head_copies=3.0)
    pipelines = [
        [StageSize(10**8, b * 3e8 * layers, b * 3e8, b * 5e8 * (layers < 9), in_flight)]
        for b, layers, in_flight in [(1, 8, 1), (4, 8, 1), (8, 8, 1), (2, 9, 4), (8, 9, 4), (8, 9, 2)]
    ]
    found = fit_overheads(pipelines, np.array([peak_bytes(stages, truth) for stages in pipelines]))
    assert (found.fixed_bytes, found.layer_copies, found.head_copies) == pytest.approx((4e9, 2.0, 3.0), rel=1e-3)


# ---- a user's job ----------------------------------------------------------------------------------------------
def test_a_calibrated_job_is_priced_by_its_gpus_constants() -> None:
    time = calibrated(job(calibrated=True), GPU).layers[0]
    assert GPU.calibration is not None
    one = layer_pass(job().model, 1, 1, 2, rates(GPU, GPU.calibration))
    assert (time.forward_s, time.recompute_s) == (one.forward_s, one.forward_s)
    assert time.backward_s == pytest.approx(one.backward_s)
    assert time.forward_s != analytic(job(), GPU).layers[0].forward_s


def test_a_calibrated_job_on_a_type_without_constants_says_what_to_do() -> None:
    with pytest.raises(SpecError, match="calibrated = True: a GPU type of this job has no `calibration`"):
        calibrated(job(calibrated=True), GPUS["L4"])


def test_a_misspelt_constant_names_the_nearest() -> None:
    mine = {"bf16_tflops": 1, "fp32_tflops": 1, "memory_gib": 1, "memory_gbytes_per_s": 1}
    cluster = {
        "datacenters": [{"name": "a", "nodes": 4, "gpu": "mine"}],
        "gpus": {"mine": {**mine, "calibration": {"matrix_eficiency": 0.5}}},
    }
    with pytest.raises(SpecError, match="matrix_efficiency"):
        job(cluster=cluster)


# ---- the measurements ------------------------------------------------------------------------------------------
@pytest.mark.skipif(not (SHARED / "vtrain").exists(), reason="vTrain's measurements are not here")
def test_the_built_in_a100_carries_what_the_measured_runs_give(load_bench: Callable[[str], ModuleType]) -> None:
    bench = load_bench("accuracy_a100")
    single, multi = (bench.read(SHARED / "vtrain" / f"{kind}_node_a100.csv") for kind in ("single", "multi"))
    found, built_in = fit([single, multi], MACHINE), GPU.calibration
    assert built_in is not None
    for name in ("matrix_efficiency", "memory_efficiency", "peer_efficiency", "layer_floor_us"):
        assert getattr(built_in, name) == pytest.approx(getattr(found, name), rel=2e-3), name


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "vtrain").exists(), reason="vTrain's measurements are not here")
def test_the_a100_bar_holds(monkeypatch: pytest.MonkeyPatch, load_bench: Callable[[str], ModuleType]) -> None:
    monkeypatch.setattr(sys, "argv", ["accuracy_a100", "--quick"])
    assert load_bench("accuracy_a100").main() == 0


@pytest.mark.skipif(not (SHARED / "sailor").exists(), reason="Sailor's measurements are not here")
def test_the_gh200_bars_hold(monkeypatch: pytest.MonkeyPatch, load_bench: Callable[[str], ModuleType]) -> None:
    monkeypatch.setattr(sys, "argv", ["accuracy_gh200"])
    assert load_bench("accuracy_gh200").main() == 0
