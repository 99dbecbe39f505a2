"""Copies a datacenter's parts to another store, after training's own traffic: when a datacenter is lost, its disks
are too.

Files first and the part last, so that the other store is usable whenever copying stops. Oldest first and without gaps,
so that all datacenters, each at its own pace, copy the same checkpoints. Knows stores and parts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

from atlas.errors import AtlasError
from atlas.runtime.checkpoint.checkpointer import Report, log
from atlas.runtime.checkpoint.copied_parts import CopiedParts, read_records
from atlas.runtime.checkpoint.manifest import Blob, SaveId, part_names, read_part
from atlas.runtime.checkpoint.retention import Retention
from atlas.runtime.checkpoint.store import BlobStore, Chunk
from atlas.runtime.checkpoint.tensors import Tally, chunks_of

RETRY_S = 5.0
"""Pause after a failed copy."""


class Replicator:
    """One for each datacenter and target, or one for each worker (`writer`). Start it with `with` or `start`.

    `yield_way` is called before every MiB and may block while training needs the link. `on_copied` is called, on the
    copying thread, for every part that is complete in the target. `retention` prunes the target; confirm the
    checkpoints that are complete over the targets of all datacenters.
    """

    def __init__(
        self,
        source: BlobStore,
        target: BlobStore,
        *,
        writer: str | None = None,
        yield_way: Callable[[], None] = lambda: None,
        retention: Retention | None = None,
        on_copied: Callable[[SaveId], None] = lambda id: None,
        report: Report = log,
        retry_s: float = RETRY_S,
    ) -> None:
        self.source, self.target, self.retry_s = source, target, retry_s
        self.retention = retention or Retention()
        self.num_bytes = 0
        """Copied so far."""
        self._record = CopiedParts(str(target), writer)
        self._refused: set[str] = set()
        self._reported = ""
        self._yield_way, self._on_copied, self._report = yield_way, on_copied, report
        self._stop = threading.Event()
        self._news = threading.Condition()
        self._pending, self._busy, self._ended = True, False, False
        self._thread = threading.Thread(target=self._run, name="replicator", daemon=True)

    # ---- start and end ---------------------------------------------------------------------------------------------
    def start(self) -> None:
        """From now on only copied parts are deleted from the source."""
        known = {record.name: record for record in read_records(self.source)}
        self._record = known.get(self._record.name, self._record)
        self._record.save(self.source)
        self._thread.start()

    def notify(self, id: SaveId | None = None) -> None:
        """A new part was written; a Checkpointer's `on_written`."""
        with self._news:
            self._pending = True
            self._news.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until every part is copied; whether it is."""
        with self._news:
            self._news.wait_for(lambda: self._ended or not (self._pending or self._busy), timeout_s)
            return not (self._pending or self._busy)

    def close(self) -> None:
        """Stop now; the next Replicator copies the rest."""
        self._stop.set()
        with self._news:
            self._news.notify_all()
        self._thread.join()

    def __enter__(self) -> Replicator:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the copying ---------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            while self._has_work():
                done = self._try_all()
                with self._news:
                    self._busy, self._pending = False, self._pending or not done
                    self._news.notify_all()
                if not done:
                    self._stop.wait(self.retry_s)
        except _StoppedError:
            pass
        except Exception as error:  # a bug: training continues, but the user must know that copying has stopped
            self._report(f"replication of {self.source} to {self.target} has stopped because of a bug: {error!r}")
            raise
        finally:
            with self._news:
                self._ended = True
                self._news.notify_all()

    def _has_work(self) -> bool:
        with self._news:
            self._news.wait_for(lambda: self._pending or self._stop.is_set())
            self._pending, self._busy = False, True
        return not self._stop.is_set()

    def _try_all(self) -> bool:
        try:
            for id, name in self._waiting():
                self._copy_part(id, name)
            self.retention.prune(self.target)
        except (OSError, AtlasError) as error:
            if str(error) != self._reported:  # retried every few seconds, reported when it changes
                self._report(f"replication of {self.source} to {self.target} failed and is retried: {error}")
            self._reported = str(error)
            return False
        self._reported = ""
        return True

    def _waiting(self) -> list[tuple[SaveId, str]]:
        """Parts that the target lacks, oldest first; without those that the target has had and deleted."""
        done = set(self._record.parts) & set(self.target.names("step-")) | self._refused
        return [
            (id, name)
            for id, name in part_names(self.source)
            if not self.retention.is_past(id) and self._record.covers(id, name) and name not in done
        ]

    def _copy_part(self, id: SaveId, name: str) -> None:
        try:
            part = read_part(self.source, name)
            for blob in part.blobs:
                self._copy(blob)
        except AtlasError as error:
            self._refused.add(name)
            self._report(f"part of {id} is not replicated to {self.target}: {error}")
            return
        self.target.write(name, [part.to_json()])
        self._on_copied(id)  # before the record is saved, which fails if the own disk is full
        here = {name for _, name in part_names(self.source)}
        self._record = replace(self._record, parts=(*(part for part in self._record.parts if part in here), name))
        self._record.save(self.source)

    def _copy(self, blob: Blob) -> None:
        tally = Tally()
        with self.source.open(blob.name) as file:
            self.target.write(blob.name, tally.through(self._yielding(chunks_of(file))))
        if tally.sha256 != blob.sha256:
            self.target.delete(blob.name)
            raise AtlasError(f"{self.source}/{blob.name}: damaged. Delete this checkpoint or restore it")

    def _yielding(self, chunks: Iterator[bytes]) -> Iterator[Chunk]:
        for chunk in chunks:
            self._yield_way()
            if self._stop.is_set():
                raise _StoppedError
            self.num_bytes += len(chunk)
            yield chunk


class _StoppedError(Exception):
    """Stopped in the middle of a file."""
