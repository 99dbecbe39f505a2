"""From a TrainingSetup to what a worker's stages need: the model, its division into stages, its microbatches.

Knows models and data. Does not know Programs beyond their counts, nor devices beyond their name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atlas.runtime.assignment import DataChoice, TrainingSetup
from atlas.runtime.data.batches import Batches, open_dataset
from atlas.runtime.models.config import DecoderConfig
from atlas.runtime.models.task import DecoderTask
from atlas.runtime.topology import BatchShare

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MADE_UP = "made up"
"""In place of the digest of a dataset."""


def make_task(
    training: TrainingSetup, *, num_stages: int, share: BatchShare, num_microbatches: int, place: str = "cpu"
) -> DecoderTask:
    """The task of every stage of a group of pipelines; `share`: its part of the microbatches of a step,
    `num_microbatches`: of a pipeline."""
    model, data = training.model, training.data
    return DecoderTask(
        model.config,
        model.layer_counts(num_stages),
        data.microbatch,
        data.length,
        num_microbatches,
        _microbatches(data, model.config, share, num_microbatches),
        first_microbatch=share.first,
        dtype=DTYPES[model.dtype],
        device=place,
        seed=model.seed,
        weights=Path(model.weights) if model.weights else None,
    )


def _microbatches(
    data: DataChoice, config: DecoderConfig, share: BatchShare, num_microbatches: int
) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    if not data.folder:
        return lambda slot, pipeline: _made_up(data, config.vocabulary, slot, share.first_pipeline + pipeline)
    dataset = open_dataset(data.folder)
    dataset.require_vocabulary(config.vocabulary)
    global_batch = data.microbatch * share.total
    batches = Batches(dataset, length=data.length, global_batch=global_batch, seed=data.seed)

    def microbatch(slot: int, pipeline: int) -> tuple[Tensor, Tensor]:
        step, number = divmod(slot, num_microbatches)
        first = (share.first + pipeline * num_microbatches + number) * data.microbatch
        found = batches.rows(step, first, first + data.microbatch)
        return torch.from_numpy(found.tokens), torch.from_numpy(found.targets)

    return microbatch


def _made_up(data: DataChoice, vocabulary: int, slot: int, pipeline: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one microbatch. A noisy count, so that there is something to learn."""
    generator = torch.Generator().manual_seed(data.seed * 7_919 + slot * 1_009 + pipeline + 1)
    start = torch.randint(vocabulary, (data.microbatch, 1), generator=generator)
    noise = torch.randint(2, (data.microbatch, data.length + 1), generator=generator)
    sequence = (start + torch.arange(data.length + 1) + noise) % vocabulary
    return sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()


def data_digest(data: DataChoice) -> str:
    """Of the training data; a resumed run compares it."""
    return open_dataset(data.folder).digest if data.folder else MADE_UP


def run_config(training: TrainingSetup, global_batch: int) -> dict[str, Any]:
    """What must not change between attempts of a run, as JSON; the division into stages may."""
    model = dataclasses.asdict(training.model)
    return {
        "model": {key: model[key] for key in ("config", "dtype", "seed")},
        "optimizer": dataclasses.asdict(training.optimizer),
        "max_norm": training.max_norm,
        "length": training.data.length,
        "global_batch": global_batch,
        "data_seed": training.data.seed,
    }
