"""Makes Programs, and rejects those that cannot finish. They are made from one list of ops per worker, or from another
Program, with the optimizer's ops or repeated; `atlas.schedules` orders the ops.

`check` accepts exactly what the engine finishes (a property test compares them): every stage has its ops, each once and
in a possible order; no workers wait for each other in a cycle; no worker holds more than its memory. An error names the
ops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from atlas.errors import ProgramError
from atlas.ir.program import COLLECTIVES, Ints, Kind, Layout, Memory, Op, Program, turn_key


def assemble(
    name: str,
    layout: Layout,
    orders: Sequence[Sequence[Op]],
    *,
    sharing: bool = False,
    turn: Ints | None = None,
    memory: Memory | None = None,
    num_iterations: int = 1,
) -> Program:
    """Makes a Program from one list of ops per worker, or per rank if every pipeline does the same.

    `turn` is by transfer; without it the order of the dispatch rule (oldest microbatch first) is used.
    """
    alike = layout.num_pipelines if len(orders) == layout.num_ranks else 1
    if len(orders) * alike != layout.num_ranks * layout.num_pipelines:
        raise ProgramError(
            f"{len(orders)} lists of ops for {layout.num_pipelines} pipelines of {layout.num_ranks} workers: "
            "give one list per worker, or one per rank"
        )
    num_slots = layout.num_microbatches * num_iterations
    flat = np.tile(np.array([op for order in orders for op in order], np.int64).reshape(-1, 3), (alike, 1))
    if len(flat) and (flat[:, 1].max() >= layout.num_stages or flat[:, 2].max() >= num_slots or flat.min() < 0):
        raise ProgramError(
            f"program {name!r}: an op names a stage or a microbatch outside "
            f"0..{layout.num_stages - 1} / 0..{num_slots - 1}"
        )
    if turn is None:
        turn = default_turns(layout, num_iterations)
    return Program(
        name=name,
        num_pipelines=layout.num_pipelines,
        num_stages=layout.num_stages,
        num_microbatches=layout.num_microbatches,
        num_iterations=num_iterations,
        stage_rank=layout.stage_rank,
        rank_dc=layout.rank_dc,
        worker_ptr=np.concatenate([[0], np.cumsum([len(order) for order in orders] * alike)]).astype(np.int64),
        kind=flat[:, 0].astype(np.int8),
        stage=flat[:, 1].astype(np.int32),
        microbatch=flat[:, 2].astype(np.int32),
        turn=turn,
        sharing=sharing,
        memory=memory,
    )


def default_turns(layout: Layout, num_iterations: int = 1) -> Ints:
    """The dispatch rule's turn of every transfer."""
    num_slots = layout.num_microbatches * num_iterations
    m, c = np.arange(num_slots)[None, :], np.arange(layout.num_pipelines)[:, None]
    keys = np.asarray(turn_key(m, c, layout.num_pipelines), np.int64)  # type: ignore[arg-type]
    shape = (2, layout.num_pipelines, layout.num_stages - 1, num_slots)
    return np.broadcast_to(keys[None, :, None, :], shape).reshape(-1).copy()


def with_optimizer(program: Program, *, norm: bool = False) -> Program:
    """The same Program with SYNC, (NORM,) and STEP at the end of each worker's iteration."""
    if program.num_iterations != 1:
        raise ProgramError(
            f"program {program.name!r} has {program.num_iterations} iterations: add the optimizer first, then repeat"
        )
    closing = np.array([Kind.SYNC, Kind.NORM, Kind.STEP] if norm else [Kind.SYNC, Kind.STEP], np.int8)
    at, stage = program.worker_ptr[1:].repeat(len(closing)), np.minimum.reduceat(program.stage, program.worker_ptr[:-1])
    return replace(
        program,
        worker_ptr=program.worker_ptr + len(closing) * np.arange(program.num_workers + 1),
        kind=np.insert(program.kind, at, np.tile(closing, program.num_workers)),
        stage=np.insert(program.stage, at, stage.repeat(len(closing))),
        microbatch=np.insert(program.microbatch, at, 0),
    )


def repeated(program: Program, times: int) -> Program:
    """The same iterations `times` times. Each worker continues as soon as its own work allows."""
    spans = list(pairwise(program.worker_ptr.tolist()))
    index = np.concatenate([np.tile(np.arange(first, end), times) for first, end in spans])
    pass_of = np.concatenate([np.arange(times).repeat(end - first) for first, end in spans])
    kind = program.kind[index]
    num_later = np.where(kind <= Kind.W, program.num_slots, program.num_iterations)
    turns = program.turn.reshape(program.transfer_shape)
    later = int(turns.max(initial=0)) + 1
    return replace(
        program,
        num_iterations=times * program.num_iterations,
        worker_ptr=program.worker_ptr * times,
        kind=kind,
        stage=program.stage[index],
        microbatch=(program.microbatch[index] + pass_of * num_later).astype(np.int32),
        turn=np.concatenate([turns + k * later for k in range(times)], axis=3).ravel(),
    )


# ---- check ---------------------------------------------------------------------------------------------------------
def check(program: Program) -> None:
    """Raises ProgramError at the first fault."""
    _require_complete(program)
    _require_local_order(program)
    _require_no_cycle(program)
    _require_memory(program)


def _fault(program: Program, what: str) -> ProgramError:
    return ProgramError(f"program {program.name!r}: {what}")


# ---- every op exists once, on the right worker --------------------------------------------------------------
def _require_complete(program: Program) -> None:
    rank = program.op_worker % program.num_ranks
    misplaced = np.flatnonzero(np.array(program.stage_rank)[program.stage] != rank)
    if misplaced.size:
        raise _fault(
            program,
            f"{program.describe(int(misplaced[0]))} is on the wrong worker: stage {program.stage[misplaced[0]]} "
            f"belongs to rank {program.stage_rank[program.stage[misplaced[0]]]}",
        )
    found = np.flatnonzero(program.op_index.ravel() >= 0).size
    if found != program.num_ops:
        raise _fault(program, f"{_first_double(program)} occurs more than once: every op is done exactly once")
    per_mb = program.op_index
    for kind, rule in ((Kind.F, "a forward"), (None, "a backward (B, or I and W)")):
        has = per_mb[Kind.F] >= 0 if kind == Kind.F else program._backward >= 0
        _require_all(program, has, rule)
    both = (per_mb[Kind.B] >= 0) & ((per_mb[Kind.I] >= 0) | (per_mb[Kind.W] >= 0))
    _require_all(program, ~both, "either B, or I and W, not both")
    _require_all(program, (per_mb[Kind.I] >= 0) == (per_mb[Kind.W] >= 0), "a W for every I, and an I for every W")
    for collective in COLLECTIVES:
        _require_everybody(program, collective)


def _require_everybody(program: Program, kind: Kind) -> None:
    """If a worker does not take part in a collective that others join, they wait forever."""
    mine = program.kind == kind
    pipeline, rank = np.divmod(program.op_worker[mine], program.num_ranks)
    by_stage = kind == Kind.SYNC
    num_places = program.num_stages if by_stage else program.num_ranks
    joins = np.zeros((program.num_slots, program.num_pipelines, num_places), np.bool_)
    joins[program.microbatch[mine], pipeline, program.stage[mine] if by_stage else rank] = True
    expected = joins.any(axis=1 if by_stage else (1, 2), keepdims=True)
    if (absent := np.argwhere(expected & ~joins)).size:
        iteration, c, place = (int(v) for v in absent[0])
        rank_of = program.stage_rank[place] if by_stage else place
        worker = program.worker_name(c * program.num_ranks + rank_of)
        raise _fault(program, f"the {kind.name} of iteration {iteration} waits for {worker}, which never joins it")


def _require_all(program: Program, has: NDArray[np.bool_], rule: str) -> None:
    if not has.all():
        c, s, m = (int(v) for v in np.argwhere(~has)[0])
        worker = program.worker_name(program.worker(c, s))
        raise _fault(program, f"microbatch {m} on stage {s} of {worker} needs {rule}")


def _first_double(program: Program) -> str:
    seen: set[tuple[int, ...]] = set()
    for i in range(program.num_ops):
        key = (int(program.op_worker[i]), *program.op(i))
        if key in seen:
            return program.describe(i)
        seen.add(key)
    raise AssertionError("no op occurs twice")


# ---- F before R before B before W; gradients added in ascending order --------------------------------------
def _require_local_order(program: Program) -> None:
    table = program.op_index
    for earlier, later in ((Kind.F, Kind.R), (Kind.F, Kind.B), (Kind.F, Kind.I), (Kind.R, Kind.B), (Kind.R, Kind.I),
                           (Kind.I, Kind.W)):  # fmt: skip
        wrong = (table[earlier] >= 0) & (table[later] >= 0) & (table[earlier] > table[later])
        if wrong.any():
            c, s, m = (int(v) for v in np.argwhere(wrong)[0])
            raise _fault(
                program,
                f"{program.describe(int(table[later, c, s, m]))} comes before "
                f"{program.op(int(table[earlier, c, s, m]))}, which it needs",
            )
    places = np.maximum(table[Kind.B], table[Kind.W])  # each microbatch has one or the other
    if (steps := np.diff(places, axis=2) < 0).any():
        c, s, m = (int(v) for v in np.argwhere(steps)[0])
        raise _fault(
            program,
            f"{program.describe(int(places[c, s, m + 1]))} comes before {program.op(int(places[c, s, m]))}: "
            "weight gradients are added in ascending order of microbatches; otherwise the sum depends on the schedule",
        )


# ---- no worker waits in a cycle ----------------------------------------------------------------------------
def _require_no_cycle(program: Program) -> None:
    senders, groups = program.transfer_src.tolist(), program.op_groups().tolist()
    sources = [senders[transfer] if transfer >= 0 else -1 for transfer in program.op_input.tolist()]
    done, at = _executed(program, sources, groups)
    if all(done):
        return

    def awaited(i: int) -> int:
        """What an op waits for that is not done: the sender of its input, or a worker that has not joined it."""
        if (source := sources[i]) >= 0 and not done[source]:
            return source
        return next(j for j, number in enumerate(groups) if number == groups[i] and at[worker[j]] != j)

    worker = program.op_worker.tolist()
    i, path = at[worker[done.index(False)]], list[int]()
    while i not in path:
        path.append(i)
        current = at[worker[i]]
        i = awaited(i) if i == current else current
    chain = " waits for ".join(program.describe(op) for op in [*path[path.index(i) :], i])
    raise _fault(program, f"deadlock: {chain}. Change the order of one of these workers")


def _executed(program: Program, sources: list[int], groups: list[int]) -> tuple[list[bool], list[int]]:
    """By op: whether it can be done; and by worker: the op at which it waits forever, or the end of its ops. Every
    worker continues until it waits for another."""
    ends, at = program.worker_ptr[1:].tolist(), program.worker_ptr[:-1].tolist()
    missing = Counter(groups)
    done, waiting = [False] * program.num_ops, dict[int, list[int]]()  # by op, or ~group: workers that wait for it
    ready = list(range(program.num_workers))
    while ready:
        worker = ready.pop()
        i = at[worker]
        while i < ends[worker]:
            if (needed := sources[i]) >= 0 and not done[needed]:
                waiting.setdefault(needed, []).append(worker)
                break
            if (number := groups[i]) >= 0 and not done[i]:
                missing[number] -= 1
                waiting.setdefault(~number, []).append(worker)
                if missing[number]:
                    break
                for member in waiting.pop(~number):
                    if member != worker:
                        done[at[member]] = True
                        ready.append(member)
            done[i] = True
            if i in waiting:
                ready += waiting.pop(i)
            i += 1
        at[worker] = i
    return done, at


# ---- memory ------------------------------------------------------------------------------------------------
def _require_memory(program: Program) -> None:
    if program.memory is None:
        return
    held = program.held(program.memory)
    over = np.flatnonzero(held > program.memory.cap)
    if over.size:
        raise _fault(
            program,
            f"{program.describe(int(over[0]))} makes its worker hold {held[over[0]]} units of memory, but "
            f"the cap is {program.memory.cap}: do a backward first, or raise the cap",
        )
