"""Who talks to whom: the connections that a worker opens, by the Program alone. The worker and whoever tells it its
peers' addresses both read it here, so they agree. Loads no torch.

A worker has a main end. Where the pipelines of a cell share the WAN, each boundary between datacenters has an end of
its own on each side, because a relay serves one boundary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from atlas.errors import ProgramError
from atlas.ir.program import BACKWARD, FORWARD, Program

GRADIENTS, CONTROL, TIED = 2, 3, 6
"""Lanes beside those of activations and their gradients: sums among pipelines; the norm; tied embeddings."""
MAIN, BEFORE, AFTER = "main", "before", "after"
"""Ends: everything; the shared boundary before this worker's stage; the one after it."""
RELAY = -1
"""The lanes of a cell's relay are its own affair."""


class PeerLink(NamedTuple):
    """A connection that its owner opens."""

    end: str
    """Of the owner."""
    peer: str
    """The peer's node, `datacenter/worker`."""
    peer_end: str
    lane: int
    far: bool
    """Whether it leaves the datacenter."""


@dataclass(frozen=True, eq=False)
class WorkerRole:
    """One worker's place among all: pipelines are numbered over the cells."""

    program: Program
    worker: int
    """Within the Program of its cell."""
    cell: int = 0
    num_cells: int = 1

    @property
    def rank(self) -> int:
        return self.worker % self.program.num_ranks

    @property
    def pipeline(self) -> int:
        """Over all cells."""
        return self.cell * self.program.num_pipelines + self.worker // self.program.num_ranks

    @property
    def num_pipelines(self) -> int:
        return self.num_cells * self.program.num_pipelines

    @property
    def cell_pipelines(self) -> range:
        first = self.cell * self.program.num_pipelines
        return range(first, first + self.program.num_pipelines)

    @property
    def other_pipelines(self) -> list[int]:
        return [c for c in range(self.num_pipelines) if c != self.pipeline]

    @property
    def name(self) -> str:
        return f"p{self.pipeline}.s{self.rank}"

    @property
    def datacenter(self) -> str:
        return self.program.rank_dc[self.rank]

    @property
    def node(self) -> str:
        return self.node_of(self.pipeline, self.rank)

    def node_of(self, pipeline: int, rank: int) -> str:
        return f"{self.program.rank_dc[rank]}/p{pipeline}.s{rank}"

    @property
    def stages(self) -> list[int]:
        return [s for s, rank in enumerate(self.program.stage_rank) if rank == self.rank]

    def shares(self, boundary: int) -> bool:
        """Whether the cell takes turns on this boundary."""
        return self.program.sharing and bool(self.program.boundary_crosses[boundary])

    def end_of(self, boundary: int) -> str:
        """Where this worker meets a boundary of its stage."""
        if not self.shares(boundary):
            return MAIN
        return AFTER if self.program.stage_rank[boundary] == self.rank else BEFORE

    @property
    def ends(self) -> list[str]:
        return list(dict.fromkeys([MAIN, *(self.end_of(b) for b in self.boundaries)]))

    @property
    def boundaries(self) -> list[int]:
        """That this worker's stages lie at, and that are not inside it."""
        rank = self.program.stage_rank
        return [
            b for b in range(self.program.num_stages - 1) if rank[b] != rank[b + 1] and self.rank in rank[b : b + 2]
        ]

    def pairs(self, end: str) -> dict[str, str]:
        """The nodes of this worker's side of a shared boundary, and their counterparts beyond it."""
        other = self.rank + 1 if end == AFTER else self.rank - 1
        return {self.node_of(c, self.rank): self.node_of(c, other) for c in self.cell_pipelines}

    def wires(self, *, tied: bool) -> list[PeerLink]:
        """All that this worker opens. `tied`: the first and the last rank exchange the gradient of one matrix."""
        return [*self._along(), *self._relays(), *self._sums(), *self._controls(tied=tied)]

    def _wire(self, end: str, pipeline: int, rank: int, peer_end: str, lane: int) -> PeerLink:
        far = self.program.rank_dc[rank] != self.datacenter
        return PeerLink(end, self.node_of(pipeline, rank), peer_end, lane, far)

    def _along(self) -> list[PeerLink]:
        """Activations forward, gradients back."""
        rank, wires = self.program.stage_rank, []
        for b in self.boundaries:
            if not self.shares(b):
                if rank[b] == self.rank:
                    wires.append(self._wire(MAIN, self.pipeline, rank[b + 1], MAIN, lane_of(FORWARD, b)))
                if rank[b + 1] == self.rank:
                    wires.append(self._wire(MAIN, self.pipeline, rank[b], MAIN, lane_of(BACKWARD, b)))
        return wires

    def _relays(self) -> list[PeerLink]:
        wires = []
        for end, other, theirs in ((AFTER, self.rank + 1, BEFORE), (BEFORE, self.rank - 1, AFTER)):
            if end in self.ends:
                wires.append(self._wire(end, self.pipeline, other, theirs, RELAY))
                mates = [c for c in self.cell_pipelines if c != self.pipeline]
                wires += [self._wire(end, c, self.rank, end, RELAY) for c in mates]
        return wires

    def _sums(self) -> list[PeerLink]:
        return [self._wire(MAIN, c, self.rank, MAIN, GRADIENTS) for c in self.other_pipelines]

    def _controls(self, *, tied: bool) -> list[PeerLink]:
        last = self.program.num_ranks - 1
        neighbours = [rank for rank in (self.rank - 1, self.rank + 1) if 0 <= rank <= last]
        wires = [self._wire(MAIN, self.pipeline, rank, MAIN, CONTROL) for rank in neighbours]
        if tied and self.opposite_end is not None:
            wires.append(self._wire(MAIN, self.pipeline, self.opposite_end, MAIN, TIED))
        return wires

    @property
    def opposite_end(self) -> int | None:
        """The rank that holds the model's other end, where this one holds exactly one of the two."""
        first, last = self.program.stage_rank[0], self.program.stage_rank[-1]
        if first == last or self.rank not in (first, last):
            return None
        return last if self.rank == first else first


def lane_of(direction: int, boundary: int) -> int:
    """Every channel of the Program has its own lane."""
    return direction + 4 * boundary


def is_along(lane: int) -> bool:
    """Whether it is a channel of the Program's."""
    return lane % 4 in (FORWARD, BACKWARD)


def require_runnable(program: Program) -> None:
    """Says what no worker can do, before anything is started."""
    if program.sharing and program.num_stages != program.num_ranks:
        raise ProgramError(
            f"program {program.name!r} takes turns on the WAN with {program.num_stages} stages on {program.num_ranks} "
            "workers of a pipeline: a relay serves one boundary. Give each worker one stage"
        )
