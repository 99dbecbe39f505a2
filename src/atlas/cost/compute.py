"""Parameters, FLOPs, bytes and seconds of each piece of the model (embedding, layer, LM head) on one GPU type. Seconds
come from FLOPs, bytes and the job's efficiency, from the type's calibration, or as measured.

Matrix products and attention run at `efficiency` of the peak, divided over the tp group, which also pays two
all-reduces of the activation per layer and pass; lookups and the loss run at the memory's bandwidth. Calibrated rates
are at the end of this file. Knows one piece at a time: `arrange` decides which stage holds it.

Letters: b sequences in a microbatch, L tokens of a sequence, H hidden, V vocabulary, tp GPUs of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from atlas.cost.profile import Entry, Piece, entry_of, unchecked
from atlas.cost.runtimes import RUNTIMES
from atlas.errors import SpecError
from atlas.spec.gpus import Calibration, Gpu
from atlas.spec.job import DataCenter, Job, Model

# ---- parameters, FLOPs and bytes -----------------------------------------------------------------------------------
# A product of an (m, k) and a (k, n) matrix is 2mkn FLOPs. Attention is causal: half of L x L is computed.
ATTENTION_BACKWARD = 2.5
"""Backward of fused attention over its forward: five products against two (the scores are computed again)."""
LOGIT_PASSES = 3
"""Times the loss goes over the fp32 logits: write, read for the sum, write the probabilities."""


def attention_width(model: Model) -> int:
    """Width of all query heads together."""
    return model.heads * model.head_width


def layer_matrix_params(model: Model) -> int:
    """Parameters of one layer that take part in matrix products."""
    queries, keys = attention_width(model), model.num_kv_heads * model.head_width
    attention = 2 * model.hidden * queries + 2 * model.hidden * keys
    return attention + (3 if model.is_gated else 2) * model.hidden * model.ffn_width


def layer_params(model: Model) -> int:
    """All parameters of one layer: matrices, norms, and in the gpt family biases."""
    if model.family == "llama":
        return layer_matrix_params(model) + 2 * model.hidden
    keys = model.num_kv_heads * model.head_width
    biases = attention_width(model) + 2 * keys + model.hidden + model.ffn_width + model.hidden
    return layer_matrix_params(model) + biases + 4 * model.hidden


def embedding_params(model: Model) -> int:
    positions = model.seq_len * model.hidden if model.family == "gpt" else 0
    return model.vocab * model.hidden + positions


def head_params(model: Model) -> int:
    """LM head and final norm; a tied head is counted here too, because the last stage must hold it."""
    return model.vocab * model.hidden + (2 if model.family == "gpt" else 1) * model.hidden


def model_params(model: Model) -> int:
    """Parameters of the whole model; a tied matrix counts once."""
    tied = model.vocab * model.hidden if model.tied_embeddings else 0
    return embedding_params(model) + model.layers * layer_params(model) + head_params(model) - tied


def layer_matrix_flops(model: Model, microbatch: int) -> float:
    """Forward of one layer's weights; the input gradient costs as much, and so does the weight gradient."""
    return 2.0 * microbatch * model.seq_len * layer_matrix_params(model)


def layer_attention_flops(model: Model, microbatch: int) -> float:
    """Forward of scores and their product with the values, causal."""
    return 2.0 * microbatch * model.seq_len * model.seq_len * attention_width(model)


def head_flops(model: Model, microbatch: int) -> float:
    """Forward of the LM head."""
    return 2.0 * microbatch * model.seq_len * model.hidden * model.vocab


def flops_per_token(model: Model) -> float:
    """Forward and backward of all products, attention causal; nothing is counted twice for recompute."""
    forward = model.layers * (layer_matrix_flops(model, 1) + layer_attention_flops(model, 1)) + head_flops(model, 1)
    return 3.0 * forward / model.seq_len


def logits_bytes(model: Model, microbatch: int) -> float:
    """Memory traffic of the loss over the logits."""
    return 4.0 * LOGIT_PASSES * microbatch * model.seq_len * model.vocab


def embedding_bytes(model: Model, microbatch: int, element_bytes: int) -> float:
    """Memory traffic of looking the tokens up: read a row, write a row."""
    return 2.0 * microbatch * model.seq_len * model.hidden * element_bytes


def layer_activation_elements(model: Model) -> int:
    """Elements per token that one layer's backward needs: inputs of the norms and of every product, with fused
    attention (no L x L scores are kept)."""
    keys = model.num_kv_heads * model.head_width
    attention = 2 * model.hidden + 2 * attention_width(model) + 2 * keys
    return attention + 2 * model.hidden + (3 if model.is_gated else 2) * model.ffn_width


# ---- seconds -------------------------------------------------------------------------------------------------------
class PieceTime(NamedTuple):
    """Seconds for one microbatch; `update_s` once per iteration."""

    forward_s: float = 0.0
    recompute_s: float = 0.0
    input_s: float = 0.0
    """Backward: gradient of the input."""
    weight_s: float = 0.0
    """Backward: gradient of the weights."""
    update_s: float = 0.0
    """Optimizer step."""

    @property
    def backward_s(self) -> float:
        return self.input_s + self.weight_s


@dataclass(frozen=True)
class ModelTime:
    """A whole model on one GPU type."""

    embedding: PieceTime
    layers: tuple[PieceTime, ...]
    head: PieceTime


def model_time(job: Job, dc: DataCenter) -> ModelTime:
    """On the GPUs of a datacenter."""
    price = calibrated if job.is_calibrated and not job.profile else analytic
    found = price(job, job.cluster.gpu(dc.name), peer_bps(job, dc))
    if job.profile is not None:
        found = measured(job, entry_of(job, job.profile, dc.gpu), found)
    found = replace(found, head=_head_at_once(found.head))
    if job.recompute and RUNTIMES[job.runtime].recomputes_in_backward:
        found = replace(found, layers=_each(found.layers, _recomputed_in_backward))
    return found


def pricing(job: Job) -> str:
    """Where the seconds of compute come from, in words, for every report of a job."""
    if job.profile is not None:
        missing = unchecked(job)
        return "a measured profile" + (f", which does not record its {', '.join(missing)}" if missing else "")
    if job.is_calibrated:
        return "calibrated constants"
    if job.efficiency is None and job.calibrated is None:
        names = ", ".join(job.without_constants)
        return f"uncalibrated: no constants for {names}, {job.stated_efficiency:.0%} of the peak is assumed"
    return f"uncalibrated: {job.stated_efficiency:.0%} of the peak, as the job states"


def peer_bps(job: Job, dc: DataCenter) -> float:
    """What one GPU sends to the rest of its tp group: a group wider than a node goes over the nodes' network."""
    inside = job.cluster.gpu(dc.name).peer_gbps * 1e9
    return inside if job.tp <= dc.gpus_per_node else min(inside, job.cluster.node_gbps(dc) * 1e9)


def _each(pieces: tuple[PieceTime, ...], change: Callable[[PieceTime], PieceTime]) -> tuple[PieceTime, ...]:
    """Change each piece once: layers are mostly the same object."""
    changed: dict[int, PieceTime] = {}
    return tuple(changed.setdefault(id(piece), change(piece)) for piece in pieces)


def _recomputed_in_backward(piece: PieceTime) -> PieceTime:
    """Recompute is part of the backward, on every stage: it starts when the gradient has arrived."""
    return piece._replace(recompute_s=0.0, input_s=piece.recompute_s + piece.input_s)


def _head_at_once(head: PieceTime) -> PieceTime:
    """The head's two gradients together: a delayed weight gradient would keep the gradient of the logits."""
    return head._replace(input_s=head.backward_s, weight_s=0.0)


def analytic(job: Job, gpu: Gpu, peer_bps: float) -> ModelTime:
    """Times from FLOPs and bytes."""
    model, b = job.model, job.microbatch
    peak_tflops = gpu.fp32_tflops if job.precision == "fp32" else gpu.bf16_tflops
    flop_per_s = peak_tflops * 1e12 * job.stated_efficiency * job.tp
    bytes_per_s = gpu.memory_gbytes_per_s * 1e9 * job.tp
    # Ring all-reduce inside the node, once after attention and once after the MLP.
    peers_s = 2 * 2 * (job.tp - 1) / job.tp * job.activation_bytes * 8 / peer_bps
    matrix_s = layer_matrix_flops(model, b) / flop_per_s
    attention_s = layer_attention_flops(model, b) / flop_per_s
    forward_s = matrix_s + attention_s + peers_s
    layer = PieceTime(
        forward_s=forward_s,
        recompute_s=forward_s,
        input_s=matrix_s + ATTENTION_BACKWARD * attention_s + peers_s,
        weight_s=matrix_s,
        update_s=_update_s(job, layer_params(model), bytes_per_s),
    )
    head_s, loss_s = head_flops(model, b) / flop_per_s, logits_bytes(model, b) / bytes_per_s
    # The loss is fused with the head and its logits are not kept per microbatch, so there is nothing to recompute.
    head = PieceTime(head_s + loss_s, 0.0, head_s, head_s, _update_s(job, head_params(model), bytes_per_s))
    return ModelTime(_embedding(job, bytes_per_s), (layer,) * model.layers, head)


def calibrated(job: Job, gpu: Gpu, peer_bps: float) -> ModelTime:
    """Times from FLOPs and bytes at the rates that the GPU type was measured to reach."""
    if gpu.calibration is None:
        raise SpecError(
            where=job.where,
            key="calibrated",
            value=True,
            rule=f"no `calibration` for {', '.join(job.without_constants)}",
            remedy="Write it under cluster.gpus, or leave `calibrated` out",
        )
    model, b = job.model, job.microbatch
    # Over the network a group reaches all of it; inside a node the measured share of its links.
    outside = peer_bps / 8 if peer_bps < gpu.peer_gbps * 1e9 else None
    fused = RUNTIMES[job.runtime].fused_attention
    at = rates(gpu, gpu.calibration, fp32=job.precision == "fp32", peer_bytes_per_s=outside, fused_attention=fused)

    bytes_per_s = at.bytes_per_s * job.tp
    layer = layer_pass(model, b, job.tp, job.element_bytes, at, job.gradient_bytes)
    layer = layer._replace(update_s=_update_s(job, layer_params(model), bytes_per_s))
    head = head_pass(model, b, job.tp, at)._replace(update_s=_update_s(job, head_params(model), bytes_per_s))
    return ModelTime(_embedding(job, bytes_per_s), (layer,) * model.layers, head)


def _embedding(job: Job, bytes_per_s: float) -> PieceTime:
    """Look the tokens up, and add their gradients back."""
    lookup_s = embedding_bytes(job.model, job.microbatch, job.element_bytes) / bytes_per_s
    return PieceTime(lookup_s, 0.0, 0.0, lookup_s, _update_s(job, embedding_params(job.model), bytes_per_s))


def _update_s(job: Job, params: int, bytes_per_s: float) -> float:
    """Read gradient and state, write state and weights."""
    return params * (job.gradient_bytes + 2 * job.optimizer_bytes + job.element_bytes) / bytes_per_s


def measured(job: Job, entry: Entry, fallback: ModelTime) -> ModelTime:
    """Times from a profile; what it leaves out comes from the analytic model."""

    def piece(measure: Piece, analytic_piece: PieceTime, *, recomputed: bool) -> PieceTime:
        weight_s = measure.backward_s / 2 if measure.weight_s is None else min(measure.weight_s, measure.backward_s)
        again_s = measure.forward_s if measure.recompute_s is None and recomputed else measure.recompute_s
        update_s = analytic_piece.update_s if measure.update_s is None else measure.update_s
        return PieceTime(measure.forward_s, again_s or 0.0, measure.backward_s - weight_s, weight_s, update_s)

    return ModelTime(
        piece(entry.embedding, fallback.embedding, recomputed=False),
        tuple(piece(one, fallback.layers[0], recomputed=True) for one in entry.each_layer(job.model.layers)),
        piece(entry.head, fallback.head, recomputed=False),
    )


# ---- calibrated rates ----------------------------------------------------------------------------------------------
# A product of matrices costs its FLOPs at the reachable peak plus its operands at the reachable bandwidth, so small or
# narrow products reach a smaller share of the peak without a constant for it. Work between products costs its bytes.
# Nothing takes less time than launching its kernels.
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
def layer_pass(
    model: Model, microbatch: int, tp: int, element_bytes: int, at: Rates, gradient_bytes: int = 0
) -> PieceTime:
    """One layer on one GPU of its group, without its update. Its weight gradient is added to a sum of
    `gradient_bytes` a parameter: the sum is read and written once a microbatch, the gradient written and read."""
    tokens = microbatch * model.seq_len
    products_s = layer_matrix_flops(model, microbatch) / tp / at.flop_per_s
    products_s += _operand_elements(model, tokens, tp) * element_bytes / at.bytes_per_s
    attention_s, attention_back_s = _attention_s(model, microbatch, tp, element_bytes, at)
    pointwise_s = _pointwise_elements(model, tokens, tp) * element_bytes / at.bytes_per_s
    # Ring all-reduce of the activation, once after attention and once after the MLP.
    ring_s = 2 * 2 * (tp - 1) / tp * tokens * model.hidden * element_bytes / at.peer_bytes_per_s
    forward_s = products_s + attention_s + pointwise_s + ring_s
    sum_bytes = 2 * (gradient_bytes + element_bytes) if gradient_bytes else 0
    weight_s = products_s + layer_params(model) / tp * sum_bytes / at.bytes_per_s
    backward_s = products_s + weight_s + attention_back_s + POINTWISE_BACKWARD * pointwise_s + ring_s
    forward_s, held_s = max(forward_s, at.layer_floor_s), max(backward_s, at.backward_floor_s)
    weight_s = held_s * weight_s / backward_s
    return PieceTime(forward_s, forward_s, held_s - weight_s, weight_s)


@lru_cache(maxsize=4096)
def head_pass(model: Model, microbatch: int, tp: int, at: Rates) -> PieceTime:
    """LM head and loss, which are not recomputed; without their update."""
    product_s = head_flops(model, microbatch) / tp / at.flop_per_s
    loss_s = logits_bytes(model, microbatch) / tp / at.bytes_per_s
    return PieceTime(product_s + loss_s, 0.0, product_s, product_s)


def _attention_s(model: Model, microbatch: int, tp: int, element_bytes: int, at: Rates) -> tuple[float, float]:
    """Forward and backward of scores and values. Unfused, the causal half that is masked is computed too."""
    product_s = layer_attention_flops(model, microbatch) / tp / at.attention_flop_per_s
    if at.fused_attention:
        return product_s, ATTENTION_BACKWARD * product_s
    scores = microbatch * model.heads / tp * model.seq_len**2
    bytes_s = SCORE_PASSES * scores * element_bytes / at.bytes_per_s
    return 2 * product_s + bytes_s, 4 * product_s + POINTWISE_BACKWARD * bytes_s


def _operand_elements(model: Model, tokens: int, tp: int) -> float:
    """Read and written once by each product: weights, and activations whole on one side and divided on the other."""
    queries, keys = attention_width(model), model.num_kv_heads * model.head_width
    inner = 2 * queries + 2 * keys + (3 if model.is_gated else 2) * model.ffn_width
    return layer_matrix_params(model) / tp + tokens * (4 * model.hidden + inner / tp)


def _pointwise_elements(model: Model, tokens: int, tp: int) -> float:
    """Read and written between products: the residual stream on every GPU; heads and MLP divided over the group."""
    queries, keys = attention_width(model), model.num_kv_heads * model.head_width
    divided = 2 * (2 * queries + 2 * keys) + (3 if model.is_gated else 2) * model.ffn_width
    return tokens * (RESIDUAL_PASSES * model.hidden + divided / tp)
