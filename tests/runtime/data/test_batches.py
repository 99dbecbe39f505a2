"""Batches: the same sequences in the same order, whatever the layout and wherever training was interrupted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atlas.errors import AtlasError
from atlas.runtime.assignment import DataChoice, ModelChoice, TrainingSetup
from atlas.runtime.data.batches import Batches, Dataset
from atlas.runtime.data.order import SampleOrder
from atlas.runtime.data.shard import ShardWriter
from atlas.runtime.models.config import gpt
from atlas.runtime.recipe import LearningRate, OptimizerSettings
from atlas.runtime.topology import BatchShare
from atlas.runtime.training import make_task


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    """Tokens count up over three shards of different lengths: a token tells where it stood."""
    start = 0
    for index, length in enumerate((161, 83, 250)):
        writer = ShardWriter(tmp_path / f"{index}.tokens", 1000, "byte")
        writer.append(np.arange(start, start + length))
        writer.finish(index, 3)
        start += length
    return Dataset.open(tmp_path)


def batches(dataset: Dataset, *, length: int = 8, global_batch: int = 12, seed: int = 1) -> Batches:
    return Batches(dataset, length=length, global_batch=global_batch, seed=seed)


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 5))
def test_an_epoch_holds_every_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    order = SampleOrder(num_samples, seed)
    found = order.samples(np.arange(epoch * num_samples, (epoch + 1) * num_samples))
    assert np.array_equal(np.sort(found), np.arange(num_samples))


def test_the_order_is_shuffled_and_every_epoch_and_seed_has_its_own() -> None:
    positions = np.arange(10_000)
    orders = [SampleOrder(10_000, 0).samples(positions + epoch * 10_000) for epoch in range(3)]
    orders.append(SampleOrder(10_000, 1).samples(positions))
    for a, order in enumerate(orders):
        assert abs(np.corrcoef(positions, order)[0, 1]) < 0.05
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
        for other in orders[:a]:
            assert np.mean(order == other) < 0.002


def test_the_order_is_frozen() -> None:
    """A change of the shuffle would make runs of today impossible to resume tomorrow."""
    found = SampleOrder(1000, 42).samples(np.arange(998, 1006))
    assert found.tolist() == FROZEN


FROZEN = [506, 158, 635, 117, 34, 419, 984, 831]


def test_a_trillion_samples_cost_no_memory() -> None:
    order = SampleOrder(10**12, 3)
    found = order.samples(np.arange(10**12 - 500, 10**12 + 500))
    assert found.min() >= 0
    assert found.max() < 10**12
    assert len(set(found[:500].tolist())) == 500


def test_targets_are_the_tokens_one_further(dataset: Dataset) -> None:
    batch = batches(dataset).batch(3)
    assert batch.tokens.shape == batch.targets.shape == (12, 8)
    assert np.array_equal(batch.tokens + 1, batch.targets)


def test_no_sequence_spans_two_shards_and_all_are_seen_in_an_epoch(dataset: Dataset) -> None:
    source = batches(dataset, global_batch=1)
    assert source.num_samples == 20 + 10 + 31
    firsts = sorted(int(source.batch(step).tokens[0, 0]) for step in range(source.num_samples))
    assert firsts == [*range(0, 160, 8), *range(161, 161 + 80, 8), *range(244, 244 + 248, 8)]


@pytest.mark.parametrize(("num_pipelines", "num_microbatches"), [(1, 1), (1, 12), (2, 3), (3, 2), (4, 3), (12, 1)])
def test_every_layout_reads_the_same_batch(dataset: Dataset, num_pipelines: int, num_microbatches: int) -> None:
    source, total = batches(dataset), num_pipelines * num_microbatches
    model = ModelChoice(gpt(num_layers=1, width=8, num_heads=1, vocabulary=1000, max_length=8))
    data = DataChoice(8, 12 // total, str(dataset.shards[0].path.parent), seed=1)
    setup = TrainingSetup(model, data, OptimizerSettings(LearningRate(1.0)))
    task = make_task(setup, num_stages=1, share=BatchShare(0, 0, total), num_microbatches=num_microbatches)
    for step in (0, 4, 5, 6):  # the fifth batch crosses into the second epoch
        slots = range(step * num_microbatches, (step + 1) * num_microbatches)
        parts = [task.microbatch(slot, pipeline) for pipeline in range(num_pipelines) for slot in slots]
        tokens, targets = (torch.cat(part).numpy() for part in zip(*parts, strict=True))
        assert np.array_equal(tokens, source.batch(step).tokens)
        assert np.array_equal(targets, source.batch(step).targets)


def test_a_run_resumed_mid_epoch_reads_the_same_batches(dataset: Dataset) -> None:
    undisturbed = batches(dataset)
    seen = [undisturbed.batch(step).tokens for step in range(9)]
    resumed = batches(Dataset.open(*(shard.path for shard in dataset.shards)))
    for step in range(4, 9):
        assert np.array_equal(resumed.batch(step).tokens, seen[step])


def test_the_order_of_samples_does_not_depend_on_the_batch(dataset: Dataset) -> None:
    small, large = batches(dataset, global_batch=4), batches(dataset, global_batch=12)
    three = np.concatenate([small.batch(step).tokens for step in range(3)])
    assert np.array_equal(three, large.batch(0).tokens)


def test_a_shard_shorter_than_one_sequence_is_named(dataset: Dataset) -> None:
    with pytest.raises(AtlasError, match=r"1\.tokens: 83 tokens, but one sequence takes 129"):
        batches(dataset, length=128)


def test_data_shorter_than_one_batch_are_named(dataset: Dataset) -> None:
    with pytest.raises(AtlasError, match=r"0\.tokens.*: 61 sequences of 8 tokens, but one batch takes 62"):
        batches(dataset, global_batch=62)


def test_the_digest_follows_the_tokens_not_their_place(dataset: Dataset, tmp_path: Path) -> None:
    paths = [shard.path for shard in dataset.shards]
    moved = [path.rename(tmp_path / f"x{path.name}") for path in paths]
    assert Dataset.open(*moved).digest == dataset.digest
    assert Dataset.open(*moved[::-1]).digest != dataset.digest
    assert Dataset.open(*moved[:2]).digest != dataset.digest
