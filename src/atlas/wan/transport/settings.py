"""What can be set on an endpoint. The defaults suit datacenters tens of milliseconds apart."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TransportSettings:
    """Times in seconds."""

    max_streams: int = 12
    """Opened to every peer and lane; how many of them carry data is chosen from what is measured."""
    num_streams: int | None = None
    """Sets that number by hand."""
    staging_bytes: int = 256 << 20
    """What a peer may send, per lane, before its receive is posted. A longer message waits for its receive."""
    max_message_bytes: int = 1 << 34
    heartbeat_s: float = 1.0
    """An idle stream says something this often: middleboxes drop the silent."""
    stall_s: float = 4.0
    """A stream that owes an answer for so long is replaced."""
    idle_s: float = 90.0
    """A stream on which a peer says nothing for so long is dropped by the receiver."""
    handshake_s: float = 10.0
    deadline_s: float = 30.0
    """How long nothing may get through before waiting is given up."""
    warm_s: float = 3.0
    """The longest that a path is warmed; most are done after a dozen round trips."""
    max_inbound: int = 4096
    """Connections that peers may hold to this endpoint at once. One more is refused; its dialer tries again later."""
    max_pending: int = 256
    """Connections that have not greeted yet; the oldest is dropped for a newer one."""
    max_handshakes: int = 16
    accepts_per_s: float = 2000.0
