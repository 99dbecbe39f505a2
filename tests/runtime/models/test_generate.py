"""Prefill in chunks, over cuts and in memory taken beforehand equals one shot; greedy decoding equals transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family_samples import FAMILIES, make, save, some_tokens
from greedy_decoding import greedy, make_slabs, prefill

from atlas.errors import ProgramError, SpecError
from atlas.runtime.models.decoder import LayerRange, cuts
from atlas.runtime.models.generate import Cache, run_cut
from atlas.runtime.models.huggingface import read_config
from atlas.runtime.models.weights import load


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = make(name)
    config = read_config(save(theirs, tmp_path))
    ours = load(config, LayerRange.whole(config), tmp_path)
    for length, chunk in ((1, None), (9, 4), (33, None), (40, 7)):
        prompt = some_tokens(batch=2, length=length, seed=length)
        expected = theirs.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False, use_cache=True,
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        assert torch.equal(greedy(ours, prompt, 20, chunk), expected)


@pytest.mark.parametrize("name", ["gpt2", "llama 3", "qwen3"])
@pytest.mark.parametrize("slabs", [False, True], ids=["growing", "slabs"])
def test_chunks_and_cuts_equal_one_shot(name: str, slabs: bool, tmp_path: Path) -> None:
    config = read_config(save(make(name), tmp_path))
    whole, tokens = load(config, LayerRange.whole(config), tmp_path), some_tokens(length=30)
    with torch.no_grad():
        expected = whole(tokens)[:, -1]
    once: Cache = {}
    assert torch.allclose(prefill(whole, tokens, once), expected, atol=1e-5)
    parts = [load(config, cut, tmp_path) for cut in cuts(config, (1, 0 + 2))]
    caches = [make_slabs(part, 2, 30) if slabs else {} for part in parts]
    start = 0
    for piece in torch.split(tokens, [1, 12, 7, 10], dim=1):
        x = piece
        for part, cache in zip(parts, caches, strict=True):
            x = run_cut(part, x, start, cache)
        start += piece.shape[1]
    assert torch.allclose(x, expected, atol=1e-5)
    for i, kv in once.items():
        assert isinstance(kv, tuple)
        mine = next(cache[i] for cache in caches if i in cache)
        pair = mine if isinstance(mine, tuple) else (mine.k_BKTE, mine.v_BKTE)
        for a, b in zip(pair, kv, strict=True):
            assert a.shape == (2, config.num_kv_heads, 30, config.head_width)
            assert torch.allclose(a, b, atol=1e-5)


def test_training_and_prefill_are_the_same_code(tmp_path: Path) -> None:
    config = read_config(save(make("llama 3"), tmp_path))
    decoder, tokens = load(config, LayerRange.whole(config), tmp_path), some_tokens()
    prefill(decoder, tokens, {})  # what it caches must not be inference tensors: training goes on afterwards
    decoder(tokens).sum().backward()
    assert all(p.grad is not None for p in decoder.parameters())


def test_too_long_a_prompt_and_too_short_a_slab_are_refused(tmp_path: Path) -> None:
    config = read_config(save(make("llama 2"), tmp_path))
    decoder = load(config, LayerRange.whole(config), tmp_path)
    with pytest.raises(SpecError, match=r"max_length = 128: a sequence has 130 tokens"):
        prefill(decoder, some_tokens(length=130), {})
    with pytest.raises(ProgramError, match="a KV slab of 8 tokens cannot hold 9"):
        prefill(decoder, some_tokens(length=9), make_slabs(decoder, 2, 8))
