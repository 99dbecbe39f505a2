"""Checkpoints copied to another datacenter over real sockets, and loaded back from what is left."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoint_samples import LAYERS, Faulty, choose_verified, meta_at, numbered, same
from checkpoint_sender import NUM_FILES

from atlas.errors import WorkerError
from atlas.runtime.checkpoint.calls import (
    CALL_LANE,
    MAX_QUEUED_BYTES,
    OWN,
    PIECE_BYTES,
    WINDOW_BYTES,
    copies_of,
    error_reply,
    pack,
    unpack,
)
from atlas.runtime.checkpoint.checkpointer import Checkpointer
from atlas.runtime.checkpoint.client import READ_AHEAD_BYTES, CheckpointClient, RemoteStore, StoreCall, behind
from atlas.runtime.checkpoint.fetch import FetchFolder
from atlas.runtime.checkpoint.load import choose, load_layers
from atlas.runtime.checkpoint.manifest import SaveId, parts_of
from atlas.runtime.checkpoint.replicate import Replicator
from atlas.runtime.checkpoint.server import CheckpointServer
from atlas.runtime.checkpoint.store import LocalStore
from atlas.wan.transport.base import Key, PeerRoute
from atlas.wan.transport.endpoint import Endpoint
from atlas.wan.transport.settings import TransportSettings

PATIENT = TransportSettings(max_streams=2, deadline_s=60.0)
HALF = {"east": LAYERS[:3], "west": LAYERS[3:]}


class Datacenter:
    """A node, its own disk, and its copies of the other datacenter's checkpoints."""

    def __init__(self, root: Path, name: str, other: str, copies: LocalStore | None = None) -> None:
        self.root, self.name, self.other = root / name, name, other
        self.own, self.kept = LocalStore(self.root / OWN), LocalStore(self.root / copies_of(other))
        self.endpoint = Endpoint(f"{name}/w", settings=PATIENT)
        self.server = CheckpointServer(self.endpoint, {OWN: self.own, copies_of(other): copies or self.kept})

    def connect(self, other: Datacenter) -> None:
        peer = f"{self.other}/w"
        self.server.admit({peer: PeerRoute(other.endpoint.address)})
        self.client = CheckpointClient(self.endpoint, peer, PeerRoute(other.endpoint.address), patience_s=60)
        self.replica = RemoteStore(self.client, copies_of(self.name))

    def save(self, step: int, size: int = 1000) -> None:
        checkpointer = Checkpointer(self.own, f"{self.name}.s0", LAYERS)
        checkpointer.save(step, numbered(step, HALF[self.name], size), meta_at(step))
        checkpointer.close()

    def close(self) -> None:
        self.server.close()
        self.endpoint.close(1.0)


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Callable[..., tuple[Datacenter, Datacenter]]]:
    made: list[Datacenter] = []

    def make(copies: LocalStore | None = None) -> tuple[Datacenter, Datacenter]:
        """`copies`: the store in which west keeps east's."""
        made.extend((Datacenter(tmp_path, "east", "west"), Datacenter(tmp_path, "west", "east", copies)))
        made[0].connect(made[1])
        made[1].connect(made[0])
        return made[0], made[1]

    yield make
    for site in made:
        site.close()


Make = Callable[..., tuple[Datacenter, Datacenter]]


def test_a_remote_store_has_the_four_methods_of_a_store(sites: Make) -> None:
    east, west = sites()
    large = os.urandom(3 * WINDOW_BYTES + 17)
    east.replica.write("step-1/a.bin", [large[:100], memoryview(large)[100:]])
    east.replica.write("step-1/empty", [])
    assert (west.root / "of-east/step-1/a.bin").read_bytes() == large
    assert east.replica.names() == ["step-1/a.bin", "step-1/empty"]
    assert east.replica.names("step-1/e") == ["step-1/empty"]
    with east.replica.open("step-1/a.bin") as file:
        assert file.read(5) == large[:5]
        assert file.read() == large[5:]
    with east.replica.open("step-1/empty") as file:
        assert file.read() == b""
    east.replica.write("step-1/a.bin", [b"new"])
    with east.replica.open("step-1/a.bin") as file:
        assert file.read() == b"new"
    east.replica.delete("step-1/a.bin")
    east.replica.delete("step-1/a.bin")
    assert east.replica.names() == ["step-1/empty"]
    with pytest.raises(FileNotFoundError):
        east.replica.open("step-1/a.bin")


def test_a_lost_datacenter_is_loaded_from_the_other(sites: Make, tmp_path: Path) -> None:
    for site in sites():
        site.save(10)
        with Replicator(site.own, site.replica, yield_way=behind(site.endpoint.is_sending)) as replicator:
            assert replicator.wait(60)
        site.save(20)  # not copied when the lights go out
    east, west = LocalStore(tmp_path / "east/own"), LocalStore(tmp_path / "east/of-west")
    shutil.rmtree(tmp_path / "west")
    checkpoint = choose_verified([east, west])
    assert checkpoint is not None
    assert checkpoint.step == 10
    assert same(load_layers(checkpoint, LAYERS), numbered(10))


def test_a_third_place_reads_both_halves_over_the_network(sites: Make) -> None:
    """Whoever takes over the lost datacenter's layers need not be where their copies are."""
    east, west = sites()
    for site in (east, west):
        site.save(10, size=600_000)  # several pieces each
        with Replicator(site.own, site.replica) as replicator:
            assert replicator.wait(60)
    shutil.rmtree(east.root)
    stores = [RemoteStore(east.client, OWN), RemoteStore(east.client, copies_of("east"))]
    checkpoint = choose_verified(stores)
    assert checkpoint is not None
    assert same(load_layers(checkpoint, LAYERS), numbered(10, LAYERS, 600_000))


def test_a_file_is_asked_for_ahead_of_its_reader(sites: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one piece per round trip: 80 ms would limit it to 12 MB/s."""
    east, _ = sites()
    large = os.urandom(READ_AHEAD_BYTES + 3 * PIECE_BYTES + 5)
    east.replica.write("step-1/a", [large])
    asked = list[int]()
    read = RemoteStore.read
    monkeypatch.setattr(RemoteStore, "read", lambda s, name, at, n: asked.append(at) or read(s, name, at, n))  # type: ignore[func-returns-value]
    with east.replica.open("step-1/a") as file:
        assert file.read(1) == large[:1]
        assert asked == list(range(0, READ_AHEAD_BYTES, PIECE_BYTES))
        assert file.read() == large[1:]
        file.seek(len(large) - 7)
        assert file.read() == large[-7:]


def test_a_broken_fetch_continues_where_it_stopped(
    sites: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    east, west = sites()
    west.save(10, size=PIECE_BYTES)  # pieces of float32: 4 MiB a layer
    (store, part) = next(iter(parts_of([RemoteStore(east.client, OWN)], SaveId(0, 10))))
    blob = part.weights[HALF["west"][0]]
    folder, asked = FetchFolder(tmp_path / "fetched"), list[int]()
    read = RemoteStore.read

    def broken(self: RemoteStore, name: str, offset: int, num_bytes: int) -> StoreCall:
        asked.append(offset)
        if offset >= 2 * PIECE_BYTES and len(asked) < 10:
            raise ConnectionError("cut off")
        return read(self, name, offset, num_bytes)

    monkeypatch.setattr("atlas.runtime.checkpoint.client.READ_AHEAD_BYTES", PIECE_BYTES)
    monkeypatch.setattr(RemoteStore, "read", broken)
    with pytest.raises(WorkerError, match="cut off"):
        folder.fetch(part.id, [[(store, blob)]])
    asked[:] = [-1] * 10
    folder = FetchFolder(tmp_path / "fetched")  # the launcher was started again
    folder.fetch(part.id, [[(store, blob)]])
    assert asked[10:] == list(range(2 * PIECE_BYTES, blob.num_bytes, PIECE_BYTES))
    assert (tmp_path / "fetched" / blob.name).read_bytes() == (west.root / OWN / blob.name).read_bytes()
    folder.fetch(SaveId(0, 20), [])
    assert not (tmp_path / "fetched" / blob.name).exists()  # of another save


@pytest.mark.parametrize("victim", ["sender", "server"])
def test_a_kill_in_the_middle_of_a_copy_leaves_nothing_that_counts(tmp_path: Path, victim: str) -> None:
    kept = LocalStore(tmp_path / "of-east")
    endpoint = Endpoint("west/w", settings=PATIENT)
    server = CheckpointServer(endpoint, {copies_of("east"): kept}, idle_s=1.0)
    sender = Path(__file__).with_name("checkpoint_sender.py")
    command = [sys.executable, str(sender), str(endpoint.address[1]), str(tmp_path / "own")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            server.admit({"east/w": PeerRoute(("127.0.0.1", int(process.stdout.readline())))})
            for _ in range(NUM_FILES):
                under_way = process.stdout.readline().split()[1]
            if victim == "sender":
                process.send_signal(signal.SIGKILL)
            else:
                server.close()
        finally:
            process.kill()
    deadline = time.monotonic() + 60
    while list(tmp_path.glob("of-east/**/.*.part")) and time.monotonic() < deadline:
        time.sleep(0.05)
    names = kept.names()
    assert names, "nothing had been copied: the test proves nothing"
    assert under_way not in names
    assert not list(tmp_path.glob("of-east/**/.*.part")), "what was half copied gives its space back"
    server.close()
    endpoint.close()
    assert choose([kept], report=lambda text: None) is None
    for name in names:  # what is there is whole
        assert (tmp_path / "of-east" / name).read_bytes() == (tmp_path / "own" / name).read_bytes()


def test_a_full_remote_disk_is_reported_and_training_continues(sites: Make, tmp_path: Path) -> None:
    told: list[str] = []
    full = True

    def disk(name: str, done: int) -> None:
        if full and done >= PIECE_BYTES:
            raise OSError(errno.ENOSPC, "No space left on device")

    east, _ = sites(Faulty(LocalStore(tmp_path / "small"), disk))
    with Replicator(east.own, east.replica, report=told.append, retry_s=0.05) as replicator:
        checkpointer = Checkpointer(east.own, "east.s0", LAYERS, on_written=replicator.notify)
        for step in (1, 2):  # training's side notices nothing
            checkpointer.save(step, numbered(step, LAYERS, 500_000), meta_at(step))
        checkpointer.close()
        assert not checkpointer.failed
        deadline = time.monotonic() + 60
        while not told and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "failed and is retried: [Errno 28] No space left on device" in told[0]
        assert "west/w" in told[0]
        assert choose([LocalStore(tmp_path / "small")], report=lambda text: None) is None
        full = False
        assert replicator.wait(60)
    checkpoint = choose_verified([LocalStore(tmp_path / "small")])
    assert checkpoint is not None
    assert checkpoint.step == 2


def test_a_node_writes_only_to_the_copies_of_its_own_datacenter(sites: Make) -> None:
    east, west = sites()
    for store in (OWN, copies_of("north")):
        with pytest.raises(OSError, match=r"east/w may not write to store|no store"):
            RemoteStore(east.client, store).write("x", [b"data"])
        with pytest.raises(OSError, match=r"east/w may not write to store|no store"):
            RemoteStore(east.client, store).delete("x")
    with pytest.raises(PermissionError, match="is outside"):
        east.replica.write("../../x", [b"data"])
    with pytest.raises(PermissionError, match="is outside"):
        east.replica.open("../own/secret")
    assert west.own.names() == west.kept.names() == []


def test_a_missing_blob_is_reported_as_missing_also_without_an_error_number() -> None:
    assert error_reply(FileNotFoundError("as obstore raises it"))["errno"] == errno.ENOENT


def test_a_blob_with_another_hash_is_discarded(sites: Make) -> None:
    east, west = sites()
    east.client.call("begin", store=copies_of("east"), name="x", upload=7)
    east.client.call("piece", b"data", upload=7)
    with pytest.raises(OSError, match="another hash"):
        east.client.call("end", upload=7, bytes=4, sha256="0" * 64).wait()
    assert west.kept.names() == []


def test_a_copy_whose_source_fails_does_not_appear(sites: Make) -> None:
    east, west = sites()

    def chunks() -> Iterator[bytes]:
        yield b"first"
        raise RuntimeError("the source is gone")

    with pytest.raises(RuntimeError):
        east.replica.write("x", chunks())
    east.replica.write("y", [b"later calls are served"])
    assert west.kept.names() == ["y"]


def test_a_peer_that_is_gone_is_an_oserror(sites: Make) -> None:
    east, west = sites()
    east.replica.write("x", [b"data"])
    west.close()
    east.client.patience_s = 1.0
    with pytest.raises(ConnectionError):
        east.replica.names()


def test_invalid_calls_are_answered_and_do_no_harm(sites: Make) -> None:
    east, west = sites()
    for verb, arguments in {"sing": {"store": OWN, "name": "x"}, "read": {"store": OWN}, "piece": {}}.items():
        with pytest.raises(OSError, match="Errno 22"):
            east.client.call(verb, **arguments).wait()
    too_much = Key("west/w", CALL_LANE, (next(east.client._calls), 0, 0, 0))
    east.endpoint.send(too_much, bytes(MAX_QUEUED_BYTES + 1)).wait(60)
    east.replica.write("x", [b"data"])
    assert west.kept.names() == ["x"]


@pytest.mark.parametrize("message", [b"", b"\0\0\0", b"\xff\xff\xff\xff{}", b"\0\0\0\2[]", b"\0\0\0\3{x}"])
def test_garbage_is_not_a_call(message: bytes) -> None:
    with pytest.raises(ValueError, match=r"header|Expecting"):
        unpack(memoryview(message))
    assert unpack(memoryview(pack({"verb": "names"}, b"rest"))) == ({"verb": "names"}, b"rest")


def test_copies_wait_for_training_but_not_forever(sites: Make) -> None:
    east, _ = sites()
    began = time.monotonic()
    behind(east.endpoint.is_sending, longest_s=120.0)()
    assert time.monotonic() - began < 60.0, "there is nothing to wait for"
    east.endpoint.open("west/w", 0, ("127.0.0.1", 1))  # no listener: messages stay in the queue
    east.endpoint.send(Key("west/w", 0), b"an activation")
    began = time.monotonic()
    behind(east.endpoint.is_sending, longest_s=0.2)()
    assert time.monotonic() - began >= 0.2
