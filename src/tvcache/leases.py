"""Decides which of several concurrent callers executes a call. Leases expire, so a dead caller blocks nothing.

Bookkeeping only, with a given clock; the store or the server does the waiting.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass
class CallLease:
    lease: int
    until_s: float


class CallLeases:
    """At most one unexpired lease for a key."""

    def __init__(self, limit_s: float, first: int = 1) -> None:
        """`first`: the first number of a lease. A server starts at a random one, so old leases are invalid."""
        self.limit_s = limit_s
        self._by_key: dict[bytes, CallLease] = {}
        self._by_lease: dict[int, bytes] = {}
        self._numbers = itertools.count(max(1, first))

    def __len__(self) -> int:
        return len(self._by_key)

    def ask(self, key: bytes, now_s: float) -> CallLease | float:
        """A new lease for the caller; or the time at which the current one expires."""
        found = self._by_key.get(key)
        if found is not None:
            if now_s < found.until_s:
                return found.until_s
            del self._by_lease[found.lease]
        flight = CallLease(next(self._numbers), now_s + self.limit_s)
        self._by_key[key] = flight
        self._by_lease[flight.lease] = key
        return flight

    def renew(self, lease: int, now_s: float) -> bool:
        """False: the lease has ended, and another caller may be executing the call."""
        key = self._by_lease.get(lease)
        if key is None:
            return False
        self._by_key[key].until_s = now_s + self.limit_s
        return True

    def end(self, lease: int) -> None:
        key = self._by_lease.pop(lease, None)
        if key is not None:
            del self._by_key[key]

    def expire(self, now_s: float) -> None:
        """Remove expired leases."""
        for flight in [flight for flight in self._by_key.values() if flight.until_s <= now_s]:
            self.end(flight.lease)
