"""Fairness between tenants: virtual token counters, as in VTC (Sheng et al., OSDI'24).

Every tenant is charged its accelerator time, divided by its weight; the tenant with the smallest counter is next. A
tenant that returns starts no lower than the smallest counter of the waiting tenants, so idling earns no credit.
Knows no windows.
"""

from __future__ import annotations

from bisect import insort
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
        self._queues: dict[str, list[PrefillRequest]] = {}
        """Of tenants with requests."""

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[PrefillRequest]:
        return chain.from_iterable(self._queues.values())

    def tenants(self) -> Iterable[str]:
        return self._queues.keys()

    def push(self, request: PrefillRequest) -> None:
        if request.tenant not in self._queues:
            self._shares.enter(request.tenant, self._queues)
        insort(self._queues.setdefault(request.tenant, []), request, key=lambda one: one.urgency)

    def pop(self) -> PrefillRequest:
        """There is one."""
        tenant = min(self._queues, key=lambda name: (self._shares.served(name), name))
        first = self._queues[tenant].pop(0)
        if not self._queues[tenant]:
            del self._queues[tenant]
        return first

    def remove(self, request_id: str) -> None:
        """If it is there."""
        queues = ((tenant, [one for one in queue if one.id != request_id]) for tenant, queue in self._queues.items())
        self._queues = {tenant: queue for tenant, queue in queues if queue}
