"""What Hugging Face calls our tensors, family by family. GPT-2 keeps queries, keys and values in one matrix, and its
matrices transposed; the rest of the world differs in names only.

Knows names. Files are `weights` and `export`.
"""

from __future__ import annotations

from dataclasses import dataclass

from atlas.runtime.models.config import DecoderConfig
from atlas.runtime.models.decoder import TIED_EMBEDDING, TIED_HEAD


@dataclass(frozen=True)
class HfTensor:
    """Where a tensor of ours lies: one of `num_parts` equal runs of rows of a tensor of theirs."""

    name: str
    transposed: bool = False
    part: int = 0
    num_parts: int = 1


LLAMA = {
    "embedding.token": "model.embed_tokens",
    "head.norm": "model.norm",
    "head.out": "lm_head",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **{f"attention.{p}": f"self_attn.{p}_proj" for p in ("q", "k", "v", "o")},
    **{f"attention.{p}_norm": f"self_attn.{p}_norm" for p in ("q", "k")},
    **{f"mlp.{p}": f"mlp.{p}_proj" for p in ("gate", "up", "down")},
}
GPT2 = {
    "embedding.token": "transformer.wte",
    "embedding.place": "transformer.wpe",
    "head.norm": "transformer.ln_f",
    "head.out": "lm_head",
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    "attention.q": "attn.c_attn",
    "attention.k": "attn.c_attn",
    "attention.v": "attn.c_attn",
    "attention.o": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
GPT2_PARTS = {"attention.q": 0, "attention.k": 1, "attention.v": 2}
NOT_WEIGHTS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")
"""Buffers that older files carry."""


def source_of(config: DecoderConfig, name: str) -> HfTensor:
    """`layers.3.mlp.up.weight` -> where Hugging Face has it. The head of a tied model lies with the embedding."""
    if config.tied and name == TIED_HEAD:
        name = TIED_EMBEDDING
    place, _, end = name.rpartition(".")
    layer = ""
    if place.startswith("layers."):
        _, index, place = place.split(".", 2)
        layer = layer_prefix(config, int(index))
    if config.family != "gpt2":
        return HfTensor(f"{layer}{LLAMA[place]}.{end}")
    theirs = f"{layer}{GPT2[place]}.{end}"
    transposed = end == "weight" and place.startswith(("attention.", "mlp."))
    part = GPT2_PARTS.get(place)
    return HfTensor(theirs, transposed) if part is None else HfTensor(theirs, transposed, part, 3)


def layer_prefix(config: DecoderConfig, index: int) -> str:
    return f"transformer.h.{index}." if config.family == "gpt2" else f"model.layers.{index}."


def base_prefix(config: DecoderConfig) -> str:
    """What the files of a model without its head (and GPT-2's own) leave out."""
    return "transformer." if config.family == "gpt2" else "model."
