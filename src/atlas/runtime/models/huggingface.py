"""Hugging Face's `config.json` to a DecoderConfig and back. A file with an unsupported feature is refused with the
key that asks for it.

Reads JSON; imports no transformers and no torch. Weights are read by `weights` and written by `export`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from atlas.errors import SpecError
from atlas.runtime.models.config import DecoderConfig, Family, RopeScaling, gpt, wrong
from atlas.spec.document import read_json, shown

Json = Mapping[str, Any]
ACTIVATIONS: dict[str, Literal["silu", "gelu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
CLASSES: dict[Family, str] = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
GPT2_KEYS = {
    "num_layers": "n_layer",
    "width": "n_embd",
    "num_heads": "n_head",
    "ffn_width": "n_inner",
    "vocabulary": "vocab_size",
    "max_length": "n_positions",
}
"""The sizes of a GPT-2 by our names."""
LLAMA_KEYS = {
    "num_layers": "num_hidden_layers",
    "width": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "ffn_width": "intermediate_size",
    "vocabulary": "vocab_size",
    "max_length": "max_position_embeddings",
}
"""Of the other families."""
ROPE_KEYS = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_length": "original_max_position_embeddings",
    },
}
"""Of a RopeScaling, by its kind."""
ABSENT: dict[Family, dict[str, Any]] = {
    "gpt2": {"layer_norm_epsilon": 1e-5, "n_positions": 1024, "activation_function": "gelu_new"},
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}
"""The defaults of transformers for missing keys."""
ONLY: dict[str, tuple[object, str]] = {
    "quantization_config": (None, "Use the weights before quantization"),
    "scale_attn_weights": (True, "Use a model with scaled attention"),
    "scale_attn_by_inverse_layer_idx": (False, "Use a model without it"),
    "add_cross_attention": (False, "Use a decoder without an encoder"),
    "partial_rotary_factor": (1.0, "Use a model that rotates whole heads"),
    "use_sliding_window": (False, "Write false: up to sliding_window tokens the model is the same"),
}
"""Keys that must be absent or have this value, and the remedy."""


def read_config(path: Path) -> DecoderConfig:
    """The decoder of a `config.json`, or of a folder with one. Dropout stays off."""
    path = path / "config.json" if path.is_dir() else path
    config = read_json(path, key="model.config", max_bytes=1024 * 1024)
    if not isinstance(config, dict):
        rule, remedy = "is not the config of a model", "Name a config.json"
        raise SpecError(where=str(path), key="model.config", value=shown(config), rule=rule, remedy=remedy)
    try:
        return parse_config(config)
    except SpecError as error:
        raise SpecError(
            where=str(path), key=error.key, value=error.value, rule=error.rule, remedy=error.remedy
        ) from None


def parse_config(raw: Json) -> DecoderConfig:
    kind = raw.get("model_type")
    if kind not in CLASSES:
        known = ", ".join(CLASSES)
        raise wrong("model_type", kind, f"this architecture is not supported; supported are {known}", "Use one of them")
    family: Family = kind
    raw = {
        **ABSENT[family],
        **{key: value for key, value in raw.items() if value is not None or key == "sliding_window"},
    }
    for key, (wanted, remedy) in ONLY.items():
        if raw.get(key, wanted) != wanted:
            raise wrong(key, shown(raw[key]), "is not supported", remedy)
    _require_full_attention(raw)
    return _gpt2(raw) if family == "gpt2" else _llama(family, raw)


def _gpt2(raw: Json) -> DecoderConfig:
    width, heads = _count(raw, "n_embd"), _count(raw, "n_head")
    if width % heads:
        raise wrong("n_head", heads, f"must divide n_embd = {width}", "Correct the file")
    config = gpt(**_counts({"n_inner": 4 * width, **raw}, GPT2_KEYS), tied=bool(raw.get("tie_word_embeddings", True)))
    activation = _activation(raw, "activation_function")
    return replace(config, norm_eps=float(raw["layer_norm_epsilon"]), activation=activation)


def _llama(family: Family, raw: Json) -> DecoderConfig:
    """Llama and similar families, which differ in biases and in Qwen3's norms of queries and keys."""
    width, heads = _count(raw, "hidden_size"), _count(raw, "num_attention_heads")
    biased = bool(raw.get("attention_bias", False)) and family in ("llama", "qwen3")
    theta, scaling = _rope(raw)
    return DecoderConfig(
        family=family,
        **_counts({"num_key_value_heads": heads, "head_dim": width // heads, **raw}, LLAMA_KEYS),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=biased or family == "qwen2",
        out_bias=biased,
        mlp_bias=bool(raw.get("mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3",
        activation=_activation(raw, "hidden_act"),
        tied=bool(raw.get("tie_word_embeddings", False)),
    )


def _require_full_attention(raw: Json) -> None:
    window = raw.get("sliding_window")
    if raw["model_type"] == "mistral" and window is not None and window < _count(raw, "max_position_embeddings"):
        remedy = f'Write "sliding_window": null: up to {window} tokens the model is the same'
        raise wrong("sliding_window", window, "sliding-window attention is not supported", remedy)
    others = [kind for kind in raw.get("layer_types") or [] if kind != "full_attention"]
    if others:
        raise wrong("layer_types", others[0], "only full_attention is supported", "Use a model without it")


def _rope(raw: Json) -> tuple[float, RopeScaling | None]:
    """Older files have `rope_theta` and `rope_scaling`; newer ones have `rope_parameters` with both."""
    old, new = raw.get("rope_scaling") or {}, raw.get("rope_parameters") or {}
    rope = {**old, **new}
    key = "rope_parameters" if new else "rope_scaling"
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if str(kind) not in ROPE_KEYS:
        rule = "this scaling of rotary positions is not supported; supported are default, linear and llama3"
        raise wrong(f"{key}.rope_type", kind, rule, f"Remove {key}: the model then has its original context length")
    for name in ROPE_KEYS[kind].values():
        if not isinstance(rope.get(name), (int, float)) or rope[name] <= 0:
            raise wrong(f"{key}.{name}", rope.get(name), f"{kind} scaling needs it, above 0", "Write it in the file")
    found: dict[str, Any] = {field: float(rope[name]) for field, name in ROPE_KEYS[kind].items()}
    scaling = RopeScaling(kind, **found)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if low >= high:
        raise wrong(f"{key}.low_freq_factor", low, f"must be below high_freq_factor = {high}", "Correct the file")
    return theta, replace(scaling, original_length=int(scaling.original_length))


def _counts(raw: Json, keys: Mapping[str, str]) -> dict[str, Any]:
    return {field: _count(raw, key) for field, key in keys.items()}


def _count(raw: Json, key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise wrong(key, shown(value), "must be a whole number of at least 1", "Write it in the file")
    return value


def _activation(raw: Json, key: str) -> Literal["silu", "gelu", "gelu_tanh"]:
    name = raw.get(key, "silu")
    if name not in ACTIVATIONS:
        raise wrong(key, shown(name), f"is not supported; supported are {', '.join(ACTIVATIONS)}", "Use one of them")
    return ACTIVATIONS[name]


# ---- write -----------------------------------------------------------------------------------------------------
def write_config(config: DecoderConfig, dtype: str = "float32") -> dict[str, Any]:
    """The `config.json` of a decoder for transformers; raises if its family cannot express it."""
    is_gpt2 = config.family == "gpt2"
    raw = {
        "architectures": [CLASSES[config.family]],
        "model_type": config.family,
        **{key: getattr(config, field) for field, key in (GPT2_KEYS if is_gpt2 else LLAMA_KEYS).items()},
        "tie_word_embeddings": config.tied,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
        **(_gpt2_keys(config) if is_gpt2 else _llama_keys(config)),
    }
    again = replace(parse_config(raw), dropout=config.dropout, init_std=config.init_std)
    for name in config.__dataclass_fields__:
        ours, theirs = getattr(config, name), getattr(again, name)
        if ours != theirs:
            rule = f"transformers' {config.family} has {theirs!r}: the model cannot be exported"
            raise wrong(name, ours, rule, "Train a model of that family's shape, or keep our own checkpoints")
    return raw


def _gpt2_keys(config: DecoderConfig) -> dict[str, Any]:
    return {
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu_new" if config.activation == "gelu_tanh" else config.activation,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": 0.0,
    }


def _llama_keys(config: DecoderConfig) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_keys(config.rope_scaling),
        "hidden_act": "gelu_pytorch_tanh" if config.activation == "gelu_tanh" else config.activation,
    }
    if config.family in ("llama", "qwen3"):
        keys["attention_bias"] = config.qkv_bias
    if config.family == "llama":
        keys["mlp_bias"] = config.mlp_bias
    if config.family == "mistral":
        keys["sliding_window"] = None
    return keys


def _rope_keys(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    found = {key: getattr(scaling, field) for field, key in ROPE_KEYS[scaling.kind].items()}
    return {"rope_type": scaling.kind, **found}
