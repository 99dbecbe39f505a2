"""`python checkpoint_killer.py ROOT SEED RUNS`: starts a process that saves step after step, kills it with SIGKILL at a
random moment (the last one while it writes a file), prints a line, and continues when it reads one. Torch is loaded
once; the writers are forks, made before any thread exists.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from itertools import count
from pathlib import Path

from checkpoint_samples import LAYERS, meta_at, numbered

from atlas.runtime.checkpoint.checkpointer import Checkpointer
from atlas.runtime.checkpoint.manifest import next_attempt
from atlas.runtime.checkpoint.replicate import Replicator
from atlas.runtime.checkpoint.retention import Retention
from atlas.runtime.checkpoint.store import LocalStore

SIZE = 60_000


def write_forever(root: Path, bell: int) -> None:
    """Two datacenters' workers in one process; the second's replica lies with the first."""
    stores = [LocalStore(root / dc) for dc in ("east", "west")]
    attempt = next_attempt(stores)
    replicator = Replicator(stores[1], LocalStore(root / "of-west"))
    replicator.start()
    writers = [
        Checkpointer(store, f"p0.s{s}", LAYERS, attempt=attempt, retention=Retention(keep=2), on_written=notify)
        for s, (store, notify) in enumerate(zip(stores, (lambda id: None, replicator.notify), strict=True))
    ]
    for step in count(1):
        for s, writer in enumerate(writers):
            writer.save(step, numbered(step, LAYERS[3 * s : 3 * s + 3], SIZE), meta_at(step))
        for writer in writers:
            writer.wait()
            assert writer.written is not None
            assert writer.written.step == step, writer.failed
            writer.retention.confirm(writer.written)
        # One system call: with PYTHONUNBUFFERED, print would make several, and a kill could come between them.
        os.write(sys.stdout.fileno(), f"{attempt} {step}\n".encode())
        os.write(bell, b".")


def stop_while_writing(child: int, root: Path) -> None:
    """Stops the child at a moment at which a file is half-written, however busy the host is."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        if any(path.name.startswith(".") for path in root.rglob("*")):
            return
        os.kill(child, signal.SIGCONT)
        time.sleep(0.001)


def main(root: Path, seed: int, runs: int) -> None:
    chance = random.Random(seed)
    save_s = 0.0
    for run in range(runs):
        ear, bell = os.pipe()
        began = time.monotonic()
        child = os.fork()
        if not child:
            write_forever(root, bell)
        os.close(bell)
        if run < 2:  # there is something to lose, of two attempts, and we know how long a save takes here
            os.read(ear, 1)
            save_s = time.monotonic() - began
        time.sleep(chance.uniform(0, 2 * save_s))
        if run == runs - 1:
            stop_while_writing(child, root)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ear)
        print("killed", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
