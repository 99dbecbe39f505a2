"""`atlas wan check`: every launcher of a plan listens on the ports that its workers would have and dials those of the
others; nothing is trained. The first datacenter, or a coordinator apart from it, collects what all have found and sends
the report to all.

    <- {"clock": n}              -> {"clock": seconds}      by this host's wall clock
    <- {"peers": {host: ...}}    -> {"reached": [...]}      one row for each other host
    <- {"report": {...}}            the end

Knows ports, certificates and names. Starts no worker and loads no torch.
"""

from __future__ import annotations

import hashlib
import json
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from atlas.cost.arrange import arrange
from atlas.errors import AtlasError
from atlas.launch.check_report import compiled
from atlas.launch.control_channel import Message
from atlas.launch.hosts import workers_by_datacenter
from atlas.launch.rendezvous import COORDINATOR, AgentName, JoinedAgent, Rendezvous, RendezvousClient
from atlas.launch.site_network import SiteFacts, SiteNetwork
from atlas.launch.site_security import security_of
from atlas.runtime.assignment import read
from atlas.spec import Job
from atlas.wan.probe.port_check import check_burst, check_port
from atlas.wan.security.certs import described
from atlas.wan.security.credentials import Credentials, Security
from atlas.wan.transport.base import Address, is_wildcard
from atlas.wan.transport.endpoint import Endpoint
from atlas.wan.transport.wire import Greeting

MAX_DIALS = 64
"""At once, by one host."""
REPLY_S = 60.0
"""For what a host has found: it dials each port for 4 s at most, then measures rates one after another."""
NUM_CLOCKS = 3
"""Questions for the clock of each launcher; the one with the shortest round trip counts."""
LATE_S = 2.0
"""How long to wait for further sites after a connection was refused: most likely it was one of those missing."""
POLL_S = 0.2


@dataclass(frozen=True)
class CheckSettings:
    """Of one launcher."""

    name: AgentName
    network: SiteNetwork
    rendezvous: Address
    bind: Address
    """Where the rendezvous listens, in the first datacenter."""
    certificates: Path | None = None
    trusted_networks: tuple[str, ...] = ()
    gather_s: float = 60.0
    apart: bool = False
    """Whether the rendezvous is on a host of its own (`COORDINATOR`), as with `atlas coordinator`."""

    def security(self, node: str) -> Security:
        if self.certificates is None:
            return Security()
        return Security(Credentials.of_folder(self.certificates, node), self.trusted_networks)


def nodes_of(job: Job, name: AgentName) -> list[str]:
    """The checkpoint server of a launcher and its workers, in the order of their ports."""
    workers: list[str] = []
    first = 0
    for part in job.parts:
        found = arrange(part)
        pipelines = range(first, first + part.cells * found.num_pipelines)
        nodes = [(dc, f"{dc}/p{c}.s{rank}") for c in pipelines for rank, dc in enumerate(found.rank_dc)]
        workers += [node for dc, node in nodes if dc == name.datacenter]
        first = pipelines.stop
    return [name.node, *workers[name.share(len(workers))]]


def check_network(job: Job, settings: CheckSettings, say: Callable[[str], None]) -> Message:
    """Check together with all other launchers of the plan; the report. Raises AtlasError if this one cannot join."""
    datacenters = list(workers_by_datacenter(job))
    first, mine = COORDINATOR if settings.apart else AgentName(datacenters[0]), settings.name
    if mine.datacenter not in [*datacenters, first.datacenter]:
        raise AtlasError(
            f"--dc {mine.datacenter}: the plan has no worker there; it has them in {', '.join(datacenters)}. Give "
            "one of these"
        )
    what = [part.model_dump(mode="json") for part in job.parts]
    digest = "check " + hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
    security = security_of(mine, settings.certificates, settings.trusted_networks)
    with ExitStack() as stack:
        address = settings.rendezvous
        if mine.node == first.node:
            coordinator = stack.enter_context(CheckCoordinator(settings, security, digest, datacenters, say))
            if settings.apart:
                return coordinator.report()
            host, port = coordinator.rendezvous.address
            address = ("127.0.0.1" if is_wildcard(host) else host, port)
        site = stack.enter_context(CheckedSite(settings, _listeners(job, settings)))
        client = RendezvousClient(address, first, mine, digest, security, grace_s=REPLY_S, patience_s=settings.gather_s)
        stack.callback(client.close)
        return site.serve(client)


def _listeners(job: Job, settings: CheckSettings) -> list[str]:
    """The nodes of this launcher, in the order of their ports, after its network was found usable."""
    nodes, ports = nodes_of(job, settings.name), settings.network.ports
    if ports is not None and ports.count < len(nodes):
        nodes = nodes[1:]  # without checkpoints there is no checkpoint server
    settings.network.require_valid([dc.name for dc in job.cluster.datacenters])
    settings.network.require_ports(len(nodes), saves=False)
    return nodes


class CheckedSite:
    """Listens on all ports of this launcher; `serve` answers the coordinator until it sends the report."""

    def __init__(self, settings: CheckSettings, nodes: Sequence[str]) -> None:
        self.settings = settings
        self._instance = secrets.randbits(62) | 1
        self._stack = ExitStack()
        self.ports: dict[str, int] = {}
        try:
            for index, node in enumerate(nodes):
                where = (settings.network.listen, settings.network.port(index))
                endpoint = Endpoint(node, where, security=settings.security(node))
                self._stack.callback(endpoint.close, 0.0)
                self.ports[node] = endpoint.address[1]
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> CheckedSite:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def facts(self) -> Message:
        mine = self.settings
        site = mine.network.facts(mine.name, mine.rendezvous)
        certificates = described(mine.certificates, mine.name.datacenter)
        return {"site": asdict(site), "ports": self.ports, "certificates": certificates}

    def serve(self, client: RendezvousClient) -> Message:
        client.channel.send({"joined": self.facts()})
        while True:
            message = client.channel.inbox.get()
            if "gone" in message:
                raise AtlasError(str(message["gone"]))
            if "report" in message:
                client.channel.wait_sent(1.0)
                return dict(message["report"])
            if "clock" in message:
                client.channel.send({"clock": time.time()})
            elif "peers" in message:
                client.channel.send({"reached": self.dial(message["peers"])})

    def dial(self, peers: Mapping[str, Message]) -> list[Message]:
        """Dial all ports of all peers at once, then measure a rate to each that was reached."""
        here = self.settings.network.facts(self.settings.name, self.settings.rendezvous)
        security = self.settings.security(self.settings.name.node)
        rows: list[Message] = []
        with ThreadPoolExecutor(MAX_DIALS) as pool:
            for host, peer in peers.items():
                there = here.dials(read(SiteFacts, peer["site"]))
                row: Message = {"from": here.host, "to": host, "host": there, "ports": {}}
                if there is not None:
                    row["found"] = {
                        (node, port): pool.submit(check_port, (there, port), self._greeting(node), security)
                        for node, port in peer["ports"].items()
                    }
                rows.append(row)
        for row in rows:
            self._finish(row, security)
        return rows

    def _finish(self, row: Message, security: Security) -> None:
        """Results in place of futures, and the rate to the first port that works."""
        found = {place: job.result() for place, job in row.pop("found", {}).items()}
        row["ports"] = {str(port): one.error for (_, port), one in found.items()}
        worked = [(place, one) for place, one in found.items() if not one.error]
        if not worked:
            return
        (node, port), _ = worked[0]
        burst = check_burst((row["host"], port), self._greeting(node), security)
        if burst.error:
            row["ports"][str(port)] = burst.error
        row["rtt_ms"] = min(one.rtt_ms for _, one in worked)
        row["mtu"] = min(one.mtu_bytes for _, one in worked)
        row["gbit_s"] = burst.gbit_s

    def _greeting(self, peer: str) -> Greeting:
        return Greeting(self.settings.name.node, peer, 0, 0, self._instance)


@dataclass
class CheckCoordinator:
    """Runs on a thread beside the first datacenter's own `CheckedSite`."""

    settings: CheckSettings
    security: Security
    digest: str
    datacenters: Sequence[str]
    say: Callable[[str], None]
    _joined: dict[str, Message] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rendezvous = Rendezvous(self.settings.bind, self.security, self._why_not)
        self._closing = threading.Event()
        self._report: Message = {}
        self._thread = threading.Thread(target=self._run, daemon=True, name="network check")

    def __enter__(self) -> CheckCoordinator:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        self.rendezvous.close()

    def report(self) -> Message:
        """Waits for the end of the check."""
        self._thread.join()
        return self._report

    def _why_not(self, agent: AgentName, plan: str) -> str | None:
        if agent.datacenter not in self.datacenters:
            return f"the plan has no datacenter of this name; it has {', '.join(self.datacenters)}"
        if plan != self.digest:
            return "it checks another plan: run `atlas wan check` with the same plan file everywhere"
        return None

    def _run(self) -> None:
        try:
            self._check()
        except Exception as error:  # on a thread: all sites wait for a report
            self._send({"rows": [], "sites": [], "warnings": [], "faults": [f"the check itself failed: {error!r}"]})
            raise

    def _send(self, report: Message) -> None:
        self._report, agents = report, list(self.rendezvous.agents.values())
        for agent in agents:
            agent.channel.send({"report": report})
        for agent in agents:
            agent.channel.wait_sent(2.0)

    def _check(self) -> None:
        missing = self._gather()
        agents = {f"{a.name.datacenter}/{a.name.part}": a for a in list(self.rendezvous.agents.values())}
        joined = {host: facts for host, agent in agents.items() if (facts := self._ask(agent, None, "joined"))}
        clocks = {host: self._clock(agents[host]) for host in joined}
        for host in joined:
            agents[host].channel.send({"peers": {other: facts for other, facts in joined.items() if other != host}})
        rows = [row for host in joined for row in self._ask(agents[host], None, "reached") or ()]
        refused = list(self.rendezvous.refusals)
        self._send(compiled(joined, rows, clocks, missing, refused, self.settings.rendezvous))

    def _gather(self) -> list[str]:
        """Wait for all; the names of those that did not come."""
        deadline, said = time.monotonic() + self.settings.gather_s, False
        while missing := self._missing():
            if self._closing.is_set() or time.monotonic() > deadline:
                break
            if not said and len(missing) < len(self.datacenters):
                said = True
                self.say(f"waiting for {', '.join(missing)}")
            refusals = self.rendezvous.refusals
            if len({refusal.host for refusal in refusals}) >= len(missing):
                deadline = min(deadline, refusals[0].at + LATE_S)
            time.sleep(POLL_S)
        return missing

    def _missing(self) -> list[str]:
        here: dict[str, list[JoinedAgent]] = {dc: [] for dc in self.datacenters}
        for agent in list(self.rendezvous.agents.values()):
            here[agent.name.datacenter].append(agent)
        return [dc for dc, agents in here.items() if not agents or len(agents) < agents[0].name.num_parts]

    def _ask(self, agent: JoinedAgent, message: Message | None, key: str) -> Any:
        """A reply of a site; None if it does not reply."""
        if message is not None:
            agent.channel.send(message)
        deadline = time.monotonic() + REPLY_S
        while time.monotonic() < deadline and not self._closing.is_set():
            try:
                reply = agent.channel.inbox.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if key in reply:
                return reply[key]
        return None

    def _clock(self, agent: JoinedAgent) -> float:
        """How far its wall clock is ahead of this host's, in seconds; 0 if the difference is below the uncertainty."""
        best = (float("inf"), 0.0)
        for number in range(NUM_CLOCKS):
            begun = time.time()
            theirs = self._ask(agent, {"clock": number}, "clock")
            ended = time.time()
            if theirs is not None:
                best = min(best, (ended - begun, theirs - (begun + ended) / 2))
        return 0.0 if abs(best[1]) <= best[0] / 2 else best[1]
