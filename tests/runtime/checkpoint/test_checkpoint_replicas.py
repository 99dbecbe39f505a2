"""Replicas: a datacenter that is lost with its disks is resumed from what the others hold of it."""

from __future__ import annotations

import errno
import shutil
import time
from pathlib import Path

import pytest
from checkpoint_samples import LAYERS, Faulty, choose_verified, meta_at, numbered, same

from atlas.runtime.checkpoint.checkpointer import Checkpointer
from atlas.runtime.checkpoint.copied_parts import forget_targets, read_records
from atlas.runtime.checkpoint.load import choose, load_layers
from atlas.runtime.checkpoint.manifest import SaveId, complete_ids
from atlas.runtime.checkpoint.replicate import Replicator
from atlas.runtime.checkpoint.retention import Retention
from atlas.runtime.checkpoint.store import LocalStore

DCS = {"east": LAYERS[:2], "west": LAYERS[2:4], "north": LAYERS[4:]}
PARTNER = {"east": "west", "west": "north", "north": "east"}


def own(root: Path, dc: str) -> LocalStore:
    return LocalStore(root / dc / "own")


def replica(root: Path, dc: str) -> LocalStore:
    """Of `dc`, on its partner's disks."""
    return LocalStore(root / PARTNER[dc] / f"of-{dc}")


def save(root: Path, dc: str, *steps: int, keep: int = 10) -> Checkpointer:
    checkpointer = Checkpointer(own(root, dc), f"{dc}.s0", LAYERS, retention=Retention(keep))
    for step in steps:
        checkpointer.save(step, numbered(step, DCS[dc]), meta_at(step))
    checkpointer.close()
    return checkpointer


@pytest.mark.parametrize("lost", list(DCS))
def test_a_lost_datacenter_is_resumed_from_the_last_replicated_checkpoint(tmp_path: Path, lost: str) -> None:
    for dc in DCS:
        save(tmp_path, dc, 10, 20)
        with Replicator(own(tmp_path, dc), replica(tmp_path, dc)) as replicator:
            assert replicator.wait(60)
        save(tmp_path, dc, 30)  # not yet copied when the lights go out
    everything = [store(tmp_path, dc) for dc in DCS for store in (own, replica)]
    newest = choose(everything)
    assert newest is not None
    assert newest.step == 30
    shutil.rmtree(tmp_path / lost)
    left = choose_verified(everything)
    assert left is not None
    assert (left.step, left.meta) == (20, meta_at(20))
    assert same(load_layers(left, LAYERS), numbered(20))


def test_parts_are_copied_as_they_are_written(tmp_path: Path) -> None:
    with Replicator(own(tmp_path, "east"), replica(tmp_path, "east")) as replicator:
        checkpointer = Checkpointer(own(tmp_path, "east"), "east.s0", LAYERS, on_written=replicator.notify)
        for step in (1, 2, 3):
            checkpointer.save(step, numbered(step, DCS["east"]), meta_at(step))
        checkpointer.close()
        assert replicator.wait(60)
    (record,) = read_records(own(tmp_path, "east"))
    assert record.target == str(replica(tmp_path, "east"))
    assert record.parts == tuple(f"step-0000000{step}-a0/east.s0.part.json" for step in (1, 2, 3))
    there = replica(tmp_path, "east")
    assert there.names("step-") == own(tmp_path, "east").names("step-")


def test_a_half_copied_part_does_not_appear_and_is_finished_later(tmp_path: Path) -> None:
    save(tmp_path, "east", 1)
    asked = list[int]()

    def hold() -> None:
        """The second piece, until it is stopped."""
        asked.append(1)
        if len(asked) > 1:
            slow._stop.wait(60)

    slow = Replicator(own(tmp_path, "east"), replica(tmp_path, "east"), yield_way=hold)
    slow.start()
    deadline = time.monotonic() + 60
    while not replica(tmp_path, "east").names() and time.monotonic() < deadline:
        time.sleep(0.01)
    slow.close()
    there = replica(tmp_path, "east").names()
    assert there
    assert not any(name.endswith(".part.json") for name in there)
    assert not slow.wait(0)
    with Replicator(own(tmp_path, "east"), replica(tmp_path, "east")) as again:
        assert again.wait(60)
    assert "step-00000001-a0/east.s0.part.json" in replica(tmp_path, "east").names()


def test_every_piece_of_a_copy_yields_to_training_first(tmp_path: Path) -> None:
    save(tmp_path, "east", *range(1, 6))
    asked = []
    with Replicator(own(tmp_path, "east"), replica(tmp_path, "east"), yield_way=lambda: asked.append(1)) as replicator:
        assert replicator.wait(60)
    assert replicator.num_bytes > 80_000
    assert len(asked) == 5 * 4


def test_saves_that_are_not_copied_yet_are_not_deleted(tmp_path: Path) -> None:
    """A slow copy holds old checkpoints back, so that all datacenters get the same ones across."""
    source, target = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    stuck = Replicator(source, target, yield_way=lambda: stuck._stop.wait(60) and None)
    stuck.start()
    checkpointer = Checkpointer(source, "w", LAYERS, retention=Retention(keep=1))
    for step in (1, 2, 3):
        checkpointer.save(step, numbered(step), meta_at(step))
    checkpointer.wait()
    assert [id.step for id in complete_ids([source])] == [1, 2, 3]
    stuck.close()
    with Replicator(source, target) as replicator:
        assert replicator.wait(60)
    checkpointer.save(4, numbered(4), meta_at(4))
    checkpointer.close()
    assert [id.step for id in complete_ids([source])] == [4]


def test_a_forgotten_target_keeps_no_saves(tmp_path: Path) -> None:
    """A datacenter that was lost; the copies of others, and those to where they go now, are waited for."""
    source, lost, now = (LocalStore(tmp_path / name) for name in ("a", "lost", "now"))
    for writer, target in (("w", lost), ("w", now), ("other", lost)):
        stuck = Replicator(source, target, writer=writer)
        stuck.start()
        stuck.close()
    forget_targets(source, "w", but=str(now))
    left = {(record.writer, record.target) for record in read_records(source)}
    assert left == {("w", str(now)), ("other", str(lost))}
    forget_targets(source, "w")
    checkpointer = Checkpointer(source, "w", LAYERS, retention=Retention(keep=1))
    for step in (1, 2, 3):
        checkpointer.save(step, numbered(step), meta_at(step))
    checkpointer.close()
    assert [id.step for id in complete_ids([source])] == [3]


def test_the_target_keeps_saves_that_all_have_copied(tmp_path: Path) -> None:
    retention = Retention(keep=1)
    with Replicator(own(tmp_path, "east"), replica(tmp_path, "east"), retention=retention) as replicator:
        save(tmp_path, "east", 1, 2, 3)
        replicator.notify()
        assert replicator.wait(60)
        names = replica(tmp_path, "east").names("step-")
        assert {name[:16] for name in names} == {"step-00000001-a0", "step-00000002-a0", "step-00000003-a0"}
        retention.confirm(SaveId(0, 2))
        replicator.notify()
        assert replicator.wait(60)
        names = replica(tmp_path, "east").names("step-")
        assert {name[:16] for name in names} == {"step-00000002-a0", "step-00000003-a0"}


def test_a_target_out_of_reach_is_reported_and_retried(tmp_path: Path) -> None:
    told: list[str] = []
    down = True

    def wire(name: str, done: int) -> None:
        if down:
            raise OSError(errno.EHOSTUNREACH, "No route to host")

    save(tmp_path, "east", 1)
    target = Faulty(replica(tmp_path, "east"), wire)
    with Replicator(own(tmp_path, "east"), target, report=told.append, retry_s=0.02) as replicator:
        deadline = time.monotonic() + 60
        while not told and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not replicator.wait(0)
        assert "failed and is retried: [Errno 113] No route to host" in told[0]
        down = False
        assert replicator.wait(60)
    assert target.names("step-") == own(tmp_path, "east").names("step-")


def test_a_damaged_part_is_not_spread_and_holds_up_nothing(tmp_path: Path) -> None:
    told: list[str] = []
    save(tmp_path, "east", 1, 2)
    (tmp_path / "east/own/step-00000001-a0/east.s0.0.weights.safetensors").write_bytes(b"rot")
    with Replicator(own(tmp_path, "east"), replica(tmp_path, "east"), report=told.append) as replicator:
        assert replicator.wait(60)
    parts = [name for name in replica(tmp_path, "east").names() if name.endswith("part.json")]
    assert parts == ["step-00000002-a0/east.s0.part.json"]
    assert len(told) == 1
    assert "east.s0.0.weights.safetensors: damaged" in told[0]


def test_a_damaged_file_gives_way_to_its_replica(tmp_path: Path) -> None:
    source, target = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    checkpointer = Checkpointer(source, "w", LAYERS)
    checkpointer.save(1, numbered(1), meta_at(1))
    checkpointer.close()
    with Replicator(source, target) as replicator:
        assert replicator.wait(60)
    (tmp_path / "a/step-00000001-a0/w.3.weights.safetensors").write_bytes(b"rot")
    told: list[str] = []
    checkpoint = choose_verified([source, target])
    assert checkpoint is not None
    assert same(load_layers(checkpoint, LAYERS, report=told.append), numbered(1))
    assert "w.3.weights.safetensors: damaged" in told[0]
    assert told[0].endswith(f"Its replica in {target} is used instead")
