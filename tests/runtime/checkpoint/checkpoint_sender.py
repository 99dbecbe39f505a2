"""`python checkpoint_sender.py PORT OWN`: saves a large checkpoint and copies it to the keeper `west/w` at PORT, on
and on, until somebody kills it. Says where it listens, then a word for every file under way.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from checkpoint_samples import LAYERS, meta_at, numbered

from atlas.runtime.checkpoint import CheckpointClient, Checkpointer, LocalStore, RemoteStore, Replicator, copies_of
from atlas.runtime.checkpoint.store import Chunk
from atlas.wan.transport.base import PeerRoute
from atlas.wan.transport.endpoint import Endpoint

SIZE = 400_000


class Told(RemoteStore):
    """Says so when it is in the middle of a file."""

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        def watched() -> Iterable[Chunk]:
            for number, chunk in enumerate(chunks):
                if number == 1:
                    print("sending", name, flush=True)
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
    Replicator(source, target, yield_way=lambda: time.sleep(0.1)).start()
    threading.Event().wait()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
