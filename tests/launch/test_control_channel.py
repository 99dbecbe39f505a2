"""Messages between launchers arrive once and in order, whatever happens to their connections."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import struct
import threading
import time
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest

from atlas.callers import MAX_GREETING
from atlas.errors import AtlasError, StartAgainError, WorkerError
from atlas.launch import control_channel as module
from atlas.launch.agent import Agent, AgentSettings, _Attempt
from atlas.launch.control_channel import ControlChannel, ControlConnection, control_loop, frame, unframed
from atlas.launch.remote_workers import RemoteWorkers
from atlas.launch.rendezvous import VERSION, AgentName, JoinedAgent, Rendezvous, RendezvousClient
from atlas.launch.run_monitor import _StallWatch
from atlas.launch.worker_processes import WorkerMessage
from atlas.wan.security.credentials import Security

EAST, WEST = AgentName("east"), AgentName("west")


def drain(channel: ControlChannel, count: int) -> list[int]:
    return [channel.inbox.get(timeout=60)["n"] for _ in range(count)]


def connection_of(sock: socket.socket) -> ControlConnection:
    async def connected() -> ControlConnection:
        return ControlConnection(*await asyncio.open_connection(sock=sock))

    return control_loop().run(connected())


def joined(a: ControlChannel, b: ControlChannel) -> None:
    left, right = socket.socketpair()
    a.attach(connection_of(left), b.num_received)
    b.attach(connection_of(right), a.num_received)


def test_messages_survive_broken_connections_in_order_and_once() -> None:
    a, b = ControlChannel(), ControlChannel()
    for n in range(5):
        a.send({"n": n})  # before there is a connection
    for number in range(1, 6):
        joined(a, b)
        for n in range(5 * number, 5 * number + 5):
            a.send({"n": n})
            b.send({"n": -n})
        if number % 2:
            time.sleep(0.05)
        a.detach()
    joined(a, b)
    assert drain(b, 30) == list(range(30))
    assert drain(a, 25) == [-n for n in range(5, 30)]
    with pytest.raises(queue.Empty):
        b.inbox.get(timeout=0.3)
    a.detach()
    b.detach()


def test_a_silent_connection_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENCE_S", 0.6)
    a = ControlChannel()
    left, _silent = socket.socketpair()
    a.attach(connection_of(left), 0)
    deadline = time.monotonic() + 60
    while a.is_connected and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not a.is_connected
    _silent.close()


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", struct.pack("!I", 1 << 31), frame({"x": 1})[:-1] + b"]", struct.pack("!I", 2) + b"[]"],
)
def test_garbage_ends_the_connection_and_nothing_else(garbage: bytes) -> None:
    a, b = ControlChannel(), ControlChannel()
    left, right = socket.socketpair()
    a.attach(connection_of(left), 0)
    right.sendall(garbage)
    deadline = time.monotonic() + 60
    while a.is_connected and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not a.is_connected
    right.close()
    joined(a, b)
    b.send({"n": 1})
    assert drain(a, 1) == [1]
    a.detach()
    b.detach()


def test_a_message_has_a_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FRAME_BYTES", 100)
    with pytest.raises(WorkerError, match="larger than the limit of 100"):
        frame({"x": "y" * 100})
    with pytest.raises(ValueError, match="a frame of"):
        unframed(bytearray(struct.pack("!I", 101)), 100)


def test_a_launcher_reconnects_by_itself() -> None:
    rendezvous = Rendezvous(("127.0.0.1", 0), Security(), lambda agent, plan: None)
    caller = RendezvousClient(rendezvous.address, EAST, WEST, "plan", Security(), grace_s=60, patience_s=60)
    agent = rendezvous.agents["west", 0]
    for n in range(3):
        agent.channel.detach()
        agent.channel.send({"n": n})
        assert drain(caller.channel, 1) == [n]
    caller.close()
    rendezvous.close()


def test_a_launcher_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atlas.launch.rendezvous.HELLO_S", 0.1)
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    with pytest.raises(AtlasError, match="not reached"):
        RendezvousClient(address, EAST, WEST, "plan", Security(), grace_s=1, patience_s=1, say=said.append)
    assert said == [f"waiting for the rendezvous 127.0.0.1:{address[1]} in east: Connection refused"], "once a minute"


def test_a_refused_launcher_gets_the_reason() -> None:
    def admission(agent: AgentName, plan: str) -> str | None:
        return None if plan == "ours" else "it holds another plan"

    rendezvous = Rendezvous(("127.0.0.1", 0), Security(), admission)
    with pytest.raises(AtlasError, match=r"rendezvous 127\.0\.0\.1:\d+ in east: refused west: it holds another plan"):
        RendezvousClient(rendezvous.address, EAST, WEST, "theirs", Security(), grace_s=1, patience_s=1)
    assert not rendezvous.agents
    with pytest.raises(AtlasError, match=r"cannot listen there.*Choose a port that is free"):
        Rendezvous(rendezvous.address, Security(), admission)
    unknown = socket.gaierror(-2, "Name or service not known")
    with (
        patch("atlas.launch.rendezvous.CallerServer.listen_at", side_effect=unknown),
        pytest.raises(AtlasError, match="cannot listen there: Name or service not known"),
    ):
        Rendezvous(("nowhere", 7700), Security(), admission)
    rendezvous.close()
    with pytest.raises(StartAgainError, match=r"not reached.*correct --rendezvous"):
        RendezvousClient(rendezvous.address, EAST, WEST, "ours", Security(), grace_s=0.2, patience_s=0.2)


def test_a_rejected_message_leaves_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FRAME_BYTES", 200)
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", 360)
    a, b = ControlChannel(), ControlChannel()
    a.send({"n": 0})
    with pytest.raises(WorkerError, match="larger than the limit of 200"):
        a.send({"n": "x" * 200})
    for n in range(1, 4):
        a.send({"n": n})
    a.send({"n": "y" * 50})
    with pytest.raises(WorkerError, match="bytes are queued for a launcher that does not read them"):
        a.send({"n": "y" * 50})
    joined(a, b)
    assert drain(b, 5) == [0, 1, 2, 3, "y" * 50]
    a.detach()
    b.detach()


def test_a_rendezvous_accepts_again_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failures = socket.socket.accept, [OSError(24, "Too many open files")]

    def flaky(sock: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return accept(sock)

    monkeypatch.setattr(socket.socket, "accept", flaky)
    rendezvous = Rendezvous(("127.0.0.1", 0), Security(), lambda agent, plan: None)
    caller = RendezvousClient(rendezvous.address, EAST, WEST, "plan", Security(), grace_s=60, patience_s=60)
    assert not failures
    caller.close()
    rendezvous.close()


@pytest.mark.parametrize(
    "hello",
    [
        struct.pack("!I", 60_000) + b"[" * 60_000,
        frame({"atlas": VERSION, "agent": ["west"], "instance": 1, "plan": "plan", "received": 0}),
        frame({"atlas": VERSION, "agent": ["west", 0, 1], "instance": float("inf"), "plan": "plan", "received": 0}),
    ],
    ids=["60,000 brackets", "incomplete name", "infinite number"],
)
def test_an_invalid_hello_ends_the_connection_and_nothing_else(hello: bytes, caplog: pytest.LogCaptureFixture) -> None:
    rendezvous = Rendezvous(("127.0.0.1", 0), Security(), lambda agent, plan: None)
    with socket.create_connection(rendezvous.address) as stranger:
        stranger.settimeout(60)
        stranger.sendall(hello)
        assert stranger.recv(1) == b"", "the connection is closed"
    caller = RendezvousClient(rendezvous.address, EAST, WEST, "plan", Security(), grace_s=60, patience_s=60)
    caller.close()
    rendezvous.close()
    assert not caplog.records, "a caller without a name cannot print a traceback"


def test_silent_connections_keep_no_launcher_out() -> None:
    rendezvous = Rendezvous(("127.0.0.1", 0), Security(), lambda agent, plan: None)
    silent = [socket.create_connection(rendezvous.address) for _ in range(2 * MAX_GREETING)]
    caller = RendezvousClient(rendezvous.address, EAST, WEST, "plan", Security(), grace_s=60, patience_s=60)
    silent[0].settimeout(60)
    with contextlib.suppress(ConnectionResetError):
        assert silent[0].recv(1) == b"", "the oldest made room"
    for sock in silent:
        sock.close()
    caller.close()
    rendezvous.close()


def test_connecting_to_another_service_is_an_error_that_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as caller:
                        caller.sendall(frame({"hello": "there"}))

        threading.Thread(target=answer, daemon=True).start()
        address = server.getsockname()
        with pytest.raises(StartAgainError, match="not reached: not a rendezvous of Atlas"):
            RendezvousClient(address, EAST, WEST, "plan", Security(), grace_s=0.2, patience_s=0.2)
        server.shutdown(socket.SHUT_RDWR)


# ---- threads that send -----------------------------------------------------------------------------------------------
class FullChannel:
    """The other side does not read."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()
        self.is_connected = True

    def send(self, message: object) -> None:
        raise WorkerError("300,000,000 bytes are queued for a launcher that does not read them")


def test_an_agent_that_cannot_forward_messages_ends() -> None:
    channel = FullChannel()
    agent = Agent(AgentSettings(WEST), cast(Any, SimpleNamespace(channel=channel)), Security(), lambda line: None)
    attempt = _Attempt(1, ["east", "west"], WEST)
    attempt.workers = cast(Any, SimpleNamespace(next_message=lambda s: WorkerMessage("p0.s0", {"step": 1}, 0)))
    thread = threading.Thread(target=agent._forward_replies, args=(attempt, attempt.workers))
    thread.start()
    assert "does not read them" in str(channel.inbox.get(timeout=60)["gone"])
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("code", "expected"), [(75, r"stopped\. Start again when the rendezvous answers"), (2, r"stopped$")]
)
def test_only_a_launcher_whose_refusal_is_not_final_says_start_again(code: int, expected: str) -> None:
    channel = FullChannel()
    channel.inbox.put({"gone": "west was not admitted", "code": code})
    client = cast(Any, SimpleNamespace(channel=channel, close=lambda: None))
    with pytest.raises(AtlasError, match=expected) as error:
        Agent(AgentSettings(WEST), client, Security(), lambda line: None).run()
    assert error.value.exit_code == code


def test_the_stall_report_names_a_worker_that_cannot_be_asked() -> None:
    said: list[str] = []

    def send(name: str, message: object) -> None:
        if name == "p0.s0":
            raise WorkerError("it does not read")
        watch.note(name, "F waits for p0.s0")

    workers = SimpleNamespace(names=["p0.s0", "p0.s1"], send=send, title=lambda name: f"worker {name}")
    watch = _StallWatch(cast(Any, SimpleNamespace(workers=workers, say=said.append, predicted_s=None)))
    watch._ask(5.0)
    assert said == ["no step for 5 s; worker p0.s0 does not answer; F waits for p0.s0"]


def test_an_invalid_message_of_an_agent_is_its_error() -> None:
    agent = JoinedAgent(WEST, 1, 0, lambda: None)
    rendezvous = SimpleNamespace(agents={("west", 0): agent})
    with RemoteWorkers(7, cast(Any, rendezvous), [agent], {"p0.s0": agent}, grace_s=lambda agent: 60) as workers:
        agent.channel.put({"epoch": 7, "from": "p0.s0"})
        with pytest.raises(WorkerError, match=r"datacenter west failed: its launcher sent an invalid message"):
            workers.wait_for("ready", 60)
