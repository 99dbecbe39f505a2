"""One transformer layer: `layer(x, positions, kv) -> (x, (k, v))`. The same code trains (no past, the KV dropped),
prefills in chunks (the past given, the new KV returned) and decodes (chunks of one token).

Knows its own number, for dropout. Does not know other layers, stages or its caller. Under tensor parallelism it holds
some of the heads; the shapes of its projections say how many.

Shape letters: B batch, L length (new tokens), T all tokens (past and new), D width, H heads, K heads of keys and
values, E head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from atlas.errors import ProgramError
from atlas.runtime.models.config import DecoderConfig
from atlas.runtime.models.dropout import Masks
from atlas.runtime.models.linear import Linear, Tape
from atlas.runtime.models.rope import Rotation, rotate, rotation

Kv = tuple[Tensor, Tensor]
"""Keys (rotated) and values of every token so far, each [B, K, T, E]."""


class KvSlab:
    """Keys and values in preallocated memory."""

    def __init__(self, k_BKTE: Tensor, v_BKTE: Tensor, length: int = 0) -> None:  # noqa: N803
        self.k_BKTE, self.v_BKTE, self.length = k_BKTE, v_BKTE, length

    def extend(self, k_BKLE: Tensor, v_BKLE: Tensor) -> Kv:  # noqa: N803
        """Append the new tokens; views of all tokens."""
        end, room = self.length + k_BKLE.shape[2], self.k_BKTE.shape[2]
        if end > room:
            raise ProgramError(f"a KV slab of {room} tokens cannot hold {end}: make it as long as the prompt")
        self.k_BKTE[:, :, self.length : end] = k_BKLE
        self.v_BKTE[:, :, self.length : end] = v_BKLE
        self.length = end
        return self.k_BKTE[:, :, :end], self.v_BKTE[:, :, :end]


class PackedSlabs:
    """Keys and values of several sequences whose new tokens are one after the other: `lengths` of each. Products with
    weights are computed over all of them at once, attention over each alone."""

    def __init__(self, slabs: Sequence[KvSlab], lengths: Sequence[int]) -> None:
        self.slabs, self.lengths = slabs, list(lengths)

    def attend(self, q_BHLE: Tensor, k_BKLE: Tensor, v_BKLE: Tensor) -> Tensor:  # noqa: N803
        parts = zip(self.slabs, *(torch.split(at, self.lengths, dim=2) for at in (q_BHLE, k_BKLE, v_BKLE)), strict=True)
        return torch.cat([_attend(q, *slab.extend(k, v)) for slab, q, k, v in parts], dim=2)


class RmsNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def make_norm(config: DecoderConfig) -> nn.Module:
    if config.norm == "rms":
        return RmsNorm(config.width, config.norm_eps)
    return nn.LayerNorm(config.width, config.norm_eps)


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        queries, keys = (n * config.head_width for n in (config.num_heads, config.num_kv_heads))
        self.q = Linear(config.width, queries, bias=config.qkv_bias)
        self.k = Linear(config.width, keys, bias=config.qkv_bias)
        self.v = Linear(config.width, keys, bias=config.qkv_bias)
        self.o = Linear(queries, config.width, bias=config.out_bias)
        if config.qk_norm:
            self.q_norm = RmsNorm(config.head_width, config.norm_eps)
            self.k_norm = RmsNorm(config.head_width, config.norm_eps)

    def forward(
        self,
        x_BLD: Tensor,  # noqa: N803
        positions_L: Tensor,  # noqa: N803
        kv: Kv | KvSlab | PackedSlabs | None,
        *,
        turned: Rotation | None = None,
        tape: Tape | None = None,
    ) -> tuple[Tensor, Kv]:
        """`turned`: the rotation of the positions, if it is known already."""
        q, k, v = (self._heads(project(x_BLD, tape=tape)) for project in (self.q, self.k, self.v))
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.config.positions == "rope":
            cos, sin = rotation(self.config, positions_L, q.dtype) if turned is None else turned
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if isinstance(kv, PackedSlabs):
            mixed_BHLE = kv.attend(q, k, v)
        else:
            k, v = _with_past(k, v, kv)
            mixed_BHLE = _attend(q, k, v)
        return self.o(mixed_BHLE.transpose(1, 2).flatten(2), tape=tape), (k, v)

    def _heads(self, projected: Tensor) -> Tensor:
        B, L, _ = projected.shape
        return projected.view(B, L, -1, self.config.head_width).transpose(1, 2)


def _with_past(k: Tensor, v: Tensor, kv: Kv | KvSlab | None) -> Kv:
    if kv is None:
        return k, v
    if isinstance(kv, KvSlab):
        return kv.extend(k, v)
    return torch.cat([kv[0], k], dim=2), torch.cat([kv[1], v], dim=2)


def _attend(q_BHLE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor) -> Tensor:  # noqa: N803
    """Causal attention; the new tokens are the last ones."""
    L, T = q_BHLE.shape[2], k_BKTE.shape[2]
    mask = _lower_right(L, T, q_BHLE.device) if 1 < L < T else None
    return functional.scaled_dot_product_attention(
        q_BHLE, k_BKTE, v_BKTE, mask, is_causal=L == T, enable_gqa=q_BHLE.shape[1] != k_BKTE.shape[1]
    )


def _lower_right(L: int, T: int, device: torch.device) -> Tensor:  # noqa: N803
    """The causal mask of the last L of T tokens."""
    if device.type == "cpu":
        return torch.ones(L, T, dtype=torch.bool, device=device).tril(T - L)
    # The fused kernels support this mask type. A tensor mask goes to a library that compiles a kernel for every shape,
    # up to a second each. torch's compiler: 2 s.
    from torch.nn.attention.bias import causal_lower_right

    mask: Tensor = causal_lower_right(L, T)
    return mask


class Mlp(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.gate = Linear(config.width, config.ffn_width, bias=config.mlp_bias) if config.gated else None
        self.up = Linear(config.width, config.ffn_width, bias=config.mlp_bias)
        self.down = Linear(config.ffn_width, config.width, bias=config.mlp_bias)

    def forward(self, x_BLD: Tensor, *, tape: Tape | None = None) -> Tensor:  # noqa: N803
        up = self.up(x_BLD, tape=tape)
        inner = self._activate(up) if self.gate is None else self._activate(self.gate(x_BLD, tape=tape)) * up
        return cast(Tensor, self.down(inner, tape=tape))

    def _activate(self, x: Tensor) -> Tensor:
        if self.activation == "silu":
            return functional.silu(x)
        return functional.gelu(x, approximate="tanh" if self.activation == "gelu_tanh" else "none")


class DecoderLayer(nn.Module):
    """A layer of the decoder, pre-norm."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.index, self.dropout = index, config.dropout
        self.attention_norm, self.mlp_norm = make_norm(config), make_norm(config)
        self.attention = Attention(config)
        self.mlp = Mlp(config)

    def forward(
        self,
        x_BLD: Tensor,  # noqa: N803
        positions_L: Tensor,  # noqa: N803
        kv: Kv | KvSlab | PackedSlabs | None = None,
        *,
        masks: Masks | None = None,
        turned: Rotation | None = None,
        tape: Tape | None = None,
    ) -> tuple[Tensor, Kv]:
        """`masks`: of dropout; None, as in inference: no dropout. `tape`: takes the weight gradients."""
        mixed, new = self.attention(self.attention_norm(x_BLD), positions_L, kv, turned=turned, tape=tape)
        attention_mask, mlp_mask = masks or (None, None)
        x_BLD = x_BLD + self._drop(mixed, attention_mask)
        return x_BLD + self._drop(self.mlp(self.mlp_norm(x_BLD), tape=tape), mlp_mask), new

    @property
    def linears(self) -> list[Linear]:
        """In the order in which `forward` calls them."""
        attention, mlp = self.attention, self.mlp
        found = [attention.q, attention.k, attention.v, attention.o, mlp.up, mlp.gate, mlp.down]
        return [linear for linear in found if linear is not None]

    def _drop(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return x if mask is None else x * mask / (1.0 - self.dropout)
