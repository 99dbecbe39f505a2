"""A message on its way out, the chunks it is cut into, and the tags that the receiver has announced.

Plain state of an `Outbox`, changed under its lock. Knows no queue, no streams and no sockets.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from atlas.wan.transport.base import Handle, Tag
from atlas.wan.transport.wire import MAX_POSTED

MAX_REMEMBERED = 1 << 14
"""Tags of finished messages. An announcement can arrive after its message has finished, on another stream; it is then
at most as old as the records that were under way."""


@dataclass(eq=False)
class OutgoingMessage:
    """One send. `again` holds chunks whose stream was lost; `unacked` what is on its way, by offset."""

    number: int
    tag: Tag
    view: memoryview
    turn: int
    handle: Handle
    whole: bool
    """It is a slice already: one chunk."""
    eager: bool = False
    put_at: float = field(default_factory=time.monotonic)
    next_offset: int = 0
    acked_bytes: int = 0
    num_taken: int = 0
    again: list[Chunk] = field(default_factory=list)
    unacked: dict[int, Chunk] = field(default_factory=dict)
    taken_at: dict[int, float] = field(default_factory=dict)

    @property
    def all_taken(self) -> bool:
        return self.num_taken > 0 and not self.again and self.next_offset >= len(self.view)

    def progress(self) -> str:
        return f"{self.acked_bytes} of {len(self.view)} bytes were acknowledged"


class Chunk(NamedTuple):
    message: OutgoingMessage
    offset: int
    num_bytes: int

    @property
    def payload(self) -> memoryview:
        return self.message.view[self.offset : self.offset + self.num_bytes]


class Announced:
    """Tags whose receive is posted. A key is used once, so an announcement for a finished message is late: without
    that rule each such tag would stay here for ever."""

    def __init__(self) -> None:
        self._tags: set[Tag] = set()
        self._finished: OrderedDict[Tag, None] = OrderedDict()

    def __contains__(self, tag: Tag) -> bool:
        return tag in self._tags

    def __len__(self) -> int:
        return len(self._tags)

    def add(self, tag: Tag) -> bool:
        """False if the peer has announced more than it may: twice its own limit, since messages under way count here
        and no longer there."""
        if tag not in self._finished:
            self._tags.add(tag)
        return len(self._tags) <= 2 * MAX_POSTED

    def finish(self, tag: Tag) -> None:
        """The message of this tag has arrived or was refused."""
        self._tags.discard(tag)
        self._finished[tag] = None
        if len(self._finished) > MAX_REMEMBERED:
            self._finished.popitem(last=False)
