"""Fairness between tenants: virtual token counters, as in VTC (Sheng et al., OSDI'24).

Every tenant is charged its accelerator time, divided by its weight; the tenant with the smallest counter is next. A
tenant that returns starts no lower than the smallest counter of the waiting tenants, so idling earns no credit.
Knows no windows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from bubbletea.admit.records import PrefillRequest


class TenantShares:
    """Counters of what tenants were served."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._served: dict[str, float] = {}

    def served(self, tenant: str) -> float:
        return self._served.get(tenant, 0.0)

    def enter(self, tenant: str, waiting: Iterable[str]) -> None:
        """A tenant without waiting requests sends one."""
        least = min((self.served(other) for other in waiting), default=0.0)
        self._served[tenant] = max(self.served(tenant), least)

    def charge(self, tenant: str, amount: float) -> None:
        self._served[tenant] = self.served(tenant) + amount / self._weights.get(tenant, 1.0)

    def ahead(self, tenant: str, waiting: Iterable[str]) -> float:
        """By how much a tenant was served more than the least served other tenant that waits."""
        others = [self.served(other) for other in waiting if other != tenant]
        return self.served(tenant) - min(others) if others else 0.0


class Backlog:
    """Offline requests, one queue per tenant. The least served tenant is next, its earliest deadline first."""

    def __init__(self, shares: TenantShares) -> None:
        self._shares = shares
        self._queues: dict[str, deque[PrefillRequest]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[PrefillRequest]:
        return chain.from_iterable(self._queues.values())

    def tenants(self) -> Iterable[str]:
        return self._queues.keys()

    def push(self, request: PrefillRequest) -> None:
        if request.tenant not in self._queues:
            self._shares.enter(request.tenant, self._queues)
            self._queues[request.tenant] = deque()
        queue = self._queues[request.tenant]
        at = len(queue)
        while at and _urgency(queue[at - 1]) > _urgency(request):
            at -= 1
        queue.insert(at, request)
        self._size += 1

    def pop(self) -> PrefillRequest | None:
        if not self._size:
            return None
        tenant = min(self._queues, key=lambda name: (self._shares.served(name), name))
        return self._take(tenant, self._queues[tenant].popleft())

    def remove(self, request_id: str) -> bool:
        """Whether it was there."""
        for tenant, queue in self._queues.items():
            for request in queue:
                if request.id == request_id:
                    queue.remove(request)
                    self._take(tenant, request)
                    return True
        return False

    def _take(self, tenant: str, request: PrefillRequest) -> PrefillRequest:
        if not self._queues[tenant]:
            del self._queues[tenant]
        self._size -= 1
        return request


def _urgency(request: PrefillRequest) -> float:
    return float("inf") if request.deadline_ns is None else float(request.deadline_ns)
