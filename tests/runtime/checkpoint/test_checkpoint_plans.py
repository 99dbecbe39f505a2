"""A checkpoint belongs to a run, not to a plan: other stages, other cells, other datacenters pick it up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from checkpoint_samples import LAYERS, Worker, choose_verified, meta_at, stages, train
from torch import Tensor

from atlas.errors import AtlasError
from atlas.runtime.checkpoint.checkpointer import Checkpointer
from atlas.runtime.checkpoint.load import choose, load_layers
from atlas.runtime.checkpoint.manifest import SaveId, complete_ids
from atlas.runtime.checkpoint.state import restore, share, states_of
from atlas.runtime.checkpoint.store import LocalStore


def save_all(pipeline: Sequence[Worker], num_pipelines: int, stores: Sequence[LocalStore], step: int) -> None:
    """As workers do: each stage of each pipeline saves its share of the stage's layers, in its datacenter."""
    for rank, worker in enumerate(pipeline):
        states = states_of(worker.module.named_parameters(), worker.optimizer)
        for replica in range(num_pipelines):
            mine = share(worker.layers, replica, num_pipelines)
            checkpointer = Checkpointer(stores[rank % len(stores)], f"p{replica}.s{rank}", LAYERS)
            checkpointer.save(step, {layer: states[layer] for layer in mine}, meta_at(step))
            checkpointer.close()


def resume(num_stages: int, stores: Sequence[LocalStore]) -> list[Worker]:
    checkpoint = choose_verified(stores)
    assert checkpoint is not None
    pipeline = stages(num_stages)
    for worker in pipeline:
        restore(load_layers(checkpoint, worker.layers), worker.module.named_parameters(), worker.optimizer)
    return pipeline


def weights(pipeline: Sequence[Worker]) -> dict[str, Tensor]:
    return {name: p.detach() for worker in pipeline for name, p in worker.module.named_parameters()}


@pytest.mark.parametrize(
    ("before", "after", "num_stores"),
    [((2, 3), (2, 2), 3), ((2, 3), (4, 1), 3), ((1, 1), (1, 6), 1), ((4, 2), (2, 3), 2), ((3, 3), (3, 3), 3)],
    ids=["6 workers to 4", "6 to 4 in one stage", "alone to 6 stages", "cells of 4 to 2", "same plan"],
)
def test_another_plan_resumes_with_the_same_losses(
    tmp_path: Path, before: tuple[int, int], after: tuple[int, int], num_stores: int
) -> None:
    undisturbed = stages(1)
    losses = [train(undisturbed, step) for step in range(10)]
    stores = [LocalStore(tmp_path / f"dc{dc}") for dc in range(num_stores)]
    pipeline = stages(before[1])
    assert [train(pipeline, step) for step in range(5)] == losses[:5]
    save_all(pipeline, before[0], stores, 5)
    assert complete_ids(stores) == [SaveId(0, 5)]
    resumed = resume(after[1], stores)
    assert [train(resumed, step) for step in range(5, 10)] == losses[5:]
    final = weights(undisturbed)
    assert all(torch.equal(tensor, final[name]) for name, tensor in weights(resumed).items())
    save_all(resumed, after[0], stores[:1], 10)
    again = choose(stores)
    assert again is not None
    assert again.meta == meta_at(10)


def test_each_layer_is_saved_by_one_of_the_pipelines() -> None:
    layers = [str(layer) for layer in range(7)]
    shares = [share(layers, replica, 3) for replica in range(3)]
    assert sorted(layer for part in shares for layer in part) == layers
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_worker_reads_only_the_files_of_its_layers(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    save_all(stages(2), 1, [store], 1)
    for layer in ("0", "1", "2", "5"):
        for path in tmp_path.rglob(f"*.{layer}.*.safetensors"):
            path.write_bytes(b"unread")
    checkpoint = choose([store])
    assert checkpoint is not None
    assert set(load_layers(checkpoint, ["3", "4"])) == {"3", "4"}


def test_optimizers_without_state_or_with_other_state_come_back(tmp_path: Path) -> None:
    worker = stages(1)[0]
    worker.optimizer = torch.optim.SGD(worker.module.parameters(), lr=0.1, momentum=0.9)  # type: ignore[assignment]
    store = LocalStore(tmp_path)
    save_all([worker], 1, [store], 0)
    checkpoint = choose([store])
    assert checkpoint is not None
    assert not load_layers(checkpoint, ["0"])["0"].optimizer, "nothing was trained yet"
    train([worker], 0)
    save_all([worker], 1, [store], 1)
    other = stages(1)[0]
    other.optimizer = torch.optim.SGD(other.module.parameters(), lr=0.1, momentum=0.9)  # type: ignore[assignment]
    checkpoint = choose([store])
    assert checkpoint is not None
    restore(load_layers(checkpoint, LAYERS), other.module.named_parameters(), other.optimizer)
    assert [train([other], step) for step in (1, 2)] == [train([worker], step) for step in (1, 2)]


def test_a_model_of_another_shape_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    save_all(stages(1), 1, [store], 1)
    checkpoint = choose([store])
    assert checkpoint is not None
    with pytest.raises(AtlasError, match="it has no layer '17'"):
        load_layers(checkpoint, ["17"])
    states = load_layers(checkpoint, LAYERS)
    first, wide = torch.zeros(8, 8), torch.zeros(9, 8)
    with pytest.raises(AtlasError, match=r"1\.0\.weight: shape \(8, 8\), but the model has shape \(9, 8\)"):
        restore(states, [("0.0.weight", first), ("1.0.weight", wide)])
    assert not first.any()
    with pytest.raises(AtlasError, match=r"0\.more: no such tensor"):
        restore(states, [("0.more", first)])


def test_parts_of_two_runs_in_one_folder_are_not_mixed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for writer, seen in (("a", 1), ("b", 2)):
        worker = stages(1)[0]
        states = states_of(worker.module.named_parameters())
        checkpointer = Checkpointer(store, writer, LAYERS)
        checkpointer.save(4, states, meta_at(seen))
        checkpointer.close()
    with pytest.raises(AtlasError, match="belongs to another run"):
        choose([store])
