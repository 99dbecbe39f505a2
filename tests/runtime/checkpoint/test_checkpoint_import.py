"""`atlas checkpoint import --format hf`: a run starts from a Hugging Face folder by way of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from atlas.cli import main
from atlas.launch.rehearse import rehearse
from atlas.launch.train_options import TrainOptions
from atlas.runtime.checkpoint.manifest import IMPORTED, Meta
from atlas.runtime.checkpoint.place import saves_under
from atlas.runtime.models.config import DecoderConfig
from atlas.runtime.models.decoder import build, cuts
from atlas.runtime.models.export import export_stage, finish_export
from atlas.spec import Job, parse_job

CONFIG = DecoderConfig("llama", 4, 32, 4, 2, 8, 48, 96, 32, tied=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder with weights of its own."""
    path = tmp_path / "hf"
    export_stage(path, build(CONFIG, cuts(CONFIG, (4,))[0], seed=9), 0, 1)
    finish_export(path, CONFIG, 1, torch.float32)
    return path


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


def test_an_import_comes_back_as_it_was(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, back = tmp_path / "saved", tmp_path / "back"
    assert main(["checkpoint", "import", str(folder), "--format", "hf", "--out", str(saved)]) == 0
    assert main(["checkpoint", "verify", str(saved)]) == 0
    assert main(["checkpoint", "export", str(saved), "--out", str(back)]) == 0
    ours, theirs = tensors(back), tensors(folder)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert main(["checkpoint", "import", str(folder), "--format", "hf", "--out", str(saved)]) == 2
    assert "Name a new place" in " ".join(capsys.readouterr().err.split())


def job() -> Job:
    model = {"layers": 4, "hidden": 32, "heads": 4, "vocab": 96, "seq_len": 32}
    dcs = [{"name": name, "nodes": 1, "gpus_per_node": 1} for name in ("east", "west")]
    cluster = {"wan": {"latency_ms": 2, "pair_gbps": 1}, "datacenters": dcs}
    sizes = {"num_microbatches": 2, "pp": 2, "pipelines_per_cell": 1, "microbatch": 1}
    return parse_job({"name": "small", "model": model, "cluster": cluster, "precision": "bf16", **sizes})


def test_a_run_from_an_import_is_equal_to_one_from_the_folder(folder: Path, tmp_path: Path) -> None:
    """In bf16: the optimizer's master weights must be those of the import."""
    assert main(["checkpoint", "import", str(folder), "--format", "hf", "--out", str(tmp_path / "saved")]) == 0
    common = {"device": "cpu", "steps": 2, "model": str(folder), "learning_rate": 0.01}
    plain = rehearse(job(), TrainOptions("1f1b", **common))  # type: ignore[arg-type]
    for name in folder.glob("*.safetensors"):  # other weights: only the import has the right ones
        safetensors.torch.save_file({k: t + 1 for k, t in tensors(folder).items()}, name, metadata={"format": "pt"})
    saved = TrainOptions("1f1b", checkpoints=tmp_path / "saved", **common)  # type: ignore[arg-type]
    assert rehearse(job(), saved).run.losses == plain.run.losses
    assert len(saves_under(str(tmp_path / "saved"))) == 3, "the import, and the saves of both datacenters"


def test_an_import_of_another_model_is_refused() -> None:
    meta = Meta(0, 0, 0, config={IMPORTED: True, "model": {"config": {"num_layers": 4}}})
    meta.require_same_run({"model": {"config": {"num_layers": 4}, "seed": 3}, "optimizer": {}}, "any data")
    with pytest.raises(Exception, match=r"saved with model\.config"):
        meta.require_same_run({"model": {"config": {"num_layers": 5}}}, "")
