"""A trained decoder as a Hugging Face folder that `transformers` loads: every stage writes its own shard; then one
process writes the index and `config.json`.

A file appears under its name when it is complete. Does not know training state: that is `runtime.checkpoint`.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from atlas.errors import WorkerError
from atlas.ir.replace import write_whole
from atlas.runtime.models.config import DecoderConfig
from atlas.runtime.models.decoder import TIED_HEAD, Decoder
from atlas.runtime.models.huggingface import write_config
from atlas.runtime.models.names import HfTensor, source_of
from atlas.runtime.models.weights import INDEX, SINGLE


def export_stage(folder: Path, decoder: Decoder, stage: int, num_stages: int) -> Path:
    """Write the shard of one stage. Under tensor parallelism all ranks call it, and one keeps the file."""
    write_config(decoder.config)  # raises for an unsupported config before anything is written
    path = folder / shard_name(stage, num_stages)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    save_file(hf_tensors(decoder), unfinished, metadata={"format": "pt"})
    return unfinished.replace(path)


def finish_export(
    folder: Path,
    config: DecoderConfig,
    num_stages: int,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write the index and the config after all shards."""
    file_of: dict[str, str] = {}
    total_bytes = 0
    for stage in range(num_stages):
        path = folder / shard_name(stage, num_stages)
        if not path.is_file():
            raise WorkerError(f"{path} is missing: stage {stage} has not been exported; export all stages, then finish")
        total_bytes += path.stat().st_size
        with safe_open(path, framework="pt") as shard:
            file_of |= dict.fromkeys(shard.keys(), path.name)
    if num_stages > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(file_of.items()))}
        _write_json(folder / INDEX, index)
    _write_json(folder / "config.json", write_config(config, str(dtype).removeprefix("torch.")))


def shard_name(stage: int, num_stages: int) -> str:
    return SINGLE if num_stages == 1 else f"model-{stage + 1:05}-of-{num_stages:05}.safetensors"


@torch.no_grad()
def hf_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """The tensors with the names and shapes of Hugging Face; a tied head is left out."""
    parts: dict[str, list[tuple[HfTensor, Tensor]]] = {}
    for name, parameter in decoder.named_parameters():
        if not (decoder.config.tied and name == TIED_HEAD):
            source = source_of(decoder.config, name)
            parts.setdefault(source.name, []).append((source, whole(parameter)))
    return {name: _joined(found) for name, found in parts.items()}


def whole(parameter: Tensor) -> Tensor:
    """The full tensor of a sharded one (a collective), on the CPU."""
    full: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return full.detach().cpu()


def _joined(found: list[tuple[HfTensor, Tensor]]) -> Tensor:
    found = sorted(found, key=lambda pair: pair[0].part)
    assert [source.part for source, _ in found] == list(range(found[0][0].num_parts)), found[0][0].name
    tensor = torch.cat([tensor for _, tensor in found]) if len(found) > 1 else found[0][1]
    return (tensor.t() if found[0][0].transposed else tensor).contiguous()


def _write_json(path: Path, content: object) -> None:
    write_whole(path, f"{json.dumps(content, indent=2)}\n".encode())
