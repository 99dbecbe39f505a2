"""A message that is being sent, its chunks, and the tags that the receiver has announced.

State of an `Outbox`, changed under its lock. Knows no queue, no streams and no sockets.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from atlas.wan.transport.base import Handle, Tag
from atlas.wan.transport.wire import MAX_POSTED

MAX_REMEMBERED = 1 << 14
"""Tags of finished messages. An announcement can arrive, on another stream, after its message has finished; it is then
at most as old as the records in flight."""


@dataclass(eq=False)
class OutgoingMessage:
    """One send. `again` has chunks whose stream was lost; `unacked` has the chunks in flight, by offset."""

    number: int
    tag: Tag
    view: memoryview
    turn: int
    handle: Handle
    whole: bool
    """Send it as one chunk: it is a slice of a transfer."""
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

    @property
    def fields(self) -> tuple[int, int, int, int, Tag, bool]:
        """The fields that headers of frames and of slices share, from `number` on."""
        message = self.message
        return message.number, len(message.view), self.offset, self.num_bytes, message.tag, message.eager


class AnnouncedTags:
    """Tags whose receive is posted. A key is used once, so an announcement for a finished message is late and is
    ignored; otherwise its tag would stay here forever."""

    def __init__(self) -> None:
        self._tags: set[Tag] = set()
        self._finished: OrderedDict[Tag, None] = OrderedDict()

    def __contains__(self, tag: Tag) -> bool:
        return tag in self._tags

    def __len__(self) -> int:
        return len(self._tags)

    def add(self, tag: Tag) -> bool:
        """False if the peer has announced more than twice its limit: messages in flight count here, but not there."""
        if tag not in self._finished:
            self._tags.add(tag)
        return len(self._tags) <= 2 * MAX_POSTED

    def finish(self, tag: Tag) -> None:
        """The message of this tag has arrived or was refused."""
        self._tags.discard(tag)
        self._finished[tag] = None
        if len(self._finished) > MAX_REMEMBERED:
            self._finished.popitem(last=False)
