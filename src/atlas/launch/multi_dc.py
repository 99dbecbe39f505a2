"""`atlas train PLAN --dc NAME`: this datacenter's part of a run over several. All launchers connect to the first
datacenter of the plan, where the run is coordinated, or to `atlas coordinator PLAN`; in each datacenter an `Agent`
starts workers and keeps checkpoints.

Datacenters share messages only: plan, data and checkpoints are each datacenter's own.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from atlas.errors import AtlasError
from atlas.launch.agent import Agent, AgentSettings
from atlas.launch.coordinator import Coordinator, RunCallbacks
from atlas.launch.hosts import hosts_needed, workers_by_datacenter
from atlas.launch.membership import is_or_are
from atlas.launch.preflight import devices_for, require_executable, require_memory
from atlas.launch.prepared_job import PreparedJob, digest_of, prepare_job
from atlas.launch.rendezvous import COORDINATOR, AgentName, RendezvousClient
from atlas.launch.replan import replan
from atlas.launch.run_state import StateFile
from atlas.launch.site_network import rendezvous_to_bind
from atlas.launch.site_security import expiry_watch, security_of
from atlas.launch.train_options import TrainOptions
from atlas.planner.space import batch_of
from atlas.spec import Job
from atlas.spec.recipe import OBJECT_STORE
from atlas.wan.security.credentials import Security
from atlas.wan.transport.base import Address, is_wildcard


def is_coordinator(job: Job, options: TrainOptions, settings: AgentSettings) -> bool:
    """Whether this launcher coordinates the run."""
    first = AgentName(_datacenters(_without_lost(job, options, settings))[0])
    return not settings.apart and settings.name.node == first.node


def train_here(job: Job, options: TrainOptions, settings: AgentSettings, callbacks: RunCallbacks) -> int:
    """Run this launcher to the end of the whole run; its exit code."""
    require_executable(job, options.filler)
    job = _without_lost(job, options, settings)
    datacenters = _datacenters(job)
    mine = settings.name
    if mine.datacenter not in datacenters:
        raise AtlasError(
            f"--dc {mine.datacenter}: the plan has no worker there; it has them in {', '.join(datacenters)}. Give one "
            "of these"
        )
    if settings.apart:
        _require_other_name(datacenters)
    _require_host(job, settings, callbacks.say)
    security = security_of(mine, settings.certificates, settings.trusted_networks)
    with expiry_watch(settings.certificates, mine.datacenter, callbacks.say):
        return _launched(job, options, settings, callbacks, security)


def _launched(
    job: Job, options: TrainOptions, settings: AgentSettings, callbacks: RunCallbacks, security: Security
) -> int:
    mine, first = settings.name, COORDINATOR if settings.apart else AgentName(_datacenters(job)[0])
    digest = digest_of(job, options)

    def agent(address: Address) -> Agent:
        client = RendezvousClient(
            address,
            first,
            mine,
            digest,
            security,
            grace_s=options.grace_s,
            patience_s=options.gather_s,
            say=callbacks.say,
        )
        return Agent(settings, client, security, callbacks.say)

    if mine.node != first.node:
        own = agent(settings.rendezvous)
        if mine.is_spare:
            callbacks.say(f"waiting as a spare of {mine.datacenter}, until a host there is lost")
        return own.run()
    prepared = prepare_job(job, options)
    needs = prepared.needs_of(prepared.roles_of(mine), saves=settings.checkpoints is not None)
    require_memory(needs, settings.device, tp=job.tp)
    coordinator = make_coordinator(prepared, options, settings, callbacks, security, _state_folder(options, settings))
    try:
        host, port = coordinator.rendezvous.address
        own = agent(("127.0.0.1" if is_wildcard(host) else host, port))
        own.say = lambda line: None  # the coordinator prints the same

        def run_agent() -> None:
            try:
                own.run()
            except BaseException as error:
                coordinator.fail(mine, error)

        thread = threading.Thread(target=run_agent, name=f"agent of {first}")
        thread.start()
        try:
            outcome = coordinator.run()
        finally:
            own.finish()
            thread.join()
    finally:
        coordinator.close()
    callbacks.say(outcome.sentence)
    return outcome.exit_code


def coordinate(job: Job, options: TrainOptions, settings: AgentSettings, callbacks: RunCallbacks, state: Path) -> int:
    """Coordinate a run from a host without workers; the exit code. `state`: the folder for what a coordinator that is
    started again must know."""
    require_executable(job, options.filler)
    job = _without_lost(job, options, settings)
    _require_other_name(_datacenters(job))
    prepared = prepare_job(job, options)
    security = security_of(settings.name, settings.certificates, settings.trusted_networks)
    with expiry_watch(settings.certificates, settings.name.datacenter, callbacks.say):
        return coordinated(make_coordinator(prepared, options, settings, callbacks, security, state), callbacks)


def coordinated(coordinator: Coordinator, callbacks: RunCallbacks) -> int:
    """Run it to the end; the exit code."""
    try:
        outcome = coordinator.run()
    finally:
        coordinator.close()
    callbacks.say(outcome.sentence)
    return outcome.exit_code


def _state_folder(options: TrainOptions, settings: AgentSettings) -> Path | None:
    """The folder of checkpoints; beside an object store, that of logs."""
    if options.checkpoints is None:
        return None
    return settings.logs if str(options.checkpoints).startswith(OBJECT_STORE) else Path(options.checkpoints)


def make_coordinator(
    prepared: PreparedJob,
    options: TrainOptions,
    settings: AgentSettings,
    callbacks: RunCallbacks,
    security: Security,
    folder: Path | None,
) -> Coordinator:
    def ask(offer: str, lost: str) -> None:
        _ask(offer, lost, callbacks.say, auto=settings.auto_replan)

    digest = digest_of(prepared.job, replace(options, stated=None))  # the coordinator's recipe applies to all
    address = rendezvous_to_bind(settings.rendezvous, settings.network)
    state = StateFile(folder, digest.partition(" ")[0])
    try:
        return Coordinator(address, security, digest, prepared, options, callbacks, ask, state)
    except BaseException:
        state.close()
        raise


def _require_other_name(datacenters: list[str]) -> None:
    if COORDINATOR.datacenter in datacenters:
        raise AtlasError(
            f"the plan has a datacenter named {COORDINATOR.datacenter!r}, and that name is reserved for the "
            "coordinator and its certificate. Rename the datacenter"
        )


def num_workers_of(job: Job, name: AgentName) -> int:
    """Workers that one launcher runs; a spare must be able to run those of any host of the plan."""
    count = workers_by_datacenter(job).get(name.datacenter, 0)
    if name.is_spare:
        return -(-count // hosts_needed(job).get(name.datacenter, 1))
    return len(range(count)[name.share(count)])


def _require_host(job: Job, settings: AgentSettings, say: Callable[[str], None]) -> None:
    """Before connecting to any other launcher: this launcher's network, and the devices of its workers."""
    name, network, num_workers = settings.name, settings.network, num_workers_of(job, settings.name)
    devices_for(num_workers, settings.device, name.datacenter, settings.local_rank, tp=job.tp)
    network.require_valid([dc.name for dc in job.cluster.datacenters])
    saves = settings.checkpoints is not None
    network.require_ports(num_workers, saves=saves, launchers=settings.launchers_here)
    if network.ports is not None:
        say(f"{name} {network.described(num_workers, saves=saves)}")


def _datacenters(job: Job) -> list[str]:
    """In the order of the pipeline."""
    return list(workers_by_datacenter(job))


def _without_lost(job: Job, options: TrainOptions, settings: AgentSettings) -> Job:
    """The job replanned without the datacenters that --without names."""
    known = [dc.name for dc in job.cluster.datacenters]
    for name in settings.without:
        if name not in known:
            raise AtlasError(f"--without {name}: the plan has no such datacenter; it has {', '.join(known)}")
    if not settings.without:
        return job
    batch = sum(batch_of(part) for part in job.parts)
    return replan(job, settings.without, options.schedule, batch=batch)


def _ask(offer: str, lost: str, say: Callable[[str], None], *, auto: bool) -> None:
    """Raise unless the user agrees to continue with another plan."""
    if auto:
        say(f"{offer}; continuing with that, from the last checkpoint that survived")
        return
    if sys.stdin.isatty():
        say(f"{offer}. Continue with that? [y/N]")
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
    places = lost.split(" and ")
    flags = " ".join(place.replace("datacenter", "--without", 1) for place in places)
    whole = all(place.startswith("datacenter ") for place in places)
    without = f"with {flags} in every datacenter" if whole else "with --auto-replan"
    raise AtlasError(
        f"{offer}. Start again {without} to use that plan, or with the same command when {lost} {is_or_are(lost)} "
        "back. With --auto-replan a run continues without asking"
    )
