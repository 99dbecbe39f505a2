"""Measures the parts of a model on this machine's accelerator: seconds of embedding, one layer and head, as
`cost.profile` reads them. `atlas simulate` can then use measured figures instead of a stated efficiency.

Times whole stages as the runtime runs them (forward without a graph, recompute, both halves of the backward) and takes
differences, so that the fixed cost of a stage is not charged to each layer. Knows no Program.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atlas.errors import AtlasError
from atlas.runtime.compiling import EAGER, available
from atlas.runtime.models.config import DecoderConfig, from_spec
from atlas.runtime.models.task import DecoderTask
from atlas.runtime.stage import Stage
from atlas.spec import Job

LAYERS = 3
"""Layers of the timed stages: enough that the launch of a single op does not matter."""


class StageTimes(NamedTuple):
    """Seconds for one microbatch."""

    forward_s: float
    recompute_s: float
    backward_s: float
    weight_s: float

    def minus(self, other: StageTimes) -> StageTimes:
        return StageTimes(*(max(0.0, mine - theirs) for mine, theirs in zip(self, other, strict=True)))

    def over(self, count: int) -> StageTimes:
        return StageTimes(*(value / count for value in self))


def profile(job: Job, device: str, repeats: int = 10, backend: str = EAGER) -> dict[str, Any]:
    """{"embedding": ..., "layer": ..., "head": ...} of a job's model, for one entry of a profile, and on what.

    `backend`: of torch's compiler, as a worker would use it.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise AtlasError("this host has no CUDA device: profile on the machine that will train, or use --device cpu")
    task = _task(job, device)
    backend = available(backend, device, 1)
    first, middle, last = (_time_stage(task, s, device, repeats, backend) for s in range(3))
    layer = middle.over(LAYERS)
    pieces = {"embedding": first.minus(middle), "layer": layer, "head": last.minus(middle)}
    facts = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "compiled": bool(backend),
    }
    times = {name: {k: round(v, 9) for k, v in found._asdict().items()} for name, found in pieces.items()}
    return {**facts, **times}


def _task(job: Job, device: str) -> DecoderTask:
    """Three stages of the job's model."""
    config = replace(from_spec(job.model), num_layers=3 * LAYERS)
    dtype = torch.float32 if job.precision == "fp32" else torch.bfloat16
    microbatch, length = job.microbatch, job.model.seq_len
    tokens = _tokens(config, microbatch, length)
    cut = (LAYERS, LAYERS, LAYERS)
    return DecoderTask(config, cut, microbatch, length, 1, tokens, dtype=dtype, device=device)


def _tokens(config: DecoderConfig, microbatch: int, length: int) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    tokens = torch.randint(config.vocabulary, (microbatch, length), generator=torch.Generator().manual_seed(0))
    return lambda slot, pipeline: (tokens, tokens)


def _time_stage(task: DecoderTask, number: int, device: str, repeats: int, backend: str = EAGER) -> StageTimes:
    """Medians over `repeats` microbatches, after three for warm-up."""
    stage = Stage(task, number, 3, 0, 1.0, backend=backend)
    found: list[StageTimes] = []
    for slot in range(repeats + 3):
        stage.gradients.begin(slot)
        x = None if stage.is_first else torch.randn(task.activation_shape, dtype=task.dtype, device=device)
        gradient = None if stage.is_last else torch.randn(task.activation_shape, dtype=task.dtype, device=device)
        forward_s = _seconds(device, partial(stage.forward, slot, x, keep=False))
        recompute_s = _seconds(device, partial(stage.recompute, slot))
        input_s = _seconds(device, partial(stage.backward_input, slot, gradient))
        weight_s = _seconds(device, partial(stage.backward_weight, slot))
        found.append(StageTimes(forward_s, recompute_s, input_s + weight_s, weight_s))
    return StageTimes(*map(statistics.median, zip(*found[3:], strict=True)))


def _seconds(device: str, work: Callable[[], object]) -> float:
    _finish(device)
    began = time.perf_counter()
    work()
    _finish(device)
    return time.perf_counter() - began


def _finish(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
