"""Leads the sites of a run from where they meet: gathers them, has them choose what to resume from, starts all workers
at one moment, hears of every step, and stops them after one and the same.

When something fails the group begins a new life (`supervisor`); when a datacenter is lost, on a new plan (`replan`).
Knows sites and messages; touches no folder and no device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atlas.errors import AtlasError, WorkerError
from atlas.ir.text import to_text
from atlas.launch.prepared_job import PreparedJob
from atlas.launch.remote_workers import RemoteWorkers
from atlas.launch.rendezvous import AgentName, JoinedAgent, Rendezvous
from atlas.launch.run_monitor import OnStep, RunMonitor, RunOutcome
from atlas.launch.supervisor import RestartPolicy, run_with_restarts
from atlas.runtime.wiring import MAIN
from atlas.wan.security.credentials import Security
from atlas.wan.transport.base import Address

MEET_S, FETCH_S = 30.0, 600.0
"""Workers read a checkpoint before they listen, and it may be large: one that dies is heard of at once in any case."""
SILENT_PATIENCES = 10
"""So many times the workers' patience without a word from anybody is the end."""
REMIND_S = 10.0
FINISH_S = 5.0

Replan = Callable[[PreparedJob, list[str]], PreparedJob]
"""The work on what is left when these datacenters are lost; raises where that cannot be, or was not allowed."""
Route = Callable[[str, str, Address], Address]
"""For tests: where `src` finds what `dst` has at an address."""


@dataclass(frozen=True)
class RunSettings:
    """How a run is led."""

    num_steps: int
    """Of the whole run."""
    save_every: int = 0
    keep: int = 3
    streams: int = 0
    """To each peer; 0: as many as the transport likes."""
    paced: bool = False
    grace_s: float = 30.0
    """How long a launcher may be out of reach before its datacenter is lost."""
    patience_s: float = 60.0
    """How long a worker waits for a peer before it complains."""
    gather_s: float = 600.0
    """How long to wait for all launchers at the start."""
    restarts: RestartPolicy = field(default_factory=RestartPolicy)


@dataclass(frozen=True)
class ResumePoint:
    """Where a life begins."""

    first_step: int = 0
    attempt: int = 0
    resume: int | None = None
    copies: dict[str, str] = field(default_factory=dict)
    """By site: the keeper that its workers copy to."""
    saves: bool = False


class Coordinator:
    """Listens from the start; `run` to the end; `close` whatever happens. `plan`: the digest that all must have."""

    def __init__(
        self,
        address: Address,
        security: Security,
        plan: str,
        work: PreparedJob,
        terms: RunSettings,
        *,
        say: Callable[[str], None],
        replan: Replan,
        tell: OnStep | None = None,
        on_start: Callable[[Mapping[str, int]], None] | None = None,
        route: Route = lambda src, dst, address: address,
    ) -> None:
        self.work, self.terms, self._plan = work, terms, plan
        self._say, self._replan, self._tell, self._on_start, self._route = say, replan, tell, on_start, route
        self._epoch = int(time.time())  # later than that of any life before, whoever led it
        self._members = list(work.datacenters)
        """Datacenters that are part of the run; those without a worker keep checkpoints."""
        self._all_datacenters = tuple(work.datacenters)
        self._num_done = 0
        self._failure: BaseException | None = None
        self.rendezvous = Rendezvous(address, security, self._judge)

    def close(self) -> None:
        self.rendezvous.close()

    def run(self) -> RunOutcome:
        """How it ended; raises what it could not go on from."""
        try:
            ending = run_with_restarts(self._live, lambda: self._num_done, self.terms.restarts, self._say)
        except KeyboardInterrupt:
            self._finish("interrupted", 130)
            raise
        except AtlasError as error:
            self._finish(str(error), 2)
            raise
        self._finish(ending.sentence, 130 if ending.stopped else 0)
        return ending

    def fail(self, site: AgentName, error: BaseException) -> None:
        """The site of this very launcher has failed, on its own thread: the run ends, it is not started again."""
        self._failure = error
        guest = self.rendezvous.guests.get((site.datacenter, site.part))
        if guest is not None:
            guest.channel.inbox.put({"failed": str(error) or repr(error)})

    def _finish(self, text: str, code: int) -> None:
        guests = list(self.rendezvous.guests.values())
        for guest in guests:
            with contextlib.suppress(WorkerError):  # one that does not read must not keep the others from hearing it
                guest.channel.send({"finish": {"text": text, "code": code}})
        deadline = time.monotonic() + FINISH_S
        for guest in guests:
            guest.channel.wait_sent(max(0.0, deadline - time.monotonic()) if guest.channel.is_connected else 0.0)

    # ---- who is there ----------------------------------------------------------------------------------------------
    def _judge(self, site: AgentName, plan: str) -> str | None:
        """Why a launcher may not join; None: it may."""
        if site.datacenter not in self._members:
            if site.datacenter in self._all_datacenters:
                return "the run has gone on without this datacenter; let it end, and start again with it"
            return f"the plan has no datacenter of this name; it has {', '.join(self._members)}"
        if plan != self._plan:
            return "it holds another plan than the datacenter where all meet: copy the same file to both"
        if not 0 <= site.part < site.num_parts:
            return f"there is no launcher {site.part} of {site.num_parts}"
        return None

    def _gathered(self) -> list[JoinedAgent]:
        """Every launcher of every member; replans where one does not come back in time."""
        deadline, remind = time.monotonic() + self.terms.gather_s, time.monotonic() + REMIND_S
        with self.rendezvous.changed:
            while True:
                if isinstance(self._failure, WorkerError):
                    raise AtlasError(str(self._failure))  # no restart would help
                if self._failure is not None:
                    raise self._failure
                missing = self._missing()
                if not missing:
                    return [g for g in self.rendezvous.guests.values() if g.name.datacenter in self._members]
                lost = [dc for dc, since in missing.items() if since and time.monotonic() - since > self.terms.grace_s]
                if lost or time.monotonic() > deadline:
                    break
                if time.monotonic() > remind:
                    remind += REMIND_S
                    self._say(f"waiting for {', '.join(missing)} at {self._where()}")
                self.rendezvous.changed.wait(0.2)
        if not lost:
            raise AtlasError(
                f"{', '.join(missing)} did not come to {self._where()} within {self.terms.gather_s:g} s. Start "
                "`atlas train PLAN --dc NAME` there, or leave it out with --without"
            )
        self._lose(lost)
        return self._gathered()

    def _missing(self) -> dict[str, float]:
        """Datacenters that are not all here, and since when; 0 where they have not been here yet."""
        missing: dict[str, float] = {}
        for dc in self._members:
            guests = [guest for guest in self.rendezvous.guests.values() if guest.name.datacenter == dc]
            away = [guest.channel.gone_since for guest in guests if not guest.channel.is_connected]
            if away or not guests or len(guests) < guests[0].name.num_parts:
                missing[dc] = min(away, default=0.0)
        return missing

    def _lose(self, lost: list[str]) -> None:
        self.work = self._replan(self.work, lost)
        self._members = [dc for dc in self._members if dc not in lost]
        for place in [place for place in self.rendezvous.guests if place[0] in lost]:
            self.rendezvous.guests.pop(place).channel.detach()

    def _where(self) -> str:
        host, port = self.rendezvous.address
        return f"{host}:{port}"

    # ---- one life --------------------------------------------------------------------------------------------------
    def _live(self) -> RunOutcome:
        guests = self._gathered()
        self._epoch += 1
        owner = {role.name: guest for guest in guests for role in self.work.roles_of(guest.name)}
        home = {role.name: owner[role.name] for role in self.work.roles}  # as the Program has them
        with RemoteWorkers(self._epoch, self.rendezvous, guests, home, self.terms.grace_s) as crew:
            crew.warn = self._say
            crew.order_all({"life": self._epoch, "datacenters": list(self._all_datacenters)})
            met = crew.hear("begun", MEET_S, of=crew.sites)
            start = self._begin(crew, guests, met)
            if start.first_step >= self.terms.num_steps:
                sentence = f"{start.first_step} steps are done already, and --steps says {self.terms.num_steps}"
                return RunOutcome(start.first_step, [], sentence)
            self._num_done = max(self._num_done, start.first_step)
            self._prepare(crew, guests, start)
            lead = RunMonitor(
                crew,
                self.work,
                start.first_step,
                silence_s=SILENT_PATIENCES * self.terms.patience_s,
                saves=start.saves,
                copies=bool(start.copies),
                say=self._say,
                tell=self._tell,
            )
            self._connect(crew, {site: found["host"] for site, found in met.items()}, start, lead)
            if start.resume is not None:
                self._say(f"goes on from the checkpoint of step {start.resume}")
            try:
                return lead.play()
            finally:
                self._num_done = max(self._num_done, lead.num_done)

    def _begin(self, crew: RemoteWorkers, guests: Sequence[JoinedAgent], met: Mapping[str, Any]) -> ResumePoint:
        """Keepers meet, and it is chosen where to go on."""
        keepers, shelves = ({site: found[name] for site, found in met.items()} for name in ("keeper", "shelves"))
        if not self._require_folders(keepers):
            return ResumePoint()
        crew.order_all({"keepers": keepers, "shelves": shelves})
        crew.hear("met", MEET_S, of=crew.sites)
        first_step, attempt, resume = self._chosen(crew)
        return ResumePoint(first_step, attempt, resume, self._copy_targets(guests), saves=True)

    def _require_folders(self, keepers: Mapping[str, Any]) -> bool:
        """Whether the run is saved."""
        without = [site.partition("/")[0] for site, place in keepers.items() if place is None]
        if without and len(without) < len(keepers):
            raise AtlasError(
                f"{', '.join(without)} has no --checkpoints, the others have: give every datacenter a folder, or none"
            )
        return not without

    def _chosen(self, crew: RemoteWorkers) -> tuple[int, int, int | None]:
        """(first step, attempt, step to resume from): one site looks at what all have."""
        asked = crew.sites[0]
        crew.order(asked, {"choose": True})
        found = crew.hear("chosen", FETCH_S, of=[asked])[asked]
        step = found["save"][1] if found["save"] is not None else None
        if step is None and found["next"]:
            self._say("what was saved before is not complete on what is here: begins with the first step")
        return step or 0, found["next"], step

    def _copy_targets(self, guests: Sequence[JoinedAgent]) -> dict[str, str]:
        """By site: the keeper that its workers copy to, in the next datacenter around; the same in every life."""
        ring = [dc for dc in self._members if any(guest.name.datacenter == dc for guest in guests)]
        if len(ring) < 2:
            return {}
        targets: dict[str, str] = {}
        for guest in guests:
            after = ring[(ring.index(guest.name.datacenter) + 1) % len(ring)]
            theirs = sorted(other.name.part for other in guests if other.name.datacenter == after)
            targets[guest.name.node] = AgentName(after, theirs[guest.name.part % len(theirs)]).node
        return targets

    def _prepare(self, crew: RemoteWorkers, guests: Sequence[JoinedAgent], start: ResumePoint) -> None:
        work, terms = self.work, self.terms
        common = {
            "program": to_text(work.program),
            "training": dataclasses.asdict(work.training),
            "num_cells": work.job.cells,
            "tp": work.job.tp,
            "num_steps": terms.num_steps,
            "first_step": start.first_step,
            "attempt": start.attempt,
            "resume": start.resume,
            "save_every": terms.save_every,
            "keep": terms.keep,
            "streams": terms.streams,
            "patience_s": terms.patience_s,
        }
        for guest in guests:
            roles = work.roles_of(guest.name)
            pace = {
                role.name: work.costs.compute_ns[role.worker // work.program.num_ranks].tolist()
                for role in roles
                if terms.paced
            }
            own = {
                "workers": [[role.cell, role.worker] for role in roles],
                "compute_ns": pace,
                "copy_to": start.copies.get(guest.name.node),
            }
            crew.order(guest.name.node, {"prepare": {**common, **own}})
        pids = crew.hear("prepared", FETCH_S, of=crew.sites)
        if self._on_start is not None:
            self._on_start({name: pid for found in pids.values() for name, pid in found.items()})

    def _connect(self, crew: RemoteWorkers, hosts: Mapping[str, str], start: ResumePoint, lead: RunMonitor) -> None:
        """Tells workers where their peers are, and keepers who will copy to them."""
        ports = crew.hear("listening", FETCH_S)
        roles = {role.node: role for role in self.work.roles}
        callers: dict[str, dict[str, Address]] = {site: {} for site in crew.sites}
        for node, role in roles.items():
            if (keeper := start.copies.get(crew.site_of(role.name))) is not None:
                callers[keeper][node] = (hosts[crew.site_of(role.name)], ports[role.name][MAIN])
        for site, nodes in callers.items():
            crew.order(site, {"admit": nodes})
        crew.hear("admitted", MEET_S, of=crew.sites)
        for role in roles.values():
            places = []
            for wire in role.wires(tied=self.work.training.model.config.tied):
                peer = roles[wire.peer].name
                address = (hosts[crew.site_of(peer)], ports[peer][wire.peer_end])
                places.append((wire.end, wire.peer, wire.lane, *self._route(role.node, wire.peer, address)))
            crew.tell(role.name, {"channels": places})
        crew.hear("ready", FETCH_S, meanwhile=lead.note)  # copies of earlier saves begin with the connections
