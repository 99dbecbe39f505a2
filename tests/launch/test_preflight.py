"""A launcher counts the memory that its workers will take before it starts them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atlas.errors import AtlasError
from atlas.ir.assemble import with_optimizer
from atlas.ir.program import Layout
from atlas.launch import preflight
from atlas.launch.preflight import layers_of, require_room, state_bytes
from atlas.runtime.assignment import DataChoice, ModelChoice, TrainingSetup
from atlas.runtime.models.config import gpt
from atlas.runtime.models.decoder import Decoder, cuts
from atlas.runtime.recipe import LearningRate, OptimizerSettings
from atlas.runtime.wiring import WorkerRole
from atlas.schedules.classic import one_f_one_b

GPT = gpt(num_layers=4, width=256, num_heads=4, vocabulary=1000, max_length=64)
PROGRAM = with_optimizer(one_f_one_b(Layout(1, 2, 2, ("a", "b"))))


def training(dtype: str, optimizer: str = "adamw") -> TrainingSetup:
    settings = OptimizerSettings(LearningRate(1e-3), name=optimizer)
    return TrainingSetup(ModelChoice(GPT, dtype=dtype), DataChoice(8, 2), settings)


@pytest.mark.parametrize(("dtype", "bytes_each"), [("fp32", 4 + 4 + 8), ("bf16", 2 + 4 + 8 + 4)])
def test_the_count_matches_the_modules_and_the_optimizer(dtype: str, bytes_each: int) -> None:
    for stage, cut in enumerate(cuts(GPT, (2, 2))):
        role = WorkerRole(PROGRAM, stage)
        found = state_bytes(training(dtype), layers_of(role, training(dtype)))
        with torch.device("meta"):
            num_values = sum(parameter.numel() for parameter in Decoder(GPT, cut).parameters())
        assert found == pytest.approx(num_values * bytes_each, rel=0.01)


def test_master_weights_of_a_bf16_model_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW in bf16: 2 bytes of weight, 4 of gradient, 8 of moments, and 4 of master weight."""
    what, role = training("bf16"), WorkerRole(PROGRAM, 0)
    need = state_bytes(what, layers_of(role, what))
    assert need == 18 * sum(preflight.num_parameters(GPT, layer) for layer in layers_of(role, what))
    plain = replace(what, optimizer=replace(what.optimizer, name="sgd"))
    assert state_bytes(plain, layers_of(role, plain)) == need * 6 // 18
    monkeypatch.setattr(preflight, "_free_bytes", lambda: need - 1)
    with pytest.raises(AtlasError, match="the model does not fit"):
        require_room([role], what, "cpu")
    monkeypatch.setattr(preflight, "_free_bytes", lambda: need)
    require_room([role], what, "cpu")
