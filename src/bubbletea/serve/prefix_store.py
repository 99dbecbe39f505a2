"""Keys and values of prompts' beginnings, in the service's host memory: whole blocks by their salted hash
(`bubbletea.admit.prefix_index`), the least recently used forgotten first when the bytes run out.

A tenant's blocks can be found by that tenant's hashes only: nobody learns of another's prompts by timing his own.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from bubbletea.admit.prefix_index import BLOCK_TOKENS, block_hashes


class Prefixes:
    def __init__(self, budget_bytes: int, block: int = BLOCK_TOKENS) -> None:
        self.budget_bytes, self.block = budget_bytes, block
        self.used_bytes = 0
        self._secret = secrets.token_bytes(16)
        self._held: OrderedDict[Hashable, list[Tensor]] = OrderedDict()
        """By hash: [2, K, block, E] of every layer."""

    def hashes(self, tokens: Sequence[int], tenant: str, salt: str = "") -> tuple[bytes, ...]:
        """`salt`: of the request; another one finds nothing of this."""
        named = hashlib.blake2b(salt.encode(errors="replace")).digest() + tenant.encode()
        key = hashlib.blake2b(named, key=self._secret, digest_size=16).digest()
        return block_hashes(tokens, key, self.block)

    def longest(self, hashes: Sequence[Hashable], limit: int) -> int:
        """How many of the first `limit` tokens are here."""
        depth = 0
        for name in hashes[: limit // self.block]:
            if name not in self._held:
                break
            depth += self.block
        return depth

    def take(self, hashes: Sequence[Hashable], num_tokens: int) -> list[Tensor]:
        """By layer: [2, K, num_tokens, E], of blocks that `longest` has seen."""
        blocks = []
        for name in hashes[: num_tokens // self.block]:
            self._held.move_to_end(name)
            blocks.append(self._held[name])
        return [torch.cat(layer, dim=2) for layer in zip(*blocks, strict=True)]

    def add(self, hashes: Sequence[Hashable], slabs: Sequence[Tensor]) -> None:
        """Copies the blocks that are not here yet out of a finished prompt's slabs, by layer [2, K, room, E]."""
        size = sum(slab[:, :, : self.block].numel() * slab.element_size() for slab in slabs)
        if not hashes or size > self.budget_bytes:
            return
        for index, name in enumerate(hashes):
            if name not in self._held:
                at = index * self.block
                self._held[name] = [slab[:, :, at : at + self.block].clone() for slab in slabs]
                self.used_bytes += size
        for name in reversed(hashes):  # what lies further back is of no use without what lies before
            self._held.move_to_end(name)
        while self.used_bytes > self.budget_bytes:
            self._held.popitem(last=False)
            self.used_bytes -= size

    def __len__(self) -> int:
        return len(self._held)
