"""ZeRO-1: each pipeline steps its own slice of a stage's flat memory and keeps the optimizer state of that slice only.
With d pipelines a bf16 parameter takes 6 + 12/d bytes instead of 18.

Gathers stepped weights, and whole optimizer state for checkpoints, which have none of this division. Knows flat memory
and exchanges; not what an optimizer does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from atlas.runtime.exchange import STATE, WEIGHTS, Exchange, ExchangeKey, PartSizes
from atlas.runtime.flat import FlatParameters, FlatPiece
from atlas.runtime.waits import Pending, Wait

OptimizerEntries = dict[str, dict[str, Tensor]]
"""Optimizer state by parameter and entry (`exp_avg`)."""


@torch.no_grad()
def gather_weights(
    step: int, flats: Mapping[int, FlatParameters], exchanges: Mapping[int, Exchange], wait: Wait
) -> None:
    """Give all pipelines the weights that their owners have stepped. `flats`: by stage."""
    started: list[tuple[FlatParameters, Tensor, list[Pending]]] = []
    for stage, flat in flats.items():
        exchange = exchanges[stage]
        whole = flat.weights.cpu() if exchange.on_host else flat.weights  # on a CPU, the weights themselves
        mine = whole[flat.slice_of(exchange.rank)]
        key, what = ExchangeKey(step, stage, WEIGHTS), f"STEP {step} waits for weights"
        started.append((flat, whole, exchange.gather(key, _bytes(mine), _bytes(whole), what)))
    for flat, whole, pending in started:
        wait(pending)
        if whole is not flat.weights:
            flat.weights.copy_(whole)


class ShardedState:
    """The optimizer state of this pipeline's slices, of all stages of a process."""

    def __init__(self, stages: Mapping[int, tuple[FlatParameters, dict[str, Tensor]]], rank: int) -> None:
        """`stages`: the memory of each, and the state of this rank's slice by entry."""
        self._stages, self._rank = stages, rank
        self._num_saves = 0

    @torch.no_grad()
    def gather(
        self, names: Sequence[Collection[str]], exchanges: Mapping[int, Exchange], wait: Wait
    ) -> OptimizerEntries:
        """The whole state of the parameters `names[rank]` in host memory, for every rank its own. All ranks call it
        alike."""
        self._num_saves += 1
        found: OptimizerEntries = {}
        for stage, (flat, state) in self._stages.items():
            wanted = [[name for name in of_rank if name in flat.offsets] for of_rank in names]
            for number, (entry, mine) in enumerate(state.items()):
                key = ExchangeKey(self._num_saves, stage, STATE + number)
                for name, whole in self._swap(key, flat, mine, wanted, exchanges[stage], wait).items():
                    found.setdefault(name, {})[entry] = whole
        return found

    def _swap(
        self,
        key: ExchangeKey,
        flat: FlatParameters,
        mine: Tensor,
        wanted: Sequence[Sequence[str]],
        exchange: Exchange,
        wait: Wait,
    ) -> dict[str, Tensor]:
        """Send each rank this rank's part of the parameters that it wants; what this rank wants, whole."""
        begin = flat.slice_of(self._rank).start
        out = [
            [mine[piece.at.start - begin : piece.at.stop - begin] for _, piece in _parts(flat, of_rank, self._rank)]
            for of_rank in wanted
        ]
        arriving = [_parts(flat, wanted[self._rank], rank) for rank in range(exchange.size)]
        sizes = PartSizes(
            [sum(len(part) for part in parts) for parts in out],
            [sum(_length(piece) for _, piece in parts) for parts in arriving],
        )
        where = torch.device("cpu") if exchange.on_host else mine.device
        sent = torch.cat([mine.new_empty(0), *(part for parts in out for part in parts)]).to(where)
        received = torch.empty(sum(sizes.into), device=where)
        wait(exchange.swap(key, sent, received, sizes, "a checkpoint waits for the optimizer state"))
        whole = {name: torch.empty(flat.weight_of[name].shape) for name in wanted[self._rank]}
        end = 0
        for name, piece in (pair for parts in arriving for pair in parts):
            begin, end = end, end + _length(piece)
            whole[name].view(-1)[piece.within] = received[begin:end].cpu()
        return whole

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Use this rank's part of a saved state, by parameter and entry."""
        for flat, state in self._stages.values():
            mine = flat.slice_of(self._rank)
            for name, piece in flat.pieces(mine).items():
                for entry, whole in saved.get(name, {}).items():
                    at = slice(piece.at.start - mine.start, piece.at.stop - mine.start)
                    state[entry][at] = whole.reshape(-1)[piece.within].to(state[entry].device)


def _parts(flat: FlatParameters, names: Sequence[str], rank: int) -> list[tuple[str, FlatPiece]]:
    """The parts of some parameters that are in a rank's slice. A second name has the state of the first."""
    pieces = flat.pieces(flat.slice_of(rank))
    return [(name, pieces[flat.owner[name]]) for name in names if flat.owner[name] in pieces]


def _length(piece: FlatPiece) -> int:
    return int(piece.at.stop - piece.at.start)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
