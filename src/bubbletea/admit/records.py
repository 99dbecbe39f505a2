"""The words that windows, admission, simulator and service share: a Window, a Request, where it was placed, or why not.

Plain values. Times are integer nanoseconds on one clock (the simulator's, or the service's monotonic one); ranges of
layers and tokens are half-open. A worker's number is `cell * workers of a cell + the Program's worker`. Knows no torch,
no sockets, no policy.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal, NamedTuple

RequestKind = Literal["online", "offline"]


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """A prompt to be prefilled. Its tokens are somebody else's: admission needs their number and their hashes."""

    id: str
    tenant: str
    prompt_tokens: int
    arrival_ns: int
    deadline_ns: int | None = None
    """Its KV should have been delivered by then; None for no hurry."""
    kind: RequestKind = "online"
    """Offline requests wait in a backlog and get what online ones leave."""
    block_hashes: tuple[Hashable, ...] = ()
    """One for each whole block of the prompt, each covering all before it, salted by tenant (`prefix.block_hashes`)."""


class PrefillSlice(NamedTuple):
    """One uninterrupted piece of work of one worker: some layers of one chunk of tokens, or a part of one of them."""

    worker: int
    start_ns: int
    end_ns: int
    first_layer: int
    end_layer: int
    first_token: int
    end_token: int


@dataclass(frozen=True, slots=True)
class PrefillLane:
    """The workers of one datacenter that hold the prefill model between them, in the order of its layers."""

    index: int
    dc: str
    workers: tuple[int, ...]
    first_layer: tuple[int, ...]
    """By worker; the next one's first is this one's end."""
    num_layers: int

    def layers(self, stage: int) -> tuple[int, int]:
        """Half-open range of the layers that the lane's `stage`-th worker holds."""
        end = self.first_layer[stage + 1] if stage + 1 < len(self.first_layer) else self.num_layers
        return self.first_layer[stage], end


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and when a request runs. Slices are chunk by chunk, within a chunk lane stage by lane stage."""

    request: PrefillRequest
    lane: PrefillLane
    cached_tokens: int
    """Prefix found in the lane's host memory: the first slice starts behind it."""
    slices: tuple[PrefillSlice, ...]
    ends: tuple[int, ...]
    """Where each chunk of tokens ends; the last one at the prompt's end."""
    computed_ns: int
    """End of the last slice."""
    delivered_ns: int
    """When the last byte of KV has left the lane's hosts: what counts as time to first token."""

    @property
    def start_ns(self) -> int:
        return self.slices[0].start_ns


Reason = Literal["deadline", "share", "too-long", "no-lane"]


@dataclass(frozen=True, slots=True)
class AdmissionRefusal:
    """Not now. `fits_at_ns` is when its KV could be delivered at the earliest, had it been let in; with `retry_at_ns`
    the same request, sent again then with the same patience, fits. Both are None when it never will."""

    request: PrefillRequest
    reason: Reason
    """deadline: no lane is done in time; share: its tenant has its part of a full house; too-long: its KV fits in no
    lane's memory; no-lane: nobody has room for the model."""
    fits_at_ns: int | None = None
    retry_at_ns: int | None = None
