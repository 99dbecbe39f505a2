"""The oracle: a single process that trains the same model on the same batches, in plain torch, with none of our code
for stages, transfers or sums. What a distributed run must agree with.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from atlas.runtime.model import batch, build_stage, loss_of
from atlas.runtime.optimizer import make_optimizer
from atlas.runtime.worker import Training

Weights = dict[str, NDArray[np.float32]]


def train_alone(
    training: Training, num_pipelines: int, num_microbatches: int, num_iterations: int
) -> tuple[list[float], Weights]:
    """Mean loss of each iteration, and the final weights by name."""
    model = build_stage(training.gpt, 0, 1)
    optimizer = make_optimizer(training.settings, dict(model.named_parameters()))
    losses = []
    for iteration in range(num_iterations):
        optimizer.zero_grad()
        total = 0.0
        for pipeline in range(num_pipelines):
            for microbatch in range(num_microbatches):
                tokens, targets = batch(training.gpt, iteration * num_microbatches + microbatch, pipeline)
                loss = loss_of(model(tokens), targets)
                (loss / (num_pipelines * num_microbatches)).backward()  # type: ignore[no-untyped-call]
                total += loss.item()
        losses.append(total / (num_pipelines * num_microbatches))
        optimizer.step()
    with torch.no_grad():
        return losses, {name: p.numpy().copy() for name, p in model.named_parameters()}
