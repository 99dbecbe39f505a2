"""Which peers may connect; and floods of connections do not disturb transfers."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from connect_errors import await_error, connect_error, until

from atlas.errors import AtlasError
from atlas.wan.security.credentials import Credentials, Protection, Security
from atlas.wan.transport import acceptor
from atlas.wan.transport.base import Key
from atlas.wan.transport.endpoint import Endpoint
from atlas.wan.transport.settings import TransportSettings
from atlas.wan.transport.wire import Greeting, pack_greeting, preamble

pytest.importorskip("cryptography")

from atlas.wan.security.certs import make_ca, make_node

PATIENT = TransportSettings(max_streams=2, deadline_s=60.0, handshake_s=30.0, heartbeat_s=0.2)
QUICK = replace(PATIENT, handshake_s=2.0)
"""For a test in which handshakes are never completed."""
CORPUS = Path(__file__).parent / "corpus"


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    make_ca(tmp_path)
    for name in ("dc1/a", "dc2/b", "dc2/c"):
        make_node(tmp_path, name)
    return tmp_path


def endpoint(name: str, credentials: Credentials, settings: TransportSettings = PATIENT) -> Endpoint:
    return Endpoint(name, security=Security(credentials), settings=settings)


def test_encrypted_bytes_arrive(certs: Path) -> None:
    with (
        endpoint("dc1/a", Credentials.of_folder(certs, "dc1/a")) as a,
        endpoint("dc2/b", Credentials.of_folder(certs, "dc2/b")) as b,
    ):
        a.connect({"dc2/b": b.address})
        data = os.urandom(3_000_001)
        got = b.recv(Key("dc1/a"))
        a.send(Key("dc2/b"), data)
        assert got.wait(60) == data
        a.channel("dc2/b").cut()
        a.send(Key("dc2/b", 0, (1, 0, 0, 0)), b"").wait(60)
        a.close()


def test_the_payload_is_not_readable_on_the_wire(certs: Path) -> None:
    seen, server = bytearray(), socket.create_server(("127.0.0.1", 0))
    with (
        endpoint("dc1/a", Credentials.of_folder(certs, "dc1/a")) as a,
        endpoint("dc2/b", Credentials.of_folder(certs, "dc2/b")) as b,
    ):

        def carry(source: socket.socket, sink: socket.socket) -> None:
            try:
                while data := source.recv(65536):
                    seen.extend(data)
                    sink.sendall(data)
            except OSError:
                pass
            sink.close()

        def serve() -> None:  # also attempts after one that took too long
            with contextlib.suppress(OSError):
                while True:
                    near, _ = server.accept()
                    far = socket.create_connection(b.address)
                    for pair in ((near, far), (far, near)):
                        threading.Thread(target=carry, args=pair, daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        a.connect({"dc2/b": server.getsockname()})
        a.send(Key("dc2/b"), b"a very secret gradient" * 1000).wait(60)
        assert b.recv(Key("dc1/a")).wait(60) == b"a very secret gradient" * 1000
        a.close()
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    assert len(seen) > 22_000
    assert b"secret" not in seen
    assert b"dc1/a" not in seen.replace(b"atlas://dc1/a", b"")


def refused(a: Endpoint, b: Endpoint, match: str) -> None:
    assert re.search(match, await_error(a.open(b.name, 0, b.address)))


def test_expired_early_foreign_and_misnamed_certificates_are_refused(certs: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    make_ca(foreign)
    other_ca = make_node(foreign, "dc1/a")
    late, early = tmp_path / "late", tmp_path / "early"
    for folder, start in ((late, -10.0), (early, 10.0)):
        folder.mkdir()
        for name in ("ca.pem", "ca.key"):
            (folder / name).write_bytes((certs / name).read_bytes())
        make_node(folder, "dc1/a", days=5, starts_in_days=start)
    with endpoint("dc2/b", Credentials.of_folder(certs, "dc2/b")) as b:
        with endpoint("dc1/a", other_ca) as a:
            refused(a, b, "CERTIFICATE_VERIFY_FAILED")
        for folder in (late, early):
            with endpoint("dc1/a", Credentials.of_folder(folder, "dc1/a")) as a:
                refused(a, b, "EXPIRED|expired|BAD_CERTIFICATE|closed|reset")
        with endpoint("dc1/a", Credentials.of_folder(certs, "dc2/c")) as a:
            refused(a, b, "closed the connection")  # its certificate is for dc2/c, so b turns it away without a word
    with (
        endpoint("dc2/b", Credentials.of_folder(certs, "dc2/c")) as b,
        endpoint("dc1/a", Credentials.of_folder(certs, "dc1/a")) as a,
    ):
        refused(a, b, "claims to be dc2/b, but its certificate is for dc2/c")


def test_a_plain_connection_to_an_endpoint_with_certificates_is_refused(certs: Path) -> None:
    with endpoint("dc2/b", Credentials.of_folder(certs, "dc2/b")) as b, Endpoint("dc1/a", settings=PATIENT) as a:
        refused(a, b, "closed the connection")


def test_a_tls_connection_without_a_certificate_is_refused(certs: Path, caplog: pytest.LogCaptureFixture) -> None:
    import ssl

    context = ssl.create_default_context(cafile=str(certs / "ca.pem"))
    context.check_hostname = False
    caplog.set_level("INFO", "atlas.wan")
    here = Credentials.of_folder(certs, "dc2/b")
    with endpoint("dc2/b", here) as b, socket.create_connection(b.address) as sock:
        sock.sendall(preamble(Protection.ENCRYPTED))
        sock.settimeout(60)
        with context.wrap_socket(sock) as tls, contextlib.suppress(OSError):
            tls.sendall(b"x" * 32 + pack_greeting(Greeting("dc1/a", "dc2/b", 0, 0, 1)))
            assert not tls.recv(1)
    assert "refused a connection" in caplog.text


def test_a_key_file_readable_by_other_users_is_refused(certs: Path) -> None:
    credentials = Credentials.of_folder(certs, "dc1/a")
    assert credentials.key_file.stat().st_mode & 0o777 == 0o600
    credentials.key_file.chmod(0o644)
    with pytest.raises(AtlasError, match="chmod 600"):
        _ = Security(credentials).client_context


def test_a_renewed_certificate_is_used_without_a_restart(certs: Path) -> None:
    credentials = Credentials.of_folder(certs, "dc1/a")
    security = Security(credentials)
    before = security.client_context
    assert security.client_context is before
    credentials.key_file.write_text("half a copy")
    os.utime(credentials.key_file, ns=(1, 1))
    assert security.client_context is before, "until the pair matches"
    with endpoint("dc2/b", Credentials.of_folder(certs, "dc2/b")) as b, Endpoint("dc1/a", security=security) as a:
        make_node(certs, "dc1/a")
        assert security.client_context is not before
        a.connect({"dc2/b": b.address})


def test_a_node_needs_a_valid_name(certs: Path) -> None:
    with pytest.raises(AtlasError, match="datacenter/worker"):
        make_node(certs, "no/body/here")


def test_a_datacenters_certificate_is_valid_for_its_nodes_only(certs: Path) -> None:
    make_node(certs, "dc3")
    theirs = Credentials.of_folder(certs, "dc3/any")
    assert theirs.cert_file.name == "dc3.pem"
    with (
        endpoint("dc2/b", Credentials.of_folder(certs, "dc2/b")) as b,
        endpoint("dc3/any", theirs) as a,
        endpoint("dc4/any", theirs) as c,
    ):
        a.connect({"dc2/b": b.address})
        assert "dc2/b" in connect_error(c, "dc2/b", b.address)


def _garbage(address: tuple[str, int], count: int, held: list[socket.socket]) -> None:
    corpus = [file.read_bytes() for file in sorted(CORPUS.iterdir())]
    for i in range(count):
        try:
            sock = socket.create_connection(address, timeout=60)
            sock.sendall(corpus[i % len(corpus)])
        except OSError:
            continue
        if i % 5 == 0:
            held.append(sock)  # half-open, and silent for ever
        else:
            sock.close()


def test_garbage_connections_do_not_stop_transfers(certs: Path) -> None:
    held: list[socket.socket] = []
    with (
        endpoint("dc1/a", Credentials.of_folder(certs, "dc1/a"), QUICK) as a,
        endpoint("dc2/b", Credentials.of_folder(certs, "dc2/b"), QUICK) as b,
    ):
        a.connect({"dc2/b": b.address})
        flood = threading.Thread(target=_garbage, args=(b.address, 600, held))
        flood.start()
        data = os.urandom(1_000_000)
        number = 0
        while flood.is_alive() or number < 20:
            got = b.recv(Key("dc1/a", 0, (number, 0, 0, 0)))
            a.send(Key("dc2/b", 0, (number, 0, 0, 0)), data)
            assert got.wait(60) == data
            number += 1
        flood.join()
        late = endpoint("dc2/c", Credentials.of_folder(certs, "dc2/c"), QUICK)
        late.connect({"dc2/b": b.address}, timeout_s=60)  # new connections are still accepted
        late.close()
        until(lambda: sum("inbound" in t.name for t in threading.enumerate()) <= 2)
        a.close()
    for sock in held:
        sock.close()


def test_a_peer_connects_at_once_among_idle_and_garbage_connections(certs: Path) -> None:
    """There are more of them than an endpoint keeps, and none has reached its deadline."""
    held: list[socket.socket] = []
    security = {name: Security(Credentials.of_folder(certs, name)) for name in ("dc1/a", "dc2/b", "dc2/c")}
    settings = TransportSettings(max_pending=100)
    with Endpoint("dc2/b", security=security["dc2/b"], settings=settings) as b:
        held += [socket.create_connection(b.address, timeout=60) for _ in range(300)]
        _garbage(b.address, 100, held)
        for name in ("dc1/a", "dc2/c"):
            with Endpoint(name, security=security[name], settings=settings) as peer:
                peer.connect({"dc2/b": b.address}, timeout_s=60)
                assert peer.channel("dc2/b").last_error == "never connected", "no attempt has failed"
    for sock in held:
        sock.close()


def test_silent_handshakes_make_room_for_new_ones(certs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "GRACE_S", 0.0)
    security = {name: Security(Credentials.of_folder(certs, name)) for name in ("dc1/a", "dc2/b")}
    settings = TransportSettings(max_streams=1, max_handshakes=4, handshake_s=60.0)
    with contextlib.ExitStack() as stack:
        b = stack.enter_context(Endpoint("dc2/b", security=security["dc2/b"], settings=settings))
        for _ in range(10):
            silent = stack.enter_context(socket.create_connection(b.address, timeout=60))
            silent.sendall(preamble(Protection.ENCRYPTED))
        a = stack.enter_context(Endpoint("dc1/a", security=security["dc1/a"], settings=settings))
        a.connect({"dc2/b": b.address}, timeout_s=60)
        assert a.channel("dc2/b").last_error == "never connected", "no attempt has failed"
