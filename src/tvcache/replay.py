"""Results of a cache on recorded trajectories, by kind of key: hits, wrong outputs, seconds, waits.

The keys are those of the live cache (`keys.key`); only what counts as history differs. A miss after mutating calls that
hit pays for executing those again, as a cache without snapshots does.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tvcache.errors import TvcacheError
from tvcache.keys import key, root
from tvcache.tools import Effect
from tvcache.trajectories import RecordedCall, RecordedRollouts, Trajectory

Keying = Literal["mutating calls", "full history", "call alone"]
KEYINGS: tuple[Keying, ...] = ("mutating calls", "full history", "call alone")
HIT_S = 0.001
"""A hit's own time: two of the server's usual round trips."""
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)


@dataclass
class KeyingResult:
    """Of one key."""

    keying: Keying
    calls: int = 0
    hits: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    """By tool: hits whose output is not the recorded one."""
    waits_s: list[list[float]] = field(default_factory=list)
    """Waits of each call, by trajectory."""

    @property
    def total_s(self) -> float:
        return math.fsum(wait for waits in self.waits_s for wait in waits)


class Durations:
    """Seconds of a recorded call: as recorded, or assumed between two bounds, the same for equal calls."""

    def __init__(self, low_s: float | None = None, high_s: float | None = None) -> None:
        self.low_s, self.high_s = low_s, high_s

    def __call__(self, step: RecordedCall) -> float:
        if self.low_s is None or self.high_s is None:
            return step.seconds or 0.0
        seed = step.call.canonical if step.call is not None else step.name.encode()
        share = int.from_bytes(hashlib.sha256(seed).digest()[:8]) / 2**64
        return self.low_s + share * (self.high_s - self.low_s)


def replay(
    recorded: RecordedRollouts,
    effect: Callable[[str], Effect],
    keying: Keying,
    seconds: Callable[[RecordedCall], float],
) -> KeyingResult:
    """Replay in file order, with one tree per task."""
    outcome, stored = KeyingResult(keying), dict[bytes, bytes]()
    for one in recorded.trajectories:
        outcome.waits_s.append(_play(one, effect, keying, seconds, stored, outcome))
    return outcome


def _play(
    trajectory: Trajectory,
    effect: Callable[[str], Effect],
    keying: Keying,
    seconds: Callable[[RecordedCall], float],
    stored: dict[bytes, bytes],
    outcome: KeyingResult,
) -> list[float]:
    state, private, waits, owed_s = root(trajectory.task), False, [], 0.0
    for step in trajectory.steps:
        outcome.calls += 1
        what, took_s = effect(step.name), seconds(step)
        mutates = what != "reads"
        if private or what == "volatile" or step.call is None or step.body is None:
            private = private or mutates
            waits.append(took_s + owed_s)
            owed_s = 0.0
            continue
        found = key(state, step.call)
        if found in stored:
            outcome.hits += 1
            outcome.wrong[step.name] += stored[found] != step.body
            waits.append(HIT_S)
            owed_s += took_s if mutates else 0.0
        else:
            stored[found] = step.body
            waits.append(took_s + owed_s)
            owed_s = 0.0
        if keying == "full history" or (keying == "mutating calls" and mutates):
            state = found
    return waits


def without(recorded: RecordedRollouts, seconds: Callable[[RecordedCall], float]) -> list[list[float]]:
    """Waits of each call without a cache, by trajectory."""
    return [[seconds(step) for step in one.steps] for one in recorded.trajectories]


def quantiles(values: Sequence[float]) -> dict[str, float]:
    ranked = sorted(values)
    return {f"p{100 * q:g}": ranked[min(len(ranked) - 1, math.ceil(q * len(ranked)) - 1)] for q in QUANTILES}


def windows(waits_s: Sequence[Sequence[float]], think_s: float, at_once: int) -> list[tuple[float, float]]:
    """(busy, idle) seconds of one accelerator, in turn: it is idle while all of its rollouts wait for tools. Rollouts
    take turns on `at_once` seats; `think_s` of generation before each call. Ends when a seat has no more."""
    seats: list[list[tuple[float, float]]] = [[] for _ in range(at_once)]
    ends = [0.0] * at_once
    for number, waits in enumerate(waits_s):
        seat = number % at_once
        for wait_s in waits:
            begin = ends[seat] + think_s
            ends[seat] = begin + wait_s
            seats[seat].append((begin, ends[seat]))
    idle = seats[0]
    for other in seats[1:]:
        idle = _overlap(idle, other)
    found, at_s, last_s = [], 0.0, min(ends)
    for begin, end in idle:
        if end <= last_s and end > begin:
            found.append((begin - at_s, end - begin))
            at_s = end
    if not found and not any(map(any, waits_s)):
        raise TvcacheError("all calls take 0 s, so the accelerator never waits for a tool: give --seconds LOW..HIGH")
    if not found:
        raise TvcacheError(
            f"{at_once} rollouts at once never wait all together, so the accelerator is never idle: lower --at-once"
        )
    return found


def _overlap(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> list[tuple[float, float]]:
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def waits_file(
    recorded: RecordedRollouts,
    before: list[list[float]],
    after: list[list[float]],
    think_s: float,
    at_once: int,
    assumed: bool,
) -> dict[str, Any]:
    """The file that `--waits` writes and `bubbletea simulate --waits` reads."""
    return {
        "format": "tvcache-waits-1",
        "source": recorded.source,
        "tool_seconds_assumed": assumed,
        "think_s": think_s,
        "rollouts_at_once": at_once,
        **{
            name: {
                "wait_quantiles_s": quantiles([wait for one in waits for wait in one]),
                "busy_idle_s": [[round(busy, 6), round(idle, 6)] for busy, idle in windows(waits, think_s, at_once)],
            }
            for name, waits in (("without_cache", before), ("with_cache", after))
        },
    }
