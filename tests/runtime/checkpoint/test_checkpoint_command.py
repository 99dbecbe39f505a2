"""`atlas checkpoint`: what is there, whether it is sound, and the model for transformers."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from atlas.cli import command_parser, main
from atlas.runtime.checkpoint.checkpointer import Checkpointer
from atlas.runtime.checkpoint.export import export_checkpoint
from atlas.runtime.checkpoint.load import choose
from atlas.runtime.checkpoint.manifest import Meta
from atlas.runtime.checkpoint.state import states_of
from atlas.runtime.checkpoint.store import LocalStore
from atlas.runtime.models.config import DecoderConfig, gpt
from atlas.runtime.models.decoder import build, cuts

LLAMA = DecoderConfig("llama", 3, 32, 4, 2, 8, 48, 96, 128, tied=True)
GPT = gpt(num_layers=3, width=32, num_heads=4, vocabulary=96, max_length=128)
TOKENS = torch.arange(20).reshape(2, 10)


def saved(root: Path, config: DecoderConfig = GPT, step: int = 5, *, seed: int = 1) -> None:
    """As two datacenters with a stage each would."""
    meta = Meta(0, seed, step, config={"model": {"config": dataclasses.asdict(config), "dtype": "fp32"}})
    layers = ["embedding", *(f"layers.{i}" for i in range(config.num_layers)), "head"]
    for stage, cut in enumerate(cuts(config, (2, 1))):
        decoder = build(config, cut, seed=seed)
        checkpointer = Checkpointer(LocalStore(root / f"dc{stage}/own"), f"p0.s{stage}", layers)
        checkpointer.save(step, states_of(decoder.named_parameters()), meta)
        checkpointer.close()


def test_the_flags_are_these() -> None:
    parser, _ = command_parser("checkpoint")
    actions = next(action.choices for action in parser._actions if action.dest == "action")
    found = {name: {o for a in sub._actions for o in a.option_strings or [a.dest]} for name, sub in actions.items()}
    help_ = {"-h", "--help"}
    assert found == {
        "list": {"folders", "--json"} | help_,
        "verify": {"folders", "--step", "--json"} | help_,
        "export": {"folders", "--step", "--out", "--format"} | help_,
        "import": {"folder", "--format", "--config", "--out"} | help_,
    }
    assert all(action.help for sub in actions.values() for action in sub._actions)


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama tied"])
def test_transformers_loads_what_is_exported(tmp_path: Path, config: DecoderConfig) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    saved(tmp_path / "run", config)
    assert main(["checkpoint", "export", str(tmp_path / "run"), "--out", str(tmp_path / "hf")]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    ours = build(config, cuts(config, (3,))[0], seed=1)
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, ours(TOKENS), atol=1e-5, rtol=1e-5)


READ_DCP = """
import sys, torch, torch.distributed.checkpoint as dcp
reader = dcp.FileSystemReader(sys.argv[1])
listed = reader.read_metadata().state_dict_metadata
state = {name: torch.empty(kept.size, dtype=kept.properties.dtype) for name, kept in listed.items()}
dcp.load(state, checkpoint_id=sys.argv[1], no_dist=True)
torch.save(state, sys.argv[2])
"""


@pytest.mark.parametrize(
    ("config", "fresh"),
    [(GPT, False), (LLAMA, False), pytest.param(GPT, True, marks=pytest.mark.slow)],
    ids=["gpt", "llama tied", "a fresh process"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's: it assumes a single process
def test_torch_reads_a_dcp_export_and_it_comes_back(tmp_path: Path, config: DecoderConfig, fresh: bool) -> None:
    saved(tmp_path / "run", config)
    run = str(tmp_path / "run")
    assert main(["checkpoint", "export", run, "--format", "dcp", "--out", str(tmp_path / "dcp")]) == 0
    assert main(["checkpoint", "export", run, "--out", str(tmp_path / "hf")]) == 0
    words = [str(tmp_path / "dcp"), str(tmp_path / "read")]
    if fresh:
        subprocess.run([sys.executable, "-W", "ignore", "-c", READ_DCP, *words], check=True)
    else:
        exec(READ_DCP.replace("sys.argv", "argv"), {"argv": ["", *words]})
    read = torch.load(tmp_path / "read", weights_only=True)
    shards = [safetensors.torch.load_file(file) for file in (tmp_path / "hf").glob("*.safetensors")]
    theirs = {name: tensor for shard in shards for name, tensor in shard.items()}
    assert int(read["step"]) == 5
    assert {name for name in read if name.startswith("model.")} == {f"model.{name}" for name in theirs}
    assert all(torch.equal(read[f"model.{name}"], tensor) for name, tensor in theirs.items())
    words = ["--config", str(tmp_path / "hf" / "config.json"), "--out", str(tmp_path / "back")]
    assert main(["checkpoint", "import", str(tmp_path / "dcp"), *words]) == 0
    back = safetensors.torch.load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in theirs.items())


def test_a_large_model_is_exported_in_several_files(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    saved(tmp_path / "run")
    checkpoint = choose([LocalStore(tmp_path / f"run/dc{s}/own") for s in range(2)])
    assert checkpoint is not None
    assert export_checkpoint(checkpoint, tmp_path / "hf", max_shard_bytes=60_000) == 3
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 3
    assert not list(tmp_path.glob(".*"))
    model, missing = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not missing["missing_keys"]
    assert model.config.n_layer == 3


def test_list_shows_complete_saves_and_missing_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, step=5)
    saved(tmp_path, step=6)
    shutil.rmtree(tmp_path / "dc1/own/step-00000006-a0")
    assert main(["checkpoint", "list", str(tmp_path), "--json"]) == 0
    five, six = json.loads(capsys.readouterr().out)
    assert (five["step"], five["complete"], five["parts"], five["num_layers"]) == (5, True, 2, 5)
    assert (six["step"], six["complete"], six["missing"]) == (6, False, ["layers.2", "head"])
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    assert "no: layers.2, head" in " ".join(capsys.readouterr().out.split())


def test_verify_reads_everything_and_names_damaged_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    assert "step 5 (attempt 0): all 5 layers are undamaged" in capsys.readouterr().out
    path = tmp_path / "dc1/own/step-00000005-a0/p0.s1.head.weights.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    assert main(["checkpoint", "verify", str(tmp_path)]) == 2
    assert f"{path}: damaged" in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(tmp_path), "--json"]) == 2
    assert len(json.loads(capsys.readouterr().out)["problems"]) == 1
    assert main(["checkpoint", "export", str(tmp_path), "--out", str(tmp_path / "hf")]) == 2
    assert "damaged" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("list", "nowhere"), "nowhere: no such folder"),
        (("list", "empty"), "empty: no checkpoint in it"),
        (("verify", "run", "--step", "9"), "no complete checkpoint of step 9. Saves found: 5"),
        (("export", "run", "--out", "empty"), "empty: exists already"),
        (("export", "other", "--out", "hf"), "does not describe its model"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: tuple[str, ...],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    saved(tmp_path / "run")
    other = Checkpointer(LocalStore(tmp_path / "other"), "w", ["0"])
    other.save(1, states_of([("0.weight", torch.ones(3))]), Meta(0, 0, 1))
    other.close()
    assert main(["checkpoint", *words]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error
    assert not (tmp_path / "hf").exists()
