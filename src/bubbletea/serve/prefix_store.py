"""Keys and values of the beginnings of prompts, in the service's host memory: whole blocks, found by their salted hash
(`admit.prefix_index`). When the bytes run out, the least recently used block is dropped.

A tenant's blocks can be found by that tenant's hashes only, so that response times reveal nothing about other tenants'
prompts. A tenant cannot push out another's blocks below the part of the budget that is reserved for that one.

A hit moves keys and values to the workers, and may take longer than computing them: `HitTimes` decides by measurement.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bubbletea.admit.prefix_index import BLOCK_TOKENS, block_hashes
from bubbletea.handoff.kv_store import reserved_bytes

LOADS, AGAIN = 8, 32
"""Loads in the moving average of their times; prefixes of which one is used although it does not pay."""


class _CachedBlock(NamedTuple):
    tenant: str
    layers: list[Tensor]
    """[2, K, block, E] of every layer."""


class HitTimes:
    """How long keys and values of a prefix take from here into the workers, against computing them there."""

    def __init__(self) -> None:
        self._ns_per_token = 0.0
        self._num_avoided = 0

    def loaded(self, num_tokens: int, took_ns: int) -> None:
        """A worker has received its layers of a prefix."""
        each = took_ns / max(1, num_tokens)
        self._ns_per_token += (each - self._ns_per_token) / LOADS if self._ns_per_token else each

    def pays(self, num_tokens: int, compute_ns: int) -> bool:
        """Whether to use a prefix of this many tokens. If the last ones took longer than computing, only every AGAIN-th
        is used, to measure again."""
        if self._ns_per_token * num_tokens <= compute_ns:
            self._num_avoided = 0
            return True
        self._num_avoided += 1
        return self._num_avoided % AGAIN == 0


class PrefixStore:
    def __init__(
        self, budget_bytes: int, weights: Mapping[str, float] | None = None, block: int = BLOCK_TOKENS
    ) -> None:
        """`weights`: of the tenants' reserved parts, as in the KV store."""
        self.budget_bytes, self.block = budget_bytes, block
        self._reserved = reserved_bytes(budget_bytes, weights or {})
        self._used: Counter[str] = Counter()
        self.times = HitTimes()
        self._secret = secrets.token_bytes(16)
        self._held: OrderedDict[Hashable, _CachedBlock] = OrderedDict()
        """By hash, least recently used first."""

    @property
    def used_bytes(self) -> int:
        return self._used.total()

    def hashes(self, tokens: Sequence[int], tenant: str, salt: str = "") -> tuple[bytes, ...]:
        """`salt`: of the request. Prompts with different salts share nothing."""
        named = hashlib.blake2b(salt.encode(errors="replace")).digest() + tenant.encode()
        key = hashlib.blake2b(named, key=self._secret, digest_size=16).digest()
        return block_hashes(tokens, key, self.block)

    def longest(self, hashes: Sequence[Hashable], limit: int) -> int:
        """How many of the first `limit` tokens are cached."""
        depth = 0
        for name in hashes[: limit // self.block]:
            if name not in self._held:
                break
            depth += self.block
        return depth

    def take(self, hashes: Sequence[Hashable], num_tokens: int) -> list[Tensor]:
        """By layer: [2, K, num_tokens, E] of blocks that `longest` has found."""
        blocks = []
        for name in hashes[: num_tokens // self.block]:
            self._held.move_to_end(name)
            blocks.append(self._held[name].layers)
        return [torch.cat(layer, dim=2) for layer in zip(*blocks, strict=True)]

    def add(self, hashes: Sequence[Hashable], slabs: Sequence[Tensor], tenant: str = "") -> None:
        """Copies the blocks that are not cached yet from a finished prompt's slabs, by layer [2, K, num_tokens, E]."""
        size = sum(slab[:, :, : self.block].numel() * slab.element_size() for slab in slabs)
        if not hashes or size > self.budget_bytes:
            return
        for index, name in enumerate(hashes):
            if name not in self._held:
                at = index * self.block
                layers = [slab[:, :, at : at + self.block].clone() for slab in slabs]
                self._held[name] = _CachedBlock(tenant, layers)
                self._used[tenant] += size
        for name in reversed(hashes):  # a block is useless without those before it, so the last is dropped first
            self._held.move_to_end(name)
        while self.used_bytes > self.budget_bytes:
            self._drop(tenant, size)

    def _drop(self, adding: str, size: int) -> None:
        """The least recently used block of the tenant that adds, or of one that holds more than its reserved part."""

        def may_lose(tenant: str) -> bool:
            return tenant == adding or self._used[tenant] - size >= self._reserved.get(tenant, 0)

        name = next(name for name, kept in self._held.items() if may_lose(kept.tenant))
        self._used[self._held.pop(name).tenant] -= size

    def __len__(self) -> int:
        return len(self._held)
