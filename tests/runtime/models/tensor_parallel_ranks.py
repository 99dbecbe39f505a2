"""`python tensor_parallel_ranks.py RANK STORE`: one of two gloo processes that hold half a model each and check
logits, loss, gradients and a step of the stage against the whole model, computed beside it."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from atlas.runtime.models.config import DecoderConfig, gpt
from atlas.runtime.models.decoder import TIED_EMBEDDING, TIED_HEAD, Decoder, LayerRange, build
from atlas.runtime.models.export import whole
from atlas.runtime.models.generate import greedy
from atlas.runtime.models.parallel import parallelize
from atlas.runtime.models.task import DecoderTask
from atlas.runtime.models.tied import join
from atlas.runtime.optimizer import AdamW, clip, global_norm, squares
from atlas.runtime.recipe import LearningRate, OptimizerSettings
from atlas.runtime.stage import Stage

QWEN = DecoderConfig(
    "qwen3", num_layers=2, width=16, num_heads=4, num_kv_heads=2, head_width=8, ffn_width=24, vocabulary=32,
    max_length=16, qk_norm=True, tied=True,
)  # fmt: skip
MODELS = [
    gpt(num_layers=2, width=16, num_heads=2, vocabulary=32, max_length=16, dropout=0.1),
    replace(QWEN, family="llama", qk_norm=False, tied=False, qkv_bias=True, out_bias=True, mlp_bias=True),
    QWEN,
]


def microbatch(slot: int, pipeline: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(slot))
    return tokens[:, :-1], tokens[:, 1:]


class Sharded(DecoderTask):
    """The same task, its stages divided over the mesh."""

    def build_stage(self, stage: int, num_stages: int) -> Decoder:
        return parallelize(super().build_stage(stage, num_stages), init_device_mesh("cpu", (dist.get_world_size(),)))


def stages_of(kind: type[DecoderTask], config: DecoderConfig) -> list[Stage]:
    task = kind(config, (1, 1), 2, 8, 2, microbatch)
    return [Stage(task, s, 2, 0, 0.5) for s in range(2)]


def train(stages: list[Stage], tensor_parallel: bool) -> tuple[float, list[float]]:
    """One step, backwards split for one microbatch and whole for the other; the norm and the losses."""
    for slot in range(2):
        x = stages[0].forward(slot, None, keep=True)
        stages[1].forward(slot, x, keep=True)
        if slot:
            stages[0].backward_input(slot, stages[1].backward_input(slot, None))
            for stage in stages:
                stage.backward_weight(slot)
        else:
            stages[0].backward(slot, stages[1].backward(slot, None))
    for stage in stages:
        for parameter, gradient in zip(stage.parameters, stage.gradients.total(), strict=True):
            parameter.grad = gradient
    named = {name: p for stage in stages for name, p in stage.named_parameters.items()}
    if stages[0].module.config.tied:
        join(named)
    parts: list[list[float]] = [squares(stage.named_parameters, stage.counted) for stage in stages]
    if tensor_parallel:
        gathered: list[list[list[float]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, parts)
        parts = [part for rank in gathered for part in rank]
    norm = global_norm(parts)
    clip(named, norm, 0.5)
    AdamW(named, OptimizerSettings(LearningRate(1e-2))).step()
    return norm, list(stages[1].losses.values())


def check(config: DecoderConfig) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tokens = microbatch(7, 0)[0]
    alone = build(config, LayerRange.whole(config))
    shared = parallelize(build(config, LayerRange.whole(config)), mesh)
    with torch.no_grad():
        assert torch.allclose(shared(tokens), alone(tokens), atol=1e-6), "logits"
    assert torch.equal(greedy(shared, tokens[:, :4], 3, chunk=3), greedy(alone, tokens[:, :4], 3)), "tokens"
    assert sum(p.numel() for p in local_shares(shared)) < 0.6 * sum(p.numel() for p in alone.parameters()), "halves"

    if config.tied:
        named = {name: p.to_local() for name, p in shared.named_parameters() if name in (TIED_EMBEDDING, TIED_HEAD)}
        assert named[TIED_EMBEDDING].data_ptr() == named[TIED_HEAD].data_ptr(), "tied ends are one memory"

    one, two = stages_of(DecoderTask, config), stages_of(Sharded, config)
    (norm, losses), (norm_tp, losses_tp) = train(one, False), train(two, True)
    assert abs(norm - norm_tp) <= 1e-5 * norm, (norm, norm_tp)
    assert all(abs(a - b) <= 1e-5 for a, b in zip(losses, losses_tp, strict=True)), (losses, losses_tp)
    for a, b in zip(one, two, strict=True):
        sharded = dict(b.module.named_parameters())
        for name, parameter in a.module.named_parameters():
            assert torch.allclose(gradient(b, name), parameter.grad, rtol=1e-4, atol=1e-7), name  # type: ignore[arg-type]
            # The keys' bias has no gradient but rounding's without rotation, and AdamW makes a step of it.
            assert "k.bias" in name or torch.allclose(whole(sharded[name]), parameter, rtol=1e-4, atol=1e-5), name


def gradient(stage: Stage, name: str) -> Tensor:
    """Whole, from every rank's share."""
    parameter, grad = dict(stage.module.named_parameters())[name], stage.named_parameters[name].grad
    assert grad is not None
    if not isinstance(parameter, DTensor):
        return grad
    return DTensor.from_local(grad, parameter.device_mesh, parameter.placements).full_tensor()


def local_shares(decoder: Decoder) -> list[Tensor]:
    return [p.to_local() if hasattr(p, "to_local") else p for p in decoder.parameters()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[1]), world_size=2)
    for model in MODELS:
        check(model)
    dist.destroy_process_group()
    print("equal", flush=True)
    os._exit(0)  # gloo's threads outlive their group and may abort an interpreter that unwinds under them
