"""Which peers may connect, and how: with mutual TLS 1.3, and with no encryption after it inside trusted networks.

A certificate lists the names that its node may use, as URIs `atlas://datacenter/worker` among its alternative names, or
`atlas://datacenter/*` for all nodes of a datacenter. The greeting inside the connection must match it. Knows
certificates and addresses; `certs` makes certificates.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import ssl
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TypeVar

from atlas.errors import AtlasError, WorkerError

log = logging.getLogger("atlas.wan")
URI = "atlas://"
LOOPBACK = ("127.0.0.0/8", "::1/128")
TLS_HEAD_BYTES, MAX_TLS_RECORD_BYTES = 5, 16384 + 256
"""RFC 8446, section 5."""
T = TypeVar("T")


@dataclass(frozen=True)
class Credentials:
    """The files that `atlas wan certs` makes for a node."""

    ca_file: Path
    cert_file: Path
    key_file: Path

    @classmethod
    def of_folder(cls, folder: Path, name: str) -> Credentials:
        """The files of node `datacenter/worker`, or those of its datacenter if it has none of its own."""
        stem, datacenter = name.replace("/", "."), datacenter_of(name)
        if not (folder / f"{stem}.pem").exists() and (folder / f"{datacenter}.pem").exists():
            stem = datacenter
        return cls(folder / "ca.pem", folder / f"{stem}.pem", folder / f"{stem}.key")


class Protection(IntEnum):
    """Of the bytes after the handshake. The values are those of a preamble (`transport.wire`)."""

    PLAIN = 0x50
    """Neither end has a certificate."""
    AUTHENTICATED = 0x41
    """Both ends prove their names in a TLS handshake; later bytes are plain."""
    ENCRYPTED = 0x53
    """Both ends prove their names, and all bytes are encrypted."""


class Security:
    """With credentials, both ends of every connection prove their names, and everything is encrypted except between
    nodes of one datacenter inside `trusted_networks`. Without, only trusted networks work; the default is loopback."""

    def __init__(self, credentials: Credentials | None = None, trusted_networks: Sequence[str] | None = None) -> None:
        if trusted_networks is None:
            trusted_networks = LOOPBACK if credentials is None else ()
        self.credentials = credentials
        self._contexts: dict[int, tuple[tuple[int, ...], ssl.SSLContext]] = {}
        """By protocol: the version of the files, and what was made of them."""
        self.trusted_networks = [network_of(text) for text in trusted_networks]

    def trusts(self, host: str) -> bool:
        """Whether this IP address is in a trusted network."""
        address = ipaddress.ip_address(host)
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
            address = address.ipv4_mapped
        return any(address in network for network in self.trusted_networks)

    def protection(self, host: str, name: str, peer: str) -> Protection:
        """For a connection of node `name` to `peer` at this IP address. Raises AtlasError if it needs certificates and
        there are none."""
        if self.credentials is None and self.trusts(host):
            return Protection.PLAIN
        if self.credentials is None:
            raise AtlasError(
                f"{peer} at {host} is outside the trusted networks {[str(n) for n in self.trusted_networks]}, and "
                "there are no certificates: make some with `atlas wan certs`, or add the network to the trusted ones"
            )
        return Protection.AUTHENTICATED if self._may_be_open(host, name, peer) else Protection.ENCRYPTED

    def accepts(self, found: Protection, host: str, name: str, peer: str) -> bool:
        """Whether a connection to node `name` from `peer` at this IP address may be protected like this."""
        if found is Protection.PLAIN:
            return self.credentials is None and self.trusts(host)
        return found is Protection.ENCRYPTED or self._may_be_open(host, name, peer)

    def _may_be_open(self, host: str, name: str, peer: str) -> bool:
        return datacenter_of(name) == datacenter_of(peer) and self.trusts(host)

    @property
    def server_context(self) -> ssl.SSLContext:
        return self._current(ssl.PROTOCOL_TLS_SERVER)

    @property
    def client_context(self) -> ssl.SSLContext:
        return self._current(ssl.PROTOCOL_TLS_CLIENT)

    def _current(self, protocol: int) -> ssl.SSLContext:
        """Of the files as they are now: a renewed certificate serves all connections made after it was copied. While
        its files do not match, the earlier one does."""
        known = self._contexts.get(protocol)
        version = self._version() if known is not None else ()
        if known is None or known[0] != version:
            try:
                known = self._version(), self._context(protocol)
            except AtlasError as error:
                if known is None:
                    raise
                log.warning("%s; the previous certificate is still used", error)
                known = version, known[1]
            self._contexts[protocol] = known
        return known[1]

    def _version(self) -> tuple[int, ...]:
        """Changes with the files."""
        assert self.credentials is not None
        files = (self.credentials.ca_file, self.credentials.cert_file, self.credentials.key_file)
        return tuple(file.stat().st_mtime_ns if file.exists() else 0 for file in files)

    def _context(self, protocol: int) -> ssl.SSLContext:
        assert self.credentials is not None
        _check_key_file(self.credentials.key_file)
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # names are checked by `require_name`
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        try:
            context.load_verify_locations(self.credentials.ca_file)
            context.load_cert_chain(self.credentials.cert_file, self.credentials.key_file)
        except (OSError, ssl.SSLError) as error:
            raise AtlasError(f"{self.credentials.cert_file}: cannot be used: {error}") from None
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # sessions are never resumed, and no bytes may follow the greeting
        return context


def network_of(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise AtlasError(f"--trusted {text}: not a network ({error}). Write it like 10.0.0.0/8") from None


def _check_key_file(path: Path) -> None:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise AtlasError(f"{path}: {error.strerror}. Make certificates with `atlas wan certs`") from None
    if mode & 0o077:
        raise AtlasError(f"{path} is readable by other users (mode {mode:o}): run chmod 600 on it")


def datacenter_of(node: str) -> str:
    return node.partition("/")[0]


def require_name(certificate: object, name: str) -> None:
    """Raises WorkerError unless the certificate has `name`."""
    alternatives = certificate.get("subjectAltName", ()) if isinstance(certificate, dict) else ()
    names = [value.removeprefix(URI) for kind, value in alternatives if kind == "URI" and value.startswith(URI)]
    if name not in names and f"{datacenter_of(name)}/*" not in names:
        raise WorkerError(f"the peer claims to be {name}, but its certificate is for {', '.join(names) or 'no node'}")


CLOSED = (
    "the peer closed the connection during the handshake. Check that both sides have certificates, or that both "
    "trust the network between them"
)


class PlainExchange:
    """A short exchange of messages on a connected socket, all before a deadline."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock, self._deadline = sock, deadline

    def write(self, data: bytes) -> None:
        self._set_timeout()
        try:
            self._sock.sendall(data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ConnectionResetError(CLOSED) from error

    def read(self, num_bytes: int) -> bytes:
        """Reads exactly this many bytes."""
        data = bytearray()
        while len(data) < num_bytes:
            self._set_timeout()
            try:
                more = self._sock.recv(num_bytes - len(data))
            except ConnectionResetError as error:
                raise ConnectionResetError(CLOSED) from error
            if not more:
                raise ConnectionResetError(CLOSED)
            data += more
        return bytes(data)

    def _set_timeout(self) -> None:
        if (left_s := self._deadline - time.monotonic()) <= 0:
            raise TimeoutError("the handshake took too long")
        self._sock.settimeout(left_s)


class TlsExchange(PlainExchange):
    """The same inside TLS. Reads no byte beyond it, so that the socket can be used without TLS afterwards."""

    def __init__(self, plain: PlainExchange, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._plain = plain
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._pump(self._tls.do_handshake)

    @property
    def certificate(self) -> object:
        return self._tls.getpeercert()

    def write(self, data: bytes) -> None:
        self._pump(lambda: self._tls.write(data))

    def read(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            left = num_bytes - len(data)
            more = self._pump(lambda left=left: self._tls.read(left))  # type: ignore[misc]
            if not more:
                raise ConnectionResetError(CLOSED)
            data += more
        return data

    def _pump(self, step: Callable[[], T]) -> T:
        while True:
            try:
                result = step()
                self._flush()
                return result
            except ssl.SSLWantReadError:
                self._flush()
                head = self._plain.read(TLS_HEAD_BYTES)
                size = int.from_bytes(head[3:5], "big")
                if size > MAX_TLS_RECORD_BYTES:
                    raise WorkerError("a TLS record is longer than allowed") from None
                self._incoming.write(head + self._plain.read(size))
            except ssl.SSLError as error:
                with contextlib.suppress(OSError):
                    self._flush()  # sends the alert with the reason
                raise WorkerError(f"TLS refused: {error.reason or error}") from None

    def _flush(self) -> None:
        if data := self._outgoing.read():
            self._plain.write(data)
