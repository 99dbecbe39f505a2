"""Where a worker's idle time went, to the nanosecond: between training's ops, and in a wait before the first piece of
prefill, between pieces and behind the last one; there, what the guard's margin took, what it did not believe in, and
what was too short for a piece. For whoever wants more of each wait used.

Knows spans. What a device did within one, launching or computing, it cannot tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from atlas.runtime.device import Span
from atlas.runtime.spans import SpanUnion


@dataclass(frozen=True)
class Wait:
    """Of one op of training."""

    began_ns: int
    ended_ns: int
    """The input was there."""
    stop_ns: int
    """Until when pieces might run; 0 where none might."""
    believed_ns: int
    """Until when the guard believed in the wait: `stop_ns` and the margin."""


@dataclass
class Idle:
    """Nanoseconds by cause; with what the device was busy they are all of the time."""

    between_ops: int = 0
    """Of training, where none waited: the host on its way from one to the next."""
    after_wait: int = 0
    """The input was there, and its op had not begun."""
    unused_wait: int = 0
    """Waits in which no piece ran."""
    before_first: int = 0
    between_pieces: int = 0
    no_fit: int = 0
    """Behind the last piece, while another might have run: it was too long, or there was none."""
    margin: int = 0
    doubt: int = 0
    """The wait went on for longer than the guard believed."""

    @property
    def total(self) -> int:
        return sum(self.rows().values())

    def rows(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def attribute(within: Span, training: Sequence[Span], pieces: Sequence[Span], waits: Sequence[Wait]) -> Idle:
    """Of the time `within`, what no span covers. Waits do not overlap each other."""
    found, busy, at_ns = Idle(), SpanUnion([*training, *pieces]), within.start_ns
    for cause, until_ns in _causes(within, training, pieces, waits):
        end_ns = min(max(at_ns, until_ns), within.end_ns)
        setattr(found, cause, getattr(found, cause) + end_ns - at_ns - busy.within_ns(Span(at_ns, end_ns)))
        at_ns = end_ns
    return found


def _causes(
    within: Span, training: Sequence[Span], pieces: Sequence[Span], waits: Sequence[Wait]
) -> Iterator[tuple[str, int]]:
    """What idle time is put down to, and until when, in order of time."""
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
