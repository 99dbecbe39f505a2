"""One emulated path in one object, for callers that have one service to put far away: a `ProxyNet` of two nodes, in a
thread of this process. No window, no trunk and no handshake; those are `atlas.wan.emulator`'s.
"""

from __future__ import annotations

from typing import NamedTuple

from atlas.errors import AtlasError
from atlas.wan.emulator.paths import PathSpec
from atlas.wan.emulator.proxy_net import Address, ProxyNet


class Lateness(NamedTuple):
    """How long after its due time a chunk left, over all chunks."""

    worst_ns: int = 0
    total_ns: int = 0
    num_chunks: int = 0


class DelayProxy:
    """Listens on `address`; connects every caller to `target`. `latency_s` is one way; `rate_bps` caps each way."""

    def __init__(self, target: Address, *, latency_s: float = 0.0, rate_bps: float | None = None) -> None:
        path = PathSpec(latency_s=latency_s, window_bytes=None, pair_bps=rate_bps)
        self._net = ProxyNet({("near", "far"): path}, process=False, handshake=False)
        self._target, self._lateness = target, Lateness()
        self.address, self._listener = self._net._listen("near", "far", target, 0)

    @property
    def target(self) -> Address:
        return self._target

    @target.setter
    def target(self, target: Address) -> None:
        """Callers from now on are connected to another."""
        self._target = target
        self._net.retarget(self._listener, target)

    @property
    def lateness(self) -> Lateness:
        try:
            late = self._net.lateness
        except AtlasError:
            return self._lateness
        self._lateness = Lateness(
            round(late.worst_s * 1e9), round(late.mean_s * late.num_pieces * 1e9), late.num_pieces
        )
        return self._lateness

    def close(self) -> None:
        """Cuts every connection at once, as a broken path would."""
        self._net.close()

    def __enter__(self) -> DelayProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
