"""What an address says about who can reach it.

It resolves no names and opens no sockets.
"""

from __future__ import annotations

import ipaddress

LOOPBACK = "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Whether only this host reaches an address. Of names, only `localhost`: any other may resolve to anything."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
