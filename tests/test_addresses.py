"""Which addresses only this host reaches."""

from __future__ import annotations

import pytest

from atlas.addresses import is_loopback


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.5", False),
        ("host.example.com", False),
        ("", False),
    ],
)
def test_only_loopback_addresses_and_localhost_are_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
