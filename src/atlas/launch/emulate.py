"""Runs a Program on this machine as if it were several datacenters: a process per worker, an emulated WAN between
them, real sockets, real gradients. Program + Costs -> Timeline, like the simulator.

The Costs that the simulator is given are the ones that pace the devices and shape the paths, so the two Timelines
differ only by what really happened. Knows plans of nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas.cost.table import Costs
from atlas.ir.ops import Kind
from atlas.ir.program import Program
from atlas.ir.text import to_text
from atlas.ir.timeline import Timeline
from atlas.launch.clocks import offsets_ns
from atlas.launch.iterations import Passes, StepProgress
from atlas.launch.measured import Records, RunClock
from atlas.launch.paths import NodePaths, paths_of
from atlas.launch.worker_processes import WorkerProcesses
from atlas.runtime.assignment import Assignment, FillerChoice, SaveChoice, TrainingSetup
from atlas.runtime.models.config import require_divisible
from atlas.runtime.wiring import TIED, WorkerRole, require_runnable
from atlas.wan.emulator.proxy_net import ProxyNet

START_TIMEOUT_S = 600.0
"""Reading a large model or checkpoint takes its time; a worker that dies is heard of at once in any case."""
HEADSTART_NS = 100_000_000
MANY_STREAMS = 2
"""To each peer: emulated paths are wide or narrow, but have no window to overcome, unless asked for."""

Weights = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class EmulationSettings:
    """How a run is carried out; what it computes is the Program's and the Training's."""

    num_steps: int = 1
    """Of a Program of one iteration; one of several iterations is run once."""
    first_step: int = 0
    device: str = "paced"
    tp: int = 1
    """Processes that share each worker's stages by tensor parallelism."""
    streams: int = MANY_STREAMS
    num_cells: int = 1
    patience_s: float = 20.0
    paths: NodePaths | None = None
    """By node pair. None: as the Costs say."""
    save: Mapping[str, SaveChoice] = field(default_factory=dict)
    """By datacenter."""
    fillers: Mapping[str, FillerChoice] = field(default_factory=dict)
    """By worker name."""
    keep_weights: bool = True
    """Whether the final weights come back."""
    keep_timeline: bool = True
    """Whether that of all steps comes back; else that of the last pass, and memory does not grow with the steps."""
    skews_ns: Mapping[str, int] = field(default_factory=dict)
    """For tests: by worker name, how far its clock is ahead."""


@dataclass(frozen=True)
class Emulation:
    """What came out of a run."""

    timeline: Timeline
    losses: list[float]
    """Mean over all microbatches, by step."""
    weights: Weights
    """The model after the last step, from the first pipeline."""
    late_s: float
    """The worst delay that the emulated paths added of their own."""
    overrun_s: float
    """Time in which a device was held up because the host was slower than the pace, worst worker."""
    norms: list[float]
    """Of the gradients, by step, where the Program takes them."""
    stopped: bool = False
    """Whether it was ended before its last step."""


def emulate(
    program: Program,
    costs: Costs,
    training: TrainingSetup,
    setup: EmulationSettings | None = None,
    *,
    on_start: Callable[[Mapping[str, int]], None] | None = None,
    on_step: Callable[[StepProgress], None] | None = None,
) -> Emulation:
    """Runs it to the end, or raises a WorkerError within about the patience of anything going wrong.

    `on_start` hears the process ids by worker name when the Program begins. Where the run is saved, Ctrl-C ends it
    after the step under way, saved and `stopped`; a second one, or any where it is not saved, ends it at once.
    """
    setup = setup or EmulationSettings()
    require_runnable(program)
    require_divisible(training.model.config, setup.tp)
    paths = setup.paths
    if paths is None:
        paths = paths_of(program, costs, training.activation_bytes, setup.num_cells)
    with ExitStack() as stack:
        run = _EmulatedRun(program, costs, training, setup, stack)
        run.assign()
        run.connect(stack.enter_context(ProxyNet(paths)) if paths else None, paths)
        if on_start is not None:
            on_start(run.fleet.pids)
        return run.play(on_step)


class _EmulatedRun:
    """One emulation under way."""

    def __init__(
        self, program: Program, costs: Costs, training: TrainingSetup, setup: EmulationSettings, stack: ExitStack
    ) -> None:
        self.program, self.costs, self.training, self.setup = program, costs, training, setup
        self.roles = [
            WorkerRole(program, w, cell, setup.num_cells)
            for cell in range(setup.num_cells)
            for w in range(program.num_workers)
        ]
        self.names = [role.name for role in self.roles]
        self.fleet = stack.enter_context(WorkerProcesses("atlas.runtime.process", self.names))
        self.net: ProxyNet | None = None
        self.records = Records(program)
        self.saved: dict[tuple[int, int], set[str]] = {}
        self.num_steps = program.num_iterations if program.num_iterations > 1 else setup.num_steps

    # ---- before --------------------------------------------------------------------------------------------------
    def assign(self) -> None:
        text, setup = to_text(self.program), self.setup
        pace_ns = self.costs.compute_ns.copy()
        pace_ns[:, :, Kind.NORM] = 0  # what it takes is the way over the emulated WAN
        for role in self.roles:
            pipeline = role.worker // self.program.num_ranks
            keeps = setup.keep_weights and role.pipeline == 0
            assignment = Assignment(
                worker=role.worker,
                program=text,
                training=self.training,
                num_steps=self.num_steps,
                first_step=setup.first_step,
                cell=role.cell,
                num_cells=setup.num_cells,
                compute_ns=tuple(map(tuple, pace_ns[pipeline].tolist())),
                device=setup.device,
                tp=setup.tp,
                streams=setup.streams,
                patience_s=setup.patience_s,
                save=setup.save.get(role.datacenter),
                filler=setup.fillers.get(role.name),
                weights_file=str(self.fleet.folder / f"{role.name}.npz") if keeps else "",
                skew_ns=setup.skews_ns.get(role.name, 0),
            )
            self.fleet.tell(role.name, {"assignment": assignment.to_json()})

    def connect(self, net: ProxyNet | None, paths: NodePaths) -> None:
        """Tells each worker where its peers are: through the emulator where there is a path, directly elsewhere."""
        self.net = net
        ports = self.fleet.hear("listening", START_TIMEOUT_S)
        tied = self.training.model.config.tied
        name_of = {role.node: role.name for role in self.roles}
        doors: dict[tuple[str, str, str], tuple[str, int]] = {}
        for role in self.roles:
            places = []
            for wire in role.wires(tied=tied):
                address = ("127.0.0.1", ports[name_of[wire.peer]][wire.peer_end])
                # The price of a SYNC holds the exchange of tied embeddings: it must not take its time twice.
                is_far = (role.node, wire.peer) in paths or (wire.peer, role.node) in paths
                if net is not None and is_far and wire.lane != TIED:
                    door = (role.node, wire.peer, wire.peer_end)
                    if door not in doors:
                        doors[door] = net.listen(role.node, wire.peer, address)
                    address = doors[door]
                places.append((wire.end, wire.peer, wire.lane, *address))
            self.fleet.tell(role.name, {"channels": places})
        self.fleet.hear("ready", START_TIMEOUT_S)

    # ---- while it runs ---------------------------------------------------------------------------------------------
    def play(self, on_step: Callable[[StepProgress], None] | None) -> Emulation:
        offsets = offsets_ns(self.fleet)
        if self.net is not None:
            self.net.reset_lateness()
        zero_ns = time.monotonic_ns() + HEADSTART_NS
        for name in self.names:
            self.fleet.tell(name, {"start_ns": zero_ns + offsets[name]})
        view = RunClock(self.names[: self.program.num_workers], self.costs, zero_ns, offsets)
        self.passes = Passes(
            self.records, view, len(self.names), self._sent_bytes, on_step, keep=self.setup.keep_timeline
        )
        silence_s = self._longest_pass_s() + self.setup.patience_s
        stopped = False
        try:
            results = self.fleet.hear("result", silence_s, meanwhile=self._meanwhile)
        except KeyboardInterrupt:
            if not self.setup.save:
                raise
            results, stopped = self._stop(silence_s), True
        late_s = self.net.lateness.worst_s if self.net is not None else 0.0
        overrun_s = max(result["overrun_ns"] for result in results.values()) / 1e9
        copied = {name: result["copied"] for name, result in results.items()}
        meta = {"late_s": late_s, "overrun_s": overrun_s, "streams": self.setup.streams, "copied": copied}
        timeline = self.records.timeline(replace(view, meta=meta))
        losses, norms = self.records.losses(), self.records.norms()
        return Emulation(timeline, losses, self._weights(), late_s, overrun_s, norms, stopped)

    def _stop(self, silence_s: float) -> dict[str, Any]:
        """Ends all workers after one and the same step."""
        for name in self.names:
            self.fleet.tell(name, {"stop": True})
        results: dict[str, Any] = {}

        def meanwhile(name: str, message: dict[str, Any]) -> bool:
            if "result" in message:
                results[name] = message["result"]
            return "result" in message or self._meanwhile(name, message)

        begun = self.fleet.hear("stopping", silence_s, meanwhile=meanwhile)
        for name in self.names:
            self.fleet.tell(name, {"last_step": max(begun.values()) - 1})
        late = [name for name in self.names if name not in results]
        return results | self.fleet.hear("result", silence_s, of=late, meanwhile=self._meanwhile)

    def _meanwhile(self, name: str, message: dict[str, Any]) -> bool:
        if "step" in message:
            self.records.add(name, message)
            self.passes.note(message["step"])
        elif "saved" in message:
            self._note_saved(name, message["saved"])
        return "step" in message or "saved" in message

    def _note_saved(self, name: str, id: list[int]) -> None:
        """A save that everybody has written is complete, and lets older ones go."""
        writers = self.saved.setdefault((id[0], id[1]), set())
        writers.add(name)
        if len(writers) == len(self.names):
            for other in self.names:
                self.fleet.tell(other, {"complete": [id]})

    def _weights(self) -> Weights:
        weights: Weights = {}
        if self.setup.keep_weights:
            for name in self.names[: self.program.num_ranks]:
                with np.load(self.fleet.folder / f"{name}.npz") as arrays:
                    weights |= dict(arrays)
        return weights

    def _sent_bytes(self) -> int:
        return self.net.stats.sent_bytes if self.net is not None else 0

    def _longest_pass_s(self) -> float:
        """More than any order of events in one pass can take: everything one after the other."""
        program, costs = self.program, self.costs
        pipeline = program.op_worker // program.num_ranks
        ops_ns = int(costs.compute_ns[pipeline, program.stage, program.kind].sum())
        wires_ns = int((costs.work_ns + costs.before_ns + costs.latency_ns).sum()) * program.num_slots
        return (ops_ns + wires_ns) / 1e9
