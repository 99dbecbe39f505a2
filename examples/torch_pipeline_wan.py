"""Run `examples/torch_pipeline.py` unchanged between two emulated datacenters: each rank in a network namespace, with
real TCP over a path with a delay, a window limit and a rate limit; first with Gloo, then with `atlas`. Needs root.

    python examples/torch_pipeline_wan.py --latency-ms 20 --pair-mbps 400 --window-kb 500
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from atlas.errors import AtlasError
from atlas.wan.emulator.namespace_net import NamespaceNet
from atlas.wan.emulator.netdev import DEVICE
from atlas.wan.emulator.paths import PathSpec

SCRIPT = Path(__file__).with_name("torch_pipeline.py")
NODES = ("east-0", "west-0")


def run(backend: str, path: PathSpec, words: list[str], timeout_s: float) -> float:
    """Print the output of the last rank; returns its median iteration time in ms."""
    with NamespaceNet({NODES: path}) as net:
        ranks = []
        for rank, node in enumerate(NODES):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(len(NODES)),
                "MASTER_ADDR": net.address(NODES[0]),
                "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": DEVICE,
                "ATLAS_NODE": node.replace("-", "/"),
                "ATLAS_HOST": net.address(node),
                "ATLAS_TRUSTED_NETWORKS": "10.99.0.0/16",  # emulated; between real sites: ATLAS_CERTS
            }
            command = [sys.executable, str(SCRIPT), "--backend", backend, *words]
            ranks.append(net.node(node).popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        said, _ = ranks[-1].communicate(timeout=timeout_s)
        if ranks[-1].returncode or ranks[0].wait(timeout_s):
            raise AtlasError(f"{backend}: a rank failed; its last words are above")
    print(said, end="", flush=True)
    return float(re.search(r"median iteration ([\d.]+) ms", said)[1])  # type: ignore[index]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency-ms", type=float, default=20.0, help="one way")
    parser.add_argument("--pair-mbps", type=float, default=400.0, help="what the path carries")
    parser.add_argument("--window-kb", type=int, default=500, help="what one connection has in flight")
    parser.add_argument("--timeout-s", type=float, default=120.0)
    args, words = parser.parse_known_args()
    path = PathSpec(args.latency_ms / 1e3, window_bytes=args.window_kb * 1000, pair_bps=args.pair_mbps * 1e6)
    try:
        gloo, atlas = (run(backend, path, words, args.timeout_s) for backend in ("gloo", "atlas"))
    except AtlasError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"the same script over atlas: {gloo / atlas:.1f} times as fast")
    return 0


if __name__ == "__main__":
    sys.exit(main())
