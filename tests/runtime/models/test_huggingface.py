"""Every family against transformers: logits, weights of one's own cut only, export and back, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_samples import FAMILIES, LLAMA, logits_of, make, save, some_tokens
from safetensors.torch import load_file, save_file

from atlas.errors import SpecError, WorkerError
from atlas.runtime.models import weights
from atlas.runtime.models.config import gpt
from atlas.runtime.models.decoder import LayerRange, build, cuts
from atlas.runtime.models.export import export_stage, finish_export, shard_name
from atlas.runtime.models.huggingface import parse_config, read_config, write_config
from atlas.runtime.models.weights import WeightsFolder, load

MAX_ERROR = 1e-5
RAW = LLAMA | {"model_type": "llama"}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs, tokens = make(name), some_tokens()
    folder = save(theirs, tmp_path)
    config = read_config(folder)
    ours = load(config, LayerRange.whole(config), folder)
    with torch.no_grad():
        error = (ours(tokens) - logits_of(theirs, tokens)).abs().max().item()
    print(f"{name}: {error:.1e}")
    assert error <= MAX_ERROR


@pytest.mark.parametrize("name", FAMILIES)
def test_every_switch_of_the_config_shows_in_the_logits(name: str, tmp_path: Path) -> None:
    """The equality above would be worth little if a wrong config could meet it."""
    theirs, tokens = make(name), some_tokens()
    config = read_config(save(theirs, tmp_path))
    wrong = [replace(config, norm_eps=config.norm_eps * 10)]
    wrong.append(replace(config, activation="gelu_tanh" if config.activation == "gelu" else "gelu"))
    if config.positions == "rope":
        wrong.append(replace(config, rope_theta=config.rope_theta * 1.1))
    if (scaling := config.rope_scaling) is not None:
        wrong += [replace(config, rope_scaling=None), replace(config, rope_scaling=replace(scaling, factor=3.0))]
        if scaling.kind == "llama3":
            for change in ({"high_freq_factor": 3.0}, {"low_freq_factor": 1.5}, {"original_length": 80}):
                wrong.append(replace(config, rope_scaling=replace(scaling, **change)))
    for other in wrong:
        with torch.no_grad():
            error = (
                (load(other, LayerRange.whole(other), tmp_path)(tokens) - logits_of(theirs, tokens)).abs().max().item()
            )
        assert error >= 30 * MAX_ERROR, other


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_loads_exported_stages(name: str, tmp_path: Path) -> None:
    config = read_config(save(make(name), tmp_path / "theirs"))
    folder, tokens = tmp_path / "ours", some_tokens()
    split = cuts(config, (0, 2, 1))
    for stage, cut in enumerate(split):
        export_stage(folder, build(config, cut, seed=5), stage, len(split))
    finish_export(folder, config, len(split))
    back, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="sdpa"
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    whole = build(config, LayerRange.whole(config), seed=5)
    with torch.no_grad():
        assert torch.allclose(whole(tokens), logits_of(back.eval(), tokens), rtol=0, atol=MAX_ERROR)
    assert read_config(folder) == config


def test_our_own_model_is_exported_to_transformers_too(tmp_path: Path) -> None:
    config = gpt(num_layers=2, width=16, num_heads=2, vocabulary=96, max_length=48, dropout=0.1)
    whole = build(config, LayerRange.whole(config))
    export_stage(tmp_path, whole, 0, 1)
    finish_export(tmp_path, config, 1)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.allclose(whole(some_tokens()), logits_of(back, some_tokens()), rtol=0, atol=MAX_ERROR)


def test_an_export_with_a_stage_missing_is_not_finished(tmp_path: Path) -> None:
    config = gpt(num_layers=2, width=16, num_heads=2, vocabulary=96, max_length=48)
    export_stage(tmp_path, build(config, cuts(config, (1, 1))[0]), 0, 2)
    with pytest.raises(WorkerError, match="stage 1 has not been exported"):
        finish_export(tmp_path, config, 2)


def test_bf16_weights_load_as_they_are(tmp_path: Path) -> None:
    theirs = make("llama 3").to(torch.bfloat16)
    folder = save(theirs, tmp_path)
    config = read_config(folder)
    ours = load(config, LayerRange.whole(config), folder, dtype=torch.bfloat16)
    tokens = some_tokens()
    with torch.no_grad():
        a, b = ours(tokens).float(), logits_of(theirs, tokens).float()
    assert (a - b).norm() <= 0.02 * b.norm()


# ---- only one's own ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["gpt2", "llama 3", "qwen3 biased"])
def test_a_worker_reads_only_the_tensors_of_its_cut(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(make(name), tmp_path)
    config = read_config(folder)
    read: list[str] = []
    real = WeightsFolder.read
    monkeypatch.setattr(WeightsFolder, "read", lambda self, n, *part: (read.append(n.name), real(self, n, *part))[1])
    middle = cuts(config, (1, 1, 1))[1]
    load(config, middle, folder)
    assert read
    assert all(".1." in name for name in read), read


def test_files_of_other_stages_are_not_needed(tmp_path: Path) -> None:
    config = read_config(save(make("llama 2"), tmp_path / "theirs"))
    split = cuts(config, (1, 1, 1))
    for stage, cut in enumerate(split):
        export_stage(tmp_path, build(config, cut), stage, 3)
    finish_export(tmp_path, config, 3)
    for stage in (0, 2):
        (tmp_path / shard_name(stage, 3)).unlink()
    mine = load(config, split[1], tmp_path)
    for name, parameter in build(config, split[1]).named_parameters():
        assert torch.equal(parameter, dict(mine.named_parameters())[name])
    with pytest.raises(SpecError, match=r"model-00001-of-00003\.safetensors: cannot be read"):
        load(config, split[0], tmp_path)


def test_shards_as_transformers_writes_them(tmp_path: Path) -> None:
    theirs, tokens = make("llama 2"), some_tokens()
    folder = save(theirs, tmp_path, shard_bytes=20_000)
    assert (folder / weights.INDEX).is_file()
    config = read_config(folder)
    with torch.no_grad():
        assert torch.allclose(
            load(config, LayerRange.whole(config), folder)(tokens), logits_of(theirs, tokens), atol=1e-4
        )


def test_a_file_without_the_name_of_the_trunk_is_read(tmp_path: Path) -> None:
    """As GPT-2's own files are."""
    theirs, tokens = make("gpt2"), some_tokens()
    folder = save(theirs, tmp_path)
    tensors = {n.removeprefix("transformer."): t for n, t in load_file(folder / weights.SINGLE).items()}
    save_file(tensors | {"h.0.attn.bias": torch.zeros(1)}, folder / weights.SINGLE)
    config = read_config(folder)
    with torch.no_grad():
        assert torch.allclose(
            load(config, LayerRange.whole(config), folder)(tokens), logits_of(theirs, tokens), atol=1e-4
        )


# ---- refusals ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"model_type": "mixtral"}, r"model_type = 'mixtral': this architecture .* supported are gpt2, llama, mistral"),
        ({"model_type": None}, r"model_type: this architecture"),
        ({"model_type": "mistral", "sliding_window": 64}, r"sliding_window = 64: .*\"sliding_window\": null: up to 64"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, r"rope_scaling\.rope_type = 'yarn'.*Remove rope_scaling"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, r"rope_scaling\.low_freq_factor"),
        ({"hidden_act": "relu"}, r"hidden_act = .*relu.* silu"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config.*before quantization"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers .*at least 1"),
        ({"num_key_value_heads": 3}, r"num_kv_heads = 3: must divide num_heads = 4"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types = 'sliding_attention'"),
        ({"model_type": "qwen2", "use_sliding_window": True}, r"use_sliding_window"),
    ],
)
def test_unsupported_configs_are_refused_by_their_key(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        parse_config(RAW | keys)


def test_older_and_newer_ways_to_write_rotary_positions_are_one() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    old = parse_config(RAW | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}})
    new = parse_config(RAW | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}})
    assert old == new
    assert old.rope_theta == 5e5


def test_a_refused_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RAW | {"model_type": "bert"}))
    with pytest.raises(SpecError, match=r"config\.json: model_type = 'bert'"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"model\.layers\.1\.mlp\.up_proj\.weight: .*not have"),
        (lambda t: t.update({"model.norm.weight": torch.ones(7)}), r"model\.norm\.weight = \[7\]: .*asks for \[32\]"),
        (lambda t: t.update({"model.layers.0.mlp.up_proj.bias": torch.ones(48)}), r"up_proj\.bias: .*no such tensor"),
        (lambda t: t.update({"lm_head.weight": torch.ones(96, 32, dtype=torch.int8)}), r"dtype I8"),
    ],
    ids=["missing", "other shape", "too many", "quantized"],
)
def test_weights_that_do_not_belong_to_the_config_are_refused(change: Any, says: str, tmp_path: Path) -> None:
    folder = save(make("llama 2"), tmp_path)
    tensors = load_file(folder / weights.SINGLE)
    change(tensors)
    save_file(tensors, folder / weights.SINGLE)
    config = read_config(folder)
    with pytest.raises(SpecError, match=says):
        load(config, LayerRange.whole(config), folder)


def test_a_folder_without_weights_or_with_a_broken_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"neither model\.safetensors nor"):
        WeightsFolder(tmp_path)
    (tmp_path / weights.SINGLE).write_bytes(b"not safetensors")
    with pytest.raises(SpecError, match="cannot be read"):
        WeightsFolder(tmp_path)
    (tmp_path / weights.INDEX).write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')
    with pytest.raises(SpecError, match="must lie in the folder itself"):
        WeightsFolder(tmp_path)
    (tmp_path / weights.INDEX).write_text("[]")
    with pytest.raises(SpecError, match="not an index"):
        WeightsFolder(tmp_path)


def test_a_shape_that_transformers_does_not_support_is_not_exported() -> None:
    config = replace(gpt(num_layers=1, width=16, num_heads=4, vocabulary=8, max_length=8), num_kv_heads=2)
    with pytest.raises(SpecError, match=r"num_kv_heads = 2: transformers' gpt2 has 4"):
        write_config(config)
