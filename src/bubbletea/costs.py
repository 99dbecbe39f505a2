"""What prefill costs: time of one layer over a chunk of tokens, bytes of KV, and their transfer to the next worker and
to the decode engine. From a GPU type's data sheet and calibration, or fitted to measured layer times.

A layer over n tokens after c cached ones takes `max(floor, base + token * n + pair * n * (c + n / 2))`: weights once,
products by token, causal attention by pair of tokens. Knows no windows and no requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from atlas.cost.compute import (
    Rates,
    attention_width,
    embedding_params,
    head_params,
    layer_activation_elements,
    layer_attention_flops,
    layer_params,
    layer_pass,
    rates,
)
from atlas.spec.gpus import Calibration, Gpu
from atlas.spec.job import Model

LLAMA_3_8B = Model(
    family="llama", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14_336, vocab=128_256, seq_len=8192
)
"""The default prefill model."""
USUAL = Calibration(
    matrix_efficiency=0.76, memory_efficiency=0.7, peer_efficiency=0.8, layer_floor_us=500, fused_attention=True
)
"""For GPU types that were not calibrated: within a tenth of a Llama-3-8B layer measured on an H200 at 512 to 4,096
tokens."""
ELEMENT_BYTES = 2
"""Of a weight, an activation, a key or a value: bfloat16 or float16."""
PCIE_BYTES_PER_S = 24e9
"""Device to host, PCIe gen 4 x16, as copies reach it."""
KERNEL_FLOOR_US = 150.0
"""Launching one layer's kernels for a prefill without autograd; a calibration's floor is that of training."""
PARTS, LEAST_TOKENS = 8, 16
"""A layer that is too long for a window is cut to eighths of the widest chunk: few sizes, whose kernels the warm-up
loads."""


def grain_of(chunk: int) -> int:
    """Tokens by which a layer over such chunks is cut."""
    return max(LEAST_TOKENS, chunk // PARTS)


@dataclass(frozen=True)
class LayerTime:
    """Nanoseconds of one layer on one worker."""

    floor_ns: float
    base_ns: float
    token_ns: float
    pair_ns: float

    def __call__(self, tokens: int, context: int) -> int:
        """For a chunk of `tokens` after `context` tokens whose KV is computed."""
        pairs = tokens * (context + tokens / 2)
        return math.ceil(max(self.floor_ns, self.base_ns + self.token_ns * tokens + self.pair_ns * pairs))

    def times(self, share: float) -> LayerTime:
        return LayerTime(*(share * part for part in self.row))

    @property
    def row(self) -> tuple[float, float, float, float]:
        return self.floor_ns, self.base_ns, self.token_ns, self.pair_ns


@dataclass(frozen=True)
class PrefillCosts:
    """One prefill model on one type of worker."""

    model: Model
    layer: LayerTime
    head_ns: int
    """LM head for the last token of a prompt, on the lane's last worker."""
    pcie_bytes_per_s: float
    """Device to host and back."""
    nic_bytes_per_s: float
    """A worker's share of its node's network: KV to the decode engine, hidden states to the lane's next worker."""
    hop_latency_ns: int
    efficient_tokens: int = 4096
    """Larger chunks gain less than a hundredth."""

    @property
    def kv_bytes(self) -> int:
        """Of one token in one layer."""
        return 2 * self.model.num_kv_heads * self.model.head_width * ELEMENT_BYTES

    @property
    def layer_weight_bytes(self) -> int:
        return layer_params(self.model) * ELEMENT_BYTES

    @property
    def end_weight_bytes(self) -> int:
        """Embedding or LM head, whichever is larger: either end of a lane holds one, a lane of one worker both."""
        return max(embedding_params(self.model), head_params(self.model)) * ELEMENT_BYTES

    def workspace_bytes(self, tokens: int) -> int:
        """Activations of one layer over a chunk."""
        return tokens * (2 * self.model.hidden + layer_activation_elements(self.model)) * ELEMENT_BYTES

    def hop_ns(self, tokens: int) -> int:
        """Hidden states of a chunk to the lane's next worker."""
        return self.hop_latency_ns + math.ceil(tokens * self.model.hidden * ELEMENT_BYTES * 1e9 / self.nic_bytes_per_s)

    def prompt_ns(self, tokens: int) -> int:
        """Accelerator time of a whole prompt in chunks, head included, over all its workers."""
        total, step = self.head_ns, self.efficient_tokens
        for first in range(0, tokens, step):
            total += self.model.layers * self.layer(min(step, tokens - first), first)
        return total


def price_prefill(
    gpu: Gpu, model: Model = LLAMA_3_8B, *, tp: int = 1, net_gbps: float = 100.0, net_latency_us: float = 20.0
) -> PrefillCosts:
    """Costs on one worker of `tp` GPUs."""
    calibration = (gpu.calibration or USUAL).model_copy(update={"fused_attention": True, "layer_floor_us": 0.0})
    at = rates(gpu, calibration)
    one, two = (_layer_s(model, tokens, tp, at) for tokens in (1024, 2048))
    pair_s = 4 * attention_width(model) / tp / at.attention_flop_per_s
    token_s = (two - one) / 1024
    head_s = head_params(model) * ELEMENT_BYTES / tp / at.bytes_per_s  # logits of one token: the matrix is read once
    return PrefillCosts(
        model=model,
        layer=LayerTime(KERNEL_FLOOR_US * 1e3, (one - 1024 * token_s) * 1e9, token_s * 1e9, pair_s * 1e9),
        head_ns=math.ceil(head_s * 1e9),
        pcie_bytes_per_s=PCIE_BYTES_PER_S * tp,
        nic_bytes_per_s=net_gbps * 1e9 / 8,
        hop_latency_ns=round(net_latency_us * 1e3),
    )


def _layer_s(model: Model, tokens: int, tp: int, at: Rates) -> float:
    """One layer without attention's products, which are counted by pair of tokens."""
    sized = model.model_copy(update={"seq_len": tokens})
    seconds = layer_pass(sized, 1, tp, ELEMENT_BYTES, at).forward_s
    return seconds - layer_attention_flops(sized, 1) / tp / at.attention_flop_per_s


def measured(costs: PrefillCosts, points: Sequence[tuple[int, int, float]]) -> PrefillCosts:
    """The same costs with layer times fitted to measured (tokens, context, seconds); the smallest is the floor."""
    tokens, context, seconds = (np.array(column, float) for column in zip(*points, strict=True))
    terms = np.stack([np.ones_like(tokens), tokens, tokens * (context + tokens / 2)], axis=1)
    weights = 1 / seconds  # minimizes relative errors
    solution, *_ = np.linalg.lstsq(terms * weights[:, None], seconds * weights, rcond=None)
    base, token, pair = (max(0.0, float(value) * 1e9) for value in solution)
    return replace(costs, layer=LayerTime(float(seconds.min()) * 1e9, base, token, pair))
