"""The settings of an endpoint. The defaults suit datacenters tens of milliseconds apart."""

from __future__ import annotations

from dataclasses import dataclass

CONNECT_S = 30.0
"""How long connecting to peers, and warming up the paths to them, may take."""


@dataclass(frozen=True)
class TransportSettings:
    """Times in seconds."""

    max_streams: int = 12
    """Connections to every peer in another datacenter, and lane; fewer where there are many (`stream_budget`). How many
    of them carry data is chosen from measurements. Inside a datacenter there are two."""
    num_streams: int | None = None
    """Sets that number instead."""
    staging_bytes: int = 256 << 20
    """What a peer may send, per lane, before its receive is posted. A longer message waits for its receive."""
    max_message_bytes: int = 1 << 34
    heartbeat_s: float = 1.0
    """An idle stream sends a ping this often, because middleboxes drop idle connections."""
    stall_s: float = 4.0
    """A stream on which an answer is due for this long is replaced."""
    idle_s: float = 90.0
    """A stream on which a peer sends nothing for this long is closed by the receiver."""
    handshake_s: float = 10.0
    deadline_s: float = 30.0
    """After this long without progress, everything that waits fails."""
    warm_s: float = 3.0
    """The longest warm-up of a path. Most end after a dozen round trips."""
    max_inbound: int = 4096
    """Connections that peers may have to this endpoint. Further ones are refused, and their dialers try again."""
    max_pending: int = 256
    """Connections that have not sent a preamble. The oldest is closed to make room for a new one."""
    max_handshakes: int = 16
    """Handshakes at the same time. One that takes long is ended to make room for a new one."""
    accepts_per_s: float = 2000.0
    record_folder: str = ""
    """Where channels to other datacenters write tables of what they send (`weather.packets`). Empty: nowhere."""
