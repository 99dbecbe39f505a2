"""Dimensions of a model from a Hugging Face `config.json`, by the keys that decoders have in common.

Known architectures differ only in their names for things; an unknown one is accepted if it uses the usual names. Does
not read weights and does not import transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atlas.spec.document import read_json, wrong

ALIASES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocab": ("vocab_size",),
    "seq_len": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    "tied_embeddings": ("tie_word_embeddings",),
}
REQUIRED = ("layers", "hidden", "heads", "vocab")

TWO_MATRICES = (
    "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "codegen", "mpt", "phi",
    "starcoder2",
)  # fmt: skip
"""Values of `model_type` whose MLP is not gated. All others have a gated MLP, as Llama has."""

TIED_BY_DEFAULT = ("gpt2", "gpt_bigcode", "gpt_neo", "opt", "bloom", "gemma", "gemma2", "gemma3_text")
"""Types whose embeddings are tied when the file does not say (transformers leaves defaults out)."""

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Keys of a mixture of experts."""

NO_DECODERS = (
    "bert", "roberta", "distilbert", "deberta-v2", "electra", "vit", "clip", "whisper", "mamba", "mamba2",
    "falcon_mamba", "rwkv", "jamba", "zamba", "zamba2", "recurrent_gemma", "bamba", "nemotron_h",
)  # fmt: skip
"""Values of `model_type` that are encoders, or whose layers differ from each other."""

MAX_SEQ_LEN = 8192
"""A training sequence is rarely as long as the longest context a model allows; longer must be asked for."""


def dimensions(path: Path, key: str = "model.config") -> dict[str, Any]:
    """Keys of `Model` found in a config file, or in a model's folder. Values are checked later, with the whole job."""
    path = path / "config.json" if path.is_dir() else path
    config = read_json(path, key=key, max_bytes=1024 * 1024)
    if not isinstance(config, dict):
        raise wrong(path, key, "is not the config of a model", "Name a Hugging Face config.json", config)
    if isinstance(config.get("text_config"), dict):  # multimodal models wrap their decoder
        config = {**config, **config["text_config"]}
    experts = next((name for name in EXPERTS if config.get(name)), None)
    if experts is not None and config[experts] != 1:
        raise wrong(path, experts, "mixtures of experts are not supported", "Use a dense model", config[experts])
    kind = str(config.get("model_type", "")).lower()
    if (reason := _unsupported(config, kind)) is not None:
        raise wrong(path, "model_type", reason, "Use a dense decoder, such as Llama, Qwen or GPT", kind or None)
    found = {name: _first(config, aliases) for name, aliases in ALIASES.items()}
    missing = [name for name in REQUIRED if found[name] is None]
    if missing:
        names = ALIASES[missing[0]]
        raise wrong(path, names[0], f"the config has no {' or '.join(names)}", f"Write model.{missing[0]} in the job")
    found["family"] = "gpt" if kind in TWO_MATRICES else "llama"
    if found["tied_embeddings"] is None and kind in TIED_BY_DEFAULT:
        found["tied_embeddings"] = True
    if found["ffn"] is None and isinstance(found["hidden"], int):
        found["ffn"] = 4 * found["hidden"]
    if isinstance(found["seq_len"], int):
        found["seq_len"] = min(found["seq_len"], MAX_SEQ_LEN)
    return {name: value for name, value in found.items() if value is not None}


def _unsupported(config: dict[str, Any], kind: str) -> str | None:
    """Why layers of this model would be priced wrongly."""
    if config.get("is_encoder_decoder"):
        return "models with an encoder and a decoder are not supported"
    if kind in NO_DECODERS:
        return "is not a decoder of equal transformer layers, so its durations would be wrong"
    if config.get("kv_lora_rank"):
        return "attention with compressed keys and values (MLA) is not supported"
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and any("attention" not in str(one) or "linear" in str(one) for one in kinds):
        return "layers without softmax attention are not supported"
    return None


def _first(config: dict[str, Any], aliases: tuple[str, ...]) -> Any:
    return next((config[alias] for alias in aliases if config.get(alias) is not None), None)
