"""A WAN to rehearse with, in two grades behind one description of paths: `ProxyNet`, a proxy on loopback that anybody
may run, and `NamespaceNet`, real TCP between network namespaces. Both say how late they were.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atlas.wan.emulator.lateness import EmulatorLateError, Lateness
from atlas.wan.emulator.paths import Paths, PathSpec, Trunk, cluster_paths, nodes_of
from atlas.wan.emulator.proxy_net import ProxyNet, ProxyStats

if TYPE_CHECKING:
    from atlas.wan.emulator.namespace_net import NamespaceNet

__all__ = [
    "EmulatorLateError",
    "Lateness",
    "NamespaceNet",
    "PathSpec",
    "Paths",
    "ProxyNet",
    "ProxyStats",
    "Trunk",
    "cluster_paths",
    "nodes_of",
]


def __getattr__(name: str) -> Any:
    """NamespaceNet needs Linux and is fetched only by who asks for it."""
    if name == "NamespaceNet":
        from atlas.wan.emulator.namespace_net import NamespaceNet

        return NamespaceNet
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
