"""A prefill in pieces, cut off and resumed, over one, two and four stages, is the prefill in one piece."""

from __future__ import annotations

import random

import pytest
import torch
from prefill_samples import (
    FAMILIES,
    LLAMA,
    Collector,
    even_ends,
    greedy_after,
    greedy_alone,
    make_stages,
    num_tasks,
    offer_everywhere,
    run_all,
    step,
    whole,
)

from atlas.errors import InfeasibleError
from atlas.runtime.device import Cpu
from bubbletea.prefill.arena import Arena
from bubbletea.prefill.engine import PrefillEngine
from bubbletea.prefill.job import PrefillTask
from bubbletea.prefill.piece_times import PieceTimes
from bubbletea.prefill.shard import ModelShard, Served
from bubbletea.prefill.warming import warm_up

SPLITS = ((4,), (2, 2), (1, 1, 1, 1), (3, 1))


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(256) for _ in range(length)]


def check(family: str, split: tuple[int, ...], length: int, rng: random.Random, device: str = "cpu") -> None:
    served = Served(FAMILIES[family], seed=rng.randrange(3))
    tokens, chunk = prompt(rng, length), rng.choice([length, max(1, length // 3), 256, 511])
    collector = Collector(served, length)
    stages = make_stages(served, split, collector, device=device)
    offer_everywhere(stages, tokens, min(chunk, length))
    # Bubbles that end after any piece, and before a piece would be whole.
    run_all(stages, lambda stage: rng.random() < 0.4, lambda piece: rng.random() < 0.7)
    assert not collector.failures
    decoder = whole(served)
    assert greedy_after(collector, decoder, 12) == greedy_alone(decoder, tokens, 12)
    assert all(stage.shard.arena.free_bytes == 64 * 2**20 - stage.shard.weights_bytes for stage in stages)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_greedy_tokens_after_hand_off_equal_those_of_the_whole_model(
    family: str, split: tuple[int, ...], device: str
) -> None:
    rng = random.Random(f"{family}{split}")
    for length in (1, rng.randrange(2, 64), rng.randrange(64, 500)):
        check(family, split, length, rng, device)


@pytest.mark.slow
def test_a_hundred_prompts_up_to_4096_tokens() -> None:
    rng = random.Random(7)
    for number in range(100):
        length = 4096 if number == 0 else rng.randrange(1, 4097)
        check(rng.choice(list(FAMILIES)), SPLITS[number % 3], length, rng)


def test_wrong_keys_change_the_tokens() -> None:
    """Or the test above would show nothing."""
    rng, served = random.Random(3), Served(LLAMA)
    tokens = prompt(rng, 200)
    collector = Collector(served, 200)
    stages = make_stages(served, (2, 2), collector)
    offer_everywhere(stages, tokens, 64)
    run_all(stages)
    collector.slabs[1].mul_(-1)
    decoder = whole(served)
    assert greedy_after(collector, decoder, 12) != greedy_alone(decoder, tokens, 12)


def test_a_cached_prefix_is_not_computed_again() -> None:
    rng, served = random.Random(4), Served(LLAMA)
    tokens = prompt(rng, 300)
    first, second = Collector(served, 300), Collector(served, 300)
    stages = make_stages(served, (4,), first)
    offer_everywhere(stages, tokens, 100)
    run_all(stages)
    again = make_stages(served, (4,), second)
    cached = [first.slabs[i][:, :, :256].clone() for i in range(4)]
    again[0].offer(PrefillTask(2, 0, 300, 256, (300,), 0, 0), tokens, cached)
    run_all(again)
    assert second.ran_pieces == 4 + 1
    for i in range(4):
        second.slabs[i][:, :, :256] = cached[i]
    decoder = whole(served)
    assert greedy_after(second, decoder, 8) == greedy_alone(decoder, tokens, 8)


def test_jobs_wait_for_memory_and_all_end() -> None:
    rng, served = random.Random(5), Served(LLAMA)
    collector = Collector(served, 300)
    shard = ModelShard(served, served.cuts((4,))[0], Arena(2 << 20, 1 << 30))
    engine = PrefillEngine(shard, collector)
    alone = (shard.arena.free_bytes) // shard.job_bytes(300, 100)
    assert 0 < alone < 10
    for job in range(10):
        engine.offer(PrefillTask(job, 0, 300, 0, even_ends(300, 100), 0, 10 - job), prompt(rng, 300))
    run_all([engine])
    assert collector.finished == 10
    assert not collector.failures


def test_the_earliest_due_goes_first() -> None:
    served = Served(LLAMA)
    engine = make_stages(served, (4,), Collector(served, 8))[0]
    for job, due_ns in ((1, 30), (2, 10), (3, 20)):
        engine.offer(PrefillTask(job, 0, 8, 0, (8,), 0, due_ns), range(8))
    flight = engine.step(lambda work, piece: Cpu().begin(work, 0, 0))
    assert flight is not None
    assert flight.task.job == 2


def test_a_piece_is_cut_to_what_fits() -> None:
    served, collector = Served(LLAMA), Collector(Served(LLAMA), 160)
    engine = make_stages(served, (4,), collector)[0]
    engine.offer(PrefillTask(1, 0, 160, 0, (160,), 0, 0), [1] * 160)
    assert not step(engine, lambda piece: False)
    assert not step(engine, lambda piece: piece.last - piece.first < 20), "an eighth has 20 tokens"
    assert step(engine, lambda piece: piece.last - piece.first <= 70)
    assert collector.spans == [(0, 0, 60)]
    assert step(engine)
    assert step(engine)
    assert collector.spans == [(0, 0, 60), (0, 60, 160), (1, 0, 160)]


def test_no_piece_starts_while_too_many_results_are_unsent() -> None:
    served, collector = Served(LLAMA), Collector(Served(LLAMA), 100)
    engine = make_stages(served, (4,), collector)[0]
    engine.offer(PrefillTask(1, 0, 100, 0, (100,), 0, 0), [1] * 100)
    collector.is_full = True
    assert not step(engine)
    collector.is_full = False
    assert step(engine)


def test_a_task_that_can_never_run_is_refused_at_once() -> None:
    served, collector = Served(LLAMA), Collector(Served(LLAMA), 500)
    shard = ModelShard(served, served.cuts((4,))[0], Arena(2 << 20, 1 << 20))
    engine = PrefillEngine(shard, collector)
    engine.offer(PrefillTask(1, 0, 9000, 0, (9000,), 0, 0), [0] * 9000)
    engine.offer(PrefillTask(2, 0, 8000, 0, (8000,), 0, 0), [0] * 8000)
    engine.offer(PrefillTask(3, 0, 500, 0, (500,), 0, 0), [0] * 500)
    assert len(collector.failures) == 3
    assert "cannot be run" in collector.failures[0]
    assert "whole arena" in collector.failures[1]
    assert "smaller chunks" in collector.failures[2]
    engine.offer(PrefillTask(4, 0, 500, 0, even_ends(500, 32), 0, 0), [0] * 500)
    run_all([engine])
    assert collector.finished == 1


def test_a_cancelled_job_gives_its_memory_back() -> None:
    served, collector = Served(LLAMA), Collector(Served(LLAMA), 300)
    engine = make_stages(served, (4,), collector)[0]
    before = engine.shard.arena.free_bytes
    engine.offer(PrefillTask(1, 0, 300, 0, (100, 300), 0, 0), [1] * 300)
    assert step(engine)
    assert engine.shard.arena.free_bytes < before
    engine.cancel(1, 0)
    assert not step(engine)
    assert engine.shard.arena.free_bytes == before
    assert num_tasks(engine) == 0


def test_an_arena_too_small_for_the_weights_is_an_error() -> None:
    served = Served(LLAMA)
    with pytest.raises(InfeasibleError, match=r"weights of 4 layers needs \d+ bytes"):
        ModelShard(served, served.cuts((4,))[0], Arena(1 << 16, 0))


def test_an_arena_joins_adjacent_free_parts() -> None:
    arena = Arena(1024, 0)
    allocations = [arena.take(256) for _ in range(4)]
    assert arena.take(1) is None
    for index in (2, 0, 3, 1):
        allocation = allocations[index]
        assert allocation is not None
        arena.free(allocation)
    assert arena.take(1024) is not None


def test_predictions_err_on_the_long_side_and_learn() -> None:
    served = Served(LLAMA)
    shard = ModelShard(served, served.cuts((4,))[0], Arena(8 << 20, 1 << 30))
    pace = PieceTimes(LLAMA)
    warm_up(shard, pace, 256)
    assert pace.predict_ns(256, 256) > pace.predict_ns(64, 64) > 0
    for took_ns in (5_000_000,) * 9 + (9_000_000,):
        pace.observe(64, 64, took_ns)
    assert pace.predict_ns(64, 64) == pytest.approx(9_000_000, rel=0.01)
    assert torch.is_inference_mode_enabled() is False


def test_predictions_distinguish_kinds_of_pieces() -> None:
    pace = PieceTimes(LLAMA)
    for _ in range(9):
        pace.observe(64, 64, 5_000_000)
        pace.observe(64, 128, 9_000_000)
        pace.observe(64, 128, 1_000_000, is_head=True)
    assert pace.predict_ns(64, 64) == pytest.approx(5_000_000, rel=0.01)
    assert pace.predict_ns(64, 128) == pytest.approx(9_000_000, rel=0.01)
    assert pace.predict_ns(64, 128, is_head=True) == pytest.approx(1_000_000, rel=0.01)
    assert pace.predict_ns(8, 8) > 0.9 * pace.overhead_ns, "what was never seen is judged by the slow ones of all"


def test_a_single_stalled_piece_does_not_change_the_prediction() -> None:
    pace = PieceTimes(LLAMA)
    pace.calibrate((8, 1_000_000), (64, 5_000_000))
    for took_ns in (5_000_000, 1_000_000_000, 5_000_000, 900_000_000, 5_000_000):
        pace.observe(64, 64, took_ns)
    assert pace.predict_ns(64, 64) == pytest.approx(5_000_000, rel=0.01)
    for _ in range(2):
        pace.observe(64, 64, 100_000_000)
    assert pace.predict_ns(64, 64) == pytest.approx(100_000_000, rel=0.01), "slow twice running is slow"


def test_every_size_of_piece_is_run_before_the_first_prompt() -> None:
    served = Served(LLAMA)
    shard = ModelShard(served, served.cuts((4,))[0], Arena(8 << 20, 1 << 30))
    ran, layer = list[tuple[int, int]](), shard.layer
    shard.layer = lambda index, x, slab: (ran.append((x.shape[1], slab.length)), layer(index, x, slab))[1]  # type: ignore[func-returns-value, method-assign]
    free_bytes = shard.arena.free_bytes
    warm_up(shard, PieceTimes(LLAMA), 256)
    sizes = set(range(32, 257, 32))
    assert {num for num, past in ran if not past} >= sizes
    assert {num for num, past in ran if past} == sizes
    assert shard.arena.free_bytes == free_bytes


def test_an_arena_of_one_chunk_is_warmed_up_with_one() -> None:
    served = Served(LLAMA)
    weights = ModelShard(served, served.cuts((4,))[0], Arena(8 << 20, 1 << 30)).weights_bytes
    one = ModelShard(served, served.cuts((4,))[0], Arena(8 << 20, 1 << 30)).job_bytes(256, 256)
    shard = ModelShard(served, served.cuts((4,))[0], Arena(weights + one + 512, 1 << 30))
    warm_up(shard, pace := PieceTimes(LLAMA), 256)
    assert pace.flops_per_ns != 1.0, "it was calibrated"
