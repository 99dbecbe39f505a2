"""A piece of several prompts: the same results as one prompt at a time, within a budget of tokens, and not at the cost
of a deadline."""

from __future__ import annotations

import random

import pytest
import torch
from prefill_samples import FAMILIES, Collector, even_ends, make_stages, run_all

from bubbletea.costs import LayerTime
from bubbletea.prefill.engine import PrefillEngine
from bubbletea.prefill.job import PrefillPiece, PrefillTask, together
from bubbletea.prefill.shard import Served
from bubbletea.prefill.staging import Staged

LENGTHS = (5, 64, 33, 64, 1, 130, 64, 17)
CHUNK = 64


class Many(Collector):
    """Results by prompt."""

    def __init__(self, served: Served) -> None:
        super().__init__(served, max(LENGTHS))
        self.blocks: dict[tuple[int, int, int], torch.Tensor] = {}
        self.heads: dict[int, torch.Tensor] = {}

    def kv(self, task: PrefillTask, piece: PrefillPiece, kv: Staged) -> None:
        super().kv(task, piece, kv)
        self.blocks[task.job, piece.layer, piece.first] = kv()

    def logits(self, task: PrefillTask, logits: Staged) -> None:
        self.heads[task.job] = logits()


def offer(stages: list[PrefillEngine], job: int, length: int, due_ns: int = 0, planned_ns: int = 0) -> None:
    tokens = random.Random(job).choices(range(256), k=length)
    peers = tuple((f"dc/{s}", "127.0.0.1", 0) for s in range(len(stages)))
    for s, stage in enumerate(stages):
        task = PrefillTask(job, 0, length, 0, even_ends(length, CHUNK), s, due_ns, peers, planned_ns)
        stage.offer(task, tokens if s == 0 else ())


def prefilled(served: Served, split: tuple[int, ...], batch_tokens: int) -> Many:
    outlet = Many(served)
    stages = make_stages(served, split, outlet)
    for stage in stages:
        stage.batch_tokens = batch_tokens
    for job, length in enumerate(LENGTHS):
        offer(stages, job, length)
    run_all(stages)
    assert outlet.finished == len(LENGTHS) * len(split)
    assert not outlet.failures
    return outlet


@pytest.mark.parametrize("split", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_gives_what_its_prompts_give_alone(family: str, split: tuple[int, ...]) -> None:
    served = Served(FAMILIES[family], seed=3)
    alone, batched = prefilled(served, split, 0), prefilled(served, split, 512)
    assert batched.ran_pieces < alone.ran_pieces / 2
    assert alone.blocks.keys() == batched.blocks.keys()
    for key, kv in alone.blocks.items():
        torch.testing.assert_close(batched.blocks[key], kv, atol=1e-5, rtol=1e-5)
    for job, logits in alone.heads.items():
        torch.testing.assert_close(batched.heads[job], logits, atol=1e-5, rtol=1e-5)


def sizes_of_batches(batch_tokens: int, *due_and_planned: tuple[int, int]) -> list[int]:
    """Tokens of the first piece with four prompts of 64."""
    stages = make_stages(Served(FAMILIES["llama"]), (4,), Many(Served(FAMILIES["llama"])))
    stages[0].batch_tokens = batch_tokens
    for job, (due_ns, planned_ns) in enumerate(due_and_planned):
        offer(stages, job, 64, due_ns, planned_ns)
    seen: list[int] = []
    run_all(stages, fits=lambda piece: seen.append(piece.last - piece.first) or True)
    return seen


def test_a_batch_stays_within_its_budget() -> None:
    four = [(0, 0)] * 4
    assert max(sizes_of_batches(0, *four)) == 64
    assert sizes_of_batches(192, *four)[:3] == [64, 128, 192], "one, two and three together; four would be too many"
    assert 256 in sizes_of_batches(512, *four)


def test_no_prompt_waits_for_others_beyond_its_deadline() -> None:
    """Alone the first is delivered at 10 and the second at 20; together both are, at 20."""
    assert 128 in sizes_of_batches(512, (25, 10), (30, 20))
    assert 128 not in sizes_of_batches(512, (15, 10), (30, 20))


def test_a_batch_that_does_not_fit_the_wait_is_smaller() -> None:
    stages = make_stages(Served(FAMILIES["llama"]), (4,), outlet := Many(Served(FAMILIES["llama"])))
    stages[0].batch_tokens = 512
    for job in range(4):
        offer(stages, job, 64)
    run_all(stages, fits=lambda piece: piece.last - piece.first <= 128)
    assert outlet.finished == 4


def test_a_batch_is_priced_by_its_tokens_and_their_pairs() -> None:
    time = LayerTime(0.0, 100.0, 10.0, 1.0)
    pieces = [PrefillPiece(0, 0, 64, 1), PrefillPiece(1, 64, 96, 1)]
    whole = together(pieces)
    apart = sum(time(piece.last - piece.first, piece.first) for piece in pieces)
    assert time(whole.last - whole.first, whole.first) == pytest.approx(apart - 100, abs=100), "the fixed part once"
    assert together(pieces[:1]) == pieces[0]
