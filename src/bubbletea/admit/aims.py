"""The operator's aims for all requests together, beside each request's own deadline.

    goal    where bubbles are scarce, few lanes are fast and most are slow. A request that no lane delivers within the
            goal takes the slowest lane that meets its deadline, and leaves the fast ones to requests that reach it
    late    the share of admitted requests that may miss their deadline. A request that cannot meet it is postponed
            instead of refused, shortest first, until windows are ample; requests that are in time go first

Knows no lanes and no windows.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

from bubbletea.admit.records import PrefillRequest

RETRY_NS = 20_000_000
"""Between two attempts to place postponed requests."""
LATEST_NS = 15_000_000_000
"""A request postponed for this long is placed where it finishes first, even if windows are scarce."""
LATE_TOKENS = 2000
"""`Aims.late_tokens` of the commands: shorter prompts are refused, not postponed."""
PLENTY = 2.5
"""Windows are ample if a prompt takes at most this many times its accelerator time divided by the lane's workers."""


@dataclass(frozen=True)
class Aims:
    """None and 0: no aims, only deadlines."""

    goal_s: float | None = None
    """As many requests as possible are delivered within this time."""
    late: float = 0.0
    """Share of the admitted requests."""
    late_tokens: int = 0
    """Only prompts with at least this many tokens are postponed; shorter ones are refused."""


class Postponed:
    """Admitted requests that will be late, and the count of how many may be."""

    def __init__(self, aims: Aims) -> None:
        self._aims = aims
        self._waiting: list[tuple[int, int, str, PrefillRequest]] = []
        """Shortest first, then by arrival."""
        self._let_in = self._late = 0
        self.look_ns = 0
        """When to try again."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[PrefillRequest]:
        return (one[3] for one in self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return any(one[2] == request_id for one in self._waiting)

    def takes(self, request: PrefillRequest) -> bool:
        """Whether this request may be late."""
        return request.prompt_tokens >= self._aims.late_tokens and self.may_take(request)

    def may_take(self, request: PrefillRequest) -> bool:
        """Whether it may be late if it is long enough: for requests of which only a minimum length is known."""
        return request.deadline_ns is not None and self._late + 1 <= self._aims.late * (self._let_in + 1)

    def count(self) -> None:
        """One more request was admitted."""
        self._let_in += 1

    def push(self, request: PrefillRequest) -> None:
        self._late += 1
        insort(self._waiting, (request.prompt_tokens, request.arrival_ns, request.id, request))

    def next(self, now_ns: int) -> tuple[PrefillRequest, bool]:
        """The next request, and whether it has waited so long that it is placed even if windows are scarce."""
        oldest = min(self, key=lambda one: one.arrival_ns)
        due = now_ns >= oldest.arrival_ns + LATEST_NS
        return (oldest if due else self._waiting[0][3]), due

    def remove(self, request_id: str) -> bool:
        """Whether it was there."""
        before = len(self._waiting)
        self._waiting = [one for one in self._waiting if one[2] != request_id]
        return len(self._waiting) < before

    def tenants(self) -> set[str]:
        return {one.tenant for one in self}
