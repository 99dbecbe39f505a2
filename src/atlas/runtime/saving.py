"""A worker's checkpoints: when it saves, which layers it saves, and how it resumes.

Formats and threads are in `checkpoint`. Knows steps, stages and layers.
"""

from __future__ import annotations

from collections.abc import Callable

from atlas.runtime.assignment import SaveChoice, TrainingSetup
from atlas.runtime.checkpoint.checkpointer import Checkpointer
from atlas.runtime.checkpoint.client import CheckpointClient, RemoteStore, behind
from atlas.runtime.checkpoint.copied_parts import forget_targets
from atlas.runtime.checkpoint.load import choose, load_layers
from atlas.runtime.checkpoint.manifest import Meta, SaveId
from atlas.runtime.checkpoint.place import store_at
from atlas.runtime.checkpoint.replicate import Replicator
from atlas.runtime.checkpoint.retention import Retention
from atlas.runtime.checkpoint.state import share
from atlas.runtime.links import WorkerLinks
from atlas.runtime.models.config import model_layers
from atlas.runtime.stage_set import StageSet
from atlas.runtime.topology import WorkerRole
from atlas.runtime.training import data_digest, run_config

COPY_S = 60.0
"""How long the end of a run waits for the copy of the last save."""
Written = Callable[[SaveId], None]


def resume(choice: SaveChoice, stage_set: StageSet) -> None:
    """Load weights and optimizer state of the step that the launcher chose, if it chose one."""
    if choice.resume is None:
        return
    training = stage_set.assignment.training
    checkpoint = choose([store_at(place) for place in choice.sources], step=choice.resume)
    assert checkpoint is not None, "`choose` finds a step or raises"
    config = run_config(training, global_batch_of(training, stage_set.role))
    checkpoint.meta.require_same_run(config, data_digest(training.data))
    # One layer at a time: a tensor-parallel rank keeps its part of each only.
    parts = {layer: stage_set.of_state(load_layers(checkpoint, [layer])[layer]) for layer in stage_set.layers}
    stage_set.restore(parts)


def global_batch_of(training: TrainingSetup, role: WorkerRole) -> int:
    """Sequences of a step."""
    return training.data.microbatch * role.share.total


class CheckpointSaving:
    """Saves every few steps and at the end.

    If the assignment says so, saves are copied to another datacenter over this worker's links, after its other traffic.
    """

    def __init__(self, choice: SaveChoice, stage_set: StageSet, on_written: Written = lambda id: None) -> None:
        self.training, role = stage_set.assignment.training, stage_set.role
        self.choice, self.role, self.stage_set = choice, role, stage_set
        self.global_batch = global_batch_of(self.training, role)
        self.digest = data_digest(self.training.data)
        self.retention = Retention(choice.keep, prunes=choice.prunes)
        self._copies = Retention(choice.keep, prunes=choice.prunes)
        self._on_written = on_written
        self._replicator: Replicator | None = None
        self.checkpointer = Checkpointer(
            store_at(choice.folder),
            role.name,
            model_layers(self.training.model.config),
            attempt=choice.attempt,
            retention=self.retention,
            on_written=self._written,
        )
        # Every group has all layers; the first one saves them.
        self._mine = share(stage_set.layers, role.pipeline, role.num_pipelines) if role.group == 0 else []

    def start_copying(self, links: WorkerLinks, on_copied: Written) -> None:
        """Copy saves to the store that the launcher chose, and no longer to one of an earlier plan: it may be lost."""
        copy, store = self.choice.copy, self.checkpointer.store
        if copy is None:
            forget_targets(store, self.role.name)
            return
        target = RemoteStore(CheckpointClient(links.main, copy.peer, copy.route), copy.store)
        self._replicator = Replicator(
            store,
            target,
            writer=self.role.name,
            yield_way=behind(links.is_sending),
            retention=self._copies,
            on_copied=on_copied,
        )
        self._replicator.start()
        forget_targets(store, self.role.name, but=str(target))

    def confirm(self, *complete: SaveId) -> None:
        """All workers have written and, where required, copied these: older ones may be deleted."""
        self.retention.confirm(*complete)
        self._copies.confirm(*complete)

    def is_due(self, num_done: int) -> bool:
        """Whether this step is saved while the run goes on."""
        return bool(self.choice.every) and num_done % self.choice.every == 0

    def save(self, num_done: int) -> None:
        """Save in the background; nothing happens if this step is saved already."""
        meta = Meta(
            samples_seen=num_done * self.global_batch,
            seed=self.training.model.seed,
            schedule_step=num_done,
            dataset=self.digest,
            config=run_config(self.training, self.global_batch),
        )
        states = self.stage_set.states(self._mine) if self.role.group == 0 else {}
        self.checkpointer.save(num_done, states, meta)

    def close(self) -> None:
        """Wait for the last write and, for a limited time, for its copy."""
        self.checkpointer.close()
        if self._replicator is not None:
            self._replicator.wait(COPY_S)
            self._replicator.close()

    def _written(self, id: SaveId) -> None:
        if self._replicator is not None:
            self._replicator.notify(id)
        self._on_written(id)
