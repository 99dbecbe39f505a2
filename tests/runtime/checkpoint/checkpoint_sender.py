"""`python checkpoint_sender.py PORT OWN`: saves a large checkpoint and copies it to the keeper `west/w` at PORT. Says
where it listens, then a word for every file under way. It stops in the middle of the last one, until it is killed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from pathlib import Path

from checkpoint_samples import LAYERS, meta_at, numbered

from atlas.runtime.checkpoint.calls import copies_of
from atlas.runtime.checkpoint.checkpointer import Checkpointer
from atlas.runtime.checkpoint.client import CheckpointClient, RemoteStore
from atlas.runtime.checkpoint.replicate import Replicator
from atlas.runtime.checkpoint.store import Chunk, LocalStore
from atlas.wan.transport.base import PeerRoute
from atlas.wan.transport.endpoint import Endpoint

SIZE = 400_000
NUM_FILES = 4


class Told(RemoteStore):
    """Says so when it is in the middle of a file, and stays in the middle of the last one."""

    num_files = 0

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        def watched() -> Iterable[Chunk]:
            for number, chunk in enumerate(chunks):
                if number == 1:
                    print("sending", name, flush=True)
                    self.num_files += 1
                    if self.num_files == NUM_FILES:
                        threading.Event().wait()
                yield chunk

        super().write(name, watched())


def main(port: int, root: Path) -> None:
    source = LocalStore(root)
    checkpointer = Checkpointer(source, "p0.s0", LAYERS)
    checkpointer.save(1, numbered(1, LAYERS, SIZE), meta_at(1))
    checkpointer.close()
    endpoint = Endpoint("east/w")
    print(endpoint.address[1], flush=True)
    target = Told(CheckpointClient(endpoint, "west/w", PeerRoute(("127.0.0.1", port))), copies_of("east"))
    Replicator(source, target).start()
    threading.Event().wait()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
