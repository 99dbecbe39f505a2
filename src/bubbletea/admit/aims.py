"""What an operator wants of many requests together, beside every one's own deadline.

    goal    where bubbles are scarce some lanes are quick and most are slow. A request that no lane delivers within the
            goal takes the slowest that is in time, and leaves the quick ones to those who reach it
    late    the share of those let in that may miss their deadline: who does not fit in time is postponed instead of
            refused, shortest first, until bubbles are plenty, and anybody who is in time goes before

Knows no lanes and no windows; `decide` asks.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

from bubbletea.admit.records import PrefillRequest

RETRY_NS = 20_000_000
"""Between two looks at whether those who are late have a place."""
LATEST_NS = 15_000_000_000
"""Who has waited for so long is placed where it is done first, whatever the bubbles are."""
LATE_TOKENS = 2000
"""What commands take for `Aims.late_tokens`: shorter prompts are refused rather than late."""
PLENTY = 2.5
"""Bubbles are plenty for a prompt that takes no longer than this times its accelerator time over the lane's workers."""


@dataclass(frozen=True)
class Aims:
    """None and 0: every request for itself."""

    goal_s: float | None = None
    """Within which as many as can be should be delivered."""
    late: float = 0.0
    """Of those let in."""
    late_tokens: int = 0
    """Only prompts of so many tokens are postponed; shorter ones are refused."""


class Postponed:
    """Requests let in that will be late, and the account of how many may be."""

    def __init__(self, aims: Aims) -> None:
        self._aims = aims
        self._waiting: list[tuple[int, int, str, PrefillRequest]] = []
        """Shortest first, then by arrival."""
        self._let_in = self._late = 0
        self.look_ns = 0
        """When it is next worth a look."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[PrefillRequest]:
        return (one[3] for one in self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return any(one[2] == request_id for one in self._waiting)

    def takes(self, request: PrefillRequest) -> bool:
        """Whether this one may be late."""
        return request.prompt_tokens >= self._aims.late_tokens and self.may_take(request)

    def may_take(self, request: PrefillRequest) -> bool:
        """Whether it might if it is long enough: where all that is known is the least it can be."""
        return request.deadline_ns is not None and self._late + 1 <= self._aims.late * (self._let_in + 1)

    def count(self) -> None:
        """One more was let in."""
        self._let_in += 1

    def push(self, request: PrefillRequest) -> None:
        self._late += 1
        insort(self._waiting, (request.prompt_tokens, request.arrival_ns, request.id, request))

    def next(self, now_ns: int) -> tuple[PrefillRequest, bool]:
        """Whose turn it is, and whether it has waited for so long that it waits no more for plenty of bubbles."""
        eldest = min(self, key=lambda one: one.arrival_ns)
        due = now_ns >= eldest.arrival_ns + LATEST_NS
        return (eldest if due else self._waiting[0][3]), due

    def remove(self, request_id: str) -> bool:
        """Whether it was there."""
        before = len(self._waiting)
        self._waiting = [one for one in self._waiting if one[2] != request_id]
        return len(self._waiting) < before

    def tenants(self) -> set[str]:
        return {one.tenant for one in self}
