"""Messages that a receiver does not accept: the send fails at once with a reason, and no stream breaks."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from cells import joined_cells
from connect_errors import connect_error, until

from atlas.errors import WorkerError
from atlas.wan.transport import inbox as inbox_module
from atlas.wan.transport import message as message_module
from atlas.wan.transport.base import Handle, Key, Tag
from atlas.wan.transport.endpoint import Endpoint
from atlas.wan.transport.inbox import Inbox
from atlas.wan.transport.outbox import Outbox
from atlas.wan.transport.settings import TransportSettings
from atlas.wan.transport.stream_slot import Faults

A, B, C = "dc1/a", "dc2/b", "dc1/c"
SMALL = TransportSettings(max_streams=2, staging_bytes=1 << 20, deadline_s=60.0, stall_s=60.0)


def tag(number: int) -> Tag:
    return (number, 0, 0, 0)


@pytest.fixture
def pair() -> Iterator[tuple[Endpoint, Endpoint]]:
    with Endpoint(A, settings=SMALL) as a, Endpoint(B, settings=SMALL) as b:
        yield a, b


def test_a_key_that_is_used_twice_fails_the_second_send_at_once(pair: tuple[Endpoint, Endpoint]) -> None:
    a, b = pair
    a.connect({B: b.address})
    a.send(Key(B, 0, tag(1)), b"first").wait(60)
    with pytest.raises(WorkerError, match=r"again: dc2/b refuses it: a message of the same key .* use each key once"):
        a.send(Key(B, 0, tag(1)), b"second", what="again").wait(60)
    assert b.recv(Key(A, 0, tag(1))).wait(60) == b"first"
    a.send(Key(B, 0, tag(2)), b"third").wait(60)
    assert a.faults._replace(num_hedged=0) == Faults()


def test_a_wrong_size_fails_both_ends_and_uses_no_staging(pair: tuple[Endpoint, Endpoint]) -> None:
    a, b = pair
    a.connect({B: b.address})
    for number in range(8):  # six would fill the staging
        got = b.recv(Key(A, 0, tag(number)), bytearray(10))
        sent = a.send(Key(B, 0, tag(number)), bytes(200_000), what="3F17")
        with pytest.raises(WorkerError, match="has 200000 bytes, but the buffer for it has 10"):
            got.wait(60)
        with pytest.raises(WorkerError, match="3F17: dc2/b refuses it: the buffer posted for it has another size"):
            sent.wait(60)
    a.send(Key(B, 0, tag(100)), bytes(700_000)).wait(60)
    assert a.faults._replace(num_hedged=0) == Faults()


def test_a_refused_message_does_not_extend_the_deadline_of_others() -> None:
    """Nothing of it may count as unanswered: a send that waits for its receive would be given up."""
    outbox, first, second = Outbox(), Handle("first"), Handle("second")
    outbox.freed(0, 1000)
    outbox.put(tag(1), memoryview(bytes(100)), 0, first)
    outbox.put(tag(2), memoryview(bytes(5000)), 1, second)
    assert outbox.pull("stream", 0, 1.0) is not None
    outbox.refused(1, "no")
    assert isinstance(first.error, WorkerError)
    assert not outbox.has_unacked
    assert not outbox.is_empty
    outbox.posted(tag(2))
    chunk = outbox.pull("stream", 0, 1.0)
    assert chunk is not None
    outbox.acknowledged("stream", 2, chunk.offset)
    assert second.done
    assert second.error is None
    assert outbox.drain(0.0)


@pytest.mark.parametrize("error", [WorkerError("this makes no sense"), ValueError("a bug")])
def test_a_consumer_that_raises_leaks_no_staging_and_breaks_no_stream(
    pair: tuple[Endpoint, Endpoint],
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    a, b = pair
    shown = list[object]()
    monkeypatch.setattr(threading, "excepthook", lambda hook: shown.append(hook.exc_value))
    caplog.set_level("INFO", "atlas.wan")
    taken: list[int] = []

    def consume(key: Key, data: memoryview) -> None:
        taken.append(key.tag[0])
        if key.tag[0] < 8:
            raise error

    b.consume(0, consume)
    a.connect({B: b.address})
    for number in range(12):  # five fill the staging
        a.send(Key(B, 0, tag(number)), bytes(200_000)).wait(60)
    until(lambda: len(taken) == 12)
    until(lambda: sum(str(error) in line for line in caplog.messages) == 8)
    assert shown == ([] if isinstance(error, WorkerError) else [error] * 8)
    assert a.faults._replace(num_hedged=0) == Faults()


def test_a_callback_that_raises_does_not_delay_other_sends(
    pair: tuple[Endpoint, Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    shown = list[object]()
    monkeypatch.setattr(threading, "excepthook", lambda hook: shown.append(hook.exc_type))
    a.connect({B: b.address})
    sends = [a.send(Key(B, 0, tag(number)), bytes(2 << 20)) for number in range(3)]  # none has credit
    called: list[Handle] = []
    sends[0].on_done(lambda handle: 1 / 0)  # type: ignore[arg-type, return-value]
    sends[0].on_done(called.append)
    a.channel(B).fail("the test says so")
    for send in sends:
        with pytest.raises(WorkerError, match="the test says so"):
            send.wait(60)
    assert called == sends[:1]
    assert shown == [ZeroDivisionError]


def test_connections_beyond_max_inbound_are_refused() -> None:
    two = TransportSettings(max_streams=2, max_inbound=2, handshake_s=30.0, stall_s=60.0)
    with Endpoint(B, settings=two) as b, Endpoint(A, settings=two) as a:
        a.connect({B: b.address})
        until(lambda: a.channel(B).num_live == 2)
        with Endpoint(C, settings=two) as c:
            refusal = "dc2/b refuses: it has as many connections as its setting max_inbound"
            assert refusal in connect_error(c, B, b.address)
        a.send(Key(B), b"still here").wait(60)
        assert a.faults._replace(num_hedged=0) == Faults()
        a.close()
        with Endpoint(C, settings=two) as c:
            c.connect({B: b.address}, timeout_s=60.0)  # a connection is free again


def test_receives_beyond_the_limit_raise_when_they_are_posted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox_module, "MAX_POSTED", 3)
    inbox = Inbox(A, 0, 1 << 20, None)
    for number in range(3):
        inbox.post(tag(number), None, Handle())
    with pytest.raises(ValueError, match=r"3F17: 3 receives from dc1/a are posted on lane 0.* wait for some of them"):
        inbox.post(tag(3), None, Handle("3F17"))


def test_a_sender_fails_when_too_many_receives_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_module, "MAX_POSTED", 4)
    outbox, handle = Outbox(), Handle("3F17")
    for number in range(8):
        outbox.posted(tag(number))
    outbox.put(tag(0), memoryview(bytes(100)), 0, handle)
    assert outbox.pull("stream", 0, 1.0) is not None, "the oldest is still known"
    outbox.posted(tag(8))
    with pytest.raises(WorkerError, match="announced more receives than"):
        handle.wait(0)


def test_an_announcement_after_its_message_is_ignored() -> None:
    outbox = Outbox()
    outbox.freed(0, 1000)
    for number in range(20):
        outbox.put(tag(number), memoryview(bytes(10)), 0, Handle())
        chunk = outbox.pull("stream", 0, 1.0)
        assert chunk is not None
        outbox.acknowledged("stream", chunk.message.number, 0)
        outbox.posted(tag(number))
    assert len(outbox._posted) == 0


def test_a_key_that_is_used_twice_in_a_cell_fails_the_second_send_at_once() -> None:
    with joined_cells(2, [200e6] * 2) as (here, there, _):
        here[0].send(Key("dc2/0", 0, tag(1)), b"first" * 1000).wait(60)
        with pytest.raises(WorkerError, match="dc2/0 refuses it: a message of the same key"):
            here[0].send(Key("dc2/0", 0, tag(1)), b"second" * 1000, turn=1).wait(60)
        assert there[0].recv(Key("dc1/0", 0, tag(1))).wait(60) == b"first" * 1000
        assert here[0].endpoint.faults._replace(num_hedged=0) == Faults()
