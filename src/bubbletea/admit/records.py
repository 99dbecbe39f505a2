"""The values that admission, simulator and service share: a request, its placement, or why it was refused.

Plain values. Times are integer nanoseconds on one clock (the simulator's, or the service's monotonic one); ranges of
layers and tokens are half-open. A worker's number is `cell * workers of a cell + the Program's worker`. Knows no torch,
no sockets, no policy.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal, NamedTuple

RequestKind = Literal["online", "offline"]


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """A prompt to be prefilled. Admission needs the number and the hashes of its tokens, not the tokens."""

    id: str
    tenant: str
    prompt_tokens: int
    arrival_ns: int
    deadline_ns: int | None = None
    """When its KV should have been delivered; None: no deadline."""
    kind: RequestKind = "online"
    """Offline requests wait in a backlog and use the windows that online requests leave."""
    block_hashes: tuple[Hashable, ...] = ()
    """One for each whole block of the prompt, over all tokens up to its end and a salt
    (`prefix_index.block_hashes`)."""

    @property
    def urgency(self) -> tuple[bool, float]:
        """Smaller goes first: online before offline, then the earlier deadline."""
        return self.kind == "offline", math.inf if self.deadline_ns is None else self.deadline_ns


class PrefillSlice(NamedTuple):
    """Uninterrupted work of one worker: some layers of one chunk of tokens, or of a part of it."""

    worker: int
    start_ns: int
    end_ns: int
    first_layer: int
    end_layer: int
    first_token: int
    end_token: int


@dataclass(frozen=True, slots=True)
class PrefillLane:
    """The workers of one datacenter that share one copy of the prefill model, in the order of its layers."""

    index: int
    dc: str
    workers: tuple[int, ...]
    first_layer: tuple[int, ...]
    """By worker; the next one's first is this one's end."""
    num_layers: int

    def layers(self, stage: int) -> tuple[int, int]:
        """Half-open range of the layers of the lane's `stage`-th worker."""
        end = self.first_layer[stage + 1] if stage + 1 < len(self.first_layer) else self.num_layers
        return self.first_layer[stage], end


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and when a request runs. Slices are ordered by chunk, then by stage of the lane."""

    request: PrefillRequest
    lane: PrefillLane
    cached_tokens: int
    """Prefix found in the lane's host memory: the first slice starts after it."""
    slices: tuple[PrefillSlice, ...]
    ends: tuple[int, ...]
    """Where each chunk of tokens ends; the last one at the prompt's end."""
    computed_ns: int
    """End of the last slice."""
    delivered_ns: int
    """When the last byte of KV has left the lane's hosts: the time to first token."""

    @property
    def start_ns(self) -> int:
        return self.slices[0].start_ns


Reason = Literal["deadline", "share", "too-long", "no-lane"]


@dataclass(frozen=True, slots=True)
class AdmissionRefusal:
    """Refused for now. `fits_at_ns`: the earliest time at which its KV could have been delivered. `retry_at_ns`: when
    the same request, sent again with the same time to its deadline, fits. Both are None if it never fits."""

    request: PrefillRequest
    reason: Reason
    """deadline: no lane finishes in time; share: its tenant has used its share of busy lanes; too-long: its KV fits in
    no lane's memory; no-lane: there is no lane."""
    fits_at_ns: int | None = None
    retry_at_ns: int | None = None
    lane_ns: int = 0
    """How long it would keep a lane busy, divided by the number of lanes."""
