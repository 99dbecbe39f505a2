"""Keeps a group of workers alive: a life that ends by a failure is followed by another, from the last complete
checkpoint, a bounded number of times and ever later. What somebody must mend first is not tried again.

Knows failures and times; what a life is, whoever calls knows: emulated workers on one machine, or datacenters.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from atlas.errors import WorkerError

T = TypeVar("T")


@dataclass(frozen=True)
class RestartPolicy:
    """How often, and how soon."""

    max_in_a_row: int = 5
    """Without a step further than any life before; then it is given up."""
    first_wait_s: float = 1.0
    max_wait_s: float = 30.0

    def wait_s(self, number: int) -> float:
        """Before the restart `number` in a row, from 1: doubled every time."""
        return min(self.max_wait_s, self.first_wait_s * float(2 ** (number - 1)))


def run_with_restarts(
    live: Callable[[], T],
    progress: Callable[[], int],
    restarts: RestartPolicy,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """What a life returns that ends by itself. `progress`: the furthest step so far, over all lives."""
    furthest, in_a_row = progress(), 0
    while True:
        try:
            return live()
        except WorkerError as error:
            in_a_row = 1 if progress() > furthest else in_a_row + 1
            furthest = max(furthest, progress())
            if in_a_row > restarts.max_in_a_row:
                raise WorkerError(
                    f"{error}. Given up after {restarts.max_in_a_row} restarts in a row without a step of progress; "
                    "checkpoints are as they were"
                ) from None
            wait_s = restarts.wait_s(in_a_row)
            say(f"{error}. Restart {in_a_row} of {restarts.max_in_a_row} in a row, in {wait_s:g} s")
            sleep(wait_s)
