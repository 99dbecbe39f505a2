"""The names of our tensors in Hugging Face files, by family. GPT-2 has queries, keys and values in one matrix, and its
matrices transposed; the other families differ in names only.

Knows names. Files are read by `weights` and written by `export`.
"""

from __future__ import annotations

from dataclasses import dataclass

from atlas.runtime.models.config import DecoderConfig
from atlas.runtime.models.decoder import TIED_EMBEDDING, TIED_HEAD


@dataclass(frozen=True)
class HfTensor:
    """A Hugging Face tensor, or one of `num_parts` equal parts of its rows."""

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
"""Buffers in older files."""


def source_of(config: DecoderConfig, name: str) -> HfTensor:
    """The Hugging Face tensor of `layers.3.mlp.up.weight`. The head of a tied model is the embedding."""
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
    """The prefix that files of a model without a head (and GPT-2's own) omit."""
    return "transformer." if config.family == "gpt2" else "model."
