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
from bubbletea.frames import PROOF, WireFrame, greet, pack, receive, send
from bubbletea.handoff.fetch import Fetcher, Ticket
from bubbletea.handoff.kv_server import KvServer, own_address
from bubbletea.handoff.kv_store import KvStore, Parcel
from bubbletea.kv_blocks import FETCH, KV, KvBlock, bytes_of, pack_block, unpack_block
from bubbletea.prefill.shard import Served

SERVED = Served(LLAMA)
T = TypeVar("T")


def filled(store: KvStore, ticket: str = "t1", length: int = 40) -> Parcel:
    parcel = store.reserve(ticket, length, length + 8)
    assert parcel is not None
    for layer in range(4):
        for start, stop in ((0, 32), (32, length)):
            parcel.put(KvBlock(ticket, SERVED.id, layer, start, stop, torch.randn(2, 2, stop - start, 16)))
    return parcel


def with_door(store: KvStore, talk: Callable[[KvServer], T]) -> T:
    """`talk` on a thread of its own, as a decode engine would be a process of its own."""

    async def main() -> T:
        kv_server = KvServer(store, "secret")
        await kv_server.start("127.0.0.1", 0)
        try:
            return await asyncio.to_thread(talk, kv_server)
        finally:
            await kv_server.close()

    return asyncio.run(main())


def test_a_decode_engine_fetches_the_stored_blocks() -> None:
    store = KvStore(SERVED, 1 << 24)
    parcel = filled(store)
    assert parcel.is_complete

    def talk(kv_server: KvServer) -> None:
        ticket = Ticket.of(kv_server.params(parcel))
        assert ticket is not None
        with Fetcher(ticket.host, ticket.port, "secret") as fetcher:
            blocks = list(fetcher.fetch(ticket))
            some = list(fetcher.fetch(ticket, 16, 32, [2]))
            fetcher.release(ticket)
            with pytest.raises(WorkerError, match="nothing under this ticket"):
                list(fetcher.fetch(ticket))
        assert [(b.layer, b.start, b.stop) for b in blocks] == [(i, 0, 40) for i in range(4)]
        assert all(torch.equal(b.kv, parcel.slabs[b.layer][:, :, :40]) for b in blocks)
        assert [(b.layer, b.start, b.stop) for b in some] == [(2, 16, 32)]
        assert torch.equal(some[0].kv, parcel.slabs[2][:, :, 16:32])

    with_door(store, talk)
    assert store.used_bytes == 0


def test_callers_without_the_token_get_nothing() -> None:
    store = KvStore(SERVED, 1 << 24)
    parcel = filled(store)

    def talk(kv_server: KvServer) -> None:
        with pytest.raises(WorkerError):
            Fetcher(*kv_server.address, "guess")
        assert Ticket.of(kv_server.params(parcel) | {"remote_engine_id": "other"}) is None

    with_door(store, talk)


@pytest.mark.parametrize("said", [{"proof": "\u00e9"}, {"proof": "\ud800", "nonce": "\ud800"}, {"proof": [1]}, {}])
def test_invalid_proofs_are_refused_and_the_server_keeps_running(said: dict[str, object]) -> None:
    store = KvStore(SERVED, 1 << 24)
    parcel = filled(store)

    def talk(kv_server: KvServer) -> None:
        with socket.create_connection(kv_server.address, 5) as sock:
            receive(sock)
            send(sock, PROOF, said)
            assert sock.recv(1) == b""
        ticket = Ticket.of(kv_server.params(parcel))
        assert ticket is not None
        with Fetcher(*kv_server.address, "secret") as fetcher:
            assert len(list(fetcher.fetch(ticket))) == 4

    with_door(store, talk)


HEAD = struct.Struct("!4sBHQI")


def frame(num_payload: int, text: bytes) -> bytes:
    """As a caller may write it who keeps to no rule of ours."""
    head = HEAD.pack(b"BTF1", PROOF, len(text), num_payload, 0)[:-4]
    return head + struct.pack("!I", zlib.crc32(head)) + text


@pytest.mark.parametrize(
    "said",
    [frame(1 << 30, b"{}"), frame(0, b"[" * 60_000), frame(0, b"[" * 4000), b"GET / HTTP/1.1\r\n" * 9],
    ids=["1 GiB", "60,000 brackets", "4,000 brackets", "HTTP"],
)
def test_before_authentication_only_small_frames_are_read(said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    def talk(kv_server: KvServer) -> None:
        with socket.create_connection(kv_server.address, 5) as sock:
            receive(sock)
            with contextlib.suppress(ConnectionError):
                sock.sendall(said)
                assert sock.recv(1) == b"", "closed at once: nothing of the payload was sent"

    with_door(KvStore(SERVED, 1 << 24), talk)
    assert [record.levelname for record in caplog.records] == ["WARNING"], "one line, no traceback"


@pytest.mark.parametrize("fields", [b"[" * 60_000, b'{"ticket": "t", "start": 1e999}', b'{"ticket": "t", "layers": 5}'])
def test_after_authentication_invalid_frames_end_the_connection(
    fields: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store = KvStore(SERVED, 1 << 24)
    ticket = filled(store).ticket

    def talk(kv_server: KvServer) -> None:
        with socket.create_connection(kv_server.address, 5) as sock:
            greet(sock, "secret", {})
            sock.settimeout(5)
            head = frame(0, fields.replace(b'"t"', f'"{ticket}"'.encode()))
            told = bytearray(head)
            told[4] = FETCH
            told[15:19] = struct.pack("!I", zlib.crc32(bytes(told[:15])))
            sock.sendall(told)
            with contextlib.suppress(ConnectionError):
                assert sock.recv(1) == b""

    with_door(store, talk)
    assert [record.levelname for record in caplog.records] == ["WARNING"], "one line, no traceback"


def test_a_kv_server_beyond_loopback_must_be_allowed_explicitly() -> None:
    kv_server = KvServer(KvStore(SERVED, 0), "secret")
    with pytest.raises(AtlasError, match="not encrypted"):
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
    for change in ({"v": 2}, {"shape": [2, 2, 4, 16]}, {"dtype": "int8"}, {"layer": -1}, {"stop": "x"}, {"shape": 3}):
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
    with pytest.raises(WorkerError, match="no place"):
        parcel.put(KvBlock("t", SERVED.id, 4, 0, 16, torch.zeros(2, 2, 16, 16)))


def test_frames_are_bounded(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="more than its reader takes"):
        pack(1, {"x": "a" * 70_000})
