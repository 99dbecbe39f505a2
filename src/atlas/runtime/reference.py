"""A single process that trains the same model on the same batches in plain torch, without our code for stages,
transfers or sums. Distributed runs are compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from atlas.runtime.assignment import TrainingSetup
from atlas.runtime.models.decoder import TIED_EMBEDDING, TIED_HEAD, loss_of
from atlas.runtime.models.task import DecoderTask
from atlas.runtime.optimizer import make_optimizer
from atlas.runtime.topology import BatchShare
from atlas.runtime.training import make_task

Weights = dict[str, NDArray[np.float32]]


def train_alone(
    training: TrainingSetup, num_pipelines: int, num_microbatches: int, num_steps: int, place: str = "cpu"
) -> tuple[list[float], Weights]:
    """Mean loss of each step, and the final weights by name."""
    return train_groups_alone(training, [(num_pipelines, num_microbatches)], num_steps, place)


def train_groups_alone(
    training: TrainingSetup, groups: Sequence[tuple[int, int]], num_steps: int, place: str = "cpu"
) -> tuple[list[float], Weights]:
    """The same where groups of pipelines differ: pipelines and microbatches of each."""
    tasks = _tasks(training, groups, place)
    model = tasks[0].build_stage(0, 1)
    if training.model.config.tied:
        assert model.head is not None
        assert model.embedding is not None
        model.head.out.weight = model.embedding.token.weight
    parameters = dict(model.named_parameters())
    optimizer = make_optimizer(training.optimizer, parameters)
    losses, count = [], sum(pipelines * microbatches for pipelines, microbatches in groups)
    for step in range(num_steps):
        optimizer.zero_grad()
        total = 0.0
        for task, (num_pipelines, num_microbatches) in zip(tasks, groups, strict=True):
            for pipeline, microbatch in np.ndindex(num_pipelines, num_microbatches):
                slot = step * num_microbatches + microbatch
                tokens, targets = (part.to(place) for part in task.microbatch(slot, pipeline))
                loss = loss_of(model(tokens, task.draw(slot, pipeline)), targets)
                (loss / count).backward()  # type: ignore[no-untyped-call]
                total += loss.item()
        losses.append(total / count)
        if training.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters.values(), training.max_norm)
        optimizer.step()
    weights = {name: p.detach().float().cpu().numpy().copy() for name, p in parameters.items()}
    if training.model.config.tied:
        weights[TIED_HEAD] = weights[TIED_EMBEDDING]
    return losses, weights


def _tasks(training: TrainingSetup, groups: Sequence[tuple[int, int]], place: str) -> list[DecoderTask]:
    """Of every group: its own part of the microbatches of a step."""
    total, tasks = sum(pipelines * microbatches for pipelines, microbatches in groups), list[DecoderTask]()
    first_pipeline = first = 0
    whole = replace(training, model=replace(training.model, layers_per_stage=()))
    for pipelines, microbatches in groups:
        share = BatchShare(first_pipeline, first, total)
        tasks.append(make_task(whole, num_stages=1, share=share, num_microbatches=microbatches, place=place))
        first_pipeline, first = first_pipeline + pipelines, first + pipelines * microbatches
    return tasks
