"""A model of six small layers, workers that each hold some of them, and what tests of checkpoints share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from atlas.runtime.checkpoint.load import Checkpoint, choose, verify
from atlas.runtime.checkpoint.manifest import Meta
from atlas.runtime.checkpoint.state import LayerState
from atlas.runtime.checkpoint.store import BlobStore, Chunk, FileWriter, LocalStore

NUM_LAYERS = 6
LAYERS = [str(layer) for layer in range(NUM_LAYERS)]
WIDTH = 8


class Worker:
    """One stage of one pipeline: its layers and an AdamW of its own."""

    def __init__(self, layers: range) -> None:
        self.layers = [str(layer) for layer in layers]
        self.module = nn.Sequential()
        for layer in layers:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(layer)
                self.module.add_module(str(layer), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.01)


def stages(num_stages: int) -> list[Worker]:
    """A pipeline."""
    return [Worker(range(s * NUM_LAYERS // num_stages, (s + 1) * NUM_LAYERS // num_stages)) for s in range(num_stages)]


def train(pipeline: list[Worker], step: int) -> float:
    """One step of the whole model; the same numbers whatever the stages."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, WIDTH, generator=generator)
    y = x.flip(-1)
    for worker in pipeline:
        x = worker.module(x)
    loss = (x - y).square().mean()
    for worker in pipeline:
        worker.optimizer.zero_grad()
    loss.backward()
    for worker in pipeline:
        worker.optimizer.step()
    return loss.item()


def meta_at(step: int) -> Meta:
    return Meta(samples_seen=4 * step, seed=7, schedule_step=step, dataset="d" * 64, config={"width": WIDTH})


def numbered(step: int, layers: Iterable[str] = LAYERS, size: int = 1000) -> dict[str, LayerState]:
    """States that tell which step and layer they are of."""
    return {
        layer: LayerState(
            {f"{layer}.weight": torch.full((size,), step + int(layer) / 100)},
            {f"{layer}.weight": {"exp_avg": torch.full((size,), -float(step)), "step": torch.tensor(float(step))}},
        )
        for layer in layers
    }


def flat(states: Mapping[str, LayerState]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for state in states.values():
        found |= state.parameters
        found |= {f"{slot}/{name}": t for name, kept in state.optimizer.items() for slot, t in kept.items()}
    return found


def same(a: Mapping[str, LayerState], b: Mapping[str, LayerState]) -> bool:
    ours, theirs = flat(a), flat(b)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def choose_verified(stores: Sequence[BlobStore], *, step: int | None = None) -> Checkpoint | None:
    """As `choose`, and every file must be undamaged."""
    found = choose(stores, step=step, report=lambda text: None)
    assert found is None or not verify(found)
    return found


class Faulty(LocalStore):
    """A store that calls `before_write(name, number of bytes so far)` before each chunk."""

    def __init__(self, store: LocalStore, before_write: Callable[[str, int], None]) -> None:
        super().__init__(store.root)
        self.before_write = before_write

    def create(self, name: str) -> FileWriter:
        writer, done = super().create(name), 0
        write = writer.write

        def watched(chunk: Chunk) -> None:
            nonlocal done
            self.before_write(name, done)
            done += len(chunk)
            write(chunk)

        writer.write = watched  # type: ignore[method-assign]
        return writer
