"""The sizes of a decoder, parameter by parameter, from its config alone, and where they lie in the memory of a stage.
Loads no torch. `tests/runtime/test_group_sums.py` compares it with the modules.
"""

from __future__ import annotations

from collections.abc import Sequence

from atlas.runtime.flat_layout import FlatLayout, ParameterSize, flat_layout
from atlas.runtime.models.config import DecoderConfig

SHARDED = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up", "embedding.token", "head.out")
"""Modules whose parameters are all divided by tensor parallelism (`models.parallel`)."""
SHARDED_MATRICES = ("attention.o.weight", "mlp.down.weight")
TIED = ("embedding.token.weight", "head.out.weight")


def stage_layout(config: DecoderConfig, layers: Sequence[str], num_slices: int, tp: int = 1) -> FlatLayout:
    """Of a stage with these layers (`model_layers`), on one rank of a tensor-parallel group."""
    sizes = {name: size for layer in layers for name, size in layer_sizes(config, layer, tp).items()}
    owner = {name: name for name in sizes}
    if config.tied and set(TIED) <= sizes.keys():
        owner[TIED[1]] = TIED[0]
    return flat_layout(sizes, owner, num_slices)


def layer_sizes(config: DecoderConfig, layer: str, tp: int = 1) -> dict[str, ParameterSize]:
    """Of the parameters of the embedding, the head or a decoder layer, in the order of the module."""
    found = {f"{layer}.{name}": size for name, size in _sizes(config, layer)}
    return {
        name: ParameterSize(size.num_values // (tp if is_sharded(name) else 1), size.is_matrix)
        for name, size in found.items()
    }


def is_sharded(name: str) -> bool:
    """Whether tensor parallelism divides a parameter."""
    return name.endswith(SHARDED_MATRICES) or name.rpartition(".")[0].endswith(SHARDED)


def _sizes(config: DecoderConfig, layer: str) -> list[tuple[str, ParameterSize]]:
    width, ffn, vocabulary = config.width, config.ffn_width, config.vocabulary
    if layer == "embedding":
        place = _matrix("place", config.max_length, width) if config.positions == "learned" else []
        return [*_matrix("token", vocabulary, width), *place]
    if layer == "head":
        return [*_norm("norm", config), *_matrix("out", width, vocabulary)]
    queries, keys = (count * config.head_width for count in (config.num_heads, config.num_kv_heads))
    linears = [(f"attention.{n}", width, w, config.qkv_bias) for n, w in (("q", queries), ("k", keys), ("v", keys))]
    found = [*_norm("attention_norm", config), *_norm("mlp_norm", config)]
    found += [part for linear in linears for part in _matrix(*linear)]
    found += _matrix("attention.o", queries, width, config.out_bias)
    if config.qk_norm:
        found += [(f"attention.{n}_norm.weight", ParameterSize(config.head_width, False)) for n in ("q", "k")]
    if config.gated:
        found += _matrix("mlp.gate", width, ffn, config.mlp_bias)
    return [*found, *_matrix("mlp.up", width, ffn, config.mlp_bias), *_matrix("mlp.down", ffn, width, config.mlp_bias)]


def _matrix(name: str, into: int, out: int, bias: bool = False) -> list[tuple[str, ParameterSize]]:
    found = [(f"{name}.weight", ParameterSize(into * out, True))]
    return [*found, (f"{name}.bias", ParameterSize(out, False))] if bias else found


def _norm(name: str, config: DecoderConfig) -> list[tuple[str, ParameterSize]]:
    names = ["weight", "bias"] if config.norm == "layer" else ["weight"]
    return [(f"{name}.{part}", ParameterSize(config.width, False)) for part in names]
