"""Tensor parallelism inside a node by torch's DTensor plans: heads and the MLP's inner width are sharded, embedding
and head by rows of the vocabulary. Between modules activations are plain tensors, whole on every rank, so that other
code (stage, WAN, dropout) does not change.

Knows modules and meshes. The caller provides the mesh and its process group.
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
    """Each half of the layer takes its whole input, computes a part, and sums the parts."""
    plan: dict[str, ParallelStyle] = {
        # A DTensor once, so that its gradient is summed over the ranks once, not per projection.
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
    if config.qk_norm:  # each rank normalizes its own heads; all heads share the weight
        for name in ("q_norm", "k_norm"):
            plan[f"attention.{name}"] = SequenceParallel(sequence_dim=1, use_local_output=True)
    return plan


def parallelize(decoder: Decoder, mesh: DeviceMesh) -> Decoder:
    """Shard in place, best on `meta`, before a rank has memory. Nothing is sent: weights that exist already must
    be the same on every rank."""
    require_divisible(decoder.config, mesh.size())
    for layer in decoder.layers.values():
        parallelize_module(layer, mesh, block_plan(decoder.config), src_data_rank=None)
    if decoder.embedding is not None:
        rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        parallelize_module(decoder.embedding.token, mesh, rows, src_data_rank=None)
    if decoder.head is not None:  # the logits are gathered: every rank computes the whole loss
        columns = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(decoder.head.out, mesh, columns, src_data_rank=None)
    decoder.retie()  # sharding gave the tied ends separate memory; both are sharded by rows and can share it again
    decoder.tensor_rank = mesh.get_local_rank()
    return decoder
