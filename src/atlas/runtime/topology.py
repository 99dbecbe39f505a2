"""Which workers connect to which: the connections that a worker opens, derived from the Program alone. The worker and
the launcher that sends it addresses both use this module, so they agree. Loads no torch.

A worker has a main end. Where the pipelines of a cell share the WAN, each boundary between datacenters has an end of
its own on each side, because a relay serves one boundary. All ends of a worker listen on one port.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from atlas.errors import ProgramError
from atlas.ir.program import BACKWARD, FORWARD, Kind, Program

GRADIENTS, CONTROL, TIED, GROUP_SUMS = 2, 3, 6, 7
"""Lanes beside those of activations and their gradients: gradient sums over pipelines; the norm; tied embeddings; sums
over groups of pipelines."""
MAIN, BEFORE, AFTER = "main", "before", "after"
"""Ends of a worker: everything else; the shared boundary before its stage; the shared boundary after it."""
RELAY = -1
"""Stands for all lanes of a cell's relay, which numbers them itself."""
RELAY_LANES = (61_000, 61_100)
"""The first lane of a relay, by the parity of the rank before its boundary: a worker has relays of at most two
boundaries, and they follow each other. Above the lanes of any Program and of checkpoints."""


class PeerLink(NamedTuple):
    """A connection that a worker opens to a peer."""

    end: str
    """Of the worker that opens it."""
    peer: str
    """The peer's node, `datacenter/worker`."""
    peer_end: str
    lane: int


@dataclass(frozen=True)
class GroupShape:
    """Pipelines that are placed alike. A run has several such groups where data parallelism spans regions."""

    first_pipeline: int
    """Over all groups."""
    num_pipelines: int
    """Over all cells."""
    num_microbatches: int
    """Of each pipeline in a step."""
    rank_dc: tuple[str, ...]
    """Each rank has one stage."""
    layers_per_stage: tuple[int, ...]

    @property
    def batch(self) -> int:
        """Microbatches of a step."""
        return self.num_pipelines * self.num_microbatches

    def node_of(self, pipeline: int, rank: int) -> str:
        """`pipeline`: within the group."""
        return f"{self.rank_dc[rank]}/p{self.first_pipeline + pipeline}.s{rank}"


class BatchShare(NamedTuple):
    """A group's part of the microbatches of a step."""

    first_pipeline: int
    """Of the group, over all groups."""
    first: int
    """Of its microbatches, over all groups."""
    total: int
    """Of all groups."""


@dataclass(frozen=True, eq=False)
class WorkerRole:
    """One worker's part in a run: its rank, stages, name and peers. Pipelines are numbered over all cells of its
    group; only names number them over all groups."""

    program: Program
    worker: int
    """Within the Program of its cell."""
    cell: int = 0
    num_cells: int = 1
    groups: tuple[GroupShape, ...] = ()
    """Of the run, in the order of their ring (`group_sum_plan`). Empty: all pipelines are placed alike."""
    group: int = 0
    """Its own."""

    @property
    def rank(self) -> int:
        return self.worker % self.program.num_ranks

    @property
    def pipeline(self) -> int:
        """Over all cells of its group."""
        return self.cell * self.program.num_pipelines + self.worker // self.program.num_ranks

    @property
    def number(self) -> int:
        """Over the workers of all cells and groups."""
        earlier = [g for g in self.groups if g.first_pipeline < self._first_pipeline]
        before = sum(g.num_pipelines * len(g.rank_dc) for g in earlier)
        return before + self.cell * self.program.num_workers + self.worker

    @property
    def num_pipelines(self) -> int:
        """Of its group."""
        return self.num_cells * self.program.num_pipelines

    @property
    def share(self) -> BatchShare:
        """Its group's part of the microbatches of a step."""
        if not self.groups:
            return BatchShare(0, 0, self.num_pipelines * self.program.num_microbatches)
        counts = [group.batch for group in self.groups]
        # In the order of pipelines: the ring may have another one.
        before = [g.batch for g in self.groups if g.first_pipeline < self._first_pipeline]
        return BatchShare(self._first_pipeline, sum(before), sum(counts))

    @property
    def _first_pipeline(self) -> int:
        return self.groups[self.group].first_pipeline if self.groups else 0

    @property
    def cell_pipelines(self) -> range:
        first = self.cell * self.program.num_pipelines
        return range(first, first + self.program.num_pipelines)

    @property
    def other_pipelines(self) -> list[int]:
        return [c for c in range(self.num_pipelines) if c != self.pipeline]

    @property
    def name(self) -> str:
        return f"p{self._first_pipeline + self.pipeline}.s{self.rank}"

    @property
    def who(self) -> str:
        """As messages name it: `p0.s1 (east)`."""
        return f"{self.name} ({self.datacenter})"

    @property
    def datacenter(self) -> str:
        return self.program.rank_dc[self.rank]

    @property
    def node(self) -> str:
        return self.node_of(self.pipeline, self.rank)

    def node_of(self, pipeline: int, rank: int) -> str:
        """`pipeline`: within its group."""
        return f"{self.program.rank_dc[rank]}/p{self._first_pipeline + pipeline}.s{rank}"

    @property
    def stages(self) -> list[int]:
        return [s for s, rank in enumerate(self.program.stage_rank) if rank == self.rank]

    def shares(self, boundary: int) -> bool:
        """Whether the cell's pipelines take turns on this boundary."""
        return self.program.sharing and bool(self.program.boundary_crosses[boundary])

    def end_of(self, boundary: int) -> str:
        """The end that this worker uses for a boundary of its stage."""
        if not self.shares(boundary):
            return MAIN
        return AFTER if self.program.stage_rank[boundary] == self.rank else BEFORE

    @property
    def ends(self) -> list[str]:
        return list(dict.fromkeys([MAIN, *(self.end_of(b) for b in self.boundaries)]))

    def relay_lane(self, end: str) -> int:
        """The first lane of the relay of a shared boundary; the same on both of its sides."""
        return RELAY_LANES[(self.rank if end == AFTER else self.rank - 1) % len(RELAY_LANES)]

    @property
    def boundaries(self) -> list[int]:
        """Boundaries between this worker's stages and those of other workers."""
        rank = self.program.stage_rank
        return [
            b for b in range(self.program.num_stages - 1) if rank[b] != rank[b + 1] and self.rank in rank[b : b + 2]
        ]

    def pairs(self, end: str) -> dict[str, str]:
        """The nodes on this worker's side of a shared boundary, and their counterparts on the other side."""
        other = self.rank + 1 if end == AFTER else self.rank - 1
        return {self.node_of(c, self.rank): self.node_of(c, other) for c in self.cell_pipelines}

    def links(self, *, tied: bool) -> list[PeerLink]:
        """All that this worker opens. `tied`: the first and the last rank exchange the gradient of one matrix."""
        return [*self._along(), *self._relays(), *self._sums(), *self._controls(tied=tied)]

    def _link(self, end: str, pipeline: int, rank: int, peer_end: str, lane: int) -> PeerLink:
        return PeerLink(end, self.node_of(pipeline, rank), peer_end, lane)

    def _along(self) -> list[PeerLink]:
        """Activations forward, gradients back."""
        rank, links = self.program.stage_rank, []
        for b in self.boundaries:
            if not self.shares(b):
                if rank[b] == self.rank:
                    links.append(self._link(MAIN, self.pipeline, rank[b + 1], MAIN, lane_of(FORWARD, b)))
                if rank[b + 1] == self.rank:
                    links.append(self._link(MAIN, self.pipeline, rank[b], MAIN, lane_of(BACKWARD, b)))
        return links

    def _relays(self) -> list[PeerLink]:
        links = []
        for end, other, theirs in ((AFTER, self.rank + 1, BEFORE), (BEFORE, self.rank - 1, AFTER)):
            if end in self.ends:
                links.append(self._link(end, self.pipeline, other, theirs, RELAY))
                mates = [c for c in self.cell_pipelines if c != self.pipeline]
                links += [self._link(end, c, self.rank, end, RELAY) for c in mates]
        return links

    def _sums(self) -> list[PeerLink]:
        return [self._link(MAIN, c, self.rank, MAIN, GRADIENTS) for c in self.other_pipelines]

    def _controls(self, *, tied: bool) -> list[PeerLink]:
        last = self.program.num_ranks - 1
        neighbours = [rank for rank in (self.rank - 1, self.rank + 1) if 0 <= rank <= last]
        links = [self._link(MAIN, self.pipeline, rank, MAIN, CONTROL) for rank in neighbours]
        if tied and self.opposite_end is not None:
            links.append(self._link(MAIN, self.pipeline, self.opposite_end, MAIN, TIED))
        return links

    @property
    def opposite_end(self) -> int | None:
        """The rank of the model's other end, if this worker has exactly one of the two."""
        first, last = self.program.stage_rank[0], self.program.stage_rank[-1]
        if first == last or self.rank not in (first, last):
            return None
        return last if self.rank == first else first


def all_roles(
    program: Program, num_cells: int, groups: tuple[GroupShape, ...] = (), group: int = 0
) -> list[WorkerRole]:
    """Of every worker of a group of pipelines, cell by cell."""
    return [
        WorkerRole(program, w, cell, num_cells, groups, group)
        for cell in range(num_cells)
        for w in range(program.num_workers)
    ]


def lane_of(direction: int, boundary: int) -> int:
    """The lane of a channel of the Program."""
    return direction + 4 * boundary


def is_along(lane: int) -> bool:
    """Whether a lane is a channel of the Program."""
    return lane % 4 in (FORWARD, BACKWARD)


def require_runnable(program: Program) -> None:
    """Raise if workers cannot execute the Program."""
    if program.sharing and program.num_stages != program.num_ranks:
        raise ProgramError(
            f"program {program.name!r} takes turns on the WAN with {program.num_stages} stages on {program.num_ranks} "
            "workers of a pipeline: turns work only with one stage on each worker. Give each worker one stage"
        )
    sums = program.op_worker[(program.kind == Kind.SYNC) & (program.microbatch == 0)]
    if len(sums) > len(np.unique(sums)):
        raise ProgramError(
            f"program {program.name!r} has several SYNC on one worker in an iteration: workers sum the gradients of "
            "all their stages in one. Simulate it, or put one SYNC behind the last backward (with_optimizer)"
        )
