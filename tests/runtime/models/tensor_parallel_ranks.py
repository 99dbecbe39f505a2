"""`python tensor_parallel_ranks.py RANK STORE`: one of two gloo processes that hold half a model each and check
logits, loss, gradients and a step of the stage against the whole model, computed beside it."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[2]))
from greedy_decoding import greedy

from atlas.runtime.models import decoder
from atlas.runtime.models.config import DecoderConfig, gpt
from atlas.runtime.models.decoder import TIED_EMBEDDING, TIED_HEAD, Decoder, LayerRange, Sharding, build
from atlas.runtime.models.export import export_stage, whole
from atlas.runtime.models.parallel import parallelize
from atlas.runtime.models.task import DecoderTask
from atlas.runtime.models.weights import load
from atlas.runtime.optimizer import AdamW, clip_factor, global_norm, norms_of, squares_of
from atlas.runtime.recipe import LearningRate, OptimizerSettings
from atlas.runtime.stage import Stage
from atlas.runtime.stage_set import add_tied

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


def sharded(model: Decoder) -> Decoder:
    return parallelize(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def stages_of(config: DecoderConfig, shard: Sharding | None) -> list[Stage]:
    task = DecoderTask(config, (1, 1), 2, 8, 2, microbatch, shard=shard)
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
        stage.adopt()
    named = {name: p for stage in stages for name, p in stage.named_parameters.items()}
    if stages[0].module.config.tied:
        add_tied(named)
    parts = [squares_of(norms_of([s.named_parameters[n].grad for n in s.counted])) for s in stages]  # type: ignore[misc]
    if tensor_parallel:
        gathered: list[list[list[float]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, parts)
        parts = [part for rank in gathered for part in rank]
    norm = global_norm(parts)
    optimizer = AdamW(named, OptimizerSettings(LearningRate(1e-2)))
    optimizer.factor = clip_factor(norm, 0.5)
    optimizer.step()
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

    check_build(config, alone)
    one, two = stages_of(config, None), stages_of(config, sharded)
    (norm, losses), (norm_tp, losses_tp) = train(one, False), train(two, True)
    assert abs(norm - norm_tp) <= 1e-5 * norm, (norm, norm_tp)
    assert all(abs(a - b) <= 1e-5 for a, b in zip(losses, losses_tp, strict=True)), (losses, losses_tp)
    for a, b in zip(one, two, strict=True):
        shards = dict(b.module.named_parameters())
        for name, parameter in a.module.named_parameters():
            assert torch.allclose(gradient(b, name), parameter.grad, rtol=1e-4, atol=1e-7), name  # type: ignore[arg-type]
            # The keys' bias has no gradient but rounding's without rotation, and AdamW makes a step of it.
            assert "k.bias" in name or torch.allclose(whole(shards[name]), parameter, rtol=1e-4, atol=1e-5), name


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that gets memory."""

    num_values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        has_memory = type(found) is Tensor and found.device.type != "meta" and found.is_floating_point()
        if has_memory and not func.is_view:  # files are mapped, as bytes
            self.num_values = max(self.num_values, found.numel())
        return found


def check_build(config: DecoderConfig, alone: Decoder) -> None:
    """A rank builds and reads its own part only: the values of the whole model, and no tensor as large as its largest
    matrix."""
    cut, most = LayerRange.whole(config), max(p.numel() for p in alone.parameters())
    with LargestTensor() as largest:
        built = build(config, cut, shard=sharded)
    assert largest.num_values <= most // 2, "the built part"
    builds = [built]
    with tempfile.TemporaryDirectory() as folder:
        export_stage(Path(folder), alone, 0, 1)
        with LargestTensor() as largest:
            builds.append(load(config, cut, Path(folder), shard=sharded))
    assert largest.num_values <= most // 2, "the loaded part"
    for found in builds:
        parameters = dict(found.named_parameters())
        for name, parameter in alone.named_parameters():
            assert torch.equal(whole(parameters[name]), parameter), name


def gradient(stage: Stage, name: str) -> Tensor:
    """Whole, from every rank's share."""
    parameter, grad = dict(stage.module.named_parameters())[name], stage.named_parameters[name].grad
    assert grad is not None
    if not isinstance(parameter, DTensor):
        return grad
    return DTensor.from_local(grad, parameter.device_mesh, parameter.placements).full_tensor()


def local_shares(model: Decoder) -> list[Tensor]:
    return [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    decoder.DRAWN_AT_ONCE = 40  # values of initial weights: some begin or end inside a row
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[1]), world_size=2)
    for config in MODELS:
        check(config)
    dist.destroy_process_group()
    print("equal", flush=True)
    os._exit(0)  # gloo's threads outlive their group and may abort an interpreter that unwinds under them
