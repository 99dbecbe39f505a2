"""Calibrated times are the default where there are constants; what measured runs say of them where they are at hand."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from atlas.cost.compute import analytic, calibrated, layer_pass, model_time, pricing, rates
from atlas.errors import SpecError
from atlas.spec import GPUS, Calibration, Model, override, parse_job
from atlas.spec.job import Job

BENCH = Path(__file__).parents[2] / "bench"
SHARED = Path(__file__).parents[3] / "shared" / "data"
GPU = GPUS["A100-80"]
TRUTH = Calibration(
    matrix_efficiency=0.8, memory_efficiency=0.6, peer_efficiency=0.7, layer_floor_us=700, fused_attention=False
)


def model(hidden: int = 4096, layers: int = 32) -> Model:
    return Model(layers=layers, hidden=hidden, heads=32, seq_len=2048)


def job(gpu: str = "A100-80", **changes: object) -> Job:
    data = {
        "model": {"layers": 8, "hidden": 4096, "heads": 32, "seq_len": 2048},
        "cluster": {"datacenters": [{"name": "a", "nodes": 4, "gpu": gpu}]},
        "num_microbatches": 8,
        "pp": 2,
    }
    return parse_job({**data, **changes})


@pytest.fixture
def load_bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A script of bench/, which finds its neighbours as it does when it is run."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


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
    slower = TRUTH.model_copy(update={"backward_floor_us": 2000.0})
    assert layer_pass(tiny, 1, 1, 2, rates(GPU, slower)).backward_s == pytest.approx(2000e-6)


def test_fused_attention_is_faster() -> None:
    fused = TRUTH.model_copy(update={"fused_attention": True})
    apart_s, fused_s = (layer_pass(model(), 4, 1, 2, rates(GPU, c)).forward_s for c in (TRUTH, fused))
    assert fused_s < apart_s


def test_summing_gradients_in_fp32_costs_their_bytes_in_the_weight_gradient() -> None:
    at = rates(GPU, TRUTH)
    without, with_sum = (layer_pass(model(), 1, 1, 2, at, sum_bytes) for sum_bytes in (0, 4))
    assert with_sum.forward_s == without.forward_s
    assert with_sum.weight_s - without.weight_s == pytest.approx(with_sum.backward_s - without.backward_s, rel=0.05)
    assert with_sum.backward_s > without.backward_s


# ---- a user's job ----------------------------------------------------------------------------------------------
def test_a_job_is_priced_by_its_gpus_constants_unless_it_says_otherwise() -> None:
    assert GPU.calibration is not None
    fused = rates(GPU, GPU.calibration, fused_attention=True)
    want = layer_pass(job().model, 1, 1, 2, fused, 4).forward_s
    stated = analytic(job(), GPU, GPU.peer_gbps * 1e9).layers[0].forward_s
    assert want != stated
    layer = {name: model_time(found, found.cluster.dc("a")).layers[0].forward_s for name, found in _kinds().items()}
    assert layer == {"left out": want, "calibrated": want, "not calibrated": stated, "efficiency": stated}


def _kinds() -> dict[str, Job]:
    return {
        "left out": job(),
        "calibrated": job(calibrated=True),
        "not calibrated": job(calibrated=False),
        "efficiency": job(efficiency=0.5),
    }


def test_a_changed_job_is_still_priced_by_constants() -> None:
    assert override(job(), ["pp=4"]).is_calibrated
    assert not override(job(efficiency=0.4), ["pp=4"]).is_calibrated


def test_one_type_without_constants_makes_the_whole_job_uncalibrated_and_the_report_says_so() -> None:
    cluster = {
        "wan": {"latency_ms": 10},
        "datacenters": [{"name": "a", "nodes": 4, "gpu": "A100-80"}, {"name": "b", "nodes": 4, "gpu": "L4"}],
    }
    mixed = job(cluster=cluster)
    assert not mixed.is_calibrated
    assert pricing(mixed) == "uncalibrated: no constants for L4, 50% of the peak is assumed"
    assert pricing(job()) == "calibrated constants"
    assert pricing(job(efficiency=0.4)) == "uncalibrated: 40% of the peak, as the job states"


@pytest.mark.parametrize("name", GPUS)
def test_every_built_in_type_is_calibrated_or_reported_as_uncalibrated(name: str) -> None:
    found = pricing(job(name))
    assert found == "calibrated constants" if GPUS[name].calibration else found.startswith("uncalibrated")


def test_a_calibrated_job_on_a_type_without_constants_says_what_to_do() -> None:
    with pytest.raises(SpecError, match="calibrated = True: no `calibration` for L4"):
        calibrated(job("L4", calibrated=True), GPUS["L4"], 1e9)


def test_a_misspelt_constant_names_the_nearest() -> None:
    mine = {"bf16_tflops": 1, "fp32_tflops": 1, "memory_gib": 1, "memory_gbytes_per_s": 1}
    cluster = {
        "datacenters": [{"name": "a", "nodes": 4, "gpu": "mine"}],
        "gpus": {"mine": {**mine, "calibration": {"matrix_eficiency": 0.5}}},
    }
    with pytest.raises(SpecError, match="matrix_efficiency"):
        job(cluster=cluster)


def test_the_network_of_a_node_follows_its_gpus() -> None:
    def net_gbps(job: Job) -> float:
        return job.cluster.node_gbps(job.cluster.datacenters[0])

    net = {name: net_gbps(job(name)) for name in ("A100-80", "H200", "L4")}
    assert net == {"A100-80": 800, "H200": 3200, "L4": 100}
    told = job(cluster={"datacenters": [{"name": "a", "nodes": 4, "net_gbps": 25}]})
    assert net_gbps(told) == 25


# ---- the fit ---------------------------------------------------------------------------------------------------
def test_least_squares_finds_the_point_that_made_the_values(load_bench: Callable[[str], ModuleType]) -> None:
    x = np.linspace(0, 1, 20)
    truth = np.array([1.5, -0.7])
    values = np.exp(truth[0] * x) + truth[1]
    fit = load_bench("common.fit")
    found = fit.least_squares(lambda at: np.exp(at[0] * x) + at[1] - values, np.array([0.0, 0.0]))
    assert found.tolist() == pytest.approx(truth.tolist(), rel=1e-4)


# ---- the measurements ------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "vtrain").exists(), reason="vTrain's measurements are not here")
def test_the_a100_bar_holds(monkeypatch: pytest.MonkeyPatch, load_bench: Callable[[str], ModuleType]) -> None:
    monkeypatch.setattr(sys, "argv", ["accuracy_a100", "--shipped"])
    assert load_bench("accuracy_a100").main() == 0


@pytest.mark.skipif(not (SHARED / "sailor").exists(), reason="Sailor's measurements are not here")
def test_the_bars_of_sailor_hold(monkeypatch: pytest.MonkeyPatch, load_bench: Callable[[str], ModuleType]) -> None:
    monkeypatch.setattr(sys, "argv", ["accuracy_sailor"])
    assert load_bench("accuracy_sailor").main() == 0
