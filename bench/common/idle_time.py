"""A worker's idle time by cause: between training's ops; in a wait before the first piece of prefill, between pieces
and after the last one (too short for a piece, the guard's margin, a wait longer than predicted). Used by benches.

Knows spans, not what a device does within one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from atlas.runtime.device import Span
from atlas.runtime.spans import SpanUnion


@dataclass(frozen=True)
class Wait:
    """A wait of one op of training."""

    began_ns: int
    ended_ns: int
    """When the input had arrived."""
    stop_ns: int
    """When pieces had to end; 0 if none could run."""
    believed_ns: int
    """The end that the guard predicted: `stop_ns` plus the margin."""


@dataclass
class Idle:
    """Nanoseconds by cause; together with the busy time they are all of the time."""

    between_ops: int = 0
    """Between two ops of training without a wait: host overhead."""
    after_wait: int = 0
    """The input had arrived, and its op had not started."""
    unused_wait: int = 0
    """Waits in which no piece ran."""
    before_first: int = 0
    between_pieces: int = 0
    no_fit: int = 0
    """After the last piece, while another was allowed: it was too long, or there was none."""
    margin: int = 0
    doubt: int = 0
    """The wait was longer than the guard predicted."""

    @property
    def total(self) -> int:
        return sum(self.rows().values())

    def rows(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def attribute(within: Span, training: Sequence[Span], pieces: Sequence[Span], waits: Sequence[Wait]) -> Idle:
    """The time `within` that no span covers, by cause. Waits must not overlap."""
    found, busy, at_ns = Idle(), SpanUnion([*training, *pieces]), within.start_ns
    for cause, until_ns in _causes(within, training, pieces, waits):
        end_ns = min(max(at_ns, until_ns), within.end_ns)
        setattr(found, cause, getattr(found, cause) + end_ns - at_ns - busy.within_ns(Span(at_ns, end_ns)))
        at_ns = end_ns
    return found


def _causes(
    within: Span, training: Sequence[Span], pieces: Sequence[Span], waits: Sequence[Wait]
) -> Iterator[tuple[str, int]]:
    """The causes of idle time and when each ends, in order of time."""
    ops, starts = (np.sort(np.array([span.start_ns for span in spans], np.int64)) for spans in (training, pieces))
    for wait in sorted(waits, key=lambda wait: wait.began_ns):
        yield "between_ops", wait.began_ns
        own = starts[np.searchsorted(starts, wait.began_ns) : np.searchsorted(starts, wait.ended_ns)]
        if not len(own):
            yield "unused_wait", wait.ended_ns
        else:
            yield "before_first", int(own[0])
            yield "between_pieces", int(own[-1])
            yield "no_fit", min(wait.stop_ns, wait.ended_ns)
            yield "margin", min(wait.believed_ns, wait.ended_ns)
            yield "doubt", wait.ended_ns
        following = ops[np.searchsorted(ops, wait.began_ns) :]
        yield "after_wait", int(following[0]) if len(following) else within.end_ns
    yield "between_ops", within.end_ns
