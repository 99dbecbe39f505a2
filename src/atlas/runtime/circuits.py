"""A worker on photonic rails: it sends between two ranks, or sums gradients, only when the launcher says that the
circuits for it are set up, and reports to the launcher what has ended on the circuits that it had.

    -> ["ask", step, rank]    it has something to send to this rank
    -> ["got", step, rank]    all that this rank sends in the step has arrived
    -> ["ready", step, RING]  it needs the ring of its own rank, for SYNC
    -> ["done", step, RING]   its SYNC has ended; with ZeRO-1, the exchange of weights too
    <- [step, rank]           the circuits to this rank, or with RING of the ring, are set up

Knows ranks and steps. Which circuits these are, and when they change, the launcher knows (`launch.rails`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

from atlas.runtime.assignment import Assignment
from atlas.runtime.topology import WorkerRole
from atlas.wan.transport.base import Handle

RING = -1
"""In the place of a rank: the ring of the worker's own rank."""


class WorkerCircuits:
    """`pairs`: of ranks whose circuits change."""

    def __init__(
        self, role: WorkerRole, pairs: Sequence[tuple[int, int]], tell: Callable[[tuple[str, int, int]], None]
    ) -> None:
        self._role, self._tell = role, tell
        own, ranks = role.rank, role.program.stage_rank
        self._peers = {a if b == own else b for a, b in pairs if own in (a, b)}
        between = Counter(b if a == own else a for a, b in pairwise(ranks) if (a == own) != (b == own))
        self._num_inputs = {peer: between[peer] * role.program.num_microbatches for peer in self._peers}
        """By peer: in a step."""
        self._lock = threading.Lock()
        self._gates: dict[tuple[int, int], Handle] = {}
        self._asked: set[tuple[int, int]] = set()
        self._got: Counter[tuple[int, int]] = Counter()

    @classmethod
    def of(cls, assignment: Assignment, tell: Callable[[tuple[str, int, int]], None]) -> WorkerCircuits | None:
        """None where no circuits change."""
        return cls(assignment.role, assignment.circuits, tell) if assignment.circuits else None

    @property
    def has_ring(self) -> bool:
        """Whether the worker has its ring only for a part of each step."""
        return bool(self._peers)

    def opened(self, step: int, rank: int) -> None:
        self._gate(step, rank).finish()

    # ---- hops --------------------------------------------------------------------------------------------------------
    def hold(self, boundary: int, slot: int, send: Callable[[], None]) -> None:
        """Call `send` when the circuits over this boundary are set up; on any thread."""
        peer, step = self._place(boundary, slot)
        if peer not in self._peers:
            send()
            return
        gate = self._gate(step, peer)
        with self._lock:
            is_first = (step, peer) not in self._asked
            self._asked.add((step, peer))
        if is_first:
            self._tell(("ask", step, peer))
        gate.on_done(lambda _: send())

    def count(self, arrival: Handle, boundary: int, slot: int) -> None:
        """Tell the launcher when the last input of a step from one rank has arrived."""
        peer, step = self._place(boundary, slot)
        if peer in self._peers:
            arrival.on_done(lambda handle: self._arrived(step, peer) if handle.error is None else None)

    def _arrived(self, step: int, peer: int) -> None:
        with self._lock:
            self._got[step, peer] += 1
            is_last = self._got[step, peer] == self._num_inputs[peer]
        if is_last:
            self._tell(("got", step, peer))

    def _place(self, boundary: int, slot: int) -> tuple[int, int]:
        """The rank at the other side of a boundary, and the step of a slot."""
        program = self._role.program
        a, b = program.stage_rank[boundary], program.stage_rank[boundary + 1]
        return b if a == self._role.rank else a, slot // program.num_microbatches

    # ---- the ring ----------------------------------------------------------------------------------------------------
    def ring(self, step: int) -> Handle:
        """Ask for the ring; done when it is set up."""
        self._tell(("ready", step, RING))
        return self._gate(step, RING)

    def summed(self, step: int) -> None:
        """Nothing of the step uses circuits any more."""
        with self._lock:
            self._gates = {key: gate for key, gate in self._gates.items() if key[0] >= step}
            self._got = Counter({key: count for key, count in self._got.items() if key[0] >= step})
            self._asked = {key for key in self._asked if key[0] >= step}
        self._tell(("done", step, RING))

    def _gate(self, step: int, rank: int) -> Handle:
        with self._lock:
            if (step, rank) not in self._gates:
                to = "its ring" if rank == RING else f"stage {rank}"
                what = f"{self._role.who} waits for circuits to {to} in step {step}"
                self._gates[step, rank] = Handle(what)
            return self._gates[step, rank]
