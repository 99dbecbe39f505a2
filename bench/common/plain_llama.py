"""A Llama in plain torch, tuned: every layer and the loss compiled, bf16 weights, float32 masters, fused AdamW and
clipping. What a stage of ours is compared with; shares no code with it.

Shape letters: B batch, L length, D width, H heads, K heads of keys and values, E head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class PlainShape:
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    ffn: int
    vocabulary: int
    length: int
    microbatch: int
    """Sequences."""

    @property
    def layer_parameters(self) -> int:
        queries, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        return self.width * (2 * queries + 2 * keys + 3 * self.ffn) + 2 * self.width

    @property
    def flops_per_token(self) -> float:
        """Forward and backward of all products, without the embedding; attention counted once for causal masks."""
        products = self.layers * (self.layer_parameters - 2 * self.width) + self.width * self.vocabulary
        return 6.0 * products + 6.0 * self.layers * self.length * self.heads * self.head_width


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight, 1e-6)


class _Layer(nn.Module):
    def __init__(self, shape: PlainShape) -> None:
        super().__init__()
        self.shape, queries, keys = shape, shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        self.norm, self.mlp_norm = _Norm(shape.width), _Norm(shape.width)
        self.q, self.k, self.v = (nn.Linear(shape.width, n, bias=False) for n in (queries, keys, keys))
        self.o = nn.Linear(queries, shape.width, bias=False)
        self.gate, self.up = (nn.Linear(shape.width, shape.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.ffn, shape.width, bias=False)

    def forward(self, x_BLD: Tensor, cos_LE: Tensor, sin_LE: Tensor) -> Tensor:  # noqa: N803
        B, L, _ = x_BLD.shape
        a = self.norm(x_BLD)
        q, k, v = (p(a).view(B, L, -1, self.shape.head_width).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = _rotate(q, cos_LE, sin_LE), _rotate(k, cos_LE, sin_LE)
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.shape.heads != self.shape.kv_heads
        )
        x_BLD = x_BLD + self.o(mixed.transpose(1, 2).flatten(2))
        m = self.mlp_norm(x_BLD)
        out: Tensor = x_BLD + self.down(functional.silu(self.gate(m)) * self.up(m))
        return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class _Loss(nn.Module):
    def __init__(self, shape: PlainShape) -> None:
        super().__init__()
        self.norm = _Norm(shape.width)
        self.out = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.out(self.norm(x)).flatten(0, 1).float(), targets.flatten())


Batch = tuple[Tensor, Tensor]
"""Tokens and targets, each [B, L]."""


class PlainLlama:
    """Trains on made-up tokens, or on given ones."""

    def __init__(self, shape: PlainShape, device: str, dtype: torch.dtype, *, backend: str, recompute: bool) -> None:
        self.shape, self.device, self.recompute = shape, device, recompute
        with torch.device(device):
            torch.set_default_dtype(dtype)
            self.embedding = nn.Embedding(shape.vocabulary, shape.width)
            layers = [_Layer(shape) for _ in range(shape.layers)]
            loss = _Loss(shape)
            torch.set_default_dtype(torch.float32)
            exponent = torch.arange(0, shape.head_width, 2).float() / shape.head_width
            angles = torch.arange(shape.length).float()[:, None] * (1.0 / 500_000.0**exponent)
            angles = torch.cat([angles, angles], dim=-1)
            self.tokens = torch.randint(shape.vocabulary, (shape.microbatch, shape.length))
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self.parameters = [p for m in (self.embedding, *layers, loss) for p in m.parameters()]
        self._plain_layers, self._plain_loss = layers, loss
        for parameter in self.parameters:
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0.0, 0.02)
        self.layers = [torch.compile(layer, backend=backend, dynamic=False) for layer in layers]
        self.loss = torch.compile(loss, backend=backend, dynamic=False)
        for parameter in self.parameters:
            parameter.grad_dtype = torch.float32  # sums over microbatches in float32; faster than in bf16, too
        self.masters = [p.detach().float() for p in self.parameters]
        groups = [
            {"params": [m for m in self.masters if m.dim() > 1], "weight_decay": 0.1},
            {"params": [m for m in self.masters if m.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=device != "cpu")

    @torch.no_grad()
    def start_from(self, weights: Mapping[str, Tensor]) -> None:
        """Use these initial weights, by their names in our models."""
        found = {"embedding.token.weight": self.embedding.weight}
        found |= {f"head.{name}": p for name, p in self._plain_loss.named_parameters()}
        for number, layer in enumerate(self._plain_layers):
            for name, parameter in layer.named_parameters():
                part = {"norm": "attention_norm", "mlp_norm": "mlp_norm"}.get(name.partition(".")[0])
                half = "attention" if name[0] in "qkvo" else "mlp"
                found[f"layers.{number}.{f'{part}.weight' if part else f'{half}.{name}'}"] = parameter
        assert found.keys() == weights.keys()
        for name, parameter in found.items():
            parameter.copy_(weights[name])
        torch._foreach_copy_(self.masters, self.parameters)

    def step(self, num_microbatches: int) -> Tensor:
        return self.train([(self.tokens, self.tokens)] * num_microbatches)

    def train(self, batches: Sequence[Batch]) -> Tensor:
        """One step; the mean loss of its microbatches."""
        losses = []
        for tokens, targets in batches:
            x = self.embedding(tokens)
            for layer in self.layers:
                if self.recompute:
                    x = checkpoint(layer, x, self.cos, self.sin, use_reentrant=False)
                else:
                    x = layer(x, self.cos, self.sin)
            loss: Tensor = self.loss(x, targets)
            (loss / len(batches)).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        self.update()
        return torch.stack(losses).mean()

    def update(self) -> None:
        """Clip, step, and refresh the bf16 weights."""
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                assert parameter.grad is not None
                master.grad, parameter.grad = parameter.grad, None
            torch.nn.utils.clip_grad_norm_(self.masters, 1.0, foreach=True)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            torch._foreach_copy_(self.parameters, self.masters)
