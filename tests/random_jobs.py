"""Random small Programs and Costs for property tests: any Program that the checker must accept, with any prices.

An order is made by repeatedly running any op that is ready, so every order can be executed.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from atlas.cost.table import FAIR, PRIVATE, TURNS, Costs, LinkCost, Trace
from atlas.ir.assemble import assemble, repeated, with_optimizer
from atlas.ir.program import NUM_KINDS, Kind, Layout, Op, Program

Node = tuple[int, Op]
"""A pipeline and one of its ops."""


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """1 to 3 pipelines, 1 to 5 stages on as many workers or, interleaved, on fewer."""
    stages = draw(st.integers(1, 5))
    ranks = draw(st.sampled_from([r for r in range(1, stages + 1) if stages % r == 0]))
    dcs = draw(st.integers(1, ranks))
    return Layout(
        draw(st.integers(1, 3)), stages, draw(st.integers(1, 6)), tuple(f"dc{r * dcs // ranks}" for r in range(ranks))
    )


@st.composite
def programs(draw: st.DrawFn, max_iterations: int = 3) -> Program:
    """Whole, split or mixed backwards; with or without recompute, optimizer, several iterations."""
    layout = draw(layouts())
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    needs = dependencies(layout, rng, split=draw(st.sampled_from([0.0, 0.5, 1.0])), recompute=draw(st.booleans()))
    orders = any_order(layout, needs, rng)
    program = assemble("random", layout, orders)
    turn = np.array([rng.randrange(2 * program.num_transfers) for _ in range(program.num_transfers)], np.int64)
    if draw(st.booleans()):
        program = replace(program, turn=turn, sharing=True)
    if draw(st.booleans()):
        program = with_optimizer(program, norm=draw(st.booleans()))
    return repeated(program, draw(st.integers(1, max_iterations)))


def dependencies(layout: Layout, rng: random.Random, *, split: float, recompute: bool) -> dict[Node, list[Node]]:
    """Every op of one iteration, and the ops that must come before it on any worker."""
    needs: dict[Node, list[Node]] = {}
    for c in range(layout.num_pipelines):
        gradient: dict[tuple[int, int], Node] = {}
        weights: dict[tuple[int, int], Node] = {}
        for s in reversed(range(layout.num_stages)):
            for m in range(layout.num_microbatches):
                forward = (c, Op(Kind.F, s, m))
                needs[forward] = [(c, Op(Kind.F, s - 1, m))] if s else []
                after = [forward]
                if recompute and rng.random() < 0.7:
                    again = (c, Op(Kind.R, s, m))
                    needs[again] = [forward]
                    after = [again]
                whole = rng.random() >= split
                backward = gradient[s, m] = (c, Op(Kind.B if whole else Kind.I, s, m))
                needs[backward] = [*after, *([gradient[s + 1, m]] if (s + 1, m) in gradient else [])]
                last = weights[s, m] = backward if whole else (c, Op(Kind.W, s, m))
                if not whole:
                    needs[last] = [backward]
                if m:
                    needs[last].append(weights[s, m - 1])
    return needs


def any_order(layout: Layout, needs: dict[Node, list[Node]], rng: random.Random) -> list[list[Op]]:
    """One list of ops per worker, from one random order of all ops."""
    orders: list[list[Op]] = [[] for _ in range(layout.num_pipelines * layout.num_ranks)]
    users: dict[Node, list[Node]] = {node: [] for node in needs}
    waits = {node: len(sources) for node, sources in needs.items()}
    for node, sources in needs.items():
        for source in sources:
            users[source].append(node)
    ready = [node for node, count in waits.items() if count == 0]
    while ready:
        k = rng.randrange(len(ready))
        ready[k], ready[-1] = ready[-1], ready[k]
        c, op = node = ready.pop()
        orders[c * layout.num_ranks + layout.stage_rank[op.stage]].append(op)
        for user in users[node]:
            waits[user] -= 1
            if not waits[user]:
                ready.append(user)
    return orders


@st.composite
def costs_for(
    draw: st.DrawFn,
    program: Program,
    policies: tuple[int, ...] = (PRIVATE, FAIR, TURNS),
    *,
    traces: bool = True,
    max_servers: int = 4,
    longest_ns: tuple[int, ...] = (1, 4, 1000, 10**9),
) -> Costs:
    """Random durations, including zeros and ties, and channels assigned to links of the given policies.

    A PRIVATE link has one channel; the others may be shared by any channels, of either direction.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    longest = draw(st.sampled_from(longest_ns))
    shape = (2, program.num_pipelines, program.num_stages - 1)
    some_traces = traces and draw(st.booleans())
    shared = [policy for policy in policies if policy != PRIVATE]
    links: list[LinkCost] = []

    often = draw(st.sampled_from([0.0, 0.2, 0.8]))

    def some(shape: tuple[int, ...], *, zeros: float = often) -> np.ndarray:
        return rng.integers(0, longest + 1, shape) * (rng.random(shape) >= zeros)

    def new_link(policy: int) -> int:
        links.append(
            LinkCost(
                f"link {len(links)}",
                policy,
                servers=int(rng.integers(1, max_servers + 1)) if policy == PRIVATE else 1,
                capacity=float(rng.choice([0.3, 1.0, 1.5, 2.0, 16.0])),
                quantum_ns=int(rng.choice([0, 1, longest // 3 + 1, 10 * longest + 1])),
                trace=_trace(rng, longest) if some_traces and rng.random() < 0.6 else None,
            )
        )
        return len(links) - 1

    crowds = [new_link(int(rng.choice(shared))) for _ in range(draw(st.integers(1, 3)))] if shared else []
    own = 1.0 if not shared else 0.3 if PRIVATE in policies else 0.0
    channel_link = np.zeros(shape, np.int32)
    for channel in np.ndindex(shape):
        channel_link[channel] = new_link(PRIVATE) if rng.random() < own else rng.choice(crowds)
    return Costs(
        some((program.num_pipelines, program.num_stages, NUM_KINDS)),
        tuple(links),
        channel_link,
        some(shape),
        some(shape, zeros=max(often, 0.6)),
        some(shape),
    )


def _trace(rng: np.random.Generator, longest: int) -> Trace:
    spans = int(rng.integers(1, 5))
    at = np.concatenate([[0], np.cumsum(rng.integers(1, 5 * longest + 1, spans - 1))])
    return Trace(
        tuple(int(t) for t in at),
        tuple(float(r) for r in rng.choice([0.2, 0.5, 1.0, 1.7], spans)),
        tuple(int(t) for t in rng.integers(0, longest + 1, spans)),
    )


def with_orders(program: Program, orders: list[list[Op]]) -> Program:
    """The same Program with other ops or another order."""
    layout = Layout(
        program.num_pipelines, program.num_stages, program.num_microbatches, program.rank_dc, program.stage_rank
    )
    return assemble(
        program.name,
        layout,
        orders,
        sharing=program.sharing,
        turn=program.turn,
        memory=program.memory,
        num_iterations=program.num_iterations,
    )
