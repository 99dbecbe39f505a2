"""`python tests/runtime/checkpoint/measure_checkpoints.py [FOLDER] [MB] [DEVICE]`: what a save costs training, and how
fast it is written, read and copied. AdamW state in fp32: three times the parameters.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from atlas.runtime.checkpoint.checkpointer import Checkpointer
from atlas.runtime.checkpoint.client import CheckpointClient, RemoteStore
from atlas.runtime.checkpoint.load import choose, load_layers
from atlas.runtime.checkpoint.manifest import Meta
from atlas.runtime.checkpoint.replicate import Replicator
from atlas.runtime.checkpoint.server import CheckpointServer
from atlas.runtime.checkpoint.state import LayerState
from atlas.runtime.checkpoint.store import BlobStore, LocalStore
from atlas.wan.transport.base import PeerRoute
from atlas.wan.transport.endpoint import Endpoint

NUM_LAYERS, SAVES = 8, 5


def states(num_bytes: int, device: str) -> dict[str, LayerState]:
    size = num_bytes // NUM_LAYERS // 3 // 4
    return {
        str(layer): LayerState(
            {f"{layer}.weight": torch.randn(size, device=device)},
            {
                f"{layer}.weight": {
                    "exp_avg": torch.randn(size, device=device),
                    "exp_avg_sq": torch.randn(size, device=device),
                    "step": torch.tensor(1.0),
                }
            },
        )
        for layer in range(NUM_LAYERS)
    }


def replicate(source: BlobStore, target: BlobStore) -> float:
    """Seconds for a byte."""
    began = time.perf_counter()
    with Replicator(source, target) as replicator:
        replicator.wait()
    return (time.perf_counter() - began) / replicator.num_bytes


def main(root: Path, num_mb: int, device: str) -> None:
    torch.set_num_threads(1)
    num_bytes = num_mb * 10**6
    layers = states(num_bytes, device)
    store, copy = LocalStore(root / "own"), LocalStore(root / "copy")
    checkpointer = Checkpointer(store, "p0.s0", list(layers))
    copies_s, writes_s = [], []
    for step in range(SAVES):
        began = time.perf_counter()
        checkpointer.save(step, layers, Meta(0, 0, 0))
        copied = time.perf_counter()
        checkpointer.wait()
        copies_s.append(copied - began)
        writes_s.append(time.perf_counter() - copied)
    first_s, *copies_s = copies_s
    checkpoint = choose([store])
    assert checkpoint is not None
    began = time.perf_counter()
    load_layers(checkpoint, checkpoint.layers)
    load_s = time.perf_counter() - began
    replicate_s = replicate(store, copy) * num_bytes
    with Endpoint("east/w") as east, Endpoint("west/w") as west:
        server = CheckpointServer(west, {"of-east": LocalStore(root / "of-east")})
        server.admit({"east/w": PeerRoute(east.address)})
        network_s = (
            replicate(store, RemoteStore(CheckpointClient(east, "west/w", PeerRoute(west.address)), "of-east"))
            * num_bytes
        )
        server.close()
    print(f"{num_mb} MB on {device}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {root}")
    for what, seconds in (
        ("pause of the first save", first_s),
        ("pause of later saves, median", statistics.median(copies_s)),
        ("write behind training, median", statistics.median(writes_s)),
        ("load and verify", load_s),
        ("replicate to another folder", replicate_s),
        ("replicate over loopback", network_s),
    ):
        print(f"  {what:32} {seconds * 1e3:8.1f} ms  {num_mb / seconds:8.0f} MB/s")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        main(Path(folder), int((sys.argv[2:3] or ["480"])[0]), (sys.argv[3:4] or ["cpu"])[0])
