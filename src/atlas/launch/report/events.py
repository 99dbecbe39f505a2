"""What a run tells about each step it has done, and the figures that follow from it. Plain values, no files."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class StepEvent(TypedDict):
    """One optimizer step. Other keys may be there too; they go into the file of JSON lines as they are."""

    step: int
    """Steps done since the run began, this one included; a resumed run goes on counting."""
    loss: float
    tokens: int
    """Trained on in this step, over all pipelines."""
    iteration_s: float
    predicted_s: NotRequired[float | None]
    """What the simulator says of `iteration_s`."""
    wan_gbit_s: NotRequired[float | None]
    """Sent between datacenters in this step, over its time."""
    wan_streams_replaced: NotRequired[int]
    """Connections of the transport that broke in this step and were opened anew; zero where nothing disturbs it."""
    wan_chunks_resent: NotRequired[int]
    """Chunks that were sent again because their connection broke."""


def tokens_per_s(event: StepEvent) -> float:
    return event["tokens"] / event["iteration_s"] if event["iteration_s"] > 0 else 0.0


def against_prediction(event: StepEvent) -> float | None:
    """How much longer it took than predicted, relative; None where nothing was predicted."""
    predicted_s = event.get("predicted_s")
    return event["iteration_s"] / predicted_s - 1 if predicted_s else None
