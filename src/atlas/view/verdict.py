"""What several timelines say in one sentence, and which of them comes first on a page. Draws nothing."""

from __future__ import annotations

from collections.abc import Sequence

from atlas.ir.analysis import summary
from atlas.ir.timeline import Timeline

WAITS = {
    "wan": "waiting for the WAN",
    "peer": "waiting for a peer",
    "sync": "gradient sync",
    "fill": "fill",
    "drain": "drain",
}
MAX_OTHERS = 4
"""Schedules that the sentence compares the fastest with."""


def best_first(timelines: Sequence[Timeline]) -> list[Timeline]:
    """Fastest first. Timelines of different sources keep their order: a prediction lies above its measurement."""
    if len({timeline.source for timeline in timelines}) > 1:
        return list(timelines)
    return sorted(timelines, key=lambda timeline: timeline.iteration_ns)


def verdict(timelines: Sequence[Timeline]) -> str:
    """Of timelines in the order of `best_first`."""
    first = timelines[0]
    if len({timeline.source for timeline in timelines}) > 1:
        parts = [f"{_name(one)} {one.source} {_seconds(one)}" for one in timelines]
        last = timelines[-1]
        off = first.iteration_ns / last.iteration_ns - 1 if last.iteration_ns else 0.0
        tail = f": the first is off the second by {off:+.1%}" if len(timelines) == 2 else ""
        return f"{', '.join(parts)}{tail}."
    if len(timelines) == 1 or not first.iteration_ns:
        return f"{_name(first)}: {_seconds(first)} an iteration ({first.source}); {_spent(first)}."
    others = [
        f"{one.iteration_ns / first.iteration_ns:.2f}x over {_name(one)}" for one in timelines[1 : 1 + MAX_OTHERS]
    ]
    more = f" and {len(timelines) - 1 - MAX_OTHERS} more" if len(timelines) > 1 + MAX_OTHERS else ""
    fastest = f"{_name(first)} is the fastest: {_seconds(first)} an iteration ({first.source})"
    return f"{fastest}, {', '.join(others)}{more}; {_spent(first)}."


def _name(timeline: Timeline) -> str:
    tcp = timeline.meta.get("tcp")
    return f"{timeline.program.name} on one connection" if tcp == "one" else timeline.program.name


def _seconds(timeline: Timeline) -> str:
    seconds = timeline.iteration_ns / 1e9
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def _spent(timeline: Timeline) -> str:
    """What accelerators do, and what they wait for most."""
    found = summary(timeline)
    total_s = timeline.makespan_ns / 1e9 * timeline.program.num_workers
    cause, seconds = max(found["bubbles_s"].items(), key=lambda pair: float(pair[1]))
    busy = f"accelerators compute {100 * found['utilization']:.0f} % of the time"
    return f"{busy}, the largest loss is {WAITS[cause]} ({100 * seconds / total_s:.0f} %)" if seconds else busy
