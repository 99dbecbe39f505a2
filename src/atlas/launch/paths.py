"""The paths between the workers of an emulated run, derived from the Costs: a transfer of the emulated model takes as
long over its path as the cost model says.

Knows Costs and paths. Starts nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from atlas.cost.table import FAIR, TURNS, Costs
from atlas.cost.weather import HOUR_S, cross_queue_s, emulated_cross
from atlas.errors import ProgramError
from atlas.ir.program import BACKWARD, FORWARD, Program
from atlas.runtime.group_sum_plan import group_parts, norm_receivers, rounds
from atlas.runtime.links import sliced_bytes
from atlas.runtime.models.config import DecoderConfig
from atlas.runtime.topology import GroupShape, WorkerRole
from atlas.wan.emulator.paths import PathSpec, Trunk
from atlas.wan.transport.wire import HEADER_BYTES

NodePaths = dict[tuple[str, str], PathSpec]


@dataclass(frozen=True)
class WeatherDraw:
    """Which draw of cross traffic the paths have whose links have a model."""

    seed: int = 0
    seconds: float = HOUR_S
    """Then it starts again."""


def paths_of(
    program: Program,
    costs: Costs,
    transfer_bytes: int,
    num_cells: int = 1,
    groups: tuple[GroupShape, ...] = (),
    group: int = 0,
    draw: WeatherDraw | None = None,
) -> NodePaths:
    """By node pair: for every channel with a cost, of one group of pipelines."""
    require_emulable(program, costs)
    paths: NodePaths = {}
    draw = draw or WeatherDraw()
    for cell in range(num_cells):
        for pipeline, boundary in np.ndindex(program.num_pipelines, program.num_stages - 1):
            left, right = program.worker(pipeline, boundary), program.worker(pipeline, boundary + 1)
            path = _path(program, costs, transfer_bytes, pipeline, boundary, cell)
            if left != right and path is not None:
                ends = [WorkerRole(program, w, cell, num_cells, groups, group).node for w in (left, right)]
                crossed = _crossed(path, costs, pipeline, boundary, draw)
                paths.setdefault((ends[0], ends[1]), crossed)
    return paths


def _crossed(path: PathSpec, costs: Costs, pipeline: int, boundary: int, draw: WeatherDraw) -> PathSpec:
    """The path with the drawn cross traffic of both directions, where its link has a model."""
    links = [costs.links[costs.channel_link[way, pipeline, boundary]] for way in (FORWARD, BACKWARD)]
    there, back = (link.weather for link in links)
    if path.pair_bps is None or there is None or back is None:
        return path
    queue_bytes = max(1, round(path.pair_bps / 8 * cross_queue_s(there)))
    cross, cross_back = (emulated_cross(weather, draw.seed, seconds=draw.seconds) for weather in (there, back))
    return replace(path, queue_bytes=queue_bytes, cross=cross, cross_back=cross_back)


def group_paths(
    roles: Sequence[WorkerRole],
    config: DecoderConfig,
    tp: int,
    lane_s: Mapping[tuple[str, str], float],
    latency_s: Callable[[str, str], float],
) -> NodePaths:
    """By node pair, between groups of pipelines: the two workers that exchange most take as long as their lane, and all
    others on it have the same rate. `lane_s`: by datacenters, the transmission of all rounds."""
    sent = {(role.node, node): num_bytes for role in roles for node, num_bytes in _met_bytes(role, config, tp).items()}
    most: dict[tuple[str, str], int] = {}
    for ends, num_bytes in sent.items():
        most[_lane(*ends)] = max(most.get(_lane(*ends), 0), num_bytes)
    paths: NodePaths = {}
    for ends in sent:
        lane = _lane(*ends)
        if ends[::-1] not in paths:
            paths[ends] = PathSpec(latency_s(*lane), None, most[lane] * 8 / lane_s[lane], None)
    norms = [(role.node, other.node_of(*peer)) for role in roles for other, peer in norm_receivers(role)]
    for ends in norms:
        if ends not in paths and ends[::-1] not in paths:
            paths[ends] = PathSpec(latency_s(*_lane(*ends)), None, None, None)
    return paths


def _lane(one: str, other: str) -> tuple[str, str]:
    return one.partition("/")[0], other.partition("/")[0]


def _met_bytes(role: WorkerRole, config: DecoderConfig, tp: int) -> Counter[str]:
    """By node of the next group: what a worker sends to it in a step."""
    after, plan, sent = (
        role.groups[(role.group + 1) % len(role.groups)],
        group_parts(role, config, tp),
        Counter[str](),
    )
    for round in rounds(role.group, len(role.groups)):
        for peer, parts in plan.sent[round.sent].items():
            sent[after.node_of(*peer)] += HEADER_BYTES + 4 * tp * sum(part.stop - part.start for part in parts)
    return sent


def _path(
    program: Program, costs: Costs, transfer_bytes: int, pipeline: int, boundary: int, cell: int
) -> PathSpec | None:
    at = (FORWARD, pipeline, boundary)
    work_ns, latency_ns = int(costs.work_ns[at]), int(costs.latency_ns[at])
    if not work_ns and not latency_ns:
        return None
    link = costs.links[costs.channel_link[at]]
    num_bytes = HEADER_BYTES + transfer_bytes
    if link.policy == TURNS:
        num_bytes = sliced_bytes(transfer_bytes, program.num_pipelines, _relayed(program, pipeline, boundary))
    rate_bps = num_bytes * 8e9 / work_ns if work_ns else None
    trunk = None
    if rate_bps is not None and link.policy == TURNS:
        rate_bps /= program.num_pipelines  # a turn uses the paths of all nodes
    elif rate_bps is not None and link.policy == FAIR:
        # Each transfer has its own rate limit, and the trunk limits all together; each cell has its own share.
        trunk = Trunk(f"{link.name} {cell}", rate_bps * link.capacity)
    return PathSpec(latency_s=latency_ns / 1e9, window_bytes=None, pair_bps=rate_bps, trunk=trunk)


def _relayed(program: Program, pipeline: int, boundary: int) -> tuple[str, ...]:
    """The nodes on the longest route of a slice."""
    other = (pipeline + 1) % program.num_pipelines
    ends = [(pipeline, boundary), (other, boundary), (other, boundary + 1), (pipeline, boundary + 1)]
    return tuple(WorkerRole(program, program.worker(c, s)).node for c, s in ends)


def require_emulable(program: Program, costs: Costs) -> None:
    """Raise if the emulator cannot reproduce the Costs."""
    for link in costs.links:
        if link.trace is not None and link.weather is None:
            raise ProgramError(
                f"program {program.name!r}: link {link.name!r} varies over time by a `trace`, which is simulated but "
                "not emulated: leave `trace` out, or give the link a `model`"
            )
        if link.servers != 1:
            raise ProgramError(
                f"program {program.name!r}: link {link.name!r} serves {link.servers} transfers at once, each at full "
                "rate, which is simulated but not emulated: use servers=1"
            )
    turns = any(link.policy == TURNS for link in costs.links)
    if turns != (program.sharing and bool(program.boundary_crosses.any())):
        raise ProgramError(
            f"program {program.name!r} and its costs do not agree on whether pipelines take turns on the WAN: "
            "pass the program's `sharing` to `price`"
        )
