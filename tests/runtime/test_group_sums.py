"""Groups of pipelines that are placed differently: who holds what, and who sends it to whom."""

from __future__ import annotations

import pytest
import torch

from atlas.ir.assemble import with_optimizer
from atlas.ir.program import Layout
from atlas.runtime.flat import FlatParameters
from atlas.runtime.group_sum_plan import GroupPeer, group_links, group_parts, rounds
from atlas.runtime.models.config import DecoderConfig, gpt, model_layers
from atlas.runtime.models.decoder import LayerRange, build
from atlas.runtime.models.sizes import stage_layout
from atlas.runtime.topology import GroupShape, WorkerRole, all_roles
from atlas.schedules.classic import one_f_one_b

GPT = gpt(num_layers=5, width=16, num_heads=2, vocabulary=64, max_length=8)
LLAMA = DecoderConfig("llama", 3, 16, 4, 2, 8, 24, vocabulary=64, max_length=8, tied=True)
QWEN = DecoderConfig("qwen3", 3, 16, 4, 2, 8, 24, vocabulary=64, max_length=8, qk_norm=True, qkv_bias=True)


@pytest.mark.parametrize("config", [GPT, LLAMA, QWEN])
@pytest.mark.parametrize("num_slices", [1, 3])
def test_the_layout_from_sizes_is_that_of_the_module(config: DecoderConfig, num_slices: int) -> None:
    flat = FlatParameters(build(config, LayerRange.whole(config)), num_slices)
    layout = stage_layout(config, model_layers(config), num_slices)
    assert (layout.offsets, layout.num_values) == (flat.offsets, flat.num_values)
    assert layout.num_gradients == len(flat.gradients)


def groups_of(*shapes: tuple[int, tuple[int, ...]]) -> list[WorkerRole]:
    """Roles of groups of (pipelines, layers by stage), each in a datacenter of its own."""
    found: list[GroupShape] = []
    for k, (count, layers) in enumerate(shapes):
        first = sum(shape.num_pipelines for shape in found)
        found.append(GroupShape(first, count, 2, (f"dc{k}",) * len(layers), layers))
    roles: list[WorkerRole] = []
    for k, shape in enumerate(found):
        layout = Layout(shape.num_pipelines, len(shape.layers_per_stage), 2, shape.rank_dc)
        roles += all_roles(with_optimizer(one_f_one_b(layout)), 1, tuple(found), k)
    return roles


SHAPES = [
    ((1, (5,)), (2, (2, 3))),
    ((3, (1, 4)), (2, (3, 2))),
    ((2, (5,)), (3, (2, 3)), (1, (1, 2, 2))),
    ((1, (5,)), (1, (5,)), (2, (4, 1)), (3, (5,))),
]


@pytest.mark.parametrize("shapes", SHAPES)
def test_every_value_is_summed_once_over_all_groups_and_equal_everywhere(
    shapes: tuple[tuple[int, tuple[int, ...]], ...],
) -> None:
    roles = groups_of(*shapes)
    generator = torch.Generator().manual_seed(1)
    wholes = [_gradients(generator) for _ in shapes]
    held = {role.node: _slice(role, wholes[role.group]) for role in roles}
    _exchange(roles, held)
    expected = {name: sum(whole[name].double() for whole in wholes) for name in wholes[0]}
    seen: dict[str, list[torch.Tensor]] = {}
    for role in roles:
        for name, first, values in _named(role, held[role.node]):
            whole = expected[name].flatten()[first : first + len(values)]
            torch.testing.assert_close(values.double(), whole, rtol=1e-5, atol=1e-5)
            seen.setdefault(f"{name}.{role.group}", []).append(values)
    for name in expected:
        bits = [torch.cat(seen[f"{name}.{k}"]) for k in range(len(shapes))]
        assert all(torch.equal(bits[0], other) for other in bits), "all groups have the same bits"


def test_links_go_to_those_that_receive_and_the_norm_goes_to_all_last_stages() -> None:
    roles = groups_of((1, (5,)), (2, (2, 3)))
    to = {role.node: {link.peer for link in group_links(role, GPT)} for role in roles}
    assert to["dc0/p0.s0"] == {f"dc1/p{c}.s{s}" for c in (1, 2) for s in (0, 1)}
    assert all(to[f"dc1/p{c}.s{s}"] == {"dc0/p0.s0"} for c in (1, 2) for s in (0, 1))


def _gradients(generator: torch.Generator) -> dict[str, torch.Tensor]:
    module = build(GPT, LayerRange.whole(GPT))
    return {name: torch.randn(p.shape, generator=generator) for name, p in module.named_parameters()}


def _runs(role: WorkerRole) -> list[tuple[str, int, int, int]]:
    """(name, first, last, where) of the role's slice, from a module that is really built."""
    shape = role.groups[role.group]
    end = sum(shape.layers_per_stage[: role.rank + 1])
    layers = range(end - shape.layers_per_stage[role.rank], end)
    cut = LayerRange(layers, role.rank == 0, role.rank == len(shape.rank_dc) - 1)
    flat = FlatParameters(build(GPT, cut), shape.num_pipelines)
    length = len(flat.gradients) // shape.num_pipelines
    begin = role.pipeline * length
    found = []
    for name, view in flat.gradient_of.items():
        offset = flat.offsets[name]
        first, last = max(begin, offset), min(begin + length, offset + view.numel())
        if first < last:
            found.append((name, first - offset, last - offset, first - begin))
    return [*found, ("", 0, length, 0)]


def _slice(role: WorkerRole, whole: dict[str, torch.Tensor]) -> torch.Tensor:
    *runs, (_, _, length, _) = _runs(role)
    mine = torch.zeros(length)
    for name, first, last, at in runs:
        mine[at : at + last - first] = whole[name].flatten()[first:last]
    return mine


def _named(role: WorkerRole, mine: torch.Tensor) -> list[tuple[str, int, torch.Tensor]]:
    return [(name, first, mine[at : at + last - first]) for name, first, last, at in _runs(role)[:-1]]


def _exchange(roles: list[WorkerRole], held: dict[str, torch.Tensor]) -> None:
    """All rounds of all workers, without links."""
    plans = {role.node: group_parts(role, GPT) for role in roles}
    count = len(roles[0].groups)
    for number in range(len(rounds(0, count))):
        sent: dict[tuple[str, str], torch.Tensor] = {}
        for role in roles:
            after = role.groups[(role.group + 1) % count]
            for peer, parts in plans[role.node].sent[rounds(role.group, count)[number].sent].items():
                sent[role.node, after.node_of(*peer)] = torch.cat([held[role.node][part] for part in parts])
        for role in roles:
            before, now = role.groups[(role.group - 1) % count], rounds(role.group, count)[number]
            for peer, parts in plans[role.node].received[now.received].items():
                _take(held[role.node], parts, sent.pop((before.node_of(*GroupPeer(*peer)), role.node)), adds=now.adds)
        assert not sent, "all that is sent is received"


def _take(mine: torch.Tensor, parts: list[slice], values: torch.Tensor, *, adds: bool) -> None:
    for part in parts:
        length = part.stop - part.start
        mine[part] = mine[part] + values[:length] if adds else values[:length]
        values = values[length:]
    assert not len(values)
