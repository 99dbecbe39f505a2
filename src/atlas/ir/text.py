"""A Program as text to read and to diff: a short header, then one line per worker in the grammar of torch's pipelining
actions, `0F0 0SEND_F0 0RECV_B0 0B0`. Sends follow their producer, receives precede their consumer.

`to_text` writes it, and `from_text` of `ir.parse` is its exact inverse. `to_torch_csv` exports to torch's runtime.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from atlas.errors import ProgramError
from atlas.ir.assemble import default_turns
from atlas.ir.ops import BACKWARDS, Kind, Op
from atlas.ir.program import FORWARD, Program

HEADING = "# atlas program 1"

Action = tuple[int, str, int]
"""Stage, kind or direction, microbatch."""

PLAIN = r"[A-Za-z0-9_.+/=-]+"
"""A name that needs no quotes."""


def to_text(program: Program) -> str:
    """The whole Program. Consecutive pipelines that do the same share their lines (`p0-p3.s0`)."""
    orders = [program.ops(w) for w in range(program.num_workers)]
    lines = [HEADING, *_header(program), ""]
    num_ranks, first = program.num_ranks, 0
    while first < program.num_pipelines:
        same, last = orders[first * num_ranks : (first + 1) * num_ranks], first
        while orders[(last + 1) * num_ranks : (last + 2) * num_ranks] == same:
            last += 1
        pipelines = f"p{first}" if last == first else f"p{first}-p{last}"
        for rank, ops in enumerate(same):
            actions = with_transfers(ops, program.num_stages, program.stage_rank, program.recompute_on_arrival)
            text = "".join(f" {stage}{kind}{microbatch}" for stage, kind, microbatch in actions)
            lines.append(f"{pipelines}.s{rank} @{quoted(program.rank_dc[rank])}:{text}")
        first = last + 1
    return "\n".join(lines + _turn_lines(program)) + "\n"


def to_torch_csv(program: Program, pipeline: int = 0) -> str:
    """One row per rank, as torch's `_PipelineScheduleRuntime._load_csv(..., "compute_only")` reads it.

    Only F, B, I and W: torch adds its own sends and receives, has no recompute op, and leaves SYNC, NORM, STEP to
    the training loop. R, P and the turn order on the WAN are lost.
    """
    if program.num_iterations != 1:
        raise ProgramError(
            f"program {program.name!r} has {program.num_iterations} iterations, but a torch schedule has one: "
            "export the Program before it is repeated"
        )
    if not 0 <= pipeline < program.num_pipelines:
        raise ProgramError(
            f"pipeline {pipeline} of {program.num_pipelines}: name one of 0..{program.num_pipelines - 1}"
        )
    known = (Kind.F, Kind.B, Kind.I, Kind.W)
    first = pipeline * program.num_ranks
    rows = (program.ops(w) for w in range(first, first + program.num_ranks))
    return "".join(",".join(str(op) for op in ops if op.kind in known) + "\n" for ops in rows)


def _header(program: Program) -> list[str]:
    lines = [
        f"name: {quoted(program.name)}",
        f"pipelines: {program.num_pipelines}",
        f"stages: {program.num_stages}",
        f"microbatches: {program.num_microbatches}",
        f"iterations: {program.num_iterations}",
        f"datacenters: {' '.join(map(quoted, program.rank_dc))}",
    ]
    if program.stage_rank != replace(program.layout, stage_rank=()).stage_rank:
        lines.append(f"stage_rank: {' '.join(map(str, program.stage_rank))}")
    lines.append(f"sharing: {_yes(program.sharing)}")
    if program.recompute_on_arrival:
        lines.append("recompute_on_arrival: yes")
    if program.memory is not None:
        taken, given = _by_kind(program.memory.acquire), _by_kind(program.memory.release)
        lines.append(f"memory: {program.memory.cap} acquire{taken} release{given}")
    return lines


def _turn_lines(program: Program) -> list[str]:
    """One line per channel whose turns differ from the dispatch rule's: the key of every microbatch, in order."""
    turns = program.turn.reshape(program.transfer_shape)
    default = default_turns(program.layout, program.num_iterations).reshape(program.transfer_shape)
    differs = (turns != default).any(axis=3)
    lines = []
    for direction, pipeline, boundary in np.argwhere(differs).tolist():
        sender = f"{boundary}SEND_F" if direction == FORWARD else f"{boundary + 1}SEND_B"
        keys = " ".join(map(str, turns[direction, pipeline, boundary].tolist()))
        lines.append(f"turn p{pipeline} {sender}: {keys}")
    return lines


def with_transfers(
    ops: Sequence[Op], num_stages: int, stage_rank: Sequence[int], recompute_on_arrival: bool
) -> list[Action]:
    """A worker's ops with the sends and receives that they imply. Stages on the same worker need neither."""
    recomputed = {op[1:] for op in ops if op.kind == Kind.R} if recompute_on_arrival else set()
    from_left = [s > 0 and stage_rank[s - 1] != stage_rank[s] for s in range(num_stages)]
    from_right = [s + 1 < num_stages and stage_rank[s + 1] != stage_rank[s] for s in range(num_stages)]
    actions: list[Action] = []
    for kind, stage, microbatch in ops:
        backward = kind in BACKWARDS
        takes_gradient = kind == Kind.R if (stage, microbatch) in recomputed else backward
        if kind == Kind.F and from_left[stage]:
            actions.append((stage, "RECV_F", microbatch))
        if takes_gradient and from_right[stage]:
            actions.append((stage, "RECV_B", microbatch))
        actions.append((stage, kind.name, microbatch))
        if kind == Kind.F and from_right[stage]:
            actions.append((stage, "SEND_F", microbatch))
        if backward and from_left[stage]:
            actions.append((stage, "SEND_B", microbatch))
    return actions


def quoted(name: str) -> str:
    """A name as it is written in the text."""
    return name if re.fullmatch(PLAIN, name) else json.dumps(name)


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def _by_kind(amounts: Sequence[int]) -> str:
    return "".join(f" {Kind(k).name}={amount}" for k, amount in enumerate(amounts) if amount)
