"""Delays notes about slices for a moment, so that several are sent as one: a note per slice would cost more than the
slice. Knows slices and hops, no sockets and no cells.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from atlas.wan.cell_relay.slices import MAX_DONE, Done, NoteKind, RelayNote, RelaySlice
from atlas.wan.transport.base import guarded

DELAY_S = {NoteKind.DEPARTED: 0.02, NoteKind.ACK: 0.01}
"""About one slice at 100 Mbit/s, and two. Urgent notes are not delayed: the sender has few slices at the relay, or the
message is complete."""
IDLE_S = 1.0
"""How long the thread sleeps without notes."""


@dataclass(eq=False)
class _AckBatch:
    due: float
    hops: tuple[str, ...]
    slices: list[Done] = field(default_factory=list)


class AckBatcher:
    """Thread-safe. Calls `send` on a thread of its own until it is closed."""

    def __init__(self, name: str, send: Callable[[RelayNote], None]) -> None:
        self._send = send
        self._waiting: dict[tuple[NoteKind, str, str, int], _AckBatch] = {}
        self._wakes_at = 0.0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)
        self._thread.start()

    def add(self, kind: NoteKind, one: RelaySlice, *, at_once: bool = False) -> None:
        """`one` departed or arrived. The note returns over the shortest path of the slices in its batch."""
        now = time.monotonic()
        due = now if at_once else now + DELAY_S[kind]
        with self._changed:
            key = (kind, one.hops[0], one.hops[-1], one.lane)
            entry = self._waiting.setdefault(key, _AckBatch(due, one.hops))
            entry.slices.append(one.done)
            entry.due = min(entry.due, due)
            entry.hops = min(entry.hops, one.hops, key=len)
            if entry.due < self._wakes_at:
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            with self._changed:
                now = time.monotonic()
                due = [key for key, entry in self._waiting.items() if entry.due <= now]
                batches = [(*key, self._waiting.pop(key)) for key in due]
                if not batches:
                    self._wakes_at = min((entry.due for entry in self._waiting.values()), default=now + IDLE_S)
                    self._changed.wait(self._wakes_at - now)
                    self._wakes_at = 0.0
            for kind, _, _, lane, entry in batches:
                for at in range(0, len(entry.slices), MAX_DONE):
                    guarded(self._send, RelayNote(kind, entry.hops, lane, tuple(entry.slices[at : at + MAX_DONE])))
