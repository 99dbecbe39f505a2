"""Values in an append-only file: one record a line, checksum first. Memory holds where each value is, not the value.

    1a2b3c4d {"tvcache":1,"log":"..."}                                   what this file is
    1a2b3c4d {"id":..,"key":..,"state":..,"task":..,"call":..,"body":..} a value
    1a2b3c4d {"drop":[ids],"keys":[..],"tool":..,"why":..}               values that cannot be trusted
    1a2b3c4d {"hits":{key:count}}                                        hits since the last such line
    1a2b3c4d {"peer":..,"log":..,"after":..}                             how far another site's log was read

A record is written before it is acknowledged. A file that ends in the middle of a record is repaired when it is opened:
the incomplete record, which was never acknowledged, is removed. This module does not use HTTP and executes nothing.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tvcache import messages
from tvcache.errors import ArgumentsError, TvcacheError
from tvcache.stores import Ask
from tvcache.values import Value

LOG = logging.getLogger("tvcache")
FORMAT = 1
"""In the first record of a log. Files of another format are refused."""
BLOCK = 4 << 20
"""Bytes that are read from the log at once."""
HEADER = b"00000000 "
"""Placeholder of a record's checksum and the space after it."""


class LogStore:
    """Not thread-safe: the server uses it from its event loop."""

    def __init__(self, path: Path, *, fsync: bool = False, read_only: bool = False) -> None:
        self.path, self._fsync, self._read_only = path, fsync, read_only
        self.damaged = self.conflicts = self.merged = 0
        self.num_dropped: Counter[str] = Counter()
        """By tool."""
        self.hits: Counter[bytes] = Counter()
        self._fresh_hits: Counter[bytes] = Counter()
        self.saved_s = 0.0
        self._where: dict[bytes, tuple[int, int]] = {}
        self._children: dict[bytes, list[bytes]] = {}
        self.cursors: dict[str, tuple[str, int]] = {}
        """By another site's address: its log's id, and how far it was read."""
        self._gone: set[str] = set()
        """Ids of dropped values: they are not adopted again from another site."""
        try:
            if not read_only:
                path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT | os.O_APPEND
            self._file = os.open(path, flags | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TvcacheError(f"{path}: {error.strerror or error}. Choose another place with --log") from None
        try:
            if not read_only:
                self._lock()
            self.log_id, self.end = self._load()
        except BaseException:
            os.close(self._file)
            raise

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, key: bytes) -> bool:
        return key in self._where

    def get(self, key: bytes) -> Value | None:
        """The value of a key; counts a hit."""
        where = self._where.get(key)
        if where is None:
            return None
        found = self._read(*where)
        self._fresh_hits[key] += 1
        self.saved_s += found["seconds"]
        return Value(found["body"].encode(), found["seconds"])

    def put(self, ask: Ask, value: Value) -> Value:
        """Store a value unless there is one; what is stored now. OSError: the disk is full, nothing changed."""
        where = self._where.get(ask.key)
        if where is not None:
            found = self._read(*where)
            if found["body"].encode() != value.body:
                self.conflicts += 1
            return Value(found["body"].encode(), found["seconds"])
        record = {
            "id": f"{self.log_id}:{self.end}",
            "key": ask.key.hex(),
            **messages.asked(ask),
            **messages.valued(value),
            "at": round(time.time(), 3),
        }
        self._index(record, *self._append(record))
        return value

    def drop(self, state: bytes, tool: str, why: str) -> int:
        """Remove every value of this state and later ones; their number."""
        waiting, keys = [state], []
        while waiting:
            for child in self._children.get(waiting.pop(), ()):
                keys.append(child)
                waiting.append(child)
        ids = [self._read(*self._where[key])["id"] for key in keys]
        self._append({"drop": ids, "keys": [key.hex() for key in keys], "tool": tool, "why": why})
        self._forget(ids, keys, tool)
        return len(keys)

    def adopt(self, record: dict[str, Any]) -> bool:
        """Adopt a record of another site's log; whether it was new. Values never change, so order does not matter."""
        if "drop" in record:
            return self._adopt_drop(record)
        if "body" not in record:
            return False
        ask, value = checked(record)
        if record["id"] in self._gone:
            return False
        where = self._where.get(ask.key)
        if where is not None:
            self.conflicts += self._read(*where)["body"].encode() != value.body
            return False
        self._index(record, *self._append(record))
        self.merged += 1
        return True

    def since(self, offset: int, limit_bytes: int = 1 << 20) -> tuple[bytes, int]:
        """Whole records from an offset on, and the offset after them."""
        data = os.pread(self._file, min(limit_bytes, self.end - offset), offset) if offset < self.end else b""
        cut = data.rfind(b"\n") + 1
        if data and not cut:  # one record longer than the limit
            return self.since(offset, limit_bytes * 4)
        return data[:cut], offset + cut

    def records(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Every value with its hits."""
        for key, where in list(self._where.items()):
            yield self._read(*where), self.hits[key] + self._fresh_hits[key]

    def remember(self, peer: str, log_id: str, after: int) -> None:
        """Record how far another site's log was read. Adopted values precede this record."""
        self.cursors[peer] = (log_id, after)
        self._append({"peer": peer, "log": log_id, "after": after})

    def flush(self) -> None:
        """Write the hit counts. The last seconds of them may be lost."""
        if self._fresh_hits:
            self._append({"hits": {key.hex(): count for key, count in self._fresh_hits.items()}})
            self.hits.update(self._fresh_hits)
            self._fresh_hits.clear()

    def sync(self) -> None:
        os.fsync(self._file)

    def close(self) -> None:
        if self._file >= 0:
            try:
                self.flush()
            except OSError as error:
                LOG.warning("tvcache: %s: the last hits are not counted (%s)", self.path, error)
            os.close(self._file)
            self._file = -1

    def _append(self, record: dict[str, Any]) -> tuple[int, int]:
        line = framed(record)
        begin = self.end
        try:
            done = os.write(self._file, line)
            if done != len(line):
                raise OSError(28, "No space left on device")
            if self._fsync:
                os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, begin)  # ignore an incomplete record
            raise
        self.end = begin + len(line)
        return begin, len(line)

    def _read(self, offset: int, length: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(os.pread(self._file, length, offset)[len(HEADER) :])
        return found

    def _index(self, record: dict[str, Any], offset: int, length: int) -> None:
        key, state = bytes.fromhex(record["key"]), bytes.fromhex(record["state"])
        self._where[key] = (offset, length)
        self._children.setdefault(state, []).append(key)

    def _adopt_drop(self, record: dict[str, Any]) -> bool:
        ids = [str(name) for name in record["drop"]]
        if set(ids) <= self._gone:
            return False
        ours = self._dropped(record)
        self._append(record)
        self._forget(ids, ours, str(record["tool"]))
        return True

    def _dropped(self, record: dict[str, Any]) -> list[bytes]:
        """The keys of a drop record whose value is still stored."""
        pairs = zip(record["drop"], map(bytes.fromhex, record["keys"]), strict=True)
        return [key for name, key in pairs if key in self and self._read(*self._where[key])["id"] == name]

    def _forget(self, ids: list[str], keys: list[bytes], tool: str) -> None:
        self._gone.update(ids)
        self.num_dropped[tool] += len(keys)
        going = set(keys)
        for key in going:
            self._where.pop(key, None)
            self.hits.pop(key, None)
            self._fresh_hits.pop(key, None)
            self._children.pop(key, None)
        for state in [state for state, children in self._children.items() if not going.isdisjoint(children)]:
            self._children[state] = [key for key in self._children[state] if key not in going]

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TvcacheError(
                f"{self.path}: another server uses this log. Stop it, or choose another with --log"
            ) from None

    def _foreign(self) -> TvcacheError:
        reader, server = "Give the file that `tvcache serve --log` wrote", "Choose another place with --log"
        return TvcacheError(f"{self.path} is not a log of tvcache. {reader if self._read_only else server}")

    def _load(self) -> tuple[str, int]:
        """Read or create the file; its id and its end."""
        size = os.fstat(self._file).st_size
        end, log_id = 0, ""
        for offset, line in lines(self._file, size):
            record = unframed(line)
            if record is not None and not log_id:
                log_id = str(record.get("log", "")) if record.get("tvcache") == FORMAT else ""
            if not log_id:
                if not line.endswith(b"\n"):
                    break  # truncated in the first line: the file is empty
                raise self._foreign()
            if record is None:
                if line.endswith(b"\n"):
                    self.damaged += 1
                    end = offset + len(line)
                    LOG.warning("tvcache: %s: the record at byte %d is damaged and is skipped", self.path, offset)
                continue
            self._apply(record, offset, len(line))
            end = offset + len(line)
        self.end = end
        if self._read_only:
            if not log_id:
                raise self._foreign()
            return log_id, end
        if end < size:
            LOG.warning(
                "tvcache: %s ends in the middle of a record: the last %d bytes are removed", self.path, size - end
            )
            os.ftruncate(self._file, end)
        if not log_id:
            log_id = secrets.token_hex(8)
            self._append({"tvcache": FORMAT, "log": log_id})
        return log_id, self.end

    def _apply(self, record: dict[str, Any], offset: int, length: int) -> None:
        if "body" in record:
            self._index(record, offset, length)
        elif "drop" in record:
            self._forget(record["drop"], self._dropped(record), str(record["tool"]))
        elif "peer" in record:
            self.cursors[record["peer"]] = (record["log"], record["after"])
        elif "hits" in record:
            self.hits.update({bytes.fromhex(key): count for key, count in record["hits"].items()})


def framed(record: dict[str, Any]) -> bytes:
    data = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()
    return b"%08x " % zlib.crc32(data) + data + b"\n"


def unframed(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None if it is incomplete."""
    data = line[len(HEADER) : -1]
    if not line.endswith(b"\n") or line[: len(HEADER)] != b"%08x " % zlib.crc32(data):
        return None
    try:
        found = json.loads(data)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def lines(file: int, size: int) -> Iterator[tuple[int, bytes]]:
    """(offset, line with its newline) of the first `size` bytes; the last line may have none."""
    with os.fdopen(os.dup(file), "rb", BLOCK) as opened:
        offset = opened.seek(0)
        while offset < size and (line := opened.readline(size - offset)):
            yield offset, line
            offset += len(line)


def checked(record: dict[str, Any]) -> tuple[Ask, Value]:
    """Check a value's record from another site; ArgumentsError if its key does not match its content."""
    ask, value = messages.ask_of(record), messages.value_of(record)
    messages.field(record, "id", str)
    if ask.key.hex() != record.get("key"):
        raise ArgumentsError("the key of a record is not the key of its call")
    return ask, value
