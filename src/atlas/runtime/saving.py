"""A worker's checkpoints: when it saves, what of its state is its to save, and how it goes on from one.

The formats and threads are `checkpoint`'s. Knows steps, stages and layers.
"""

from __future__ import annotations

from collections.abc import Callable

from atlas.runtime.assignment import Assignment, SaveChoice, Training
from atlas.runtime.checkpoint import (
    Checkpointer,
    Line,
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
from atlas.runtime.links import Links
from atlas.runtime.models.decoder import layer_of
from atlas.runtime.tensor_parallel.stage_set import Holding
from atlas.runtime.training import data_digest, model_layers, run_config
from atlas.runtime.wiring import Seat

COPY_S = 60.0
"""How long the end of a run waits for the last save to be across."""
Written = Callable[[SaveId], None]


def resume(training: Training, choice: SaveChoice, seat: Seat, holding: Holding) -> None:
    """Takes weights and optimizer state from the step that the launcher chose, if it chose one."""
    if choice.resume is None:
        return
    checkpoint = choose([LocalStore(folder) for folder in choice.sources], step=choice.resume)
    assert checkpoint is not None, "`choose` finds a step or raises"
    config = run_config(training, global_batch_of(training, seat))
    checkpoint.meta.require_same_run(config, data_digest(training.data))
    states = {layer: holding.of_state(state) for layer, state in load_layers(checkpoint, holding.layers).items()}
    restore(states, holding.parameters.items(), holding.optimizer, layer_of)


def global_batch_of(training: Training, seat: Seat) -> int:
    """Sequences of a step."""
    return training.data.microbatch * seat.num_pipelines * seat.program.num_microbatches


class Saving:
    """Saves every so many steps and at the end.

    Where the assignment says so, saves are copied to another datacenter over this worker's links, behind what else it
    sends.
    """

    def __init__(
        self,
        assignment: Assignment,
        choice: SaveChoice,
        seat: Seat,
        holding: Holding,
        on_written: Written = lambda id: None,
    ) -> None:
        self.training: Training = assignment.training
        self.choice, self.seat, self.holding = choice, seat, holding
        self.global_batch = global_batch_of(self.training, seat)
        self.digest = data_digest(self.training.data)
        self.retention, self._copies = Retention(choice.keep), Retention(choice.keep)
        self._on_written = on_written
        self._replicator: Replicator | None = None
        self.checkpointer = Checkpointer(
            LocalStore(choice.folder),
            seat.name,
            model_layers(self.training.model.config),
            attempt=choice.attempt,
            retention=self.retention,
            on_written=self._written,
        )
        self._mine = share(holding.layers, seat.pipeline, seat.num_pipelines)

    def copy_over(self, links: Links, on_copied: Written) -> None:
        """From now on, what is saved is copied to where the launcher said, and to nowhere else: a place that a plan of
        before had chosen may be lost."""
        copy, store = self.choice.copy, self.checkpointer.store
        if copy is None:
            forget_targets(store, self.seat.name)
            return
        target = RemoteStore(Line(links.main, copy.peer, (copy.host, copy.port)), copy.shelf)
        self._replicator = Replicator(
            store,
            target,
            writer=self.seat.name,
            yield_way=behind(links),
            retention=self._copies,
            on_copied=on_copied,
        )
        self._replicator.start()
        forget_targets(store, self.seat.name, but=str(target))

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
        self.checkpointer.save(num_done, self.holding.states(self._mine), meta)

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
