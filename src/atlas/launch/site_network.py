"""A launcher's place in the network: where its host listens, what others dial, on which ports, and how it reaches
others. And from the places of all launchers: who dials whom.

Knows addresses and ports. Opens a socket only to check that an address and its ports are this host's and free.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from atlas.addresses import is_loopback
from atlas.errors import AtlasError
from atlas.launch.machine import network_name
from atlas.launch.rendezvous import AgentName
from atlas.wan.transport.base import Address, PeerRoute, is_wildcard
from atlas.wan.transport.handshake import resolve

NONE = "none"
"""In place of an address: it cannot be dialled."""
FREE_S = 5.0
"""How long ports may still be held by processes of a launcher that was killed: they end within 2 s."""
POLL_S = 0.1
ANYWHERE = ("192.0.2.1", 9)
"""Of a network for documentation (RFC 5737): finds the default route; nothing is sent there."""


@dataclass(frozen=True)
class PortRange:
    """Both ends included."""

    first: int
    last: int

    @classmethod
    def of(cls, text: str, flag: str = "--ports") -> PortRange:
        first, dash, last = text.partition("-")
        if not (dash and first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) <= 65535):
            raise AtlasError(f"{flag} {text}: must be LO-HI, two ports from 1 to 65535, such as 7710-7719")
        return cls(int(first), int(last))

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    def share(self, index: int, count: int) -> PortRange:
        """The part of one of several launchers on a host. May be empty: `SiteNetwork.require_ports` checks it."""
        each = self.count // count
        return PortRange(self.first + index * each, self.first + (index + 1) * each - 1)

    def overlaps(self, other: PortRange) -> bool:
        return self.first <= other.last and other.first <= self.last

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


@dataclass(frozen=True)
class SiteNetwork:
    """What a user says about the network of one launcher."""

    listen: str = "127.0.0.1"
    """The address to bind; 0.0.0.0: all of this host."""
    advertise: str = ""
    """What launchers of other datacenters dial: an address, a name, or `NONE`. Empty: `listen`."""
    ports: PortRange | None = None
    """For the checkpoint server (the first) and the workers. None: the kernel chooses."""
    reach: Mapping[str, str] = field(default_factory=dict)
    """By datacenter (`west`) or host (`west/1`): what this host dials, in place of what that one advertises."""
    private: bool = False
    """Whether nobody else can connect to hosts of this datacenter, or insert packets there: torch.distributed, which
    does not authenticate, may then sum gradients between them."""

    def require_valid(self, datacenters: Sequence[str]) -> None:
        """Raises AtlasError if this host cannot use it. `datacenters`: those of the plan."""
        require_own(self.listen)
        if is_wildcard(self.listen) and not self.advertise:
            raise AtlasError(
                f"--listen {self.listen}: other datacenters cannot dial that. Give --advertise HOST, the address or "
                "name at which they reach this host, or --advertise none if they cannot"
            )
        if self.advertise != NONE:
            require_name_resolves("--advertise", self.advertise or self.listen)
            if is_wildcard(self.advertise):
                raise AtlasError(f"--advertise {self.advertise}: others cannot dial that. Give one address, or none")
        for peer, host in self.reach.items():
            datacenter, slash, number = peer.partition("/")
            if datacenter not in datacenters:
                raise AtlasError(
                    f"--reach {peer}={host}: the plan has no such datacenter; it has {', '.join(datacenters)}. Write "
                    "NAME=HOST, or NAME/NUMBER=HOST for one host of several"
                )
            if slash and not number.isdecimal():
                raise AtlasError(
                    f"--reach {peer}={host}: {number!r} is not the number of a host. Write {datacenter}/0={host} for "
                    f"the first host, or {datacenter}={host} for all"
                )
            if host != NONE:
                require_name_resolves(f"--reach {peer}={host}: it", host)

    def require_ports(self, num_workers: int, *, saves: bool, launchers: int = 1, serves: bool = False) -> None:
        """Raises AtlasError if the range is too small, or one of its ports is in use by another program. `launchers`:
        on this host; `serves`: the checkpoint server listens already."""
        if self.ports is None:
            return
        needed = num_workers + saves
        if self.ports.count < needed:
            what = f"{num_workers} worker(s)" + (" and a checkpoint server" if saves else "")
            shared = f", and {launchers} launchers on this host share it: {launchers * needed} in all" * (launchers > 1)
            raise AtlasError(
                f"--ports {self.ports}: {max(0, self.ports.count)} port(s) for this launcher, but it needs {needed} "
                f"({what}{shared}). Give a longer range, and open it in the firewall"
            )
        for port in range(self.ports.first + serves, self.ports.first + needed):
            _require_free(self.listen, port, self.ports)

    def port(self, index: int) -> int:
        """0: the checkpoint server; then the workers of this host."""
        return 0 if self.ports is None else self.ports.first + index

    def described(self, num_workers: int, *, saves: bool) -> str:
        """For the user: where it listens, and how many ports it needs."""
        needed, others = num_workers + saves, self.advertise or self.listen
        where = "ports that the kernel chooses" if self.ports is None else f"ports {self.ports}"
        dialled = (
            "others cannot dial it, so it dials for both directions" if others == NONE else f"others dial {others}"
        )
        return (
            f"listens at {self.listen} on {where}, of which it needs {needed} ({num_workers} worker(s)"
            f"{' and a checkpoint server' if saves else ''}); {dialled}"
        )

    def facts(self, name: AgentName, rendezvous: Address) -> SiteFacts:
        """For the other launchers."""
        dialled = None if self.advertise == NONE else self.advertise or self.listen
        local = own_address(rendezvous) if is_wildcard(self.listen) else self.listen
        here = (self.listen, network_name())
        return SiteFacts(name.datacenter, name.part, local, dialled, dict(self.reach), self.ports, *here)


@dataclass(frozen=True)
class SiteFacts:
    """The network of a launcher, as sent to the others."""

    datacenter: str
    part: int
    local: str
    """What hosts of its own datacenter dial."""
    advertise: str | None
    """What other datacenters dial. None: they cannot."""
    reach: Mapping[str, str] = field(default_factory=dict)
    ports: PortRange | None = None
    listen: str = ""
    """What it binds."""
    network: str = ""
    """The name of its machine's addresses (`machine`)."""

    @property
    def host(self) -> str:
        return f"{self.datacenter}/{self.part}"

    def shares_ports(self, other: SiteFacts) -> bool:
        """Whether both listen at one address of one machine."""
        binds = {self.listen, other.listen}
        return self.network == other.network != "" and (len(binds) == 1 or any(map(is_wildcard, binds)))

    def dials(self, other: SiteFacts) -> str | None:
        """The host at which this one dials the other; None if it cannot."""
        given = self.reach.get(other.host, self.reach.get(other.datacenter))
        if given is not None:
            return None if given == NONE else given
        return other.local if self.datacenter == other.datacenter else other.advertise

    def route(self, other: SiteFacts, port: int) -> PeerRoute:
        """How a node of this host connects with a node of the other that listens on this port."""
        host = self.dials(other)
        return PeerRoute(None if host is None else (host, port), other.dials(self) is None)


def require_connected(sites: Iterable[tuple[SiteFacts, SiteFacts]]) -> None:
    """Raises AtlasError for a pair in which neither can dial the other, or which share a port."""
    for one, other in sites:
        if one.dials(other) is None and other.dials(one) is None:
            raise AtlasError(
                f"{one.host} and {other.host} exchange messages, and neither can dial the other (--advertise none, "
                "--reach none); at least one must be able to. Give one of them a public address and --advertise, or "
                "connect them by a VPN and give --reach"
            )


def require_apart(sites: Sequence[SiteFacts]) -> None:
    """Raises AtlasError if two launchers would listen on the same port of one address."""
    for one, other in combinations(sites, 2):
        if one.ports is None or other.ports is None or not one.ports.overlaps(other.ports):
            continue
        mates = one.datacenter == other.datacenter and one.local == other.local
        here = one.shares_ports(other)
        if here or mates or (one.advertise is not None and one.advertise == other.advertise):
            where = "on one host" if here else f"both dialled at {one.local if mates else one.advertise}"
            raise AtlasError(
                f"{one.host} and {other.host} are {where}, and their --ports {one.ports} and {other.ports} overlap. "
                "Give each launcher a range of its own"
            )


# ---- addresses -------------------------------------------------------------------------------------------------------
def own_address(toward: Address) -> str:
    """This host's address on the way to another one. Sends nothing."""
    for where in (toward, ANYWHERE):
        try:
            family, address = resolve(where)
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect(address)
                found = str(sock.getsockname()[0])
        except OSError:
            continue
        if not is_loopback(found):
            return found
    return "127.0.0.1"


def rendezvous_to_bind(rendezvous: Address, network: SiteNetwork) -> Address:
    """Where the rendezvous listens: at its own address if this host has it, else at --listen, with the same port: the
    address that others dial may belong to a NAT."""
    (host, port), listen, ports = rendezvous, network.listen, network.ports
    if ports is not None and ports.first <= port <= ports.last:
        raise AtlasError(f"--ports {ports}: the rendezvous has port {port}. Give a range without it")
    return (host if _bind_error(host, 0) is None or listen == SiteNetwork().listen else listen), port


def require_own(host: str) -> None:
    reason = _bind_error(host, 0)
    if reason is not None:
        raise AtlasError(
            f"--listen {host}: not an address of this host ({reason}). Give one that `ip addr` shows, or 0.0.0.0; what "
            "the others dial is --advertise"
        )


def require_name_resolves(flag: str, host: str) -> None:
    try:
        resolve((host, 0))
    except (OSError, UnicodeError):
        raise AtlasError(
            f"{flag} {host}: does not resolve. Give an IP address, or a name that DNS knows here"
        ) from None


def _require_free(host: str, port: int, ports: PortRange) -> None:
    deadline = time.monotonic() + FREE_S
    while (reason := _bind_error(host, port)) is not None:
        if time.monotonic() > deadline:
            raise AtlasError(
                f"--ports {ports}: port {port} at {host} cannot be used: {reason}. Two launchers on one host need "
                "ranges that do not overlap; `ss -ltnp` shows which process uses it"
            )
        time.sleep(POLL_S)


def _bind_error(host: str, port: int) -> str | None:
    """Why this host cannot listen there; None: it can."""
    try:
        family, address = resolve((host, port))
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(1)
    except (OSError, UnicodeError) as error:
        return getattr(error, "strerror", None) or "no address"
    return None
