"""A Program as text to read and to diff: a short header, then one line per worker in the grammar of torch's pipelining
actions, `0F0 0SEND_F0 0RECV_B0 0B0`. Sends follow their producer, receives precede their consumer.

`to_text` writes it and `from_text`, its exact inverse, reads it, also after a person edited it: it checks that the
text is well formed and names the line that is not. `ir.assemble.check` checks the Program; `to_torch_csv` exports it to
torch.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from atlas.errors import ProgramError
from atlas.ir.assemble import assemble, default_turns
from atlas.ir.program import (
    BACKWARD,
    BACKWARDS,
    FORWARD,
    NUM_KINDS,
    Ints,
    Kind,
    Layout,
    Memory,
    Op,
    Program,
    parse_action,
)

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
            actions = with_transfers(ops, program.num_stages, program.stage_rank)
            text = "".join(f" {stage}{kind}{microbatch}" for stage, kind, microbatch in actions)
            lines.append(f"{pipelines}.s{rank} @{quoted(program.rank_dc[rank])}:{text}")
        first = last + 1
    return "\n".join(lines + _turn_lines(program)) + "\n"


def program_id(text: str) -> str:
    """The same for two that run the same Program."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def to_torch_csv(program: Program) -> str:
    """The first pipeline, one row per rank, as torch's `_PipelineScheduleRuntime._load_csv(..., "compute_only")` reads.

    Only F, B, I and W: torch adds its own sends and receives, has no recompute op, and leaves SYNC, NORM, STEP to
    the training loop. R, P and the turn order on the WAN are lost.
    """
    if program.num_iterations != 1:
        raise ProgramError(
            f"program {program.name!r} has {program.num_iterations} iterations, but a torch schedule has one: "
            "export the Program before it is repeated"
        )
    known = (Kind.F, Kind.B, Kind.I, Kind.W)
    rows = (program.ops(w) for w in range(program.num_ranks))
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
    lines.append(f"sharing: {'yes' if program.sharing else 'no'}")
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


def with_transfers(ops: Sequence[Op], num_stages: int, stage_rank: Sequence[int]) -> list[Action]:
    """A worker's ops with the sends and receives that they imply. Stages on the same worker need neither."""
    from_left = [s > 0 and stage_rank[s - 1] != stage_rank[s] for s in range(num_stages)]
    from_right = [s + 1 < num_stages and stage_rank[s + 1] != stage_rank[s] for s in range(num_stages)]
    actions: list[Action] = []
    for kind, stage, microbatch in ops:
        backward = kind in BACKWARDS
        if kind == Kind.F and from_left[stage]:
            actions.append((stage, "RECV_F", microbatch))
        if backward and from_right[stage]:
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


def _by_kind(amounts: Sequence[int]) -> str:
    return "".join(f" {Kind(k).name}={amount}" for k, amount in enumerate(amounts) if amount)


MAX_TRANSFERS, MAX_WORKERS = 1 << 28, 1 << 20
"""A header with more than this is a typing error."""

_REQUIRED = ("name", "pipelines", "stages", "microbatches", "datacenters")
_KEYS = (*_REQUIRED, "iterations", "stage_rank", "sharing", "memory")
_TOKEN = rf'"(?:[^"\\]|\\.)*"|{PLAIN}'
_WORKER = re.compile(rf"p(\d{{1,9}})(?:-p(\d{{1,9}}))?\.s(\d{{1,9}}) +@({_TOKEN}) *:(.*)")
_TURN = re.compile(r"turn +p(\d{1,9}) +(\d{1,9})SEND_([FB]) *:(.*)")
_DIRECTION = {"F": FORWARD, "B": BACKWARD}


@dataclass
class _Draft:
    """What has been read so far, with line numbers."""

    header: dict[str, tuple[int, str]] = field(default_factory=dict)
    workers: list[tuple[int, re.Match[str]]] = field(default_factory=list)
    turns: list[tuple[int, re.Match[str]]] = field(default_factory=list)


def from_text(text: str) -> Program:
    """Reads the output of `to_text`. In a line without any SEND or RECV, they are implied."""
    draft = _read(text)
    if missing := [key for key in _REQUIRED if key not in draft.header]:
        raise ProgramError(f"the header has no {missing[0]!r}: it needs {', '.join(_REQUIRED)}")
    layout = Layout(
        _count(draft, "pipelines"),
        _count(draft, "stages"),
        _count(draft, "microbatches"),
        tuple(_names(*draft.header["datacenters"])),
    )
    iterations = _count(draft, "iterations")
    num_workers = layout.num_pipelines * layout.num_ranks
    transfers = 2 * layout.num_pipelines * max(1, layout.num_stages - 1) * layout.num_microbatches * iterations
    if transfers > MAX_TRANSFERS or num_workers > MAX_WORKERS:
        raise ProgramError(
            f"the header makes {num_workers} workers and {transfers} transfers: at most {MAX_WORKERS} and "
            f"{MAX_TRANSFERS} are allowed; lower pipelines, stages, microbatches or iterations"
        )
    if "stage_rank" in draft.header:
        layout = _with_stage_rank(layout, *draft.header["stage_rank"])
    name = _names(*draft.header["name"])
    if len(name) != 1:
        raise _wrong(draft.header["name"][0], draft.header["name"][1], 'one name, in "quotes" if it has spaces')
    orders = _orders(draft, layout, layout.num_microbatches * iterations)
    return assemble(
        name[0],
        layout,
        orders,
        sharing=_sharing(*draft.header.get("sharing", (0, "no"))),
        turn=_turns(draft, layout, iterations),
        memory=_memory(*draft.header["memory"]) if "memory" in draft.header else None,
        num_iterations=iterations,
    )


def _read(text: str) -> _Draft:
    draft = _Draft()
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        if worker := _WORKER.fullmatch(line):
            draft.workers.append((number, worker))
        elif turn := _TURN.fullmatch(line):
            draft.turns.append((number, turn))
        else:
            key, colon, value = line.partition(":")
            if not colon or key not in _KEYS:
                near = difflib.get_close_matches(key, _KEYS, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise _wrong(number, line, f"'p0.s0 @datacenter: ops', or a key of {', '.join(_KEYS)}{hint}")
            if key in draft.header:
                raise _wrong(number, line, f"{key!r} once; line {draft.header[key][0]} has it already")
            draft.header[key] = (number, value.strip())
    return draft


def _orders(draft: _Draft, layout: Layout, num_slots: int) -> list[list[Op]]:
    num_workers = layout.num_pipelines * layout.num_ranks
    orders: dict[int, list[Op]] = {}
    for number, match in draft.workers:
        first, last, rank = int(match[1]), int(match[2] or match[1]), int(match[3])
        who = match[0].partition(" ")[0]
        if not (first <= last < layout.num_pipelines and rank < layout.num_ranks):
            expected = f"pipelines p0..p{layout.num_pipelines - 1} and ranks s0..s{layout.num_ranks - 1}"
            raise _wrong(number, who, f"{expected}, as the header says")
        if _unquoted(number, match[4]) != layout.rank_dc[rank]:
            raise _wrong(number, f"@{match[4]}", f"@{quoted(layout.rank_dc[rank])}, the header's datacenter of s{rank}")
        ops = _ops(number, match[5].split(), layout, num_slots)
        for pipeline in range(first, last + 1):
            if orders.setdefault(pipeline * layout.num_ranks + rank, ops) is not ops:
                raise _wrong(number, who, f"each worker once; p{pipeline}.s{rank} has a line already")
    if len(orders) < num_workers:
        pipeline, rank = divmod(next(w for w in range(num_workers) if w not in orders), layout.num_ranks)
        raise ProgramError(f"there is no line for p{pipeline}.s{rank}: each of {num_workers} workers needs one")
    return [orders[w] for w in range(num_workers)]


def _ops(number: int, tokens: list[str], layout: Layout, num_slots: int) -> list[Op]:
    actions = [_action(number, token) for token in tokens]
    for token, (stage, _, microbatch) in zip(tokens, actions, strict=True):
        if stage >= layout.num_stages or microbatch >= num_slots:
            raise _wrong(number, token, f"stages 0..{layout.num_stages - 1} and microbatches 0..{num_slots - 1}")
    ops = [Op(Kind[kind], stage, microbatch) for stage, kind, microbatch in actions if kind in Kind.__members__]
    if len(ops) < len(actions):
        implied = with_transfers(ops, layout.num_stages, layout.stage_rank)
        _require_implied(number, tokens, actions, implied)
    return ops


def _require_implied(number: int, tokens: list[str], actions: list[Action], implied: list[Action]) -> None:
    """Sends and receives follow from the ops: they must be exactly where the ops require them."""
    for place in range(max(len(actions), len(implied))):
        given = actions[place] if place < len(actions) else None
        wanted = implied[place] if place < len(implied) else None
        if given == wanted:
            continue
        after = f" after {tokens[place - 1]}" if place else " first"
        shown = "{}{}{}".format(*wanted) if wanted else "nothing more"
        raise _wrong(
            number,
            tokens[place] if given else "the end of the line",
            f"{shown}{after} (a send follows its producer, a receive precedes its consumer; or leave out all of them)",
        )


def _action(number: int, token: str) -> Action:
    if len(token) > 40:
        raise _wrong(number, token[:40] + "…", "an op such as 3F17")
    try:
        return parse_action(token)
    except ProgramError as error:
        raise ProgramError(f"line {number}: {error}") from None


def _turns(draft: _Draft, layout: Layout, iterations: int) -> Ints:
    shape = (2, layout.num_pipelines, layout.num_stages - 1, layout.num_microbatches * iterations)
    turns = default_turns(layout, iterations).reshape(shape)
    seen: set[tuple[int, int, int]] = set()
    for number, match in draft.turns:
        pipeline, stage, direction = int(match[1]), int(match[2]), _DIRECTION[match[3]]
        boundary = stage - direction
        if pipeline >= layout.num_pipelines or not 0 <= boundary < layout.num_stages - 1:
            raise _wrong(number, match[0].partition(":")[0], "a channel between two stages of a pipeline of the header")
        if (direction, pipeline, boundary) in seen:
            raise _wrong(number, match[0].partition(":")[0], "each channel once")
        seen.add((direction, pipeline, boundary))
        keys = match[4].split()
        if len(keys) != shape[3] or not all(re.fullmatch(r"-?[0-9]{1,18}", key) for key in keys):
            raise _wrong(number, match[4].strip()[:60], f"{shape[3]} whole numbers, one per microbatch")
        turns[direction, pipeline, boundary] = [int(key) for key in keys]
    return turns.reshape(-1)


def _memory(number: int, value: str) -> Memory:
    match = re.fullmatch(r"([0-9]{1,18}) +acquire((?: +\w+=\S+)*) +release((?: +\w+=\S+)*)", value)
    amounts = []
    for group in (match[2], match[3]) if match else ():
        row = [0] * NUM_KINDS
        for entry in group.split():
            kind, _, amount = entry.partition("=")
            if kind not in Kind.__members__ or not re.fullmatch(r"-?[0-9]{1,18}", amount):
                raise _wrong(number, entry, f"a kind ({', '.join(Kind.__members__)}) and a whole number, such as F=1")
            row[Kind[kind]] = int(amount)
        amounts.append(tuple(row))
    if match is None:
        raise _wrong(
            number, value, "the cap, then what each kind takes and gives back: '4 acquire F=1 release B=1 W=1'"
        )
    return Memory(int(match[1]), *amounts)


def _with_stage_rank(layout: Layout, number: int, value: str) -> Layout:
    ranks = value.split()
    known = {str(r) for r in range(layout.num_ranks)}
    if len(ranks) != layout.num_stages or not known.issuperset(ranks):
        raise _wrong(number, value, f"a rank of 0..{layout.num_ranks - 1} for each of {layout.num_stages} stages")
    stage_rank = tuple(map(int, ranks))
    return replace(layout, stage_rank=stage_rank)


def _count(draft: _Draft, key: str) -> int:
    number, value = draft.header.get(key, (0, "1"))
    if not re.fullmatch(r"[0-9]{1,9}", value) or int(value) < 1:
        raise _wrong(number, f"{key}: {value}", "a whole number from 1 to 999999999")
    return int(value)


def _sharing(number: int, value: str) -> bool:
    if value not in ("yes", "no"):
        raise _wrong(number, f"sharing: {value}", "yes or no")
    return value == "yes"


def _names(number: int, value: str) -> list[str]:
    if not re.fullmatch(rf"(?:{_TOKEN})(?: +(?:{_TOKEN}))*", value):
        raise _wrong(
            number,
            value,
            'names separated by spaces, in "quotes" if they have other characters than letters, digits and _.+/=-',
        )
    return [_unquoted(number, token) for token in re.findall(_TOKEN, value)]


def _unquoted(number: int, token: str) -> str:
    if not token.startswith('"'):
        return token
    try:
        return str(json.loads(token))
    except ValueError:
        raise _wrong(number, token, "a name quoted as in JSON") from None


def _wrong(number: int, given: str, expected: str) -> ProgramError:
    return ProgramError(f"line {number}: got {given!r}, expected {expected}")
