"""`atlas init`: a job from a model and regions; questions on a terminal; refusals."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import yaml
from cli_runner import Atlas

from atlas.catalogue.models import shapes
from atlas.cost.compute import model_params
from atlas.spec.job import Model
from atlas.spec.load import load_job

ASKED = ("--model", "llama-3-8b", "--batch", "1M", "--seq", "8192")
SITES = ("--dc", "aws:us-east-1=64xH100", "--dc", "gcp:europe-west4=32xA100-80GB")


def test_init_writes_a_valid_commented_job_with_priors(atlas: Atlas) -> None:
    said = atlas("init", *ASKED, *SITES)
    assert said.code == 0, said.err
    text = Path("job.yaml").read_text()
    assert "# prior: p5.48xlarge on demand, list of 2026-07-20" in text
    assert "+-25 %" in text
    job = load_job("job.yaml", to_plan=True)
    east, europe = job.cluster.datacenters
    assert (east.nodes, east.gpu, europe.nodes, europe.gpu) == (8, "H100", 4, "A100-80")
    assert east.usd_per_gpu_hour == east.prior.usd_per_gpu_hour == 6.88
    assert job.cluster.links is not None
    link = job.cluster.links[0]
    assert link.latency_ms == link.prior.latency_ms == 48.3
    assert job.left_open == ("pp", "num_microbatches")
    assert "2022-11" in said.err


def test_every_public_shape_has_the_published_number_of_parameters(atlas: Atlas) -> None:
    for one in shapes().values():
        counted = model_params(Model.model_validate(one.keys)) / 1e9
        assert counted == pytest.approx(one.billions, rel=0.03), one.name
        assert one.source


def test_a_hugging_face_folder_is_a_model(atlas: Atlas, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    config = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8}
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 1000, "max_position_embeddings": 2048}))
    said = atlas("init", "--model", "mine", "--batch", "64 sequences", *SITES)
    assert said.code == 0, said.err
    assert load_job("job.yaml", to_plan=True).model.layers == 4


def test_what_the_flags_leave_out_is_asked_for_on_a_terminal(atlas: Atlas, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = io.StringIO("lama-3-8b\nllama-3-8b\naws:us-east-1=64xH10\naws:us-east-1=64xH100\n\n1000000\n1M\n")
    monkeypatch.setattr(answers, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", answers)
    said = atlas("init")
    assert said.code == 0, said.err
    assert "Did you mean llama-3-8b" in said.err
    assert "The nearest: 999424" in said.err
    assert yaml.safe_load(Path("job.yaml").read_text())["batch"] == "1M"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("--model", "lama-3-8b", "--batch", "1M", *SITES), ["llama-3-8b"]),
        (("--model", "mixtral-8x7b", "--batch", "1M", *SITES), ["mixture of experts", "dense"]),
        ((*ASKED, "--dc", "aws:us-east1=8xH100"), ["aws:us-east-1"]),
        ((*ASKED, "--dc", "gpc:europe-west4=8xH100"), ["gcp:europe-west4"]),
        ((*ASKED, "--dc", "aws:us-east-1=8xA100"), ["A100-40GB or A100-80GB"]),
        ((*ASKED, "--dc", "aws:us-east-1=8"), ["COUNTxGPU"]),
        ((*ASKED, "--dc", "aws:eu-west-1=8xH100"), ["no price list has H100", "aws:eu-west-2", "@USD"]),
        ((*ASKED, *SITES, "--dc", "aws:us-east-1=8xH200"), ["named twice"]),
        (("--model", "llama-3-8b", "--batch", "1000000", *SITES), ["122.07 sequences", "999424", "1007616"]),
        (("--model", "llama-3-8b", "--batch", "lots", *SITES), ["512 sequences"]),
        (SITES, ["--model", "--batch"]),
        ((*ASKED, *SITES, "--out", "tiny.yaml"), ["exists already", "--force"]),
    ],
)
def test_bad_input_of_init_is_refused(atlas: Atlas, words: tuple[str, ...], wanted: list[str]) -> None:
    said = atlas("init", *words)
    assert said.code == 2
    assert not Path("job.yaml").exists()
    for text in wanted:
        assert text in said.err


def test_a_mixture_of_experts_config_is_refused_with_the_reason(atlas: Atlas) -> None:
    Path("config.json").write_text(json.dumps({"model_type": "mixtral", "num_local_experts": 8}))
    assert (
        "mixtures of experts are not supported" in atlas("init", "--model", "config.json", "--batch", "1M", *SITES).err
    )
    Path("config.json").write_text(json.dumps({"model_type": "mamba", "num_hidden_layers": 8}))
    assert "durations would be wrong" in atlas("init", "--model", "config.json", "--batch", "1M", *SITES).err


def test_a_price_of_ones_own_is_no_prior(atlas: Atlas) -> None:
    assert atlas("init", *ASKED, "--dc", "aws:eu-west-1=8xH100@2.5").code == 0
    dc = load_job("job.yaml", to_plan=True).cluster.datacenters[0]
    assert dc.usd_per_gpu_hour == 2.5
    assert dc.prior.usd_per_gpu_hour is None


def test_a_job_without_parallelism_is_for_the_planner_only(atlas: Atlas) -> None:
    atlas("init", *ASKED, *SITES)
    said = atlas("simulate", "job.yaml")
    assert said.code == 2
    assert "atlas plan job.yaml" in said.err


def test_all_mistakes_of_a_file_are_reported_at_once(atlas: Atlas) -> None:
    text = (
        Path("tiny.yaml").read_text().replace("hidden: 2048", "hiden: 2048").replace("latency_ms: 20", "latency_ms: x")
    )
    Path("bad.yaml").write_text(text.replace("gpu: A100-40", "gpu: A100", 1))
    said = atlas("plan", "bad.yaml")
    assert said.code == 2
    for wanted in ("3 mistakes", "model.hiden", "latency_ms = 'x'", "A100-40GB or A100-80GB"):
        assert wanted in said.err
    text = Path("tiny.yaml").read_text().replace("pp: 4", "pp: 40").replace("heads: 16", "heads: 17")
    Path("bad.yaml").write_text(text)
    assert "2 mistakes" in atlas("simulate", "bad.yaml").err


@pytest.mark.parametrize(
    ("model", "batch", "sites"),
    [
        ("qwen3-0.6b", "256K", ("aws:us-west-2=8xL40S", "azure:westeurope=8xA100-80GB")),
    ],
)
def test_regions_in_verdict_out(atlas: Atlas, model: str, batch: str, sites: tuple[str, ...]) -> None:
    """bench/first_job.py asks eleven such questions with all searches."""
    dcs = [word for site in sites for word in ("--dc", site)]
    assert atlas("init", "--model", model, "--batch", batch, *dcs).code == 0
    said = atlas("plan", "job.yaml", "--tries", "0", "--no-break-even")
    assert said.code == 0, said.err
    assert said.out.startswith(("Worth it: ", "Not worth it: "))
    assert "per trillion tokens" in " ".join(said.out.split())
    assert "Prior, not measured by you" in said.out
