"""The prefix cache of the lanes: which lane's hosts hold the KV of which blocks of tokens. Blocks are identified by
hash.

A hash covers all tokens up to the end of its block, so one lookup finds a whole prefix. It is salted by tenant, so that
timing reveals nothing about other tenants' prompts. When a lane's memory is full, the least recently used block is
dropped, the end of a prefix before its start. Knows no KV bytes.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Sequence

BLOCK_TOKENS = 512
"""As in Mooncake's traces, whose blocks are identified by hashes (`sim.traces`)."""


def block_hashes(tokens: Sequence[int], salt: bytes, block: int = BLOCK_TOKENS) -> tuple[bytes, ...]:
    """One hash for each whole block of a prompt, each over all tokens up to its end and the tenant's salt."""
    found = []
    before = hashlib.blake2b(salt, digest_size=16).digest()
    for end in range(block, len(tokens) + 1, block):
        piece = b"".join(int(token).to_bytes(4, "little") for token in tokens[end - block : end])
        before = hashlib.blake2b(before + piece, digest_size=16).digest()
        found.append(before)
    return tuple(found)


class PrefixCache:
    """Blocks by lane, within `capacity` blocks each."""

    def __init__(self, num_lanes: int, capacity: int) -> None:
        self.capacity = capacity
        self._held: list[OrderedDict[Hashable, None]] = [OrderedDict() for _ in range(num_lanes)]
        self._where: dict[Hashable, set[int]] = {}

    def longest(self, hashes: Sequence[Hashable], limit: int) -> tuple[int, frozenset[int]]:
        """(tokens, lanes): the longest prefix of at most `limit` tokens that any lane holds, and the lanes that hold
        it."""
        depth, lanes = 0, frozenset[int]()
        for k, name in enumerate(hashes[: limit // BLOCK_TOKENS]):
            at = self._where.get(name)
            if not at:
                break
            depth, lanes = (k + 1) * BLOCK_TOKENS, frozenset(at)
        return depth, lanes

    def tokens(self, lane: int, hashes: Sequence[Hashable], limit: int) -> int:
        """Tokens of the prefix that one lane holds."""
        held, depth = self._held[lane], 0
        for name in hashes[: limit // BLOCK_TOKENS]:
            if name not in held:
                break
            depth += BLOCK_TOKENS
        return depth

    def add(self, lane: int, hashes: Sequence[Hashable]) -> None:
        """A lane's hosts now hold these blocks."""
        held = self._held[lane]
        for name in reversed(hashes):  # all later blocks need the start of a prefix: it is dropped last
            held[name] = None
            held.move_to_end(name)
            self._where.setdefault(name, set()).add(lane)
        while len(held) > self.capacity:
            name, _ = held.popitem(last=False)
            lanes = self._where[name]
            lanes.discard(lane)
            if not lanes:
                del self._where[name]
