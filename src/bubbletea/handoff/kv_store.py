"""Keys and values of finished and unfinished prefills in host memory, within a budget of bytes: here, for the embedded
decoder, or at the workers, for decode engines that fetch them there.

A parcel is reserved as a whole before its prefill is admitted, with room for the tokens that will be decoded after it,
so an admitted request never runs out of memory. Handed-off parcels expire. A part of the budget is divided among the
known tenants and reserved for each; the rest is first come, first served. Not thread-safe: used on the service's event
loop. Shape letters as in `kv_blocks`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from atlas.errors import WorkerError
from atlas.runtime.models.block import KvSlab
from bubbletea.constants import MIB
from bubbletea.kv_blocks import KvBlock, reach
from bubbletea.kv_server import WantedBlocks
from bubbletea.prefill.shard import Served

KEEP_S = 60.0
"""A handed-off parcel that is not fetched within this time is dropped."""
DIVIDED = 0.25
"""The share of the budget that is divided among the tenants by weight and reserved for each."""


@dataclass
class Parcel:
    """One prompt's keys and values: `slabs` by layer, [2, K, num_tokens, E]; none if they are at the workers."""

    ticket: str
    model: str
    length: int
    slabs: list[Tensor]
    num_bytes: int
    tenant: str = ""
    expires_s: float = math.inf
    expected_s: float = math.inf
    """When it is expected to be released; `expires_s` is the latest."""
    on_release: Callable[[], None] = lambda: None
    """Sends the release to the workers that have it."""
    _arrived: list[set[tuple[int, int]]] = field(default_factory=list)

    def put(self, block: KvBlock) -> None:
        """A block may arrive twice after a prefill was restarted: the same bytes in the same place."""
        if not 0 <= block.layer < len(self.slabs) or block.stop > self.length:
            raise WorkerError(f"a block for layer {block.layer}, tokens to {block.stop}, is outside {self._extent()}")
        into = self.slabs[block.layer][:, :, block.start : block.stop]
        if into.shape != block.kv.shape or into.dtype != block.kv.dtype:
            raise WorkerError(
                f"a block of shape {list(block.kv.shape)} in {block.kv.dtype}, where {list(into.shape)} in "
                f"{into.dtype} is expected"
            )
        into.copy_(block.kv)
        self.mark(block.layer, block.start, block.stop)

    def mark(self, layer: int, start: int, stop: int) -> None:
        """These tokens of a layer are complete."""
        if not 0 <= layer < len(self._arrived) or not 0 <= start < stop <= self.length:
            raise WorkerError(f"a block for layer {layer}, tokens {start} to {stop}, is outside {self._extent()}")
        self._arrived[layer].add((start, stop))

    def _extent(self) -> str:
        return f"its prompt of {self.length} tokens and {len(self._arrived)} layers"

    def restart(self) -> None:
        """Its prefill starts again on other workers; what is here stays, what the earlier ones have is lost."""
        if not self.slabs:
            self._arrived = [set() for _ in self._arrived]

    @property
    def num_complete(self) -> int:
        """The number of first tokens that all layers have."""
        return min(map(reach, self._arrived), default=0)

    @property
    def is_complete(self) -> bool:
        return self.num_complete >= self.length

    def cache(self) -> dict[int, KvSlab]:
        """For a decoder in this process, which appends to the prompt."""
        return {i: KvSlab(slab[0][None], slab[1][None], self.length) for i, slab in enumerate(self.slabs)}


def reserved_bytes(budget_bytes: int, weights: Mapping[str, float]) -> dict[str, int]:
    """By tenant: the part of the budget that no other tenant can use. A tenant without a weight has none."""
    whole = sum(weights.values())
    return {tenant: int(DIVIDED * budget_bytes * weight / whole) for tenant, weight in weights.items()}


class KvStore:
    def __init__(self, served: Served, budget_bytes: int, weights: Mapping[str, float] | None = None) -> None:
        """`weights`: of the tenants. A single tenant, or tenants without a weight, may use all of it."""
        self.served, self.budget_bytes = served, budget_bytes
        self._weights = dict(weights or {})
        self._used: Counter[str] = Counter()
        self._parcels: dict[str, Parcel] = {}
        self._promised: dict[str, tuple[str, int]] = {}
        """Refused requests that will come back, in order: tenant and bytes."""

    @property
    def used_bytes(self) -> int:
        return self._used.total()

    def bytes_of(self, num_tokens: int) -> int:
        return num_tokens * self.served.config.num_layers * self.served.kv_bytes_per_layer_token

    def limit_bytes(self, tenant: str) -> int:
        """The most that it may hold while the others hold nothing."""
        return self._left(tenant, Counter())

    def _left(self, tenant: str, used: Counter[str]) -> int:
        """What it may take now: neither in use, nor reserved for other tenants that hold less than their part."""
        reserved = reserved_bytes(self.budget_bytes, self._weights)
        others = sum(max(0, size - used[other]) for other, size in reserved.items() if other != tenant)
        return self.budget_bytes - used.total() - others

    def has_room(self, num_tokens: int, tenant: str = "", *, is_promised: bool = False) -> bool:
        """`is_promised`: it was refused and has come back; others wait for those who have not come back yet."""
        used = self._used if is_promised else self._used_and_promised()
        return self.bytes_of(num_tokens) <= self._left(tenant, used)

    def _used_and_promised(self) -> Counter[str]:
        """By tenant; no tenant counts for more than it may hold."""
        used = self._used.copy()
        for tenant, size in self._promised.values():
            used[tenant] += size
        for tenant in {tenant for tenant, _ in self._promised.values()}:
            used[tenant] = max(self._used[tenant], min(used[tenant], self.limit_bytes(tenant)))
        return used

    def promise(self, name: str, num_tokens: int, tenant: str = "") -> None:
        """A refused request comes back for this much when it is free."""
        self._promised[name] = tenant, self.bytes_of(num_tokens)

    def unpromise(self, name: str) -> None:
        self._promised.pop(name, None)

    def explain(self, num_tokens: int, tenant: str) -> str:
        """The reason for missing memory, as text."""
        sizes = (self.bytes_of(num_tokens), self.used_bytes, self.budget_bytes, self._used[tenant])
        needed, used, whole, own = (f"{size / MIB:.1f}" for size in sizes)
        return (
            f"{num_tokens} tokens need {needed} MiB; {used} of {whole} MiB are in use, {own} by this tenant, "
            f"who may hold {self.limit_bytes(tenant) / MIB:.1f}"
        )

    def room_at_s(self, num_tokens: int, tenant: str = "") -> float:
        """When enough memory is expected to be free for it and for the tenant's earlier promises; infinite if unknown.
        Those who need more than all of the memory take turns."""
        used, now_s, limit = self._used.copy(), time.monotonic(), self.limit_bytes(tenant)
        needed = self.bytes_of(num_tokens) + sum(size for name, size in self._promised.values() if name == tenant)
        turns = max(1.0, needed / max(1, limit))
        for parcel in sorted(self._parcels.values(), key=lambda parcel: min(parcel.expected_s, parcel.expires_s)):
            used[parcel.tenant] -= parcel.num_bytes
            if min(needed, limit) <= self._left(tenant, used):
                return now_s + (min(parcel.expected_s, parcel.expires_s) - now_s) * turns
        return math.inf

    def reserve(
        self, ticket: str, length: int, num_tokens: int, tenant: str = "", *, at_workers: bool = False
    ) -> Parcel | None:
        """For a prompt of `length` tokens and `num_tokens` in all; None if there is not enough memory."""
        if not self.has_room(num_tokens, tenant, is_promised=True):
            return None
        config, size = self.served.config, self.bytes_of(num_tokens)
        shape = (2, config.num_kv_heads, num_tokens, config.head_width)
        layers = range(config.num_layers)
        slabs = [] if at_workers else [torch.empty(shape, dtype=self.served.torch_dtype) for _ in layers]
        parcel = Parcel(ticket, self.served.id, length, slabs, size, tenant, _arrived=[set() for _ in layers])
        self._parcels[ticket] = parcel
        self._used[tenant] += size
        return parcel

    def find(self, ticket: str) -> Parcel | None:
        return self._parcels.get(ticket)

    def keep(self, ticket: str, seconds: float = KEEP_S) -> None:
        """Keeps it until it is released, but at most for this long."""
        self._parcels[ticket].expires_s = time.monotonic() + seconds

    def release(self, ticket: str) -> None:
        parcel = self._parcels.pop(ticket, None)
        if parcel is not None:
            self._used[parcel.tenant] -= parcel.num_bytes
            parcel.slabs = []  # who still has the parcel does not hold its memory
            parcel.on_release()

    def blocks(self, wanted: WantedBlocks) -> Sequence[KvBlock]:
        raise LookupError("the workers have the keys and values, not the service")

    def drop_expired(self) -> None:
        now = time.monotonic()
        for ticket in [t for t, parcel in self._parcels.items() if parcel.expires_s < now]:
            self.release(ticket)

    def __len__(self) -> int:
        return len(self._parcels)
