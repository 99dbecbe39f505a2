"""The report of one training step, and the figures derived from it. Plain values, no files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NotRequired, TypedDict

from atlas.ir.timeline import Timeline


class StepEvent(TypedDict):
    """One optimizer step. Further keys are allowed and go into the file of JSON lines as they are."""

    step: int
    """Steps since the run began, this one included; a resumed run continues the count."""
    loss: float
    tokens: int
    """Trained on in this step, by all pipelines."""
    iteration_s: float
    num_workers: NotRequired[int]
    """Of all pipelines."""
    tokens_per_gpu_s: NotRequired[float]
    """Tokens a second, divided by the GPUs."""
    mfu: NotRequired[float]
    """Model FLOPs (causal attention, no recompute) a second, divided by what the GPUs could do at most."""
    predicted_s: NotRequired[float | None]
    """Simulated `iteration_s`."""
    wan_gbit_s: NotRequired[float | None]
    """Sent between datacenters in this step, divided by its time."""
    wan_streams_replaced: NotRequired[int]
    """Connections of the transport that broke in this step and were replaced."""
    wan_chunks_resent: NotRequired[int]
    """Chunks that were sent again because their connection broke."""

    wan_retransmits: NotRequired[int]
    """TCP segments that the kernels of all workers sent again in this step."""
    checkpoint_step: NotRequired[int]
    """Of the last checkpoint that is complete; absent before the first."""


OnStep = Callable[[StepEvent, Timeline], None]
"""Called after every step, with the timeline of the pass that did it."""


def tokens_per_s(event: StepEvent) -> float:
    return event["tokens"] / event["iteration_s"] if event["iteration_s"] > 0 else 0.0


@dataclass(frozen=True)
class GpuFacts:
    """What makes tokens a second comparable between runs."""

    per_worker: int
    """GPUs of a worker."""
    flops_per_token: float
    """Forward and backward."""
    peak_flops: float
    """Of one GPU, FLOP/s by its data sheet."""
    paced_tokens: float = 0.0
    """On paced devices, which train a small model in the time of the job's own: tokens of that one by GPU and
    iteration, times `--slower`. 0 on GPUs."""

    def figures(self, event: StepEvent) -> StepEvent:
        """The event with the figures of a GPU."""
        if self.paced_tokens:
            rate = self.paced_tokens / event["iteration_s"] if event["iteration_s"] > 0 else 0.0
            return {**event, "mfu": rate * self.flops_per_token / self.peak_flops}
        rate = tokens_per_s(event) / (event["num_workers"] * self.per_worker)
        return {**event, "tokens_per_gpu_s": rate, "mfu": rate * self.flops_per_token / self.peak_flops}


def against_prediction(event: StepEvent) -> float | None:
    """How much longer it took than predicted, relative; None without a prediction."""
    predicted_s = event.get("predicted_s")
    return event["iteration_s"] / predicted_s - 1 if predicted_s else None
