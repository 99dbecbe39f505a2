"""Parameters, FLOPs and bytes of a decoder's pieces: embedding, layer, LM head. Pure arithmetic on a Model.

A product of an (m, k) and a (k, n) matrix is 2mkn FLOPs. Attention is causal: half of L x L is computed. Knows no
hardware and no parallelism.

Letters: b sequences in a microbatch, L tokens of a sequence, H hidden, V vocabulary.
"""

from __future__ import annotations

from atlas.spec.job import Model

ATTENTION_BACKWARD = 2.5
"""Backward of fused attention over its forward: five products against two (the scores are computed again)."""
LOGIT_PASSES = 3
"""Times the loss goes over the fp32 logits: write, read for the sum, write the probabilities."""


def attention_width(model: Model) -> int:
    """Width of all query heads together."""
    return model.heads * model.head_width


def layer_matrix_params(model: Model) -> int:
    """Parameters of one layer that take part in matrix products."""
    queries, keys = attention_width(model), model.num_kv_heads * model.head_width
    attention = 2 * model.hidden * queries + 2 * model.hidden * keys
    return attention + (3 if model.is_gated else 2) * model.hidden * model.ffn_width


def layer_params(model: Model) -> int:
    """All parameters of one layer: matrices, norms, and in the gpt family biases."""
    if model.family == "llama":
        return layer_matrix_params(model) + 2 * model.hidden
    keys = model.num_kv_heads * model.head_width
    biases = attention_width(model) + 2 * keys + model.hidden + model.ffn_width + model.hidden
    return layer_matrix_params(model) + biases + 4 * model.hidden


def embedding_params(model: Model) -> int:
    positions = model.seq_len * model.hidden if model.family == "gpt" else 0
    return model.vocab * model.hidden + positions


def head_params(model: Model) -> int:
    """LM head and final norm; a tied head is counted here too, because the last stage must hold it."""
    return model.vocab * model.hidden + (2 if model.family == "gpt" else 1) * model.hidden


def model_params(model: Model) -> int:
    """Parameters of the whole model; a tied matrix counts once."""
    tied = model.vocab * model.hidden if model.tied_embeddings else 0
    return embedding_params(model) + model.layers * layer_params(model) + head_params(model) - tied


def layer_matrix_flops(model: Model, microbatch: int) -> float:
    """Forward of one layer's weights; the input gradient costs as much, and so does the weight gradient."""
    return 2.0 * microbatch * model.seq_len * layer_matrix_params(model)


def layer_attention_flops(model: Model, microbatch: int) -> float:
    """Forward of scores and their product with the values, causal."""
    return 2.0 * microbatch * model.seq_len * model.seq_len * attention_width(model)


def head_flops(model: Model, microbatch: int) -> float:
    """Forward of the LM head."""
    return 2.0 * microbatch * model.seq_len * model.hidden * model.vocab


def logits_bytes(model: Model, microbatch: int) -> float:
    """Memory traffic of the loss over the logits."""
    return 4.0 * LOGIT_PASSES * microbatch * model.seq_len * model.vocab


def embedding_bytes(model: Model, microbatch: int, element_bytes: int) -> float:
    """Memory traffic of looking the tokens up: read a row, write a row."""
    return 2.0 * microbatch * model.seq_len * model.hidden * element_bytes


def layer_activation_elements(model: Model) -> int:
    """Elements per token that one layer's backward needs: inputs of the norms and of every product, with fused
    attention (no L x L scores are kept)."""
    keys = model.num_kv_heads * model.head_width
    attention = 2 * model.hidden + 2 * attention_width(model) + 2 * keys
    return attention + 2 * model.hidden + (3 if model.is_gated else 2) * model.ffn_width
