"""The description of a decoder: its dimensions and the few switches that distinguish the families (GPT-2, Llama, Qwen,
Mistral), and how its layers are named and divided.

Knows no files, no tensors and no stages: `huggingface` reads and writes `config.json`, `decoder` builds modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from atlas.errors import ProgramError, SpecError
from atlas.spec.job import Model

Family = Literal["gpt2", "llama", "mistral", "qwen2", "qwen3"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are scaled for contexts longer than the original one."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    """llama3 only, as the two below: wavelengths longer than original_length / low are divided by `factor`."""
    high_freq_factor: float = 4.0
    """Wavelengths shorter than original_length / high stay as they are; between the two, a blend."""
    original_length: int = 8192


@dataclass(frozen=True)
class DecoderConfig:
    """One pre-norm decoder. The defaults are Llama's; `gpt` and `huggingface.read_config` set the others."""

    family: Family
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    ffn_width: int
    vocabulary: int
    max_length: int
    """The longest sequence."""
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    positions: Literal["rope", "learned"] = "rope"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    """Bias of the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head's query and key before the rotation (Qwen3)."""
    gated: bool = True
    """SwiGLU-like MLP of three matrices; otherwise two."""
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    tied: bool = False
    """Embedding and head are one matrix."""
    dropout: float = 0.0
    """After the embedding, the attention and the MLP; off by default, whatever the file says. No dropout inside
    attention: torch's fused attention cannot draw it from a given generator."""
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise wrong("num_kv_heads", self.num_kv_heads, f"must divide num_heads = {self.num_heads}", "Change one")
        if self.positions == "rope" and self.head_width % 2:
            raise wrong("head_width", self.head_width, "must be even for rotary positions", "Change heads or width")
        if not 0.0 <= self.dropout < 1.0:
            raise wrong("dropout", self.dropout, "must be at least 0 and below 1", "Write 0 to turn it off")


GPT: dict[str, Any] = {
    "family": "gpt2",
    "norm": "layer",
    "norm_eps": 1e-5,
    "positions": "learned",
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "gated": False,
    "activation": "gelu",
}
"""What distinguishes a GPT from the defaults."""


def gpt(
    *,
    num_layers: int,
    width: int,
    num_heads: int,
    vocabulary: int,
    max_length: int,
    ffn_width: int | None = None,
    tied: bool = False,
    dropout: float = 0.0,
) -> DecoderConfig:
    """A small GPT: GPT-2's shape with the exact GELU and, by default, untied embeddings."""
    if width % num_heads:
        raise wrong("num_heads", num_heads, f"must divide width = {width}", "Change one of them")
    return DecoderConfig(
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_width=width // num_heads,
        ffn_width=ffn_width or 4 * width,
        vocabulary=vocabulary,
        max_length=max_length,
        tied=tied,
        dropout=dropout,
        **GPT,
    )


def from_spec(model: Model) -> DecoderConfig:
    """The decoder with the dimensions of a job's `model` (see `huggingface` for `model.config`)."""
    is_gpt = model.family == "gpt"
    if model.is_gated == is_gpt:
        raise wrong("model.gated", model.is_gated, f"not supported for the {model.family} family", "Leave it out")
    if is_gpt and (model.num_kv_heads != model.heads or model.head_width * model.heads != model.hidden):
        rule = "a gpt needs kv_heads = heads, and heads x head_dim = hidden"
        raise wrong("model.kv_heads", model.num_kv_heads, rule, "Write family: llama, or leave kv_heads, head_dim out")
    return DecoderConfig(
        num_layers=model.layers,
        width=model.hidden,
        num_heads=model.heads,
        num_kv_heads=model.num_kv_heads,
        head_width=model.head_width,
        ffn_width=model.ffn_width,
        vocabulary=model.vocab,
        max_length=model.seq_len,
        tied=model.tied_embeddings,
        **(GPT if is_gpt else {"family": "llama"}),
    )


def wrong(key: str, value: object, rule: str, remedy: str) -> SpecError:
    return SpecError(where="model", key=key, value=value, rule=rule, remedy=remedy)


def require_divisible(config: DecoderConfig, degree: int) -> None:
    """Raise unless every rank of a tensor-parallel group gets an equal part."""
    shares = {
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "ffn_width": config.ffn_width,
        "vocabulary": config.vocabulary,
    }
    for key, size in shares.items():
        if size % degree:
            raise wrong(
                key, size, f"cannot be divided among {degree} tensor-parallel GPUs", "Choose a tp that divides it"
            )


def even_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage: nearly equal, counting embedding and head as a layer each."""
    whole = num_layers + 2
    if num_stages > whole:
        raise ProgramError(f"{num_stages} stages for {whole} layers: give each stage at least one layer")
    counts = [whole * (s + 1) // num_stages - whole * s // num_stages for s in range(num_stages)]
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts)


def model_layers(config: DecoderConfig) -> list[str]:
    """The layers of the whole model, as checkpoints name them."""
    return ["embedding", *(f"layers.{i}" for i in range(config.num_layers)), "head"]


def layer_of(name: str) -> str:
    """The part of the model that a parameter belongs to: `embedding`, `layers.3` or `head`."""
    return ".".join(name.split(".")[: 2 if name.startswith("layers.") else 1])


def activation_width(config: DecoderConfig, tp: int) -> int:
    """Values a token that the backward of one layer needs on one of `tp` ranks: inputs of norms, attention and MLP,
    which every rank has whole, and its part of queries, keys, values, attention's output and the MLP's inner values."""
    queries, keys = config.num_heads * config.head_width, config.num_kv_heads * config.head_width
    return 4 * config.width + (2 * queries + 2 * keys + (3 if config.gated else 2) * config.ffn_width) // tp
