"""Writers that are killed and disks that fill up: the latest complete checkpoint always loads and is what was saved."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_samples import LAYERS, choose_verified, meta_at, numbered, same

from atlas.runtime.checkpoint.checkpointer import Checkpointer
from atlas.runtime.checkpoint.load import Checkpoint, load_layers
from atlas.runtime.checkpoint.manifest import SaveId
from atlas.runtime.checkpoint.retention import Retention
from atlas.runtime.checkpoint.store import LocalStore

SIZE = 60_000
RUNS = 10


def check(checkpoint: Checkpoint | None, size: int) -> None:
    assert checkpoint is not None
    assert checkpoint.meta == meta_at(checkpoint.step)
    assert same(load_layers(checkpoint, LAYERS), numbered(checkpoint.step, LAYERS, size))


def test_writers_killed_at_any_moment_leave_complete_checkpoints(tmp_path: Path) -> None:
    killer = Path(__file__).with_name("checkpoint_killer.py")
    command = [sys.executable, str(killer), str(tmp_path), "1", str(RUNS)]
    stores = [LocalStore(tmp_path / name) for name in ("east", "west")]
    survivors = [LocalStore(tmp_path / name) for name in ("east", "of-west")]
    told, torn, replicated = SaveId(-1, 0), 0, None
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        for line in process.stdout:
            if line != "killed\n":
                told = SaveId(*map(int, line.split()))
                continue
            newest = choose_verified(stores)
            check(newest, SIZE)
            assert newest is not None
            assert newest.id >= told, "what was said to be written is there"
            replicated = choose_verified(survivors)
            if replicated is not None:
                check(replicated, SIZE)
            torn += any(path.name.startswith(".") for path in tmp_path.rglob("*"))
            process.stdin.write("\n")
            process.stdin.flush()
    assert process.returncode == 0
    assert told.attempt >= 1
    assert replicated is not None
    assert torn, "no kill came while something was written: the test proves nothing"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Of one MiB, where we may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if mount.returncode:
        pytest.skip("a small disk needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_keeps_its_checkpoints(small_disk: Path) -> None:
    told: list[str] = []
    store = LocalStore(small_disk)
    checkpointer = Checkpointer(store, "w", LAYERS, retention=Retention(keep=9), report=told.append)
    for step in range(1, 5):  # 0.3 MB each: the last does not fit
        checkpointer.save(step, numbered(step, LAYERS, 6000), meta_at(step))
        checkpointer.wait()
    assert [id.step for id in checkpointer.failed] == [4]
    assert "No space left on device" in told[0]
    check(choose_verified([store]), 6000)
    (small_disk / "step-00000001-a0" / "w.part.json").unlink()
    for path in (small_disk / "step-00000001-a0").iterdir():
        path.unlink()
    checkpointer.save(5, numbered(5, LAYERS, 6000), meta_at(5))
    checkpointer.close()
    newest = choose_verified([store])
    assert newest is not None
    assert newest.step == 5
    check(newest, 6000)
