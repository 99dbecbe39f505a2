"""Runs a Program on this machine as if it were several datacenters: one process per worker, an emulated WAN between
them, real sockets, real gradients. Program + Costs -> Timeline, like the simulator.

The same Costs price the simulation, pace the devices and shape the paths, so the two Timelines differ only by what
really happened. Does not know plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas.cost.table import Costs
from atlas.cost.weather import least_share
from atlas.ir.program import Kind, Program
from atlas.ir.text import to_text
from atlas.ir.timeline import Timeline
from atlas.launch.checkpoint_folders import first_step
from atlas.launch.paths import NodePaths, WeatherDraw, group_paths, paths_of
from atlas.launch.prepared_job import PreparedGroup, divided, links_of, roles_of, shapes_of
from atlas.launch.rails import RailControl, RailCosts, RailReport, RailSettings
from atlas.launch.report.events import OnStep
from atlas.launch.run_monitor import RunMonitor, RunOutcome, connect_workers
from atlas.launch.worker_logs import WorkerLogs
from atlas.launch.worker_processes import WORKER, WorkerProcesses
from atlas.planner.group_sums import group_lanes
from atlas.runtime.assignment import Assignment, FillerChoice, SaveChoice, TrainingSetup
from atlas.runtime.models.config import require_divisible
from atlas.runtime.topology import TIED, PeerLink, WorkerRole, all_roles, require_runnable
from atlas.wan.emulator.proxy_net import ProxyNet
from atlas.wan.transport.base import Address

START_TIMEOUT_S = 600.0
"""Reading a large model or checkpoint takes minutes; a worker that dies is reported at once in any case."""
HEADSTART_NS = 100_000_000
"""From the start signal to the first op: longer than a message takes to a process on this machine."""
MANY_STREAMS = 2
"""To each peer: emulated paths have no window limit that more streams would overcome, unless the caller sets one."""

Weights = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class EmulationSettings:
    """How a run is executed; the Program and the TrainingSetup say what it computes."""

    num_steps: int = 1
    """Of a Program of one iteration; a Program of several iterations is run once."""
    device: str = "paced"
    tp: int = 1
    """Processes that share each worker's stages by tensor parallelism."""
    streams: int = MANY_STREAMS
    tcp: str = "many"
    slower: int = 1
    """How much slower than their jobs say groups of pipelines exchange gradients."""
    num_cells: int = 1
    groups: tuple[PreparedGroup, ...] = ()
    """Where pipelines are placed differently: all groups, of which the Program and the Costs are the first."""
    patience_s: float = 60.0
    paths: NodePaths | None = None
    """By node pair. None: derived from the Costs, and between groups of pipelines from their jobs."""
    weather: WeatherDraw = field(default_factory=WeatherDraw)
    """The cross traffic of paths that are derived."""
    save: Mapping[str, SaveChoice] = field(default_factory=dict)
    """By datacenter; they say which step is the first."""
    fillers: Mapping[str, FillerChoice] = field(default_factory=dict)
    """By worker name."""
    logs: Path | None = None
    """The folder for the workers' logs; None: they are deleted."""
    keep_weights: bool = True
    """Whether to return the final weights."""
    keep_timeline: bool = True
    """Whether to return the timeline of all steps; otherwise of the last pass, so that memory does not grow."""
    predicted_s: float | None = None
    """Simulated seconds of an iteration, for `on_step`."""
    rails: RailSettings = field(default_factory=RailSettings)
    """How circuits are changed, where the Costs say that they are."""
    nccl_on_shared_gpu: bool = False
    """For tests: sums by NCCL although workers share a GPU."""
    skews_ns: Mapping[str, int] = field(default_factory=dict)
    """For tests: by worker name, how far its clock is ahead."""


@dataclass(frozen=True)
class Emulation:
    """The results of a run."""

    timeline: Timeline
    losses: list[float]
    """Mean over all microbatches, by step."""
    weights: Weights
    """The model after the last step, from the first pipeline."""
    late_s: float
    """The longest delay beyond what the emulated paths were asked to add."""
    overrun_s: float
    """Time by which the host was slower than a paced device's cost, worst worker."""
    norms: list[float]
    """Of the gradients, by step, if the Program computes them."""
    rails: RailReport | None = None
    """Where circuits change."""
    exit_code: int = 0
    """130 where a user stopped it before its last step, 75 where a scheduler did."""

    @property
    def stopped(self) -> bool:
        return self.exit_code != 0


def emulate(
    program: Program,
    costs: Costs,
    training: TrainingSetup,
    settings: EmulationSettings | None = None,
    *,
    on_start: Callable[[Mapping[str, int]], None] | None = None,
    on_step: OnStep | None = None,
) -> Emulation:
    """Run the Program to the end. A failure raises a WorkerError within about `patience_s`.

    `on_start` is called with the process ids by worker name when the Program starts. Where the run is saved, Ctrl-C
    ends it after the current step, saved and `stopped`; a second one, or one where it is not saved, ends it at once.
    """
    settings = settings or EmulationSettings()
    require_runnable(program)
    require_divisible(training.model.config, settings.tp)
    groups = settings.groups
    roles = roles_of(groups, shapes_of(groups)) if groups else all_roles(program, settings.num_cells)
    paths = _paths(program, costs, training, settings, roles) if settings.paths is None else settings.paths
    with ExitStack() as stack:
        workers = stack.enter_context(WorkerProcesses(WORKER, [role.name for role in roles], WorkerLogs(settings.logs)))
        rails = stack.enter_context(_rails(workers, roles, costs, settings))
        settings = replace(settings, patience_s=settings.patience_s + rails.deadline_s)
        _assign(workers, roles, costs, training, settings, rails)
        net = stack.enter_context(ProxyNet(paths)) if paths else None
        _connect(workers, roles, net, paths, partial(links_of, training=training, tp=settings.tp))
        if on_start is not None:
            on_start(workers.pids)
        monitor = RunMonitor(
            workers,
            program,
            costs,
            first_step(settings.save),
            silence_s=_longest_pass_s(program, costs) + settings.patience_s,
            saves=bool(settings.save),
            on_step=on_step,
            predicted_s=settings.predicted_s,
            sent_bytes=None if net is None else lambda: net.stats.sent_bytes,
            headstart_ns=HEADSTART_NS + rails.lead_ns,
            on_start=partial(_begin, rails, net),
            source="emulated",
            keep_all=settings.keep_timeline,
        )
        if net is not None:
            net.reset_lateness()
        outcome = monitor.play()
        late_s = net.lateness.worst_s if net is not None else 0.0
        overrun_s = max(result["overrun_ns"] for result in outcome.results.values()) / 1e9
        report, facts = rails.report(monitor.records.num_forgotten), _worker_facts(outcome)
        facts |= {} if report is None else {"fabric": report.rows}
        timeline = monitor.timeline({"late_s": late_s, "overrun_s": overrun_s, "streams": settings.streams, **facts})
        weights = _weights(workers, program) if settings.keep_weights else {}
        return Emulation(
            timeline, outcome.losses, weights, late_s, overrun_s, monitor.records.norms(), report, outcome.exit_code
        )


def _begin(rails: RailControl, net: ProxyNet | None, zero_ns: int) -> None:
    """What begins with the run, at `zero_ns` of the monotonic clock."""
    rails.begin(zero_ns)
    if net is not None:
        net.restart_weather(zero_ns)


def _worker_facts(outcome: RunOutcome) -> dict[str, Any]:
    """What workers report at the end, for the timeline's `meta`."""
    return {
        key: {name: result[key] for name, result in outcome.results.items()}
        for key in ("copied", "compiled", "peak_bytes", "start_s")
    }


def _rails(workers: WorkerProcesses, roles: list[WorkerRole], costs: Costs, settings: EmulationSettings) -> RailControl:
    program, groups = roles[0].program, settings.groups
    num_steps = program.num_iterations if program.num_iterations > 1 else settings.num_steps
    first = first_step(settings.save)
    of_groups = [RailCosts(c.circuits, c.compute_ns) for c in [g.costs for g in groups] or [costs]]
    return RailControl(workers, roles, of_groups, range(first, first + num_steps), settings.rails)


def _paths(
    program: Program,
    costs: Costs,
    training: TrainingSetup,
    settings: EmulationSettings,
    roles: Sequence[WorkerRole],
) -> NodePaths:
    num_bytes = training.activation_bytes
    if not settings.groups:
        return paths_of(program, costs, num_bytes, settings.num_cells, draw=settings.weather)
    paths: NodePaths = {}
    for number, group in enumerate(settings.groups):
        where = (group.job.cells, roles[0].groups, number, settings.weather)
        paths |= paths_of(group.program, group.costs, num_bytes, *where)
    lanes = group_lanes([group.job for group in settings.groups], settings.tcp, settings.slower)
    return paths | group_paths(roles, training.model.config, settings.tp, lanes.transmit_s, lanes.latency_s)


def _assign(
    workers: WorkerProcesses,
    roles: list[WorkerRole],
    costs: Costs,
    training: TrainingSetup,
    settings: EmulationSettings,
    rails: RailControl,
) -> None:
    texts: dict[int, str] = {}
    first = {role.datacenter: role for role in reversed(roles)}
    for role in roles:
        save = settings.save.get(role.datacenter)
        program, group = role.program, settings.groups[role.group] if settings.groups else None
        pace_ns = (costs if group is None else group.costs).compute_ns[role.worker // program.num_ranks].copy()
        pace_ns[:, Kind.NORM] = 0  # its cost is the way over the emulated WAN
        keeps = settings.keep_weights and role.pipeline == 0 and role.group == 0
        text = texts.setdefault(role.group, to_text(program))
        assignment = Assignment(
            worker=role.worker,
            program=text,
            training=training if group is None else divided(training, group),
            num_steps=program.num_iterations if program.num_iterations > 1 else settings.num_steps,
            first_step=first_step(settings.save),
            cell=role.cell,
            num_cells=role.num_cells,
            groups=role.groups,
            group=role.group,
            compute_ns=tuple(map(tuple, pace_ns.tolist())),
            device=settings.device,
            tp=settings.tp,
            streams=settings.streams,
            patience_s=settings.patience_s,
            circuits=rails.pairs[role.group],
            save=save and replace(save, prunes=role is first[role.datacenter]),
            filler=settings.fillers.get(role.name),
            weights_file=str(_weights_file(workers, role.name)) if keeps else "",
            shares_gpu=True,
            nccl_on_shared_gpu=settings.nccl_on_shared_gpu,
            skew_ns=settings.skews_ns.get(role.name, 0),
        )
        workers.send(role.name, {"assignment": asdict(assignment)})


def _connect(
    workers: WorkerProcesses,
    roles: list[WorkerRole],
    net: ProxyNet | None,
    paths: NodePaths,
    links_of: Callable[[WorkerRole], list[PeerLink]],
) -> None:
    """Connect workers through the emulator where there is a path between their nodes, and directly elsewhere."""
    ports = workers.wait_for("listening", START_TIMEOUT_S)
    name_of = {role.node: role.name for role in roles}
    emulated: dict[tuple[str, str], Address] = {}

    def address_of(role: WorkerRole, link: PeerLink) -> Address:
        address = ("127.0.0.1", ports[name_of[link.peer]])
        has_path = (role.node, link.peer) in paths or (link.peer, role.node) in paths
        # The cost of a SYNC includes the exchange of tied embeddings: the emulator must not delay it again.
        if net is None or not has_path or link.lane == TIED:
            return address
        target = (role.node, link.peer)
        if target not in emulated:
            emulated[target] = net.listen(role.node, link.peer, address)
        return emulated[target]

    connect_workers(workers, roles, links_of=links_of, address_of=address_of)
    workers.wait_for("ready", START_TIMEOUT_S)


def _weights_file(workers: WorkerProcesses, name: str) -> Path:
    return workers.logs.folder / f"{name}.npz"


def _weights(workers: WorkerProcesses, program: Program) -> Weights:
    """The first pipeline's."""
    weights: Weights = {}
    for name in workers.names[: program.num_ranks]:
        with np.load(_weights_file(workers, name)) as arrays:
            weights |= dict(arrays)
    return weights


def _longest_pass_s(program: Program, costs: Costs) -> float:
    """An upper bound on the time of one pass: all ops and transfers one after the other, in the worst weather."""
    pipeline = program.op_worker // program.num_ranks
    ops_ns = int(costs.compute_ns[pipeline, program.stage, program.kind].sum())
    transfers_ns = int((costs.work_ns + costs.before_ns + costs.latency_ns).sum()) * program.num_slots
    return (ops_ns + transfers_ns / least_share(costs)) / 1e9
