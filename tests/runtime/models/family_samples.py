"""Tiny random models of every family, made by transformers: what ours are held against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()
LLAMA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
LLAMA3_ROPE = {
    # Of the four wavelengths (6.3, 30, 140, 664) one is kept, one blended, two divided: every branch is seen.
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
GPT2: dict[str, Any] = {
    "n_layer": 3,
    "n_embd": 32,
    "n_head": 4,
    "n_positions": 128,
    "vocab_size": 96,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "gpt2 untied": ("GPT2", GPT2 | {"tie_word_embeddings": False, "n_inner": 40, "activation_function": "gelu"}),
    "llama 2": ("Llama", LLAMA | {"num_key_value_heads": 4}),
    "llama 3": ("Llama", LLAMA | {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama linear": ("Llama", LLAMA | {"rope_parameters": LINEAR_ROPE, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", LLAMA | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", LLAMA | {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 biased": ("Qwen3", LLAMA | {"head_dim": 8, "attention_bias": True}),
    "mistral": ("Mistral", LLAMA | {"sliding_window": None}),
}


def make(name: str) -> Any:
    """The transformers model, with every parameter random (norms and biases too), in eval mode."""
    stem, keys = FAMILIES[name]
    kind = "LMHeadModel" if stem == "GPT2" else "ForCausalLM"
    model = getattr(transformers, stem + kind)(getattr(transformers, f"{stem}Config")(**keys))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise if parameter.dim() > 1 or key.endswith("bias") else 1.0 + noise)
    return model.eval()


def save(model: Any, folder: Path, shard_bytes: int | None = None) -> Path:
    model.save_pretrained(folder, **({"max_shard_size": shard_bytes} if shard_bytes else {}))
    return folder


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(tokens).logits
    return logits


def some_tokens(batch: int = 2, length: int = 48, vocabulary: int = 96, seed: int = 0) -> torch.Tensor:
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))
