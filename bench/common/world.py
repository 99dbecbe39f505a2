"""The emulated testbed: three datacenters on loopback with the paper's ratios, every time divided by a scale.

It has the paths, a probe that measures them, and the costs for the simulator, which come from the probe and never from
the emulator's settings. Two connections without a window stand for many connections: eighteen with a window each, on
sixteen lanes, are more pieces than one proxy can forward. With turns, the costs describe what the transport does with a
transfer: slices with their own heads that are not interrupted, and hops inside the datacenters that take the measured
extra time. The transfer is alone in its direction; the other direction is busy, as in training.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import numpy as np

from atlas.cost.table import Costs
from atlas.ir.program import BACKWARD, FORWARD, QUANTUM_NS, Program
from atlas.launch.paths import NodePaths
from atlas.runtime.assignment import TrainingSetup, stand_in
from atlas.runtime.links import slice_bytes_of, sliced_bytes
from atlas.runtime.topology import WorkerRole
from atlas.schedules import Setting
from atlas.wan.cell_relay.relay import Cell
from atlas.wan.emulator.paths import PathSpec
from atlas.wan.emulator.proxy_net import ProxyNet
from atlas.wan.probe.agent import ProbeAgent
from atlas.wan.probe.survey import LinkMeasurement, Survey
from atlas.wan.transport.base import Address, Handle, Key
from atlas.wan.transport.endpoint import Endpoint
from atlas.wan.transport.settings import TransportSettings
from atlas.wan.transport.wire import HEADER_BYTES
from common.cases import ONE_TCP_SLOWER, cell

STAGES, MICROBATCHES = 3, 12
PROBE_S = 1.5
NUM_LONE = 12
NAMES = ("dc0/p0.s0", "dc0/p1.s0", "dc1/p1.s1", "dc1/p0.s1")
"""Names of the nodes on the way of a slice."""


def training() -> TrainingSetup:
    """The least arithmetic for 64 KiB of activations: one layer per stage, sixteen numbers per token."""
    small = stand_in(num_layers=STAGES, width=16, num_heads=1, length=64, microbatch=16, vocabulary=32)
    return replace(small, model=replace(small.model, layers_per_stage=(1,) * STAGES))


def setting(num_pipelines: int, in_flight: int, scale: int) -> Setting:
    """The cell of `testbed_sim.py`, `scale` times as fast."""
    whole = cell(STAGES, MICROBATCHES, num_pipelines, in_flight)
    assert whole.turns is not None
    return replace(whole, apart=faster(whole.apart, scale), turns=faster(whole.turns, scale))


def faster(costs: Costs, scale: int) -> Costs:
    return replace(
        costs,
        compute_ns=costs.compute_ns // scale,
        work_ns=costs.work_ns // scale,
        latency_ns=costs.latency_ns // scale,
    )


@dataclass(frozen=True)
class Found:
    """The results of a probe."""

    latency_ns: int
    transfer_ns: int
    """Time of one activation over one node pair."""
    lone_ns: int = 0
    """What one takes from end to end through a cell that carries nothing else that way; known where pipelines take
    turns."""

    def apart(self, costs: Costs) -> Costs:
        """The same costs with these figures for all WAN transfers."""
        return self._price(costs, self.transfer_ns, 0)

    def turns(self, costs: Costs, num_pipelines: int) -> Costs:
        """The same for a cell with turns."""
        num_bytes, byte_ns = training().activation_bytes, self.transfer_ns / transfer_bytes()
        work_ns = round(byte_ns * sliced_bytes(num_bytes, num_pipelines, NAMES) / num_pipelines)
        hops_ns = max(0, self.lone_ns - work_ns - self.latency_ns)
        priced = self._price(costs, work_ns, hops_ns // 2)
        quantum_ns = max(QUANTUM_NS, round(byte_ns * slice_bytes_of(num_bytes, num_pipelines)))
        return replace(priced, links=tuple(replace(link, quantum_ns=quantum_ns) for link in costs.links))

    def _price(self, costs: Costs, work_ns: int, hop_ns: int) -> Costs:
        crosses = costs.latency_ns > 0
        return replace(
            costs,
            work_ns=np.where(crosses, work_ns, costs.work_ns),
            before_ns=np.where(crosses, hop_ns, costs.before_ns),
            latency_ns=np.where(crosses, self.latency_ns + hop_ns, costs.latency_ns),
        )


def probed(of: Setting, found: Found, tcp: str) -> Setting:
    """The setting for schedules and simulator."""
    assert of.turns is not None
    turns = found.turns(of.turns, of.layout.num_pipelines) if tcp == "turns" else None
    return replace(of, apart=found.apart(of.apart), turns=turns)


def path(of: Setting, tcp: str) -> PathSpec:
    """A path between two nodes of neighbouring datacenters; with one connection its window limits the rate."""
    work_ns, latency_ns = int(of.apart.work_ns.max()), int(of.apart.latency_ns.max())
    pair_bps = transfer_bytes() * 8e9 / work_ns
    window = round(pair_bps / ONE_TCP_SLOWER / 8 * 2 * latency_ns / 1e9) if tcp == "one" else None
    return PathSpec(latency_s=latency_ns / 1e9, window_bytes=window, pair_bps=pair_bps)


def transfer_bytes() -> int:
    return HEADER_BYTES + training().activation_bytes


def node_paths(program: Program, spec: PathSpec) -> NodePaths:
    paths: NodePaths = {}
    for pipeline in range(program.num_pipelines):
        for boundary in range(program.num_stages - 1):
            ends = (WorkerRole(program, program.worker(pipeline, s)).node for s in (boundary, boundary + 1))
            left, right = ends
            paths[left, right] = spec
    return paths


def probe(spec: PathSpec, tcp: str, num_pipelines: int) -> Found:
    """Probe two agents on an emulator with this path, like `atlas wan probe`."""
    token = secrets.token_hex(16)
    with ExitStack() as stack:
        agents = {name: stack.enter_context(ProbeAgent("127.0.0.1", 0, token)) for name in ("east-0", "west-0")}
        net = stack.enter_context(ProxyNet({("east-0", "west-0"): spec}))
        doors = {(a, b): net.listen(a, b, agents[b].address) for a, b in (("east-0", "west-0"), ("west-0", "east-0"))}
        how = Survey(
            {name: agent.address for name, agent in agents.items()},
            token,
            reach=lambda a, b: doors[a, b],
            max_streams=1 if tcp == "one" else 2,
            min_s=PROBE_S,
        )
        found = read(how.link("east", "west"), tcp)
    return replace(found, lone_ns=probe_cell(spec, num_pipelines)) if tcp == "turns" else found


def read(link: LinkMeasurement, tcp: str) -> Found:
    bps = link.sweep[0].bps if tcp == "one" else link.pair_bps
    return Found(round(link.rtt.median_s / 2 * 1e9), round(transfer_bytes() * 8e9 / bps))


def probe_cell(spec: PathSpec, num_pipelines: int) -> int:
    """Median time in ns of single transfers through a cell that is busy in the other direction."""
    took_ns = []
    with joined_cells(spec, num_pipelines) as (here, there):
        back = [sent(there, here, BACKWARD, number) for number in range(2 * num_pipelines)]
        for number in range(NUM_LONE):
            back.pop(0).wait(30.0)
            back.append(sent(there, here, BACKWARD, 2 * num_pipelines + number))
            begin_ns = time.monotonic_ns()
            got = sent(here, there, FORWARD, number)
            got.wait(10.0)
            took_ns.append(got.end_ns - begin_ns)
        for got in back:
            got.wait(30.0)
    return round(statistics.median(took_ns))


def sent(side: list[Cell], other: list[Cell], lane: int, number: int) -> Handle:
    """Send one transfer in the turn of its number, from each node in order; its arrival."""
    a, b = (cells[number % len(cells)] for cells in (side, other))
    got = b.recv(Key(a.name, lane, (number, 0, 0, 0)))
    a.send(Key(b.name, lane, (number, 0, 0, 0)), bytes(training().activation_bytes), turn=number)
    return got


@contextmanager
def joined_cells(spec: PathSpec, size: int) -> Iterator[tuple[list[Cell], list[Cell]]]:
    """The two sides of a boundary that a cell shares, in this process."""
    sides = [f"dc0/p{c}.s0" for c in range(size)], [f"dc1/p{c}.s1" for c in range(size)]
    slice_bytes = slice_bytes_of(training().activation_bytes, size)
    with ExitStack() as stack:
        net = stack.enter_context(ProxyNet(dict.fromkeys(zip(*sides, strict=True), spec)))
        ends = {
            name: stack.enter_context(Endpoint(name, settings=TransportSettings(max_streams=1)))
            for side in sides
            for name in side
        }
        cells: dict[str, Cell] = {}
        peers: dict[str, dict[str, Address]] = {}
        for side, other, lane in ((*sides, FORWARD), (*sides[::-1], BACKWARD)):
            for name, far in zip(side, other, strict=True):
                mates = dict(zip(side, other, strict=True))
                cells[name] = Cell(ends[name], mates, (FORWARD, BACKWARD), slice_bytes, sends=(lane,))
                stack.callback(cells[name].close, 1.0)
                peers[name] = {mate: ends[mate].address for mate in side if mate != name}
                peers[name][far] = net.listen(name, far, ends[far].address)
        with ThreadPoolExecutor(len(cells)) as pool:
            list(pool.map(lambda name: cells[name].connect(peers[name]), cells))
        yield [cells[name] for name in sides[0]], [cells[name] for name in sides[1]]
