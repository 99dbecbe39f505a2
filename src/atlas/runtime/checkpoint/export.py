"""A checkpoint as a Hugging Face folder that `transformers` loads, whatever plan wrote it. One shard of the model is in
memory at a time; the folder appears when it is complete.

Knows checkpoints and decoders. Optimizer state is not exported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

from atlas.errors import AtlasError
from atlas.ir.replace import new_folder
from atlas.runtime.assignment import read
from atlas.runtime.checkpoint.load import Checkpoint, load_layers
from atlas.runtime.checkpoint.state import restore
from atlas.runtime.models.config import DecoderConfig
from atlas.runtime.models.decoder import LayerRange, cuts, empty
from atlas.runtime.models.export import export_stage, finish_export

MAX_SHARD_BYTES = 4 << 30
Progress = Callable[[str, int, int], None]


def decoder_of(checkpoint: Checkpoint) -> DecoderConfig:
    """The saved model: `model.config` of the run's configuration."""
    try:
        return read(DecoderConfig, checkpoint.meta.config["model"]["config"])
    except (KeyError, TypeError, ValueError) as error:
        raise AtlasError(
            f"checkpoint of {checkpoint.id}: it does not describe its model ({error}). Only checkpoints of "
            "`atlas train` can be exported"
        ) from error


def export_checkpoint(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress = lambda what, done, total: None,
) -> int:
    """Write `folder`, which must not exist yet; the number of its shards."""
    with new_folder(folder) as unfinished:
        config = decoder_of(checkpoint)
        shards = _shards(checkpoint, config, max_shard_bytes)
        dtype = torch.float32
        for number, cut in enumerate(shards):
            progress("exporting", number, len(shards))
            dtype = _export(checkpoint, config, cut, unfinished, number, len(shards))
        finish_export(unfinished, config, len(shards), dtype)
    return len(shards)


def _shards(checkpoint: Checkpoint, config: DecoderConfig, max_bytes: int) -> list[LayerRange]:
    """Consecutive layers, divided as evenly as possible."""
    blobs = {layer: part.weights[layer] for _, part in checkpoint.parts for layer in part.weights}
    total_bytes = sum(blob.num_bytes for blob in blobs.values())
    count = min(config.num_layers, max(1, math.ceil(total_bytes / max_bytes)))
    ends = [config.num_layers * (number + 1) // count for number in range(count)]
    return cuts(config, [end - start for start, end in zip([0, *ends], ends, strict=False)])


def _export(
    checkpoint: Checkpoint, config: DecoderConfig, cut: LayerRange, folder: Path, number: int, num_shards: int
) -> torch.dtype:
    """Write one shard; its dtype, as saved."""
    names = ["embedding"] * cut.has_embedding + [f"layers.{i}" for i in cut.layers] + ["head"] * cut.has_head
    states = load_layers(checkpoint, names, optimizer=False)
    dtype = next(iter(next(iter(states.values())).parameters.values())).dtype
    decoder = empty(config, cut, dtype, "cpu")
    restore(states, decoder.named_parameters())
    export_stage(folder, decoder, number, num_shards)
    return dtype
