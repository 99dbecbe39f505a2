"""Copies a datacenter's parts to another place, behind training's traffic: a lost datacenter takes its disks along.

Files first and the part last, so that what is in the other place is usable whenever the copying stops. Oldest first,
none left out, so that the datacenters, each at its own pace, get the same checkpoints across. Knows stores and parts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from atlas.errors import AtlasError
from atlas.runtime.checkpoint.checkpointer import Report, log
from atlas.runtime.checkpoint.copied_parts import CopiedParts, read_records
from atlas.runtime.checkpoint.manifest import SUFFIX, Blob, SaveId, ids, read_part
from atlas.runtime.checkpoint.retention import Retention
from atlas.runtime.checkpoint.store import BlobStore, Chunk
from atlas.runtime.checkpoint.tensors import Tally, chunks_of

RETRY_S = 5.0
BURST_S = 0.1


class Replicator:
    """One for each datacenter and target, or one for each worker (`writer`). Start it with `with` or `start`.

    `rate_bps` caps its traffic; `yield_way` is called before every MiB and may block while training needs the link.
    `on_copied` hears, on the copying thread, of every part that is whole in the target.
    `retention` prunes the target and wants to be told which checkpoints all datacenters have across (`complete_ids`
    of the targets).
    """

    def __init__(
        self,
        source: BlobStore,
        target: BlobStore,
        *,
        writer: str | None = None,
        rate_bps: float | None = None,
        yield_way: Callable[[], None] = lambda: None,
        retention: Retention | None = None,
        on_copied: Callable[[SaveId], None] = lambda id: None,
        report: Report = log,
        retry_s: float = RETRY_S,
    ) -> None:
        self.source, self.target, self.rate_bps, self.retry_s = source, target, rate_bps, retry_s
        self.retention = retention or Retention()
        self.num_bytes = 0
        """Sent so far."""
        self._record = CopiedParts(str(target), writer)
        self._refused: set[str] = set()
        self._told = ""
        self._yield_way, self._on_copied, self._report = yield_way, on_copied, report
        self._due_s = 0.0
        self._stop = threading.Event()
        self._news = threading.Condition()
        self._pending, self._busy, self._ended = True, False, False
        self._thread = threading.Thread(target=self._run, name="replicator", daemon=True)

    # ---- life ----------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """From now on nothing is deleted from the source that has not been copied."""
        known = {record.name: record for record in read_records(self.source)}
        self._record = known.get(self._record.name, self._record)
        self._record.save(self.source)
        self._thread.start()

    def notify(self, id: SaveId | None = None) -> None:
        """There is something new; give it to a Checkpointer as `on_written`."""
        with self._news:
            self._pending = True
            self._news.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until everything that is there has been copied; whether it has."""
        with self._news:
            self._news.wait_for(lambda: self._ended or not (self._pending or self._busy), timeout_s)
            return not (self._pending or self._busy)

    def close(self) -> None:
        """Stop now; what is half copied is not there, and is copied by the next Replicator."""
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
        except Exception as error:  # a bug of ours: training goes on, but somebody must know that nothing is copied now
            self._report(f"replication of {self.source} to {self.target} has ended, a bug of ours: {error!r}")
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
            if str(error) != self._told:  # tried every few seconds, told when it is something new
                self._report(f"replication of {self.source} to {self.target} is held up, and tried again: {error}")
            self._told = str(error)
            return False
        self._told = ""
        return True

    def _waiting(self) -> list[tuple[SaveId, str]]:
        """Parts that are here and not there, oldest first; not what the target has had and let go."""
        done = set(self._record.parts) & set(self.target.names("step-")) | self._refused
        return [
            (id, name)
            for id in sorted(ids(self.source))
            if not self.retention.is_past(id)
            for name in self.source.names(id.folder)
            if name.endswith(SUFFIX) and self._record.covers(id, name) and name not in done
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
        self._on_copied(id)  # whatever happens to the record: our own disk may be full
        here = {name for id in ids(self.source) for name in self.source.names(id.folder)}
        self._record = replace(self._record, parts=(*(part for part in self._record.parts if part in here), name))
        self._record.save(self.source)

    def _copy(self, blob: Blob) -> None:
        tally = Tally()
        with self.source.open(blob.name) as file:
            self.target.write(blob.name, tally.through(self._paced(chunks_of(file))))
        if tally.sha256 != blob.sha256:
            self.target.delete(blob.name)
            raise AtlasError(f"{self.source}/{blob.name}: damaged. Delete this checkpoint or restore it")

    def _paced(self, chunks: Iterator[bytes]) -> Iterator[Chunk]:
        for chunk in chunks:
            self._yield_way()
            if self.rate_bps is not None:
                now_s = time.monotonic()
                self._stop.wait(max(0.0, self._due_s - now_s))
                self._due_s = max(self._due_s, now_s - BURST_S) + len(chunk) * 8 / self.rate_bps
            if self._stop.is_set():
                raise _StoppedError
            self.num_bytes += len(chunk)
            yield chunk


class _StoppedError(Exception):
    """Asked to stop while a file was under way."""
