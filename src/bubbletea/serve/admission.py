"""Which requests the service admits: by memory for keys and values, the limit for training, and the planner's windows.

A refusal says when to retry, and until then something is kept for the request: time of the lanes, its turn for memory,
or its tenant's turn. New requests that cannot start at once are placed after it. So a retry of the same request (`key`)
at that time is admitted, although others have arrived in between. If there is no retry, what was kept is released soon
after, and less is kept for that tenant. Used on the service's event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from dataclasses import dataclass, replace

from bubbletea.admit.records import AdmissionRefusal, Placement, PrefillRequest
from bubbletea.constants import SECOND
from bubbletea.handoff.kv_store import KvStore
from bubbletea.serve.metrics import ServiceMetrics
from bubbletea.serve.planner import Planner
from bubbletea.serve.prefills import Refused
from bubbletea.serve.slowdown_limit import SlowdownLimit

TICK_S = 0.02
"""Between two looks for free memory, and the shortest Retry-After."""
UNKNOWN_S = 1.0
"""Retry-After if it is unknown when memory or a lane will be free."""
EARLY_NS = 50_000_000
"""A request that is this much too early is in time: clocks and rounding differ."""
SLACK_NS, SLACK_PART = 250_000_000, 8
"""Added to the time at which a request would fit, or this part of its wait: windows vary."""
GRACE_NS, GRACE_PART = 2 * SECOND, 4
"""What is kept for a request is kept this much longer, or a part of its wait: Retry-After is in whole seconds."""
MEMORY_S = 10.0
"""A request that comes back in time waits this long for memory, since responses may take longer than expected."""
TRUSTED, MOST, EARNED = 256, 1024, 2
"""Requests of one tenant for which something is kept: at first, at most, and how many more after one has come back.
After one that has not, it is one less."""


@dataclass(frozen=True)
class KeptPlace:
    """What is kept for a refused request. `request` has an id of its own."""

    request: PrefillRequest
    due_ns: int
    """When it should be sent again."""
    reason: str
    lane_ns: int = 0
    """Time of the lanes that is kept."""

    @property
    def expires_ns(self) -> int:
        return self.due_ns + max(GRACE_NS, (self.due_ns - self.request.arrival_ns) // GRACE_PART)


class Admission:
    """`limit`: the limit for training, if there is training."""

    def __init__(
        self, planner: Planner, store: KvStore, metrics: ServiceMetrics, limit: SlowdownLimit | None = None
    ) -> None:
        self.planner, self.store, self.metrics, self.limit = planner, store, metrics, limit
        self._kept: dict[bytes, deque[KeptPlace]] = {}
        """By key: equal requests in the order of their refusal."""
        self._trust: Counter[str] = Counter()
        """By tenant: more than TRUSTED, or less."""
        self._num_kept: Counter[str] = Counter()
        self.kept_ns = 0
        """Time of the lanes that is kept for all of them."""

    def __len__(self) -> int:
        return self._num_kept.total()

    def check(self, request: PrefillRequest, num_tokens: int, key: bytes, likely_tokens: int) -> None:
        """Raises Refused if a prompt of at least this length would be refused; called before tokenizing.
        `likely_tokens`: its expected length, for which a place is kept."""
        if key in self._kept:
            return  # it comes back
        self._require_room(request, num_tokens, key)
        refusal = self.planner.quote(request, request.arrival_ns, self.kept_ns)
        if refusal is not None:
            raise self._refused(replace(refusal, request=replace(request, prompt_tokens=likely_tokens)), key)

    async def admit(
        self, request: PrefillRequest, num_tokens: int, key: bytes
    ) -> tuple[Placement | None, PrefillRequest]:
        """Its placement, if it has one already, and the request with its time of arrival. Raises Refused. The caller
        reserves the memory at once."""
        kept = self._taken(key) if key in self._kept else None
        is_back = kept is not None and request.arrival_ns >= kept.due_ns - EARLY_NS
        if kept is not None:
            try:
                request = await self._awaited_room(request, num_tokens) if is_back else request
            finally:
                self._free(kept)
        now_ns = request.arrival_ns
        try:
            self._require_room(request, num_tokens, key, is_back=is_back)
            found = self.planner.admit(request, now_ns, 0 if is_back else self.kept_ns)
            if isinstance(found, AdmissionRefusal) and is_back and kept is not None and _is_promised(found, kept):
                self.planner.claim(request)
                found = None
            if isinstance(found, AdmissionRefusal):
                raise self._refused(found, key)
        except Refused:
            if is_back:
                self.metrics.came_back("refused")
            raise
        if is_back:
            self._trust[request.tenant] = min(MOST - TRUSTED, self._trust[request.tenant] + EARNED)
            self.metrics.came_back("admitted")
        return found, request

    def pass_time(self, now_ns: int) -> None:
        """Frees what nobody came back for."""
        for key, row in list(self._kept.items()):
            while row and row[0].expires_ns < now_ns:
                kept = self._taken(key)
                self._free(kept)
                tenant = kept.request.tenant
                self._trust[tenant] = max(1 - TRUSTED, self._trust[tenant] - 1)

    # ---- refusals ----------------------------------------------------------------------------------------------
    def _require_room(self, request: PrefillRequest, num_tokens: int, key: bytes, *, is_back: bool = False) -> None:
        store, tenant = self.store, request.tenant
        if request.kind == "online" and self.limit is not None and self.limit.overcommitted:
            self.metrics.refused("overcommitted")
            raise Refused("overcommitted", self.limit.retry_s)
        if store.has_room(num_tokens, tenant, is_promised=is_back):
            return
        self.metrics.refused("memory")
        detail = store.explain(num_tokens, tenant)
        if store.bytes_of(num_tokens) > store.limit_bytes(tenant):
            raise Refused("memory", None, detail)
        at_s = store.room_at_s(num_tokens, tenant)
        retry_s = UNKNOWN_S if math.isinf(at_s) else max(TICK_S, at_s - time.monotonic())
        if self._may_keep(key, tenant):
            store.promise(request.id, num_tokens, tenant)
            self._keep(key, KeptPlace(request, request.arrival_ns + int(retry_s * SECOND), "memory"))
        raise Refused("memory", retry_s, detail)

    def _refused(self, refusal: AdmissionRefusal, key: bytes) -> Refused:
        self.metrics.refused(refusal.reason)
        if refusal.reason == "no-lane":
            return Refused(refusal.reason, UNKNOWN_S)
        if refusal.retry_at_ns is None or refusal.fits_at_ns is None:
            return Refused(refusal.reason, None)
        request, at_ns = refusal.request, refusal.retry_at_ns
        if refusal.reason == "deadline":
            at_ns += max(SLACK_NS, (at_ns - request.arrival_ns) // SLACK_PART)
        if self._may_keep(key, request.tenant):
            if refusal.reason == "share":
                self.planner.charge(request.tenant, request.prompt_tokens)
            self._keep(key, KeptPlace(request, at_ns, refusal.reason, refusal.lane_ns))
        return Refused(refusal.reason, max(0.0, (at_ns - time.monotonic_ns()) / SECOND))

    # ---- what is kept ------------------------------------------------------------------------------------------
    async def _awaited_room(self, request: PrefillRequest, num_tokens: int) -> PrefillRequest:
        """Until there is memory for it, or it has waited for too long. With its new time of arrival."""
        until_s = time.monotonic() + MEMORY_S
        while not self.store.has_room(num_tokens, request.tenant, is_promised=True) and time.monotonic() < until_s:
            await asyncio.sleep(TICK_S)
        return replace(request, arrival_ns=time.monotonic_ns())

    def _may_keep(self, key: bytes, tenant: str) -> bool:
        return bool(key) and self._num_kept[tenant] < TRUSTED + self._trust[tenant]

    def _keep(self, key: bytes, kept: KeptPlace) -> None:
        self._kept.setdefault(key, deque()).append(kept)
        self._num_kept[kept.request.tenant] += 1
        self.kept_ns += kept.lane_ns

    def _taken(self, key: bytes) -> KeptPlace:
        """It is not waited for any more; what is kept for it still is."""
        row = self._kept[key]
        kept = row.popleft()
        if not row:
            del self._kept[key]
        return kept

    def _free(self, kept: KeptPlace) -> None:
        request = kept.request
        self._num_kept[request.tenant] -= 1
        self.kept_ns -= kept.lane_ns
        self.store.unpromise(request.id)
        if kept.reason == "share":
            self.planner.charge(request.tenant, -request.prompt_tokens)


def _is_promised(refusal: AdmissionRefusal, kept: KeptPlace) -> bool:
    """It is taken even though it does not fit now: windows have become shorter, or a lane was lost."""
    return refusal.reason == "share" or (kept.reason == "deadline" and refusal.reason in ("deadline", "no-lane"))
