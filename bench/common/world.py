"""The emulated testbed: three datacenters on loopback, the paper's ratios, every time divided by three.

Knows the paths, how a probe finds out what they give, and what the simulator is told of it: never the emulator's own
settings. Many connections are stood for by two without a window: eighteen that are held to a window each, on sixteen
lanes, are more pieces than one proxy moves.
"""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from dataclasses import dataclass, replace

from atlas.cost.table import Costs
from atlas.ir.program import Program
from atlas.launch.paths import NodePaths
from atlas.runtime.assignment import Training, stand_in
from atlas.runtime.wiring import Seat
from atlas.schedules import Setting
from atlas.wan.emulator import PathSpec, ProxyNet
from atlas.wan.probe import Agent, Survey
from atlas.wan.probe.survey import LinkMeasurement
from atlas.wan.wire import HEADER_BYTES
from common.cases import ONE_TCP_SLOWER, cell

STAGES, MICROBATCHES = 3, 12
SCALE = 3
"""All times are those of the paper's testbed, divided by this."""
QUANTUM_NS = 5_000_000
"""Not scaled: it is what the transport does."""
PROBE_S = 1.5


def training() -> Training:
    """As little arithmetic as 64 KiB of activations can have: a layer a stage, sixteen numbers a token."""
    small = stand_in(num_layers=STAGES, width=16, num_heads=1, length=64, microbatch=16, vocabulary=32)
    return replace(small, model=replace(small.model, layers_per_stage=(1,) * STAGES))


def setting(num_pipelines: int, in_flight: int, budget: int = 200) -> Setting:
    """The cell of `testbed_sim.py`, three times as fast."""
    whole = cell(STAGES, MICROBATCHES, num_pipelines, in_flight, budget=budget)
    assert whole.turns is not None
    return replace(whole, apart=faster(whole.apart), turns=faster(whole.turns))


def faster(costs: Costs) -> Costs:
    return replace(
        costs,
        compute_ns=costs.compute_ns // SCALE,
        work_ns=costs.work_ns // SCALE,
        latency_ns=costs.latency_ns // SCALE,
        links=tuple(replace(link, quantum_ns=QUANTUM_NS) for link in costs.links),
    )


@dataclass(frozen=True)
class Found:
    """What a probe says of the paths."""

    latency_ns: int
    transfer_ns: int
    """Of one activation over one node pair."""

    def price(self, costs: Costs, num_sharing: int) -> Costs:
        """The same costs with these figures wherever something crosses the WAN."""
        crosses = costs.latency_ns > 0
        work, latency = costs.work_ns.copy(), costs.latency_ns.copy()
        work[crosses] = round(self.transfer_ns / num_sharing)
        latency[crosses] = self.latency_ns
        return replace(costs, work_ns=work, latency_ns=latency)


def probed(of: Setting, found: Found, tcp: str) -> Setting:
    """What schedules and the simulator are given."""
    assert of.turns is not None
    turns = found.price(of.turns, of.layout.num_pipelines) if tcp == "turns" else None
    return replace(of, apart=found.price(of.apart, 1), turns=turns)


def path(of: Setting, tcp: str) -> PathSpec:
    """Between two nodes of neighbouring datacenters; on one connection a window holds it to its share."""
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
            ends = (Seat(program, program.worker(pipeline, s)).node for s in (boundary, boundary + 1))
            left, right = ends
            paths[left, right] = spec
    return paths


def probe(spec: PathSpec, tcp: str) -> Found:
    """Asks two agents on an emulator with this path, as `atlas wan probe` does."""
    token = secrets.token_hex(16)
    with ExitStack() as stack:
        agents = {name: stack.enter_context(Agent("127.0.0.1", 0, token)) for name in ("east-0", "west-0")}
        net = stack.enter_context(ProxyNet({("east-0", "west-0"): spec}))
        doors = {(a, b): net.listen(a, b, agents[b].address) for a, b in (("east-0", "west-0"), ("west-0", "east-0"))}
        how = Survey(
            {name: agent.address for name, agent in agents.items()},
            token,
            reach=lambda a, b: doors[a, b],
            max_streams=1 if tcp == "one" else 2,
            min_s=PROBE_S,
        )
        return read(how.link("east", "west"), tcp)


def read(link: LinkMeasurement, tcp: str) -> Found:
    bps = link.sweep[0].bps if tcp == "one" else link.pair_bps
    return Found(round(link.rtt.median_s / 2 * 1e9), round(transfer_bytes() * 8e9 / bps))
