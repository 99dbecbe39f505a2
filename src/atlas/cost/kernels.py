"""Seconds of one layer and of the LM head at calibrated rates: a sum of what the arithmetic, the memory and the other
GPUs of the tensor-parallel group take, and never less than it takes to launch the kernels.

A product of matrices costs its FLOPs at the reachable peak plus its operands at the reachable bandwidth, so small or
narrow products reach a smaller share of the peak without a constant for it. Work between products costs its bytes.
Knows one GPU type and one layer, not which stage holds it.

Letters: b sequences, L tokens of each, H hidden, tp GPUs of the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from atlas.cost import flops
from atlas.spec.gpus import Calibration, Gpu
from atlas.spec.job import Model

RESIDUAL_PASSES = 10
"""Times a forward reads or writes the residual stream outside products: two norms (2 each), two fused bias, dropout
and add (3 each). Every GPU of a tp group does all of it."""
SCORE_PASSES = 6.5
"""Times a forward without fused attention reads or writes the L x L scores: product out, scale-mask-softmax in and out,
dropout in, out and mask, product in."""
POINTWISE_BACKWARD = 1.3
"""Bytes of the backward of all that over its forward: counted per kernel, about 8.5 against 6.5 on the scores."""


@dataclass(frozen=True)
class Rates:
    """What one GPU reaches."""

    flop_per_s: float
    bytes_per_s: float
    """Of its memory."""
    peer_bytes_per_s: float
    """To the rest of its tp group, one direction, in a ring."""
    attention_flop_per_s: float
    """Of products inside attention."""
    layer_floor_s: float
    """Minimum of a layer's forward: the host launches its kernels one by one."""
    backward_floor_s: float
    """Minimum of a layer's backward."""
    fused_attention: bool


@dataclass(frozen=True)
class Pass:
    """Seconds of one piece for one microbatch."""

    forward_s: float
    backward_s: float
    weight_s: float
    """The part of the backward that no other worker waits for."""


def rates(
    gpu: Gpu,
    calibration: Calibration,
    *,
    fp32: bool = False,
    peer_bytes_per_s: float | None = None,
    fused_attention: bool = True,
) -> Rates:
    """A GPU type's peaks times the shares that were measured. `peer_bytes_per_s` where the group leaves its node;
    `fused_attention` where the calibration has no value."""
    peak = (gpu.fp32_tflops if fp32 else gpu.bf16_tflops) * 1e12
    fused = fused_attention if calibration.fused_attention is None else calibration.fused_attention
    return Rates(
        flop_per_s=peak * calibration.matrix_efficiency,
        attention_flop_per_s=peak * (calibration.attention_efficiency or calibration.matrix_efficiency),
        bytes_per_s=gpu.memory_gbytes_per_s * 1e9 * calibration.memory_efficiency,
        peer_bytes_per_s=peer_bytes_per_s or gpu.peer_gbps / 8 * 1e9 * calibration.peer_efficiency,
        layer_floor_s=calibration.layer_floor_us / 1e6,
        backward_floor_s=(calibration.backward_floor_us or 2 * calibration.layer_floor_us) / 1e6,
        fused_attention=fused,
    )


@lru_cache(maxsize=4096)
def layer_pass(model: Model, microbatch: int, tp: int, element_bytes: int, at: Rates, gradient_bytes: int = 0) -> Pass:
    """One layer on one GPU of its group. Its weight gradient is added to a sum of `gradient_bytes` a parameter: the sum
    is read and written once a microbatch, the gradient written and read."""
    tokens = microbatch * model.seq_len
    products_s = flops.layer_matrix_flops(model, microbatch) / tp / at.flop_per_s
    products_s += _operand_elements(model, tokens, tp) * element_bytes / at.bytes_per_s
    attention_s, attention_back_s = _attention_s(model, microbatch, tp, element_bytes, at)
    pointwise_s = _pointwise_elements(model, tokens, tp) * element_bytes / at.bytes_per_s
    # Ring all-reduce of the activation, once after attention and once after the MLP.
    ring_s = 2 * 2 * (tp - 1) / tp * tokens * model.hidden * element_bytes / at.peer_bytes_per_s
    forward_s = products_s + attention_s + pointwise_s + ring_s
    sum_bytes = 2 * (gradient_bytes + element_bytes) if gradient_bytes else 0
    weight_s = products_s + flops.layer_params(model) / tp * sum_bytes / at.bytes_per_s
    backward_s = products_s + weight_s + attention_back_s + POINTWISE_BACKWARD * pointwise_s + ring_s
    held_s = max(backward_s, at.backward_floor_s)
    return Pass(max(forward_s, at.layer_floor_s), held_s, held_s * weight_s / backward_s)


@lru_cache(maxsize=4096)
def head_pass(model: Model, microbatch: int, tp: int, at: Rates) -> Pass:
    """LM head and loss."""
    product_s = flops.head_flops(model, microbatch) / tp / at.flop_per_s
    loss_s = flops.logits_bytes(model, microbatch) / tp / at.bytes_per_s
    return Pass(product_s + loss_s, 2 * product_s, product_s)


def _attention_s(model: Model, microbatch: int, tp: int, element_bytes: int, at: Rates) -> tuple[float, float]:
    """Forward and backward of scores and values. Unfused, the causal half that is masked is computed too."""
    product_s = flops.layer_attention_flops(model, microbatch) / tp / at.attention_flop_per_s
    if at.fused_attention:
        return product_s, flops.ATTENTION_BACKWARD * product_s
    scores = microbatch * model.heads / tp * model.seq_len**2
    bytes_s = SCORE_PASSES * scores * element_bytes / at.bytes_per_s
    return 2 * product_s + bytes_s, 4 * product_s + POINTWISE_BACKWARD * bytes_s


def _operand_elements(model: Model, tokens: int, tp: int) -> float:
    """Read and written once by each product: weights, and activations whole on one side and divided on the other."""
    queries, keys = flops.attention_width(model), model.num_kv_heads * model.head_width
    inner = 2 * queries + 2 * keys + (3 if model.is_gated else 2) * model.ffn_width
    return flops.layer_matrix_params(model) / tp + tokens * (4 * model.hidden + inner / tp)


def _pointwise_elements(model: Model, tokens: int, tp: int) -> float:
    """Read and written between products: the residual stream on every GPU; heads and MLP divided over the group."""
    queries, keys = flops.attention_width(model), model.num_kv_heads * model.head_width
    divided = 2 * (2 * queries + 2 * keys) + (3 if model.is_gated else 2) * model.ffn_width
    return tokens * (RESIDUAL_PASSES * model.hidden + divided / tp)
