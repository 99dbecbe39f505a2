"""What the runtime that executes a job does to its costs: `runtime: atlas | megatron | torch` in a job file.

`atlas` is what `atlas train` executes. The others describe frameworks whose measured runs are predicted: Megatron-LM,
and plain torch.distributed pipelines (send and receive one after the other). Knows only how a framework behaves, no job
and no price.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Runtime:
    """How one framework behaves."""

    recomputes_in_backward: bool
    """Recompute starts when the gradient has arrived, as part of the backward, on the last stage too. Otherwise it is
    an op of its own, done ahead where there is time, and left out on the last stage."""
    sender_waits: bool
    """A worker computes nothing until its tensor is sent."""
    receiver_waits: bool
    """Nor while it receives one: transfers are not paired with each other."""
    sends_whole: bool
    """Every GPU of a tp group sends the whole activation. Otherwise each sends its part of it."""
    packs_replicas: bool
    """Replicas of a stage fill node after node, so that their gradient ring has the nodes' network to itself.
    Otherwise pipelines do, and the rings of a node's stages divide its network."""
    uses_peer_links: bool
    """Stages hand activations on over NVLink or PCIe, not over the node's network, if a plan fits in one node."""
    splits_evenly: bool
    """Every stage has the same number of layers, where they divide."""
    fused_attention: bool
    """The L x L scores of attention stay on chip."""
    recomputes_by_layer: bool
    """With recompute every layer's input is kept, and one layer's activations exist at a time. Otherwise the stage's
    input is kept, and all its activations exist at a time."""
    whole_widths: float
    """What every GPU of a tp group keeps of a layer undivided, per token, in widths of the model: inputs of norms,
    attention and MLP, masks of dropout. No runtime here has sequence parallelism."""
    usable_share: float
    """Of a GPU's memory, where the job states no cap."""
    fixed_bytes: float
    """CUDA context, NCCL's buffers, workspaces, fragmentation; 0: covered by `usable_share`."""
    layer_copies: float
    """Gradients and temporaries that a backward holds at once, in activations of one layer."""
    head_copies: float
    """Logits, probabilities and their gradients at the loss, in activations of the head."""


_MEGATRON = Runtime(
    recomputes_in_backward=True,
    sender_waits=True,
    receiver_waits=False,
    sends_whole=False,
    packs_replicas=True,
    uses_peer_links=True,
    splits_evenly=True,
    fused_attention=False,
    recomputes_by_layer=True,
    whole_widths=5,
    usable_share=1.0,
    fixed_bytes=2e9,
    layer_copies=0.5,
    head_copies=1.5,
)
"""Overheads of Megatron: context and NCCL, gradients of a layer while its activations are freed, logits in fp16 and in
fp32. Not fitted: the 55 A100 runs only show that they fit."""
_TORCH = replace(_MEGATRON, receiver_waits=True, sends_whole=True, fixed_bytes=4.5e9, layer_copies=2.4, head_copies=3.1)
"""Overheads fitted on the peak memory of 15 GH200 runs (Sailor)."""

RUNTIMES: dict[str, Runtime] = {
    "atlas": Runtime(
        recomputes_in_backward=False,
        sender_waits=False,
        receiver_waits=False,
        sends_whole=False,
        packs_replicas=False,
        uses_peer_links=False,
        splits_evenly=False,
        fused_attention=True,
        recomputes_by_layer=False,
        whole_widths=4,
        usable_share=0.92,
        fixed_bytes=0.0,
        layer_copies=0.0,
        head_copies=0.0,
    ),
    "megatron": _MEGATRON,
    "torch": _TORCH,
}
