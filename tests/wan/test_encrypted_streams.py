"""Sealed streams while receives are posted: what a poster writes must not disturb what the same stream reads.

`bench/wan_faults.py` does it with 1,000 messages on four streams.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

from atlas.wan.security.credentials import Credentials, Security
from atlas.wan.transport import channel_tuner, inbox
from atlas.wan.transport.base import Handle, Key
from atlas.wan.transport.endpoint import Endpoint
from atlas.wan.transport.inbound import Inbound
from atlas.wan.transport.inbox import Inbox
from atlas.wan.transport.settings import TransportSettings
from atlas.wan.transport.stream import SocketStream
from atlas.wan.transport.stream_slot import Faults
from atlas.wan.transport.wire import RECORD_BYTES, Greeting, RecordKind

pytest.importorskip("cryptography")

from atlas.wan.security.aead import cipher_of
from atlas.wan.security.certs import make_ca, make_node

A, B = "dc1/a", "dc2/b"


def sealed_streams() -> tuple[SocketStream, SocketStream]:
    near, far = socket.socketpair()
    secrets = (b"1" * 32, b"2" * 32)
    return SocketStream(near, cipher_of(*secrets, is_dialer=True)), SocketStream(
        far, cipher_of(*secrets, is_dialer=False)
    )


def test_a_thread_may_write_records_while_another_reads_payloads() -> None:
    near, far = sealed_streams()
    payloads = [np.random.default_rng(i).integers(0, 256, 1 << 20, np.uint8) for i in range(8)]
    records: list[bool] = []
    stop, got = threading.Event(), np.zeros(1 << 20, np.uint8)

    def write_records() -> None:
        while not stop.is_set():
            far.write(b"r" * 64)

    def read_records() -> None:
        with contextlib.suppress(OSError):  # until it is aborted
            while True:
                records.append(near.read_head(64) == b"r" * 64)

    def write_payloads() -> None:
        for payload in payloads:
            near.write(b"h" * 64, payload.data)

    threads = [threading.Thread(target=target, daemon=True) for target in (write_records, read_records, write_payloads)]
    for thread in threads:
        thread.start()
    try:
        for payload in payloads:
            assert far.read_head(64) == b"h" * 64
            far.read_into(got.data)
            assert np.array_equal(got, payload)
    finally:
        stop.set()
        threads[0].join(60)
        for stream in (near, far):
            stream.abort()
        for thread in threads:
            thread.join(60)
        near.close()
        far.close()
    assert records
    assert all(records)


@pytest.mark.parametrize(("num_streams", "count", "num_bytes"), [(2, 16, 8 << 20), (4, 60, 1 << 20)])
def test_receives_posted_while_messages_arrive_break_no_stream(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_streams: int, count: int, num_bytes: int
) -> None:
    faults = exchange(tmp_path, caplog, num_streams, count, num_bytes)
    assert faults._replace(num_hedged=0) == Faults()


def test_a_chunk_that_is_sent_twice_breaks_no_stream(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when an answer is late because the host is busy: the second copy arrives while the first still does."""
    monkeypatch.setattr(channel_tuner, "HEDGE_S", 0.0)
    monkeypatch.setattr(channel_tuner, "HEDGE_TRIPS", 0)
    monkeypatch.setattr(inbox, "LATE_COPY_S", 60.0)
    num_hedged = 0
    while not num_hedged:  # usually some of the first exchange
        faults = exchange(tmp_path, caplog, 2, 32, 8 << 20)
        assert faults._replace(num_hedged=0) == Faults()
        num_hedged += faults.num_hedged


def exchange(tmp_path: Path, caplog: pytest.LogCaptureFixture, num_streams: int, count: int, num_bytes: int) -> Faults:
    """Messages from A to B over encrypted streams, with receives posted while earlier messages arrive."""
    caplog.set_level("INFO", "atlas.wan")  # a failure then shows why a stream was lost
    make_ca(tmp_path)
    for name in (A, B):
        make_node(tmp_path, name)
    settings = TransportSettings(
        max_streams=num_streams, num_streams=num_streams, staging_bytes=num_bytes // 2, stall_s=60.0, deadline_s=120.0
    )
    draw = random.Random(num_streams)
    data = [draw.randbytes(num_bytes) for _ in range(4)]
    with (
        Endpoint(A, security=Security(Credentials.of_folder(tmp_path, A)), settings=settings) as a,
        Endpoint(B, security=Security(Credentials.of_folder(tmp_path, B)), settings=settings) as b,
    ):
        a.connect({B: b.address})
        sent = [a.send(Key(B, 0, (i, 0, 0, 0)), data[i % 4], i) for i in range(count)]
        got: list[Handle] = []
        while len(got) < count:
            ahead = draw.randint(1, 4)
            got += [b.recv(Key(A, 0, (i, 0, 0, 0))) for i in range(len(got), min(count, len(got) + ahead))]
            if (waited := len(got) - 4) >= 0:
                got[waited].wait(120)
        for i, handle in enumerate(got):
            assert handle.wait(120) == data[i % 4]
        for handle in sent:
            handle.wait(120)
        return a.faults


def test_a_stream_is_not_closed_while_a_record_is_sent() -> None:
    """The descriptor would then be another connection's."""
    near, far = sealed_streams()
    inbound = Inbound(far, Greeting("dc1/a", "dc2/b", 0, 0, 1), Inbox("dc1/a", 0, 1 << 20, None), TransportSettings())
    sent: list[bool] = []

    def tell_until_it_is_gone() -> None:
        while inbound.send_record(RecordKind.FREED, 1):
            sent.append(far.sock.fileno() >= 0)

    teller = threading.Thread(target=tell_until_it_is_gone, daemon=True)
    teller.start()
    near.read_head(RECORD_BYTES)  # records are being sent
    inbound.close()
    teller.join(60)
    assert not teller.is_alive()
    assert all(sent)
    assert not inbound.send_record(RecordKind.FREED, 2)
    near.close()
