"""Saves a worker's layers in the background: `save` copies them to host memory at a step boundary, and a thread
writes them.

A save that fails (a full disk) is reported: earlier checkpoints are unchanged and training continues. Knows this worker
and its store; not its peers, nor when to save.
"""

from __future__ import annotations

import errno
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from atlas.errors import AtlasError
from atlas.runtime.checkpoint.manifest import Blob, CheckpointPart, Meta, SaveId
from atlas.runtime.checkpoint.retention import Retention
from atlas.runtime.checkpoint.state import LayerState
from atlas.runtime.checkpoint.store import BlobStore
from atlas.runtime.checkpoint.tensors import Tally, stream

_NAME = re.compile(r"[A-Za-z0-9_][\w.+-]*")
Report = Callable[[str], None]
log: Report = logging.getLogger("atlas.checkpoint").warning


class Checkpointer:
    """One for each worker. `layers`: all layers of the model, not only the worker's own.

    `on_written` is called from the writing thread with each save that is on disk. Call `wait` or `close` before the
    process ends; a save that is still being written when the process dies is lost.
    """

    def __init__(
        self,
        store: BlobStore,
        writer: str,
        layers: Sequence[str],
        *,
        attempt: int = 0,
        retention: Retention | None = None,
        on_written: Callable[[SaveId], None] = lambda id: None,
        report: Report = log,
    ) -> None:
        for name in (writer, *layers):
            assert _NAME.fullmatch(name), f"{name!r} cannot be part of a file name"
        self.store, self.writer, self.layers, self.attempt = store, writer, tuple(layers), attempt
        self.retention = retention or Retention()
        self.written: SaveId | None = None
        """The last save of this worker that is on disk."""
        self.failed: dict[SaveId, str] = {}
        self._on_written, self._report = on_written, report
        self._buffers: dict[tuple[str, ...], Tensor] = {}
        self._thread: threading.Thread | None = None
        self._crash: BaseException | None = None

    def save(self, step: int, states: Mapping[str, LayerState], meta: Meta) -> None:
        """Save the current `states`, by layer. Returns as soon as the caller may change its tensors again."""
        unknown = set(states) - set(self.layers)
        assert not unknown, f"the model has no layers {sorted(unknown)}"
        self.wait()
        id = SaveId(self.attempt, step)
        if self.written == id:  # the same step of the same attempt has the same state
            return
        snapshot = self._snapshot(states)
        self._thread = threading.Thread(target=self._write, args=(id, snapshot, meta), name=f"checkpoint-{step}")
        self._thread.daemon = True
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is being written; whether that is so."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        if self._crash is not None:
            crash, self._crash = self._crash, None
            raise crash
        return True

    def close(self) -> None:
        self.wait()
        self._buffers.clear()

    # ---- the copy, while training waits --------------------------------------------------------------------------
    def _snapshot(self, states: Mapping[str, LayerState]) -> dict[str, LayerState]:
        devices: set[torch.device] = set()
        snapshot = {}
        for layer, state in states.items():
            weights = {name: self._copy(("w", name), tensor, devices) for name, tensor in state.parameters.items()}
            entries = {
                name: {entry: self._copy(("o", name, entry), tensor, devices) for entry, tensor in kept.items()}
                for name, kept in state.optimizer.items()
            }
            snapshot[layer] = LayerState(weights, entries)
        for device in devices:
            torch.accelerator.current_stream(device).synchronize()
        return snapshot

    def _copy(self, key: tuple[str, ...], tensor: Tensor, devices: set[torch.device]) -> Tensor:
        """Into memory that is kept between saves: fresh pages cost more than the copy itself."""
        buffer = self._buffers.get(key)
        away = tensor.device.type != "cpu"
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=away)
            self._buffers[key] = buffer
        buffer.copy_(tensor.detach(), non_blocking=away)
        if away:
            devices.add(tensor.device)
        return buffer

    # ---- the write, in the background ----------------------------------------------------------------------------
    def _write(self, id: SaveId, snapshot: dict[str, LayerState], meta: Meta) -> None:
        try:
            self._prune()  # saves that were confirmed since the last save
            self._write_part(id, snapshot, meta)
            self.written = id
            self._on_written(id)
            self._prune()
        except OSError as error:
            self._fail(id, error)
        except BaseException as error:  # a bug: raised by `wait`, not lost with the thread
            self._crash = error

    def _write_part(self, id: SaveId, snapshot: dict[str, LayerState], meta: Meta) -> None:
        weights, optimizer = {}, {}
        for layer, state in snapshot.items():
            weights[layer] = self._put(f"{id.folder}{self.writer}.{layer}.weights.safetensors", state.parameters)
            entries = {f"{entry}/{name}": t for name, kept in state.optimizer.items() for entry, t in kept.items()}
            if entries:
                optimizer[layer] = self._put(f"{id.folder}{self.writer}.{layer}.optimizer.safetensors", entries)
        part = CheckpointPart(id, self.writer, self.layers, weights, optimizer, meta)
        self.store.write(part.name, [part.to_json()])

    def _put(self, name: str, tensors: Mapping[str, Tensor]) -> Blob:
        tally = Tally()
        in_order = dict(sorted(tensors.items()))  # equal states have equal files, also after a resume
        self.store.write(name, tally.through(stream(in_order)))
        return Blob(name, tally.num_bytes, tally.sha256)

    def _prune(self) -> None:
        try:
            self.retention.prune(self.store)
        except (OSError, AtlasError) as error:
            self._report(f"{self.store}: old checkpoints cannot be deleted: {error}")

    def _fail(self, id: SaveId, error: OSError) -> None:
        why = error.strerror or str(error)
        self.failed[id] = why
        last = (
            f"its last checkpoint is of {self.written}"
            if self.written
            else "it has written no checkpoint in this attempt"
        )
        self._report(
            f"checkpoint of {id} not written by {self.writer} to {self.store}: {why}; {last}. Training continues. "
            f"{'Free some space' if error.errno == errno.ENOSPC else 'Fix the cause'}, or the next save will fail too"
        )
        self._clear(id)

    def _clear(self, id: SaveId) -> None:
        """Delete what a failed save has written."""
        try:
            for name in self.store.names(f"{id.folder}{self.writer}."):
                self.store.delete(name)
        except OSError as error:
            self._report(f"{self.store}: the rest of {id} cannot be deleted: {error}")
