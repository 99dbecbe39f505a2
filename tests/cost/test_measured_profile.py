"""A measured profile replaces FLOPs; one that is cut off or garbled is one message."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atlas.cost.arrange import arrange
from atlas.cost.compute import pricing
from atlas.cost.memory import worker_memory
from atlas.cost.price import price
from atlas.cost.profile import load_profile, shape_of
from atlas.errors import AtlasError, SpecError
from atlas.ir.program import Kind
from atlas.spec import load_job, override

TINY = Path(__file__).parents[2] / "examples" / "tiny.yaml"
LAYER = {"forward_s": 0.010, "backward_s": 0.025, "weight_s": 0.010, "recompute_s": 0.009, "update_s": 0.001}
HEAD = {"forward_s": 0.005, "backward_s": 0.010}
ENTRY = {"gpu": "A100-40", "microbatch": 1, "tp": 1, "seq_len": 2048, "layer": LAYER, "head": HEAD}
TEXT = json.dumps({"model": "tiny", "entries": [ENTRY]})


def priced(folder: Path, content: object, name: str = "profile.json"):
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return price(load_job(TINY, [f"profile={path}", "layers_per_stage=[2, 2, 2, 2]"]))


@pytest.mark.parametrize("name", ["profile.json", "profile.yaml"])
def test_times_are_those_measured(tmp_path: Path, name: str) -> None:
    ms = priced(tmp_path, TEXT, name).compute_ns[0] / 1e6
    kinds = [Kind.F, Kind.R, Kind.B, Kind.I, Kind.W, Kind.STEP]
    assert ms[1, kinds].tolist() == pytest.approx([20, 18, 50, 30, 20, 2])
    assert ms[3, kinds[:5]].tolist() == pytest.approx([25, 18, 60, 40, 20])  # the head's is done in I


def test_layers_one_by_one(tmp_path: Path) -> None:
    layers = [{"forward_s": 0.001 * (i + 1), "backward_s": 0.002} for i in range(8)]
    ms = priced(tmp_path, {"entries": [{**ENTRY, "layer": None, "layers": layers}]}).compute_ns[0] / 1e6
    assert ms[:, Kind.F].tolist() == pytest.approx([3, 7, 11, 15 + 5])
    assert ms[1, Kind.R] == pytest.approx(7)
    assert ms[1, Kind.W] == pytest.approx(2)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (TEXT[:-30], "not JSON"),
        ("", "not JSON"),
        ("[]", "profile.json"),
        ({"entries": []}, "entries"),
        ({"entires": []}, "Did you mean 'entries'?"),
        ({"entries": [{**ENTRY, "layer": {**LAYER, "forward_ms": 3}}]}, "Did you mean 'forward_s'?"),
        ({"entries": [{**ENTRY, "layer": {**LAYER, "forward_s": -1}}]}, "at least 0"),
        ({"entries": [{**ENTRY, "layer": {**LAYER, "forward_s": float("nan")}}]}, "finite"),
        ({"entries": [{**ENTRY, "layer": {**LAYER, "forward_s": 0}}]}, "a layer takes no time"),
        ({"entries": [{**ENTRY, "layer": {"forward_s": 1}}]}, "backward_s: is required and missing"),
        ({"entries": [{**ENTRY, "layer": None}]}, "either `layer`"),
        ({"entries": [{**ENTRY, "layers": [LAYER]}]}, "either `layer`"),
        ({"entries": [{**ENTRY, "layer": None, "layers": [LAYER] * 7}]}, "has 7 layers"),
        ({"entries": [{**ENTRY, "gpu": "H100"}]}, "nothing was measured for gpu A100-40"),
        ({"entries": [{**ENTRY, "microbatch": 2}]}, "nothing was measured"),
    ],
)
def test_a_wrong_profile_is_one_message(tmp_path: Path, content: object, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        priced(tmp_path, content)
    assert words in str(caught.value)
    assert "profile.json" in str(caught.value)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(TEXT)), st.text(max_size=5))
def test_a_cut_and_garbled_profile_never_breaks_the_loader(tmp_path: Path, cut: int, tail: str) -> None:
    for name in ("p.json", "p.yaml"):
        path = tmp_path / name
        path.write_text(TEXT[:cut] + tail + TEXT[cut + 3 :], encoding="utf-8", errors="replace")
        with suppress(AtlasError):
            load_profile(path)


# ---- the shape that was measured -----------------------------------------------------------------------------
SHAPE = {
    "seq_len": 2048,
    "hidden": 2048,
    "heads": 16,
    "kv_heads": 16,
    "head_dim": 128,
    "ffn": 8192,
    "gated": False,
    "vocab": 32_000,
    "precision": "bf16",
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seq_len", 128),
        ("hidden", 1024),
        ("heads", 8),
        ("kv_heads", 4),
        ("head_dim", 64),
        ("ffn", 4096),
        ("gated", True),
        ("vocab", 50_304),
        ("precision", "fp32"),
    ],
)
def test_a_profile_of_another_model_is_refused(tmp_path: Path, key: str, value: object) -> None:
    priced(tmp_path, {"entries": [{**ENTRY, **SHAPE}]})
    with pytest.raises(SpecError) as caught:
        priced(tmp_path, {"entries": [{**ENTRY, **SHAPE, key: value}]}, "other.json")
    assert f"{key} {value}, the job has {SHAPE[key]}" in str(caught.value)
    assert "atlas profile" in str(caught.value)


def test_every_dimension_that_changes_the_time_of_a_layer_is_recorded() -> None:
    """Otherwise a profile of one model prices another in silence."""
    job = load_job(TINY)
    changes = {"hidden": 4096, "heads": 32, "kv_heads": 4, "head_dim": 64, "ffn": 4096, "gated": True}
    changes |= {"seq_len": 128, "vocab": 50_304}
    not_of_a_layer = {"family", "config", "layers", "tied_embeddings"}  # the family decides `gated` and `ffn`
    assert changes.keys() == type(job.model).model_fields.keys() - not_of_a_layer
    for key, value in changes.items():
        assert shape_of(override(job, [f"model.{key}={json.dumps(value)}"])) != shape_of(job), key


def test_of_several_entries_the_one_of_this_model_is_taken(tmp_path: Path) -> None:
    other = {**ENTRY, **SHAPE, "seq_len": 128, "layer": {"forward_s": 1.0, "backward_s": 1.0}}
    ms = priced(tmp_path, {"entries": [other, {**ENTRY, **SHAPE}]}).compute_ns[0] / 1e6
    assert ms[1, Kind.F] == pytest.approx(20)


def test_a_profile_without_its_number_of_tokens_is_refused(tmp_path: Path) -> None:
    old = {key: value for key, value in ENTRY.items() if key != "seq_len"}
    with pytest.raises(SpecError, match=r"Measure again with `atlas profile`, or add `seq_len: N`"):
        priced(tmp_path, {"entries": [old]})
    priced(tmp_path, {"entries": [old, ENTRY]}, "both.json")


def test_a_profile_without_the_rest_of_its_shape_is_used_and_reported_as_unchecked(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    for entry, words in ((ENTRY, "does not record its hidden"), ({**ENTRY, **SHAPE}, "a measured profile")):
        path.write_text(json.dumps({"entries": [entry]}))
        assert words in pricing(load_job(TINY, [f"profile={path}"]))


def test_measured_sizes_replace_those_of_the_shape(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    piece = {**LAYER, "params": 10**8, "activation_bytes": 3e8}
    path.write_text(json.dumps({"entries": [{**ENTRY, "layer": piece}]}))
    sets = [f"profile={path}", "layers_per_stage=[2, 2, 2, 2]"]
    worker = worker_memory(load_job(TINY, sets), arrange(load_job(TINY, sets)))[1]
    assert (worker.weights, worker.activations) == (2 * 10**8 * 2, 2 * 3 * 10**8)
