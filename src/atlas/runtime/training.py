"""From what a worker was told to train to what its stages take: the model, its cut, its microbatches.

Knows assignments and models. Does not know Programs beyond their counts, nor devices beyond their name.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atlas.errors import ProgramError
from atlas.runtime.assignment import SHIPPED, DataChoice, TrainingSetup
from atlas.runtime.data.batches import Batches, Dataset
from atlas.runtime.data.tokenize import sample_text, tokenize
from atlas.runtime.data.tokenizers import ByteTokenizer
from atlas.runtime.models.config import DecoderConfig
from atlas.runtime.models.task import DecoderTask

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MADE_UP = "made up"
"""What stands for the digest of data that is none."""


def even_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage: runs of nearly equal length, embedding and head counted as a layer each."""
    whole = num_layers + 2
    if num_stages > whole:
        raise ProgramError(f"{num_stages} stages for {whole} layers: give each stage at least one layer")
    counts = [whole * (s + 1) // num_stages - whole * s // num_stages for s in range(num_stages)]
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts)


def make_task(
    training: TrainingSetup, *, num_stages: int, num_pipelines: int, num_microbatches: int, place: str = "cpu"
) -> DecoderTask:
    """What every stage of a run is told; `num_pipelines` over all cells."""
    model, data = training.model, training.data
    return DecoderTask(
        model.config,
        model.layers_per_stage or even_layers(model.config.num_layers, num_stages),
        data.microbatch,
        data.length,
        num_microbatches,
        _microbatches(data, model.config, num_pipelines, num_microbatches),
        dtype=DTYPES[model.dtype],
        device=place,
        seed=model.seed,
        weights=Path(model.weights) if model.weights else None,
    )


def _microbatches(
    data: DataChoice, config: DecoderConfig, num_pipelines: int, num_microbatches: int
) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    if not data.folder:
        return lambda slot, pipeline: _made_up(data, config.vocabulary, slot, pipeline)
    dataset = open_dataset(data.folder)
    dataset.require_vocabulary(config.vocabulary)
    global_batch = data.microbatch * num_pipelines * num_microbatches
    batches = Batches(dataset, length=data.length, global_batch=global_batch, seed=data.seed)

    def microbatch(slot: int, pipeline: int) -> tuple[Tensor, Tensor]:
        step, number = divmod(slot, num_microbatches)
        found = batches.microbatch(
            step, pipeline, number, num_pipelines=num_pipelines, num_microbatches=num_microbatches
        )
        return torch.from_numpy(found.tokens), torch.from_numpy(found.targets)

    return microbatch


def _made_up(data: DataChoice, vocabulary: int, slot: int, pipeline: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one microbatch. A noisy count, so that there is something to learn."""
    generator = torch.Generator().manual_seed(data.seed * 7_919 + slot * 1_009 + pipeline + 1)
    start = torch.randint(vocabulary, (data.microbatch, 1), generator=generator)
    noise = torch.randint(2, (data.microbatch, data.length + 1), generator=generator)
    sequence = (start + torch.arange(data.length + 1) + noise) % vocabulary
    return sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()


def open_dataset(folder: str) -> Dataset:
    """Shards of a folder, or those of the text that ships."""
    return _shipped() if folder == SHIPPED else Dataset.open(Path(folder))


@cache
def _shipped() -> Dataset:
    """The shipped text by bytes: written once a process; the shards stay readable after their folder is gone."""
    with tempfile.TemporaryDirectory(prefix="atlas-text-") as folder:
        tokenize([sample_text()], Path(folder) / "tokens", ByteTokenizer())
        return Dataset.open(Path(folder) / "tokens")


def data_digest(data: DataChoice) -> str:
    """Of what is trained on: a resumed run compares it."""
    return open_dataset(data.folder).digest if data.folder else MADE_UP


def run_config(training: TrainingSetup, global_batch: int) -> dict[str, Any]:
    """What must not change from one attempt of a run to the next, JSON-able; how it is cut may."""
    model = dataclasses.asdict(training.model)
    return {
        "model": {key: model[key] for key in ("config", "dtype", "seed")},
        "optimizer": dataclasses.asdict(training.optimizer),
        "max_norm": training.max_norm,
        "length": training.data.length,
        "global_batch": global_batch,
        "data_seed": training.data.seed,
    }


def model_layers(config: DecoderConfig) -> list[str]:
    """The parts of the whole model that checkpoints are made of."""
    return ["embedding", *(f"layers.{i}" for i in range(config.num_layers)), "head"]
