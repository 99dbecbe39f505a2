"""`atlas train PLAN --dc NAME`: this datacenter's part of a run over several. In the first datacenter of the plan all
meet, and the run is led from there; everywhere a `Agent` starts workers and keeps checkpoints.

Nothing is shared but messages: plan, data and checkpoints are each datacenter's own.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from atlas.cost.arrange import arrange
from atlas.errors import AtlasError
from atlas.launch.agent import Agent, AgentSettings
from atlas.launch.coordinator import Coordinator, Route, RunSettings
from atlas.launch.preflight import devices_for, require_executable, require_room
from atlas.launch.prepared_job import PreparedJob, digest_of, prepare_job
from atlas.launch.rehearse import TrainOptions
from atlas.launch.rendezvous import AgentName, RendezvousClient
from atlas.launch.replan import replan
from atlas.launch.run_monitor import OnStep
from atlas.spec import Job
from atlas.wan.security.credentials import Credentials, Security
from atlas.wan.transport.base import Address

Say = Callable[[str], None]
OWN_SITE_S = 30.0


@dataclass(frozen=True)
class LauncherSettings:
    """This launcher's place in the run."""

    settings: AgentSettings
    rendezvous: Address
    auto_replan: bool = False
    """Whether a lost datacenter is left behind without asking."""
    without: tuple[str, ...] = ()
    """Datacenters that are known to be lost."""


@dataclass(frozen=True)
class RunCallbacks:
    """Who wants to hear of it."""

    say: Say
    tell: OnStep | None = None
    on_start: Callable[[Mapping[str, int]], None] | None = None
    """Process ids by worker, at every start; for tests."""
    route: Route = lambda src, dst, address: address


def leads(job: Job, options: TrainOptions, here: LauncherSettings) -> bool:
    """Whether all meet at this launcher."""
    return here.settings.name.node == AgentName(_ranks(_job(job, options, here))[0]).node


def train_here(job: Job, options: TrainOptions, terms: RunSettings, here: LauncherSettings, hooks: RunCallbacks) -> int:
    """Runs to the end of the whole run; the exit code."""
    require_executable(job)
    job = _job(job, options, here)
    ranks = _ranks(job)
    mine = here.settings.name
    if mine.datacenter not in ranks:
        raise AtlasError(f"--dc {mine.datacenter}: the plan has no worker there; it has them in {', '.join(ranks)}")
    _require_devices(job, here.settings)
    security = security_of(here.settings)
    leader = AgentName(ranks[0])
    digest = digest_of(job, options)
    if mine.node != leader.node:
        caller = _caller(here, leader, digest, security, terms)
        return Agent(here.settings, caller, security, hooks.say).run()
    work = prepare_job(job, options)
    require_room(work.roles_of(mine), work.training, here.settings.device, tp=job.tp)
    return _lead(work, options, terms, here, hooks, (digest, leader, security))


def _lead(
    work: PreparedJob,
    options: TrainOptions,
    terms: RunSettings,
    here: LauncherSettings,
    hooks: RunCallbacks,
    identity: tuple[str, AgentName, Security],
) -> int:
    digest, leader, security = identity
    coordinator = Coordinator(
        here.rendezvous,
        security,
        digest,
        work,
        terms,
        say=hooks.say,
        replan=lambda work, lost: _replanned(work, lost, options, hooks.say, auto=here.auto_replan),
        tell=hooks.tell,
        on_start=hooks.on_start,
        route=hooks.route,
    )
    try:
        caller = _caller(replace(here, rendezvous=coordinator.rendezvous.address), leader, digest, security, terms)
        site = Agent(here.settings, caller, security, lambda line: None)

        def run_site() -> None:
            try:
                site.run()
            except BaseException as error:
                coordinator.fail(here.settings.name, error)

        thread = threading.Thread(target=run_site, name=f"site {leader}")
        thread.start()
        try:
            ending = coordinator.run()
        finally:
            caller.channel.inbox.put({"finish": {"text": "", "code": 0}})
            thread.join()
    finally:
        coordinator.close()
    hooks.say(ending.sentence)
    return 130 if ending.stopped else 0


def _caller(
    here: LauncherSettings, leader: AgentName, digest: str, security: Security, terms: RunSettings
) -> RendezvousClient:
    return RendezvousClient(
        here.rendezvous,
        leader,
        here.settings.name,
        digest,
        security,
        grace_s=terms.grace_s,
        patience_s=terms.gather_s,
    )


def security_of(settings: AgentSettings) -> Security:
    if settings.certificates is None:
        return Security()
    credentials = Credentials.of_folder(settings.certificates, settings.name.node)
    security = Security(credentials, settings.trusted_networks)
    _ = security.server_context, security.client_context  # files that are missing or do not fit are told now
    return security


def _require_devices(job: Job, settings: AgentSettings) -> None:
    """Before anybody is met: the devices of this launcher's workers."""
    found, name = arrange(job), settings.name
    count = found.rank_dc.count(name.datacenter) * found.num_pipelines * job.cells
    first, last = (count * (name.part + k) // name.num_parts for k in (0, 1))
    devices_for(last - first, settings.device, name.datacenter, settings.local_rank, tp=job.tp)


def _job(job: Job, options: TrainOptions, here: LauncherSettings) -> Job:
    return replan(job, _known(job, here.without), options.schedule) if here.without else job


def _ranks(job: Job) -> list[str]:
    """Datacenters in the order of the pipeline."""
    return list(dict.fromkeys(arrange(job).rank_dc))


def _known(job: Job, names: tuple[str, ...]) -> tuple[str, ...]:
    known = [dc.name for dc in job.cluster.datacenters]
    for name in names:
        if name not in known:
            raise AtlasError(f"--without {name}: the plan has no such datacenter; it has {', '.join(known)}")
    return names


def _replanned(work: PreparedJob, lost: list[str], options: TrainOptions, say: Say, *, auto: bool) -> PreparedJob:
    """On what is left, asked first."""
    gone = " and ".join(lost)
    new = prepare_job(replan(work.job, lost, options.schedule), options, work)
    places = ", ".join(f"{new.program.rank_dc.count(dc)} in {dc}" for dc in new.datacenters)
    offer = (
        f"datacenter {gone} is lost. On what is left: {new.program.num_ranks} stages ({places}), "
        f"{new.predicted_s:.3g} s an iteration instead of {work.predicted_s:.3g} s (simulated)"
    )
    if auto:
        say(f"{offer}; going on with that, from the last checkpoint that survived")
        return new
    if sys.stdin.isatty():
        say(f"{offer}. Go on with that? [y/N]")
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return new
    raise AtlasError(
        f"{offer}. Start again with --without {lost[0]} in every datacenter to go on with that, or with it when it is "
        "back; --auto-replan does the former by itself"
    )
