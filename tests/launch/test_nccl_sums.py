"""Sums of gradients by NCCL, on one GPU: each process appears as a host of its own. Correct, and slow."""

from __future__ import annotations

import numpy as np
import pytest

from atlas.cost.table import kind_costs, uniform_costs
from atlas.ir.assemble import with_optimizer
from atlas.ir.program import Layout
from atlas.launch.emulate import Emulation, EmulationSettings, emulate
from atlas.runtime.assignment import DataChoice, ModelChoice, TrainingSetup
from atlas.runtime.models.config import gpt
from atlas.runtime.recipe import LearningRate, OptimizerSettings
from atlas.schedules.classic import one_f_one_b

pytestmark = pytest.mark.gpu
GPT = gpt(num_layers=2, width=64, num_heads=2, vocabulary=64, max_length=16)


@pytest.mark.parametrize(("pipelines", "tp"), [(2, 1), (4, 1), (2, 2)])
def test_ordered_sums_by_nccl_have_the_bits_of_the_transport(pipelines: int, tp: int) -> None:
    program = with_optimizer(one_f_one_b(Layout(pipelines, 1, 2, ("a",))), norm=True)
    costs = uniform_costs(pipelines, 1, kind_costs(forward_ns=0))
    settings = EmulationSettings(
        3, device="cuda:0", tp=tp, streams=1, paths={}, nccl_on_shared_gpu=True, patience_s=60.0
    )

    def trained(sums: str, zero: int) -> Emulation:
        optimizer = OptimizerSettings(LearningRate(1e-3))
        setup = TrainingSetup(ModelChoice(GPT), DataChoice(16, 2), optimizer, 0.5, sums=sums, zero=zero)  # type: ignore[arg-type]
        return emulate(program, costs, setup, settings)

    expected = trained("transport", 0)
    for zero in (0, 1):
        found = trained("ordered", zero)
        assert found.losses == expected.losses
        assert all(np.array_equal(found.weights[name], weight) for name, weight in expected.weights.items())
