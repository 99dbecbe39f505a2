"""Delay, rate and loss by the kernel's netem, if the user chooses it. Needs `tc` (iproute2) and a kernel with netem.

A node's netem shapes everything that the node sends, so all paths of a node must be equal. The forwarder then only
forwards.
"""

from __future__ import annotations

import shutil
import subprocess

from atlas.errors import AtlasError
from atlas.wan.emulator.netdev import DEVICE, in_thread
from atlas.wan.emulator.paths import Paths, PathSpec

PACKET_BYTES = 1500
"""netem counts its queue in packets of this size."""
MIN_QUEUE_PACKETS = 1000
"""netem's own default."""


def path_of_node(paths: Paths, node: str) -> PathSpec:
    """The path that netem emulates for a node. Raises AtlasError if netem cannot emulate its paths."""
    own = [path for pair, path in paths.items() if node in pair]
    if any(path != own[0] for path in own):
        raise AtlasError(
            f"node {node!r} has paths that differ: netem shapes all of them alike. Leave kernel shaping off"
        )
    if own[0].trunk is not None or (own[0].pair_bps is not None and len(own) > 1):
        raise AtlasError(
            f"node {node!r} shares a trunk or caps several pairs: netem supports neither. Leave kernel shaping off"
        )
    return own[0]


def netem_arguments(path: PathSpec) -> list[str]:
    """The arguments after `tc qdisc add dev DEVICE root`."""
    words = ["netem", "delay", f"{path.latency_s * 1e6:.0f}us"]
    if path.jitter_s:
        words += [f"{path.jitter_s * 5e5:.0f}us"]
    if path.loss:
        words += ["loss", f"{path.loss * 100:g}%"]
    queued_bytes = path.queue
    if path.pair_bps is not None:
        words += ["rate", f"{path.pair_bps:.0f}bit"]
        queued_bytes += round(path.pair_bps / 8 * path.latency_s)
    return [*words, "limit", str(max(MIN_QUEUE_PACKETS, queued_bytes // PACKET_BYTES))]


def shape_in_kernel(namespace_fd: int, path: PathSpec) -> None:
    """Adds netem to a namespace's device. Raises AtlasError if `tc` or the kernel's netem is missing."""
    tc = shutil.which("tc")
    if tc is None:
        raise AtlasError("kernel shaping needs `tc`, which is missing: install iproute2, or leave kernel shaping off")
    command = [tc, "qdisc", "add", "dev", DEVICE, "root", *netem_arguments(path)]
    done = in_thread(lambda: subprocess.run(command, capture_output=True, text=True, timeout=10), namespace_fd)
    if done.returncode:
        output = (done.stderr or done.stdout).strip().splitlines()[:1]
        raise AtlasError(
            f"this kernel has no netem ({' '.join(output)}): leave kernel shaping off, the forwarder shapes"
        )
