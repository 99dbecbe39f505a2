"""Cuts, seeds, dimensions from a job, and whether it all fits."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from atlas.errors import SpecError
from atlas.priority import NICENESS
from atlas.runtime.models import decoder
from atlas.runtime.models.config import DecoderConfig, from_spec, gpt, layer_of
from atlas.runtime.models.decoder import TIED_EMBEDDING, TIED_HEAD, LayerRange, build, cuts
from atlas.runtime.models.huggingface import parse_config
from atlas.spec.job import Model

CONFIG = gpt(num_layers=4, width=16, num_heads=2, vocabulary=32, max_length=8)
TIED = gpt(num_layers=4, width=16, num_heads=2, vocabulary=32, max_length=8, tied=True)
LLAMA_8B = parse_config(
    {
        "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
    }
)  # fmt: skip


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_any_cut_holds_the_weights_of_the_whole(config: DecoderConfig) -> None:
    whole = dict(build(config, LayerRange.whole(config), seed=4).named_parameters())
    assert not torch.equal(whole["layers.0.attention.q.weight"], whole["layers.1.attention.q.weight"])
    assert torch.equal(whole[TIED_EMBEDDING], whole[TIED_HEAD]) == config.tied
    for layers in ((4,), (1, 3), (0, 1, 2, 1, 0)):
        seen = {}
        for cut in cuts(config, layers):
            for name, parameter in build(config, cut, seed=4).named_parameters():
                assert torch.equal(parameter, whole[name]), name
                seen[name] = parameter
        assert seen.keys() == whole.keys()
    assert not torch.equal(
        whole[TIED_EMBEDDING], dict(build(config, LayerRange.whole(config)).named_parameters())[TIED_EMBEDDING]
    )


def test_building_does_not_use_torchs_global_generator() -> None:
    before = torch.get_rng_state()
    build(CONFIG, LayerRange.whole(CONFIG))
    assert torch.equal(before, torch.get_rng_state())


def test_threads_that_draw_many_weights_leave_the_cores_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = build(CONFIG, LayerRange.whole(CONFIG))
    drawn, seen = decoder._draw, set[int]()

    def draw(*args: object) -> None:
        seen.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        drawn(*args)  # type: ignore[arg-type]

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    monkeypatch.setattr(decoder, "MANY_WEIGHTS", 1)
    monkeypatch.setattr(decoder, "_draw", draw)
    shared = build(CONFIG, LayerRange.whole(CONFIG))
    assert seen == {max(before, NICENESS)}
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), shared.parameters(), strict=True))


@pytest.mark.parametrize(
    ("layers", "says"),
    [((1, 2), "must add up to the model's 4"), ((2, 0, 2), "between the first and the last"), ((), "add up")],
)
def test_a_cut_that_does_not_work_out_is_refused(layers: tuple[int, ...], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        cuts(CONFIG, layers)


def test_parameters_know_their_layer() -> None:
    names = [name for name, _ in build(CONFIG, LayerRange.whole(CONFIG)).named_parameters()]
    assert sorted({layer_of(name) for name in names}) == ["embedding", "head", *(f"layers.{i}" for i in range(4))]


def test_a_sequence_longer_than_the_model_knows_is_refused() -> None:
    with pytest.raises(SpecError, match=r"max_length = 8: a sequence has 9 tokens"):
        build(CONFIG, LayerRange.whole(CONFIG))(torch.zeros(1, 9, dtype=torch.int64))


def test_a_jobs_dimensions_make_a_decoder() -> None:
    llama = from_spec(Model(family="llama", layers=2, hidden=64, heads=4, kv_heads=2, seq_len=16, vocab=100))
    assert (llama.num_kv_heads, llama.head_width, llama.ffn_width, llama.positions) == (2, 16, 256, "rope")
    ours = from_spec(Model(layers=2, hidden=64, heads=4, seq_len=16, vocab=100, tied_embeddings=True))
    assert (ours.family, ours.ffn_width, ours.tied) == ("gpt2", 256, True)
    with pytest.raises(SpecError, match=r"model\.kv_heads = 2"):
        from_spec(Model(layers=2, hidden=64, heads=4, kv_heads=2, seq_len=16))
    with pytest.raises(SpecError, match=r"model\.gated"):
        from_spec(Model(layers=2, hidden=64, heads=4, gated=True, seq_len=16))


@pytest.mark.parametrize("key", ["dropout", "num_kv_heads", "head_width"])
def test_impossible_dimensions_name_their_key(key: str) -> None:
    bad = {"dropout": 1.0, "num_kv_heads": 3, "head_width": 7}
    sizes = {"num_layers": 1, "width": 16, "num_heads": 2, "num_kv_heads": 2, "head_width": 8, "ffn_width": 8,
             "vocabulary": 8, "max_length": 8}  # fmt: skip
    with pytest.raises(SpecError, match=key):
        DecoderConfig("llama", **(sizes | {key: bad[key]}))  # type: ignore[arg-type]
