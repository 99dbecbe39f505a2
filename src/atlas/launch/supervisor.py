"""Restarts a run that failed from the last complete checkpoint: a bounded number of times in a row, with growing
delays. An error that the user must fix is not retried.

Knows failures and delays. The caller knows what an attempt is: emulated workers on one machine, or datacenters.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from atlas.errors import WorkerError

T = TypeVar("T")
restarts = logging.getLogger("atlas.restarts")
"""One record for each restart, with the error; for reports, not for the terminal."""
restarts.setLevel(logging.INFO)
restarts.propagate = False
restarts.addHandler(logging.NullHandler())


@dataclass(frozen=True)
class RestartPolicy:
    """How often and how soon to restart."""

    max_in_a_row: int = 5
    """Restarts without a step beyond the furthest so far; then the run fails."""
    first_wait_s: float = 1.0
    max_wait_s: float = 30.0

    def wait_s(self, number: int) -> float:
        """Before restart `number` in a row, from 1: doubled every time."""
        return min(self.max_wait_s, self.first_wait_s * float(2 ** (number - 1)))


def run_with_restarts(
    attempt: Callable[[], T],
    progress: Callable[[], int],
    policy: RestartPolicy,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """The result of the first attempt that does not fail. `progress`: the furthest step so far, over all attempts."""
    furthest, in_a_row = progress(), 0
    while True:
        try:
            return attempt()
        except WorkerError as error:
            in_a_row = 1 if progress() > furthest else in_a_row + 1
            furthest = max(furthest, progress())
            if in_a_row > policy.max_in_a_row:
                given_up = (
                    f"Stopped after {policy.max_in_a_row} restarts in a row without a new step; checkpoints "
                    "are unchanged"
                )
                raise WorkerError(_with_sentence(error, given_up)) from None
            wait_s = policy.wait_s(in_a_row)
            restarts.info("%s", error)
            say(_with_sentence(error, f"Restart {in_a_row} of {policy.max_in_a_row} in a row, in {wait_s:g} s"))
            sleep(wait_s)


def _with_sentence(error: WorkerError, sentence: str) -> str:
    """After the error's own sentence and before the log lines that follow it, if any."""
    first, newline, lines = str(error).partition("\n")
    return f"{first}{newline}{lines}\n{sentence}" if newline else f"{first}. {sentence}"
