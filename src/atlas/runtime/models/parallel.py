"""Tensor parallelism inside a node by torch's own DTensor plans: heads and the MLP's inner width are divided, the
embedding and the head by rows of the vocabulary. Between modules activations are plain tensors, whole on every rank,
so that nobody outside (stage, WAN, dropout) needs to know.

Knows modules and meshes. Who is in the mesh, and the process group behind it, come from outside.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from atlas.runtime.models.config import DecoderConfig, require_divisible
from atlas.runtime.models.decoder import Decoder


def block_plan(config: DecoderConfig) -> dict[str, ParallelStyle]:
    """The layer's two halves each take their input whole, compute a share, and add the shares up."""
    plan: dict[str, ParallelStyle] = {
        # Made a DTensor once, so that its gradient is added up over the ranks once, not per projection.
        "attention": PrepareModuleInput(
            input_layouts=(Replicate(), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "mlp": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
        **{f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")},
        "attention.o": RowwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }
    if config.gated:
        plan["mlp.gate"] = ColwiseParallel()
    if config.qk_norm:  # each rank norms its own heads; the weight is shared by all heads
        for name in ("q_norm", "k_norm"):
            plan[f"attention.{name}"] = SequenceParallel(sequence_dim=1, use_local_output=True)
    return plan


def embedding_plan() -> dict[str, ParallelStyle]:
    return {"token": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())}


def head_plan() -> dict[str, ParallelStyle]:
    """The logits are gathered: the loss is computed whole, on every rank."""
    return {"out": ColwiseParallel(output_layouts=Replicate())}


def parallelize(decoder: Decoder, mesh: DeviceMesh) -> Decoder:
    """Shards a cut in place. Every rank must have built or loaded the same weights; nothing is sent."""
    require_divisible(decoder.config, mesh.size())
    for layer in decoder.layers.values():
        parallelize_module(layer, mesh, block_plan(decoder.config), src_data_rank=None)
    if decoder.embedding is not None:
        parallelize_module(decoder.embedding, mesh, embedding_plan(), src_data_rank=None)
    if decoder.head is not None:
        parallelize_module(decoder.head, mesh, head_plan(), src_data_rank=None)
    decoder.retie()  # sharding made two memories of it; both are cut by rows, so they can be one again
    decoder.tensor_rank = mesh.get_local_rank()
    return decoder
