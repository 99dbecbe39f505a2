"""The keys and values that a worker has computed for decode engines, in its host memory, until they have fetched them:
its layers of each prompt, under the ticket of the hand-off. Bounded in bytes.

A part is opened with its task. The service gives it a lease when all workers of the lane are done; it is dropped when
the lease ends, when the service says so, or when the service is lost before. Parts under a lease outlive their service.
Thread-safe. Knows blocks and tickets; not sockets.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bubbletea.kv_blocks import KvBlock, reach
from bubbletea.kv_server import NO_TICKET, WantedBlocks


@dataclass
class _KeptPart:
    job: tuple[int, int]
    """The number and the attempt of its task."""
    length: int
    layers: range
    num_bytes: int
    blocks: dict[int, list[KvBlock]] = field(default_factory=dict)
    """By layer, in order of their tokens."""
    expires_s: float = math.inf


class KeptParts:
    """A KvHolder of `kv_server`."""

    def __init__(self) -> None:
        self.budget_bytes = 0
        """Set by every service that is joined."""
        self._parts: dict[str, _KeptPart] = {}
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        return sum(part.num_bytes for part in self._parts.values())

    def open(self, ticket: str, job: tuple[int, int], length: int, layers: range, num_bytes: int) -> bool:
        """Whether there is room. The service counts what it has asked for; leases of an earlier one, which it does not
        know, end early if they are in the way."""
        with self._lock:
            self._parts.pop(ticket, None)
            leased = sorted((part.expires_s, t) for t, part in self._parts.items() if part.expires_s < math.inf)
            while self.used_bytes + num_bytes > self.budget_bytes and leased:
                del self._parts[leased.pop(0)[1]]
            if self.used_bytes + num_bytes > self.budget_bytes:
                return False
            self._parts[ticket] = _KeptPart(job, length, layers, num_bytes)
            return True

    def put(self, job: tuple[int, int], block: KvBlock) -> None:
        """Ignored if the part is gone, or is that of another attempt."""
        block = block.checked()
        with self._lock:
            part = self._parts.get(block.ticket)
            if part is not None and part.job == job:
                part.blocks.setdefault(block.layer, []).append(block)

    def lease(self, job: tuple[int, int], seconds: float) -> None:
        with self._lock:
            for part in self._parts.values():
                if part.job == job:
                    part.expires_s = time.monotonic() + seconds

    def cancel(self, job: tuple[int, int]) -> None:
        with self._lock:
            self._parts = {t: part for t, part in self._parts.items() if part.job != job}

    def lose_service(self) -> None:
        """Drops what has no lease. Numbers of jobs start again with the next service."""
        with self._lock:
            self._parts = {t: part for t, part in self._parts.items() if part.expires_s < math.inf}
            for part in self._parts.values():
                part.job = (-1, -1)

    # ---- a KvHolder ----------------------------------------------------------------------------------------------
    def blocks(self, wanted: WantedBlocks) -> Sequence[KvBlock]:
        with self._lock:
            part = self._parts.get(wanted.ticket)
            if part is None or part.expires_s < time.monotonic():
                raise LookupError(NO_TICKET)
            layers = wanted.layers or tuple(part.layers)
            if missing := [layer for layer in layers if layer not in part.layers]:
                raise LookupError(
                    f"layer {missing[0]} is not here: this worker has layers {part.layers[0]} to {part.layers[-1]}"
                )
            found = [block for layer in layers for block in part.blocks.get(layer, ())]
            spans = ([(block.start, block.stop) for block in part.blocks.get(layer, ())] for layer in layers)
            if any(reach(some) < part.length for some in spans):
                raise LookupError("it is not complete: its prefill has not ended")
        some = [block for block in found if block.start < wanted.stop and block.stop > wanted.start]
        if wanted.heads is None:
            return some
        first, stop = wanted.heads
        if some and not 0 <= first < stop <= (num_heads := some[0].kv.shape[1]):
            raise LookupError(f"heads {first} to {stop - 1} are not here: a layer has heads 0 to {num_heads - 1}")
        return [block.of_heads(first, stop) for block in some]

    def release(self, ticket: str) -> None:
        with self._lock:
            self._parts.pop(ticket, None)

    def drop_expired(self) -> None:
        now = time.monotonic()
        with self._lock:
            self._parts = {t: part for t, part in self._parts.items() if part.expires_s >= now}

    def __len__(self) -> int:
        return len(self._parts)
