"""The model a user describes by its dimensions: a decoder of the GPT or the Llama family.

Knows shapes only. What they cost is `cost.flops`; reading a Hugging Face `config.json` is `huggingface`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from atlas.spec.fields import Count, Flag, Frozen, Size, Text


class Model(Frozen):
    """Dimensions of one decoder-only transformer."""

    family: Literal["gpt", "llama"] = "gpt"
    """gpt: learned positions, biases, two-matrix MLP of 4 x hidden. llama: rotary positions, no biases, gated
    three-matrix MLP."""
    config: Text | None = None
    """A Hugging Face `config.json` that the dimensions come from; keys written beside it win."""
    layers: Annotated[int, Field(strict=True, ge=1, le=512)]
    """Transformer layers."""
    hidden: Size
    """Width of the residual stream (H)."""
    heads: Count
    """Attention heads."""
    kv_heads: Count | None = None
    """Heads of keys and values when fewer (grouped queries). Left out: as many as `heads`."""
    head_dim: Count | None = None
    """Width of one head. Left out: hidden / heads."""
    ffn: Size | None = None
    """Inner width of the MLP. Left out: 4 x hidden (gpt), 8/3 x hidden rounded up to 256 (llama)."""
    gated: Flag | None = None
    """Whether the MLP has three matrices. Left out: as the family has it."""
    vocab: Size = 50_304
    """Rows of the embedding and of the LM head."""
    seq_len: Size
    """Tokens of one training sequence (L)."""
    tied_embeddings: Flag = False
    """Whether embedding and LM head are one matrix. Over several stages both ends hold it and must agree on its
    gradient every iteration, over the WAN."""

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def is_gated(self) -> bool:
        return self.family == "llama" if self.gated is None else self.gated

    @property
    def ffn_width(self) -> int:
        if self.ffn is not None:
            return self.ffn
        return 4 * self.hidden if self.family == "gpt" else -(-8 * self.hidden // 3 // 256) * 256
