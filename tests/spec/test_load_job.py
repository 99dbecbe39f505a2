"""A job file that is right loads to what it says; one that is wrong gets one message that says where and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from shipped_jobs import EXAMPLES, SHIPPED

from atlas.errors import AtlasError, InfeasibleError, SpecError
from atlas.spec import Job, load_cluster, load_job, override, parse_job
from atlas.spec.document import MAX_BYTES

TINY = EXAMPLES / "tiny.yaml"


def write(folder: Path, text: str | bytes, name: str = "job.yaml") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def message(path: str | Path, *overrides: str) -> str:
    with pytest.raises(SpecError) as caught:
        load_job(path, overrides)
    assert all((caught.value.where, caught.value.key, caught.value.rule, caught.value.remedy))
    return str(caught.value)


def tiny_with(folder: Path, old: str, new: str) -> Path:
    text = TINY.read_text()
    assert old in text
    return write(folder, text.replace(old, new))


# ---- right files -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_jobs_load(path: Path) -> None:
    assert isinstance(load_job(path), Job)
    assert path.read_text().startswith("# ")


def test_the_testbed_has_both_models_at_four_latencies() -> None:
    jobs = [load_job(EXAMPLES / f"testbed/gpt-{m}-{ms}ms.yaml") for m in "ab" for ms in (10, 20, 30, 40)]
    assert [job.cluster.wan.latency_ms for job in jobs] == [10, 20, 30, 40] * 2
    assert [(j.model.seq_len, j.model.hidden) for j in jobs] == [(4096, 4096)] * 4 + [(6144, 8192)] * 4
    assert all(len(job.cluster.datacenters) == 3 and job.pp == 3 for job in jobs)


def test_a_base_is_merged_key_by_key() -> None:
    base, job = load_job(EXAMPLES / "gpt-a.yaml"), load_job(EXAMPLES / "testbed/gpt-a-10ms.yaml")
    assert job.cluster.wan.latency_ms == 10
    assert job.cluster.wan.pair_gbps == base.cluster.wan.pair_gbps
    assert job.model == base.model


def test_a_cluster_may_live_in_its_own_file(tmp_path: Path) -> None:
    data = yaml.safe_load(TINY.read_text())
    write(tmp_path, yaml.safe_dump(data.pop("cluster")), "sites.yaml")
    path = write(tmp_path, yaml.safe_dump({**data, "cluster": "sites.yaml"}))
    assert load_job(path).cluster == load_job(TINY).cluster == load_cluster(tmp_path / "sites.yaml")
    assert load_job(path, ["cluster.wan.latency_ms=7"]).cluster.wan.latency_ms == 7


def test_a_mistake_in_a_cluster_file_names_that_file_and_line(tmp_path: Path) -> None:
    data = yaml.safe_load(TINY.read_text())
    cluster = write(tmp_path, "wan: {latency_ms: 20}\ndatacenters:\n  - name: a\n    nods: 4\n", "sites.yaml")
    text = message(write(tmp_path, yaml.safe_dump({**data, "cluster": "sites.yaml"})))
    assert f"{cluster}:4" in text
    assert "cluster.datacenters[0].nods" in text
    assert "'nodes'" in text
    with pytest.raises(SpecError, match=r"sites\.yaml:4"):
        load_cluster(cluster)


def test_links_inherit_what_they_leave_out() -> None:
    job = load_job(EXAMPLES / "llama-70b-5-regions.yaml")
    route = job.cluster.route("ohio", "oregon")
    assert route is not None
    assert (route.latency_ms, route.pair_gbps, route.trunk_gbps, route.window_bytes) == (24.5, 5, 800, 3_000_000)
    assert job.cluster.route("ohio", "london") is None


def test_a_user_may_define_a_gpu() -> None:
    own = "cluster.gpus={mine: {bf16_tflops: 10, fp32_tflops: 5, memory_gib: 8, memory_gbytes_per_s: 100}}"
    job = load_job(TINY, [own, "cluster.datacenters.east.gpu=mine"])
    assert job.cluster.gpu("east").bf16_tflops == 10
    assert job.cluster.gpu("west").bf16_tflops == 312


# ---- --set -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "value_of", "expected"),
    [
        ("cluster.wan.latency_ms=33", lambda j: j.cluster.wan.latency_ms, 33),
        ("cluster.datacenters.east.nodes=7", lambda j: j.cluster.datacenters[0].nodes, 7),
        ("cluster.datacenters[west].nodes=7", lambda j: j.cluster.datacenters[1].nodes, 7),
        ("cluster.datacenters[1].net_gbps=1e2", lambda j: j.cluster.datacenters[1].net_gbps, 100),
        ("cluster.links=[{between: [east, west]}]", lambda j: j.cluster.links[0].between, ("east", "west")),
        ("recompute=false", lambda j: j.recompute, False),
        ("layers_per_stage=[1, 2, 2, 3]", lambda j: j.layers_per_stage, (1, 2, 2, 3)),
        ("pipelines_per_cell=", lambda j: j.pipelines_per_cell, None),
        ("jitter.compute=0.1", lambda j: j.jitter.compute, 0.1),
        ("model.kv_heads=4", lambda j: j.model.num_kv_heads, 4),
        ("name=a=b", lambda j: j.name, "a=b"),
    ],
)
def test_set_changes_one_thing(text: str, value_of, expected: object) -> None:
    assert value_of(load_job(TINY, [text])) == expected
    assert value_of(override(load_job(TINY), [text])) == expected


def test_set_finds_a_link_by_its_ends_in_either_order() -> None:
    path = EXAMPLES / "three-dcs.yaml"
    for name in ("west,central", "central,west", "0"):
        job = load_job(path, [f"cluster.links[{name}].latency_ms=99"])
        assert [link.latency_ms for link in job.cluster.links or ()] == [99, 15, 38]


def test_later_sets_win() -> None:
    assert load_job(TINY, ["microbatch=2", "microbatch=3"]).microbatch == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pp", "is not key=value"),
        ("=3", "is not key=value"),
        ("..=3", "not a path of keys"),
        ("cluster.wan.latncy_ms=3", "Did you mean 'latency_ms'?"),
        ("cluster.datacenters.est.nodes=3", "east, west"),
        ("cluster.datacenters[7].nodes=3", "no such item; cluster.datacenters has 2"),
        ("name.first=3", "has no keys below it"),
        ("pp=four", "must be a whole number"),
        ("pp=true", "must be a whole number"),
        ("pp=2.0", "must be a whole number"),
        ("pp=[", "not valid YAML"),
        ("a.b.c=3", "a: unknown key"),
        ("cluster.links[east,west].pair_gbps=3", "the job has no list cluster.links"),
        ("cluster=nowhere.yaml", "no such file"),
        ("model.config=nowhere.json", "no such file"),
    ],
)
def test_a_bad_set_names_itself(text: str, words: str) -> None:
    shown = message(TINY, text)
    assert words in shown
    assert "--set" in shown or "nowhere" in shown


# ---- wrong values ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("num_microbatches: 8", "num_microbatche: 8", ["job.yaml:27", "Did you mean 'num_microbatches'?"]),
        ("num_microbatches: 8", "", ["num_microbatches", "is required and missing"]),
        ("pair_gbps: 5", "pair_gbps: -5", ["cluster.wan.pair_gbps = -5", "greater than 0"]),
        ("latency_ms: 20", "latency_ms: .nan", ["cluster.wan.latency_ms", "finite"]),
        ("latency_ms: 20", "latency_ms: 1e999", ["cluster.wan.latency_ms", "finite"]),
        ("latency_ms: 20", "latency_ms: twenty", ["cluster.wan.latency_ms = 'twenty'", "must be a number"]),
        ("latency_ms: 20", "latency_ms: 40ms", ["'40ms': must be a number. Write only the number, without"]),
        ("layers: 8", f"layers: {'9' * 30}", ["model.layers", "at most 512"]),
        ("layers: 8", f"layers: {'9' * 6000}", ["model.layers"]),
        ("pp: 4", "pp: 9", ["job.yaml:28", "9 stages are more than the model's 8 layers"]),
        ("pp: 4", "pp: 4\ninterleave: 3", ["4 x 3"]),
        ("pp: 4", "pp: 4\npp: 4", ["job.yaml:29", "is written twice"]),
        ("name: west", "name: east", ["two datacenters have this name"]),
        ("name: west", "name: we.st", ["must consist of letters, digits, - and _"]),
        ("gpu: A100-40", "gpu: A100-4", ["no such GPU type", "Did you mean A100-40GB?"]),
        ("name: east,", "name: east, location: [91, 0],", ["location[0] = 91", "at most 90"]),
        ("name: east,", "name: east, location: [0],", ["location", "missing"]),
        ("heads: 16", "heads: 15", ["must divide model.hidden"]),
        ("heads: 16", "heads: 16\n  kv_heads: 3", ["must divide model.heads"]),
        ("microbatch: 1", "microbatch: 1\ntp: 3", ["tp = 3", "must divide model.heads"]),
        ("microbatch: 1", "microbatch: 1\nlayers_per_stage: [2, 2, 2]", ["3 numbers for 4 stages"]),
        ("microbatch: 1", "microbatch: 1\nlayers_per_stage: [2, 2, 2, 1]", ["adds up to 7"]),
        ("microbatch: 1", "placement: [{dc: eats, stages: 4}]", ["placement[0].dc", "Did you mean 'east'?"]),
        ("microbatch: 1", "placement: [{dc: east, stages: 3}]", ["add up to 3, but pp is 4"]),
        ("microbatch: 1", "placement: [{dc: east, stages: 2}, {dc: east, stages: 2}]", ["entry before names it too"]),
        ("microbatch: 1", "efficiency: 1.5", ["efficiency = 1.5"]),
        ("microbatch: 1", "jitter: {wan: 1000}", ["jitter.wan = 1000", "at most 3"]),
        ("microbatch: 1", "placement: []", ["must have at least 1 item, not 0"]),
        ("microbatch: 1", "precision: fp8", ["'bf16', 'fp16' or 'fp32'"]),
        ("model:\n", "model: gpt\nm:\n", ["m: unknown key"]),
        ("  # without `links`", "  links: [{between: [east, mars]}]\n  #", ["no such datacenter"]),
        ("  # without `links`", "  links: [{between: [east, east]}]\n  #", ["joins two datacenters"]),
        ("  # without `links`", "  links: [{between: [east]}]\n  #", ["cluster.links[0].between[1]", "Write one more"]),
        ("  # without `links`", "  links: [{between: [east, west]}, {between: [west, east]}]\n  #", ["a link already"]),
        ("  # without `links`", "  links: [{between: [east, west], trace: no.csv}]\n  #", ["no.csv", "no such file"]),
        ("  # without `links`", "  gpus: {x: {bf16_tflops: 3}}\n  #", ["cluster.gpus.x.fp32_tflops", "missing"]),
    ],
)  # fmt: skip
def test_a_wrong_value_names_file_key_rule_and_remedy(tmp_path: Path, old: str, new: str, words: list[str]) -> None:
    text = message(tiny_with(tmp_path, old, new))
    assert str(tmp_path) in text
    for word in words:
        assert word in text


def test_a_link_without_any_latency_says_where_to_write_it(tmp_path: Path) -> None:
    path = tiny_with(tmp_path, "latency_ms: 20 # one way", "window_bytes: 1")
    text = message(path, "cluster.links=[{between: [east, west]}]")
    assert "cluster.links[0].latency_ms" in text
    assert "cluster.wan.latency_ms" in text


def test_a_list_whose_items_are_wrong_is_not_called_empty_too(tmp_path: Path) -> None:
    path = tiny_with(tmp_path, "nodes: 4", "nodes: 2.5")
    assert message(path).startswith("2 mistakes:")


def test_more_stages_than_layers_is_infeasible_not_ill_formed() -> None:
    with pytest.raises(InfeasibleError):
        load_job(TINY, ["pp=9"])


def test_plain_data_makes_a_job_too() -> None:
    assert parse_job(yaml.safe_load(TINY.read_text())).model_dump() == load_job(TINY).model_dump()
    with pytest.raises(SpecError):
        parse_job([1, 2])


# ---- files that are not job files at all -------------------------------------------------------------------
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(9)
)
NASTY: dict[str, bytes] = {
    "empty": b"",
    "only a comment": b"# hello\n",
    "a list": b"- 1\n- 2\n",
    "a scalar": b"42",
    "null": b"~",
    "binary": bytes(range(256)) * 4,
    "latin-1": "name: Z\xfcrich".encode("latin-1"),
    "utf-16": "name: x".encode("utf-16"),
    "control characters": b"name: \x07\x00",
    "tab indentation": b"model:\n\tlayers: 4\n",
    "unclosed": b"model: {layers: 4",
    "alias bomb": LAUGHS.encode(),
    "alias of itself": b"&a [*a]",
    "key that is itself": b"&a {x: *a}",
    "unknown alias": b"a: *b",
    "very deep": b"[" * 5000,
    "very deep mapping": b"".join(b" " * i + b"a:\n" for i in range(600)),
    "two documents": b"a: 1\n---\nb: 2\n",
    "python tag": b"!!python/object/apply:os.system ['true']",
    "custom tag": b"name: !x y",
    "merge key": b"a: &a {pp: 3}\nb:\n  <<: *a\n",
    "complex key": b"? [a, b]\n: c\n",
    "number key": b"1: 2\n",
    "bad escape": b'name: "\\UFFFFFFFF"',
    "surrogate": b'"\\ud800": 3',
    "odd key": b'"a\\nb\\e[31m": 3',
    "long key": b"a" * 3000 + b": 3",
    "sexagesimal": b"pp: 1:30",
    "date": b"pp: 2024-01-01",
    "infinite": b"pp: .inf",
    "model is a list": b"model: [1]\ncluster: {datacenters: 3}\n",
    "cluster is a number": b"model: {}\ncluster: 3\n",
    "cluster is a folder": b"cluster: .\n",
    "cluster is itself": b"cluster: job.yaml\n",
    "cluster path with NUL": b'cluster: "a\\0b"\n',
    "cluster path too long": b"cluster: " + b"x" * 5000,
    "base is itself": b"base: job.yaml\n",
    "base is a number": b"base: 3\n",
    "base is missing": b"base: nowhere.yaml\n",
    "base with NUL": b'base: "a\\0b"\n',
    "key that pydantic marks keys with": b'model: {}\n"[key]": 3\n',
    "config is itself": b"model: {config: job.yaml}\n",
    "config is a folder": b"model: {config: .}\n",
    "too big": b"#" * (MAX_BYTES + 1),
}


@pytest.mark.parametrize("name", NASTY)
def test_a_malicious_file_is_one_message(tmp_path: Path, name: str) -> None:
    text = message(write(tmp_path, NASTY[name]))
    assert "job.yaml" in text or "nowhere" in text or str(tmp_path) in text or "xxx" in text
    assert text.replace("\n", "").isprintable()
    assert len(text) < 1500


def test_a_folder_and_a_missing_file_are_named(tmp_path: Path) -> None:
    assert "is a folder" in message(tmp_path)
    assert "there is no such file" in message(tmp_path / "nothing.yaml")
    assert "cannot be read" in message("\0") or "no such file" in message("\0")


def test_a_syntax_error_names_its_line(tmp_path: Path) -> None:
    assert "job.yaml:3" in message(write(tmp_path, "name: x\npp: 4\nmodel: }\n"))


def test_bases_in_a_circle_are_cut(tmp_path: Path) -> None:
    write(tmp_path, "base: job.yaml", "other.yaml")
    assert "form a cycle" in message(write(tmp_path, "base: other.yaml"))


def test_a_long_row_of_bases_is_refused_and_is_no_cycle(tmp_path: Path) -> None:
    for k in range(12):
        write(tmp_path, f"base: base{k + 1}.yaml", f"base{k}.yaml")
    assert "more than 8 base files in a row" in message(tmp_path / "base0.yaml")


# ---- Hugging Face configs ----------------------------------------------------------------------------------
LLAMA3_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}
OPT = {
    "model_type": "opt", "hidden_size": 1024, "ffn_dim": 4096, "num_attention_heads": 16, "num_hidden_layers": 24,
    "max_position_embeddings": 2048, "vocab_size": 50272,
}  # fmt: skip
PHI3 = {**{k: v for k, v in OPT.items() if k != "ffn_dim"}, "model_type": "phi3", "intermediate_size": 8192}
NEOX = {
    "model_type": "gpt_neox", "hidden_size": 6144, "intermediate_size": 24576, "num_attention_heads": 64,
    "num_hidden_layers": 44, "max_position_embeddings": 2048, "vocab_size": 50432,
}  # fmt: skip
MISTRAL = {**LLAMA3_8B, "model_type": "mistral", "head_dim": None}
QWEN3 = {**LLAMA3_8B, "model_type": "qwen3", "head_dim": 128, "max_position_embeddings": 40960}


def job_of_config(folder: Path, config: object, **model: object) -> Job:
    write(folder, json.dumps(config), "config.json")
    data = yaml.safe_load(TINY.read_text())
    return load_job(write(folder, yaml.safe_dump({**data, "model": {"config": "config.json", **model}})))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA3_8B, ("llama", 32, 4096, 32, 8, 14336, 128256, 8192, False)),
        (GPT2, ("gpt", 12, 768, 12, 12, 3072, 50257, 1024, True)),
        (OPT, ("gpt", 24, 1024, 16, 16, 4096, 50272, 2048, True)),
        (NEOX, ("gpt", 44, 6144, 64, 64, 24576, 50432, 2048, False)),
        (PHI3, ("llama", 24, 1024, 16, 16, 8192, 50272, 2048, False)),
        (QWEN3, ("llama", 32, 4096, 32, 8, 14336, 128256, 8192, False)),
        (MISTRAL, ("llama", 32, 4096, 32, 8, 14336, 128256, 8192, False)),
        ({**LLAMA3_8B, "model_type": "brand_new"}, ("llama", 32, 4096, 32, 8, 14336, 128256, 8192, False)),
    ],
    ids=["llama", "gpt2", "opt", "gpt_neox", "phi3", "qwen3", "mistral", "unknown"],
)  # fmt: skip
def test_a_hugging_face_config_gives_the_dimensions(tmp_path: Path, config: dict, expected: tuple) -> None:
    m = job_of_config(tmp_path, config).model
    found = (m.family, m.layers, m.hidden, m.heads, m.num_kv_heads, m.ffn_width, m.vocab, m.seq_len, m.tied_embeddings)
    assert found == expected


def test_keys_beside_a_config_win(tmp_path: Path) -> None:
    assert job_of_config(tmp_path, LLAMA3_8B, seq_len=2048).model.seq_len == 2048


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ([], "is not the config of a model"),
        ({}, "num_hidden_layers"),
        ({**LLAMA3_8B, "num_local_experts": 8}, "mixtures of experts"),
        ({**LLAMA3_8B, "hidden_size": "wide"}, "model.hidden"),
        ({**LLAMA3_8B, "hidden_size": 10**400}, "model.hidden"),
        ({**LLAMA3_8B, "vocab_size": -1}, "model.vocab"),
    ],
)
def test_a_wrong_config_is_one_message(tmp_path: Path, config: object, words: str) -> None:
    with pytest.raises(AtlasError, match=words):
        job_of_config(tmp_path, config)


def test_a_truncated_config_is_one_message(tmp_path: Path) -> None:
    write(tmp_path, json.dumps(LLAMA3_8B)[:-20], "config.json")
    assert "not JSON" in message(TINY, f"model.config={tmp_path / 'config.json'}")
