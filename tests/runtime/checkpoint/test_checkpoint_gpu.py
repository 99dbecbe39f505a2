"""On a GPU: the snapshot is of the step boundary although training goes on at once, and optimizers come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_samples import choose_verified, meta_at

from atlas.runtime.checkpoint.checkpointer import Checkpointer
from atlas.runtime.checkpoint.load import load_layers
from atlas.runtime.checkpoint.state import restore, states_of
from atlas.runtime.checkpoint.store import LocalStore

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def model_and_optimizer(fused: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.Linear(2048, 2048)).cuda()
    return model, torch.optim.AdamW(model.parameters(), fused=fused)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator("cuda").manual_seed(step)
    x = torch.randn(64, 2048, device="cuda", generator=generator)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("fused", [False, True])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, fused: bool) -> None:
    model, optimizer = model_and_optimizer(fused)
    for step in range(3):
        train(model, optimizer, step)
    checkpointer = Checkpointer(LocalStore(tmp_path), "w", ["0", "1"])
    checkpointer.save(3, states_of(model.named_parameters(), optimizer), meta_at(3))
    for step in range(3, 6):
        train(model, optimizer, step)
    checkpointer.close()
    checkpoint = choose_verified([LocalStore(tmp_path)])
    assert checkpoint is not None
    other, its_optimizer = model_and_optimizer(fused)
    restore(load_layers(checkpoint, ["0", "1"]), other.named_parameters(), its_optimizer)
    for step in range(3, 6):
        train(other, its_optimizer, step)
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
