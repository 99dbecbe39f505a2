"""Keys and values over the wire: whole, checked, only to who holds the token, and gone when released."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from prefill_samples import LLAMA

from atlas.errors import AtlasError, WorkerError
from atlas.wan.security.certs import make_ca, make_node
from atlas.wan.security.credentials import Credentials, Security
from bubbletea.frames import PROOF, WireFrame, greet, pack, receive, send
from bubbletea.handoff.fetch import EngineIdentity, Fetcher
from bubbletea.handoff.kv_store import KvStore
from bubbletea.handoff.remote_parts import RemotePart, Ticket
from bubbletea.kv_blocks import FETCH, KV, KvBlock, bytes_of, pack_block, unpack_block
from bubbletea.kv_server import KvHolder, KvServer, KvServerThread, WantedBlocks, own_address
from bubbletea.prefill.kept_parts import KeptParts
from bubbletea.prefill.messages import LOGITS
from bubbletea.prefill.shard import Served

SERVED = Served(LLAMA)
T = TypeVar("T")


WANTED = {"ticket": "t1", "start": 0, "stop": 40}
CALLER = EngineIdentity("secret")


def filled(ticket: str = "t1", length: int = 40) -> KeptParts:
    """The layers 0 to 3 of one prompt, in two pieces."""
    kept = KeptParts()
    kept.budget_bytes = 1 << 24
    assert kept.open(ticket, (1, 0), length, range(4), 4 * length * SERVED.kv_bytes_per_layer_token)
    for layer in range(4):
        for start, stop in ((0, 32), (32, length)):
            kept.put((1, 0), KvBlock(ticket, SERVED.id, layer, start, stop, torch.randn(2, 2, stop - start, 16)))
    return kept


def ticket_at(address: tuple[str, int]) -> Ticket:
    return Ticket("t1", *address, SERVED.id, 40, (RemotePart(*address, 0, 4),))


def with_door(holder: KvHolder, talk: Callable[[KvServer], T]) -> T:
    """`talk` on a thread of its own, as a decode engine would be a process of its own."""

    async def main() -> T:
        kv_server = KvServer(holder, "secret")
        await kv_server.start("127.0.0.1", 0)
        try:
            return await asyncio.to_thread(talk, kv_server)
        finally:
            await kv_server.close()

    return asyncio.run(main())


def test_a_decode_engine_fetches_the_kept_blocks() -> None:
    kept = filled()
    pieces = kept.blocks(WantedBlocks("t1", 0, 40, ()))

    def talk(kv_server: KvServer) -> None:
        ticket = ticket_at(kv_server.address)
        with Fetcher(*kv_server.address, CALLER) as fetcher:
            blocks = list(fetcher.fetch(ticket))
            some = list(fetcher.fetch(ticket, 16, 32, [2], (1, 2)))
            fetcher.release(ticket)
            with pytest.raises(WorkerError, match="nothing under this ticket"):
                list(fetcher.fetch(ticket))
        assert [(b.layer, b.start, b.stop) for b in blocks] == [(i, *s) for i in range(4) for s in ((0, 32), (32, 40))]
        assert all(torch.equal(b.kv, piece.kv) for b, piece in zip(blocks, pieces, strict=True))
        assert [(b.layer, b.start, b.stop) for b in some] == [(2, 0, 32)], "whole pieces: no byte is hashed again"
        assert torch.equal(some[0].kv, pieces[4].kv[:, 1:2])

    with_door(kept, talk)
    assert kept.used_bytes == 0


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"layers": [3, 4]}, "layer 4 is not here: this worker has layers 0 to 3"),
        ({"heads": [1, 3]}, "heads 1 to 2 are not here: a layer has heads 0 to 1"),
        ({"ticket": "t2"}, "nothing under this ticket"),
    ],
)
def test_what_a_worker_does_not_have_is_refused_with_the_reason(asked: dict[str, object], said: str) -> None:
    with pytest.raises(LookupError, match=said):
        filled().blocks(WantedBlocks.of(WANTED | asked))


def test_a_part_ends_with_its_lease_and_an_incomplete_one_is_not_sent() -> None:
    kept = filled()
    kept.lease((1, 0), 60.0)
    kept.lose_service()
    assert len(kept.blocks(WantedBlocks.of(WANTED))) == 8, "a lease outlives its service"
    kept.cancel((1, 0))
    assert len(kept) == 1, "another service counts its jobs from 1 too"
    kept = filled()
    kept.lease((1, 0), -1.0)
    with pytest.raises(LookupError, match="has expired"):
        kept.blocks(WantedBlocks.of(WANTED))
    kept.drop_expired()
    assert kept.used_bytes == 0
    assert kept.open("t1", (2, 0), 40, range(4), 1)
    kept.put((1, 0), KvBlock("t1", SERVED.id, 0, 0, 40, torch.zeros(2, 2, 40, 16)))
    with pytest.raises(LookupError, match="not complete"):
        kept.blocks(WantedBlocks.of(WANTED))
    kept.lose_service()
    assert len(kept) == 0, "without a lease it goes with its service"


def test_parts_stay_within_their_budget() -> None:
    kept = KeptParts()
    kept.budget_bytes = 100
    assert kept.open("a", (1, 0), 8, range(4), 60)
    assert not kept.open("b", (2, 0), 8, range(4), 41)
    kept.lease((1, 0), 60.0)
    assert kept.open("b", (2, 0), 8, range(4), 41), "a lease that the service does not count ends early"
    assert kept.used_bytes == 41


def test_with_certificates_a_part_is_fetched_over_mutual_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_ca(tmp_path)
    for datacenter in ("east", "west"):
        make_node(tmp_path, datacenter)
    server = KvServer(filled(), "secret", Security(Credentials.of_folder(tmp_path, "east/p0.s0"), ()).server_context)
    thread = KvServerThread(server, "127.0.0.1")
    try:
        ticket = ticket_at(thread.address)
        with Fetcher(*thread.address, EngineIdentity("secret", str(tmp_path), "east/vllm"), "east/p0.s0") as fetcher:
            assert len(list(fetcher.fetch(ticket))) == 8
        with pytest.raises(WorkerError, match="its certificate is for east"):
            Fetcher(*thread.address, EngineIdentity("secret", str(tmp_path), "east/vllm"), "west/p0.s0")
        with pytest.raises(WorkerError, match="name their folder in `certs`"):
            Fetcher(*thread.address, CALLER, "east/p0.s0")
        monkeypatch.setattr("bubbletea.frames.GREETING_S", 0.2)  # neither side says a word first
        with pytest.raises((OSError, WorkerError)):
            Fetcher(*thread.address, CALLER)
    finally:
        thread.close()


def test_callers_without_the_token_get_nothing() -> None:
    def talk(kv_server: KvServer) -> None:
        with pytest.raises(WorkerError, match="the service has another token: give both sides the same"):
            Fetcher(*kv_server.address, EngineIdentity("guess"))

    with_door(filled(), talk)
    assert Ticket.of({"do_remote_prefill": True, "remote_engine_id": "other"}) is None


@pytest.mark.parametrize("said", [{"proof": "\u00e9"}, {"proof": "\ud800", "nonce": "\ud800"}, {"proof": [1]}, {}])
def test_invalid_proofs_are_refused_and_the_server_keeps_running(said: dict[str, object]) -> None:
    def talk(kv_server: KvServer) -> None:
        with socket.create_connection(kv_server.address, 60) as sock:
            receive(sock)
            send(sock, PROOF, said)
            assert receive(sock).fields == {}, "no proof of the server's"
            assert sock.recv(1) == b""
        with Fetcher(*kv_server.address, CALLER) as fetcher:
            assert len(list(fetcher.fetch(ticket_at(kv_server.address)))) == 8

    with_door(filled(), talk)


def frame(kind: int, num_payload: int, text: bytes) -> bytes:
    """As a caller may write it who keeps to no rule of ours."""
    head = struct.pack("!4sBHQI", b"BTF3", kind, len(text), num_payload, zlib.crc32(text))
    return head + struct.pack("!I", zlib.crc32(head)) + text


@pytest.mark.parametrize(
    "said",
    [
        frame(PROOF, 1 << 30, b"{}"),
        frame(PROOF, 0, b"[" * 60_000),
        frame(PROOF, 0, b"[" * 4000),
        b"GET / HTTP/1.1\r\n" * 9,
    ],
    ids=["1 GiB", "60,000 brackets", "4,000 brackets", "HTTP"],
)
def test_before_authentication_only_small_frames_are_read(said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    def talk(kv_server: KvServer) -> None:
        with socket.create_connection(kv_server.address, 60) as sock:
            receive(sock)
            with contextlib.suppress(ConnectionError):
                sock.sendall(said)
                assert sock.recv(1) == b"", "closed at once: nothing of the payload was sent"

    with_door(KvStore(SERVED, 1 << 24), talk)
    assert [record.levelname for record in caplog.records] == ["WARNING"], "one line, no traceback"


@pytest.mark.parametrize(
    "fields", [b"[" * 60_000, b'{"ticket": "t", "stop": 1e999}', b'{"ticket": "t", "stop": 1, "layers": 5}']
)
def test_after_authentication_invalid_frames_end_the_connection(
    fields: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    def talk(kv_server: KvServer) -> None:
        with socket.create_connection(kv_server.address, 60) as sock:
            greet(sock, "secret", {})
            sock.sendall(frame(FETCH, 0, fields))
            with contextlib.suppress(ConnectionError):
                assert sock.recv(1) == b""

    with_door(filled(), talk)
    assert [record.levelname for record in caplog.records] == ["WARNING"], "one line, no traceback"


def test_a_kv_server_beyond_loopback_needs_certificates() -> None:
    kv_server = KvServer(KvStore(SERVED, 0), "secret")
    with pytest.raises(AtlasError, match="need certificates"):
        asyncio.run(kv_server.start("0.0.0.0", 0))


def test_a_kv_server_on_all_addresses_reports_one_that_can_be_reached() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert own_address("0.0.0.0") not in ("0.0.0.0", "")


def test_a_damaged_block_is_an_error() -> None:
    fields, payload = pack_block(KvBlock("t", SERVED.id, 0, 0, 3, torch.randn(2, 2, 3, 16)))
    good = unpack_block(WireFrame(KV, fields, bytes(payload)), model=SERVED.id)
    assert bytes_of(good.kv) == payload
    spoilt = bytearray(payload)
    spoilt[17] ^= 1
    with pytest.raises(WorkerError, match="damaged"):
        unpack_block(WireFrame(KV, fields, spoilt))
    with pytest.raises(WorkerError, match="same model"):
        unpack_block(WireFrame(KV, fields, payload), model="other")
    for change in ({"v": 1}, {"shape": [2, 2, 4, 16]}, {"dtype": "int8"}, {"layer": -1}, {"stop": "x"}, {"shape": 3}):
        with pytest.raises(WorkerError):
            unpack_block(WireFrame(KV, fields | change, payload))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_dtype_can_be_sent(dtype: torch.dtype) -> None:
    kv = torch.randn(2, 2, 5, 16).to(dtype)
    fields, payload = pack_block(KvBlock("t", "m", 1, 2, 7, kv))
    assert torch.equal(unpack_block(WireFrame(KV, fields, bytearray(payload))).kv, kv)


def test_the_store_stays_within_its_budget() -> None:
    store = KvStore(SERVED, 100 * 4 * 2 * 2 * 16 * 4)
    assert store.reserve("a", 60, 60) is not None
    assert store.reserve("b", 41, 41) is None
    assert store.reserve("b", 40, 40) is not None
    store.release("a")
    store.keep("b", -1.0)
    store.drop_expired()
    assert (store.used_bytes, len(store)) == (0, 0)


def test_the_store_predicts_when_memory_is_free() -> None:
    store = KvStore(SERVED, 100 * 4 * 2 * 2 * 16 * 4)
    for ticket, expected_s in (("a", 7.0), ("b", 3.0), ("c", 5.0)):
        parcel = store.reserve(ticket, 30, 30)
        assert parcel is not None
        parcel.expected_s = expected_s
    assert [store.room_at_s(num) for num in (11, 40, 41, 70, 71, 100)] == [3.0, 3.0, 5.0, 5.0, 7.0, 7.0]
    parcel.expires_s, parcel.expected_s = 4.0, math.inf
    assert store.room_at_s(41) == 4.0
    parcel.expires_s = math.inf
    assert store.room_at_s(100) == math.inf


def test_no_tenant_can_use_all_of_the_store() -> None:
    """A quarter is divided by weight: 5 tokens for each of four, 5 + 5 for the one who counts twice."""
    store = KvStore(SERVED, 100 * 4 * 2 * 2 * 16 * 4, {"a": 1.0, "b": 1.0, "c": 2.0, "d": 1.0})
    taken = sum(store.reserve(f"a{n}", 1, 1, "a") is not None for n in range(200))
    assert taken == 80, "all but what is set aside for the others"
    assert store.room_at_s(1, "a") == math.inf
    for tenant, share in (("b", 5), ("c", 10), ("d", 5)):
        assert sum(store.reserve(f"{tenant}{n}", 1, 1, tenant) is not None for n in range(50)) == share
    assert store.used_bytes == store.budget_bytes
    store.find("a3").expected_s = 7.0  # type: ignore[union-attr]
    assert store.room_at_s(1, "b") == store.room_at_s(1, "a") == 7.0
    store.release("b0")
    assert not store.has_room(1, "a"), "that is b's again"
    assert store.has_room(1, "b")
    assert store.limit_bytes("a") == store.bytes_of(80)


def test_one_tenant_alone_may_use_all_of_the_store() -> None:
    for weights in (None, {"a": 2.0}):
        store = KvStore(SERVED, 100 * 4 * 2 * 2 * 16 * 4, weights)
        assert store.reserve("t", 100, 100, "a") is not None


def test_a_parcel_with_a_hole_is_not_complete() -> None:
    store = KvStore(SERVED, 1 << 24)
    parcel = store.reserve("t", 40, 40)
    assert parcel is not None
    for layer in range(4):
        parcel.put(KvBlock("t", SERVED.id, layer, 0, 16, torch.zeros(2, 2, 16, 16)))
        parcel.put(KvBlock("t", SERVED.id, layer, 24, 40, torch.zeros(2, 2, 16, 16)))
    assert parcel.num_complete == 16
    with pytest.raises(WorkerError, match="outside its prompt of 40 tokens and 4 layers"):
        parcel.put(KvBlock("t", SERVED.id, 4, 0, 16, torch.zeros(2, 2, 16, 16)))


@pytest.mark.parametrize("at", [3, 4, 7, 20, 25, 60, 101])
def test_a_frame_with_a_flipped_bit_is_an_error(at: int) -> None:
    """In its magic, kind, sizes, checksum, fields or payload."""
    here, there = socket.socketpair()
    payload = b"y" * 64
    data = bytearray(pack(LOGITS, {"job": 1, "attempt": 0}, payload) + payload)
    data[at] ^= 4
    here.sendall(data)
    here.close()
    with there, pytest.raises(WorkerError):
        receive(there)


def test_frames_are_bounded(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="larger than the receiver accepts"):
        pack(1, {"x": "a" * 70_000})
