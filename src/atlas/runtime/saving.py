"""A worker's checkpoints: when it saves, what of its state is its to save, and how it goes on from one.

The formats and threads are `checkpoint`'s. Knows steps, stages and layers.
"""

from __future__ import annotations

from collections.abc import Callable

from atlas.runtime.assignment import Assignment, SaveChoice, TrainingSetup
from atlas.runtime.checkpoint import (
    CheckpointClient,
    Checkpointer,
    LocalStore,
    Meta,
    RemoteStore,
    Replicator,
    Retention,
    SaveId,
    behind,
    choose,
    forget_targets,
    load_layers,
    restore,
    share,
)
from atlas.runtime.links import WorkerLinks
from atlas.runtime.models.decoder import layer_of
from atlas.runtime.tensor_parallel.stage_set import StageSet
from atlas.runtime.training import data_digest, model_layers, run_config
from atlas.runtime.wiring import WorkerRole

COPY_S = 60.0
"""How long the end of a run waits for the last save to be across."""
Written = Callable[[SaveId], None]


def resume(training: TrainingSetup, choice: SaveChoice, role: WorkerRole, stage_set: StageSet) -> None:
    """Takes weights and optimizer state from the step that the launcher chose, if it chose one."""
    if choice.resume is None:
        return
    checkpoint = choose([LocalStore(folder) for folder in choice.sources], step=choice.resume)
    assert checkpoint is not None, "`choose` finds a step or raises"
    config = run_config(training, global_batch_of(training, role))
    checkpoint.meta.require_same_run(config, data_digest(training.data))
    states = {layer: stage_set.of_state(state) for layer, state in load_layers(checkpoint, stage_set.layers).items()}
    restore(states, stage_set.parameters.items(), stage_set.optimizer, layer_of)


def global_batch_of(training: TrainingSetup, role: WorkerRole) -> int:
    """Sequences of a step."""
    return training.data.microbatch * role.num_pipelines * role.program.num_microbatches


class Saving:
    """Saves every so many steps and at the end.

    Where the assignment says so, saves are copied to another datacenter over this worker's links, behind what else it
    sends.
    """

    def __init__(
        self,
        assignment: Assignment,
        choice: SaveChoice,
        role: WorkerRole,
        stage_set: StageSet,
        on_written: Written = lambda id: None,
    ) -> None:
        self.training: TrainingSetup = assignment.training
        self.choice, self.role, self.stage_set = choice, role, stage_set
        self.global_batch = global_batch_of(self.training, role)
        self.digest = data_digest(self.training.data)
        self.retention, self._copies = Retention(choice.keep), Retention(choice.keep)
        self._on_written = on_written
        self._replicator: Replicator | None = None
        self.checkpointer = Checkpointer(
            LocalStore(choice.folder),
            role.name,
            model_layers(self.training.model.config),
            attempt=choice.attempt,
            retention=self.retention,
            on_written=self._written,
        )
        self._mine = share(stage_set.layers, role.pipeline, role.num_pipelines)

    def copy_over(self, links: WorkerLinks, on_copied: Written) -> None:
        """From now on, what is saved is copied to where the launcher said, and to nowhere else: a place that a plan of
        before had chosen may be lost."""
        copy, store = self.choice.copy, self.checkpointer.store
        if copy is None:
            forget_targets(store, self.role.name)
            return
        target = RemoteStore(CheckpointClient(links.main, copy.peer, (copy.host, copy.port)), copy.shelf)
        self._replicator = Replicator(
            store,
            target,
            writer=self.role.name,
            yield_way=behind(links),
            retention=self._copies,
            on_copied=on_copied,
        )
        self._replicator.start()
        forget_targets(store, self.role.name, but=str(target))

    def confirm(self, *complete: SaveId) -> None:
        """These are written, and copied where they are to be, by everybody: older ones may go."""
        self.retention.confirm(*complete)
        self._copies.confirm(*complete)

    def after_step(self, num_done: int) -> None:
        """`num_done` steps of the training are done."""
        if self.choice.every and num_done % self.choice.every == 0:
            self.save(num_done)

    def save(self, num_done: int) -> None:
        """Behind training; a second time for the same step costs nothing."""
        meta = Meta(
            samples_seen=num_done * self.global_batch,
            seed=self.training.model.seed,
            schedule_step=num_done,
            dataset=self.digest,
            config=run_config(self.training, self.global_batch),
        )
        self.checkpointer.save(num_done, self.stage_set.states(self._mine), meta)

    def close(self) -> None:
        """Waits for the last write, and a while for its copy."""
        self.checkpointer.close()
        if self._replicator is not None:
            self._replicator.wait(COPY_S)
            self._replicator.close()

    def _written(self, id: SaveId) -> None:
        if self._replicator is not None:
            self._replicator.notify(id)
        self._on_written(id)
