"""Tables of packets: what a sender saw of one path. `EAST-WEST.packets.csv` has the header `sent_ns,bytes,rtt_ns` and
one row per packet (or chunk) in the order of sending; `rtt_ns` of a lost one is `lost`.

Older parts of the same table are `EAST-WEST.packets.1.csv`, `.2.csv`, ... (the largest number is the oldest).
"""

from __future__ import annotations

import contextlib
import io
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atlas.errors import AtlasError, SpecError

Ints = NDArray[np.int64]
HEADER = b"sent_ns,bytes,rtt_ns"
LOST = -1
"""`rtt_ns` of a lost packet."""
MAX_ROWS = 4_000_000
"""Rows that are kept in memory: the newest."""
MAX_RTT_NS, MAX_BYTES, MAX_SENT_NS = 3600 * 10**9, 1 << 31, 1 << 62
BLOCK_BYTES = 16 << 20
SUFFIX = ".packets.csv"
_PART = re.compile(r"(?P<name>.+)\.packets(?:\.(?P<age>\d{1,4}))?\.csv")


@dataclass(frozen=True)
class PacketTable:
    """One path's packets in the order of sending."""

    where: str
    """The file or folder that errors name."""
    sent_ns: Ints
    num_bytes: Ints
    rtt_ns: Ints
    """`LOST` for a lost one."""
    num_rows: int = 0
    """Rows in the files. Only the newest are kept."""

    @property
    def lost(self) -> NDArray[np.bool_]:
        return np.equal(self.rtt_ns, LOST)

    @property
    def span_s(self) -> float:
        return float(self.sent_ns[-1] - self.sent_ns[0]) / 1e9 if len(self.sent_ns) else 0.0

    def part(self, first: int, end: int) -> PacketTable:
        cut = slice(first, end)
        return PacketTable(self.where, self.sent_ns[cut], self.num_bytes[cut], self.rtt_ns[cut], end - first)


def paths_in(folder: Path) -> dict[str, list[Path]]:
    """By name of the path: the files of its table, the oldest first."""
    found: dict[str, list[tuple[int, Path]]] = {}
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise bad(folder, "DIR", None, f"{error.strerror}", "Name a folder of `atlas wan probe --record`") from None
    for path in entries:
        if match := _PART.fullmatch(path.name):
            found.setdefault(match["name"], []).append((int(match["age"] or 0), path))
    return {name: [path for _, path in sorted(parts, reverse=True)] for name, parts in found.items()}


def read_path(folder: Path, name: str | None = None) -> tuple[str, PacketTable]:
    """The name and the table of a path in a folder. `name` may be left out where there is one path."""
    tables = paths_in(folder)
    if not tables:
        remedy = "Record some with `atlas wan probe --record DIR` or `atlas train --record-wan DIR`"
        raise bad(folder, "DIR", None, f"has no *{SUFFIX} table", remedy)
    if name is None and len(tables) > 1:
        raise bad(folder, "--path", None, "the folder has several paths", f"Name one of {', '.join(tables)}")
    name = name or next(iter(tables))
    if name not in tables:
        raise bad(folder, "--path", name, "no such path in the folder", f"Name one of {', '.join(tables)}")
    return name, read_packets(tables[name])


def read_packets(files: list[Path], max_rows: int = MAX_ROWS) -> PacketTable:
    """Checks every row; keeps the newest `max_rows`, so memory is bounded however long the files are."""
    kept: deque[Ints] = deque()
    num_kept = num_rows = 0
    last_ns = -1
    for path in files:
        row = 0
        for block in _blocks(path):
            found = _parsed(path, block, row)
            _require_valid(path, found, row, last_ns)
            last_ns, row = int(found[-1, 0]), row + len(found)
            kept.append(found)
            num_kept += len(found)
            while num_kept - len(kept[0]) >= max_rows:
                num_kept -= len(kept.popleft())
        num_rows += row
    table = np.concatenate(kept)[-max_rows:] if kept else np.zeros((0, 3), np.int64)
    where = str(files[-1])
    return PacketTable(where, table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy(), num_rows)


def _blocks(path: Path) -> Iterator[bytes]:
    """The rows of a file without its header, whole lines at a time. A last line that was cut off is left out."""
    try:
        with path.open("rb") as file:
            header = file.readline(256).strip().replace(b" ", b"")
            if header != HEADER:
                given = header[:60].decode("ascii", "replace")
                raise bad(path, "header", given, f"the first line must be {HEADER.decode()}", "Add it, or record again")
            rest = b""
            while data := file.read(BLOCK_BYTES):
                whole, newline, rest = (rest + data).rpartition(b"\n")
                if newline and whole.strip():
                    yield whole
                if len(rest) > BLOCK_BYTES:
                    raise bad(path, "row", None, "a line is longer than 16 MB", "Record again")
    except OSError as error:
        raise bad(path, "table", None, f"cannot be read: {error.strerror}", "Check the file") from None


def _parsed(path: Path, block: bytes, first_row: int) -> Ints:
    """[row, 3], by numpy. If it refuses the block, every line is read by itself, to name the wrong one."""
    if b"-" not in block and b"." not in block:  # numpy would take negative and decimal numbers
        text = io.BytesIO(block.replace(b"lost", b"-1"))
        with contextlib.suppress(ValueError):
            found = np.loadtxt(text, np.int64, delimiter=",", ndmin=2, comments=None)
            if found.shape == (block.count(b"\n") + 1, 3):  # it skips empty lines
                return found
    return np.array([_row(path, first_row + k, line) for k, line in enumerate(block.split(b"\n"))], np.int64)


def _row(path: Path, row: int, line: bytes) -> tuple[int, int, int]:
    cells = [cell.strip() for cell in line.split(b",")]
    names = HEADER.decode().split(",")
    if len(cells) != len(names):
        given = line[:60].decode("ascii", "replace")
        raise bad(path, f"row {row}", given, f"a row has {len(names)} values", "Fix this row or remove it")
    found = []
    for name, cell in zip(names, cells, strict=True):
        if name == "rtt_ns" and cell == b"lost":
            found.append(LOST)
            continue
        if not re.fullmatch(rb"\d{1,18}|[1-4]\d{18}", cell):
            rule = "must be a whole number, not negative" + (", or `lost`" if name == "rtt_ns" else "")
            given = cell[:40].decode("ascii", "replace")
            raise bad(path, f"row {row}.{name}", given, rule, "Fix this row or remove it")
        found.append(int(cell))
    return found[0], found[1], found[2]


def _require_valid(path: Path, rows: Ints, first_row: int, last_ns: int) -> None:
    before = np.concatenate([[last_ns], rows[:-1, 0]])
    sent, size, rtt = rows.T
    rules = (
        ("sent_ns", sent, sent < before, "times must not go back", "Sort the rows by sent_ns"),
        ("sent_ns", sent, (sent < 0) | (sent > MAX_SENT_NS), "is not a time in nanoseconds", "Check the unit"),
        ("bytes", size, (size < 1) | (size > MAX_BYTES), f"must be from 1 to {MAX_BYTES}", "Check the unit"),
        ("rtt_ns", rtt, (rtt == 0) | (rtt > MAX_RTT_NS), "must be more than 0 and at most an hour", "Check the unit"),
    )
    for name, values, wrong, rule, remedy in rules:
        if (at := np.flatnonzero(wrong)).size:
            raise bad(path, f"row {first_row + int(at[0])}.{name}", int(values[at[0]]), rule, remedy)


def bad(where: Path | str, key: str, value: object, rule: str, remedy: str) -> SpecError:
    """An error about a table."""
    return SpecError(where=str(where), key=key, value=value, rule=rule, remedy=remedy)


# ---- writing -------------------------------------------------------------------------------------------------------
class PacketLog:
    """Writes one path's table. At most `num_parts` files of `part_bytes` each remain; older rows are removed.

    Rows may arrive in the order of acknowledgements: they are sorted, and one that is later than `HOLD_NS` is dropped
    and counted. Thread-safe. `add` costs a list's append; every 8192nd call also writes.
    """

    HOLD_NS = 5_000_000_000
    FLUSH_ROWS = 8192

    def __init__(self, folder: Path, name: str, *, part_bytes: int = 32 << 20, num_parts: int = 4) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._~-]*", name):
            raise AtlasError(f"a path named {name!r}: use letters, digits, '.', '-', '_' and '~'")
        self._folder, self._name = folder, name
        self._part_bytes, self._num_parts = part_bytes, num_parts
        self._rows: list[tuple[int, int, int]] = []
        self._lock = threading.Lock()
        self._written_ns = -1
        self._flushed_at, self._flush_at = time.monotonic(), self.FLUSH_ROWS
        self.dropped = 0
        folder.mkdir(parents=True, exist_ok=True)
        if self._path(0).exists():
            self._rotate()  # an earlier run's rows stay, as an older part
        self._path(0).write_bytes(HEADER + b"\n")
        self._size = len(HEADER) + 1

    def add(self, sent_ns: int, num_bytes: int, rtt_ns: int = LOST) -> None:
        self._rows.append((sent_ns, num_bytes, rtt_ns))
        if len(self._rows) >= self._flush_at:
            self._flush_if_free()

    def write_older(self) -> None:
        """Writes rows that are old enough, at most once a second: a process that is killed loses seconds only."""
        if self._rows and time.monotonic() - self._flushed_at >= 1.0:
            self._flush_if_free()

    def _flush_if_free(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                self._flush(self.HOLD_NS)
            finally:
                self._lock.release()

    def close(self) -> None:
        """Writes everything. More may be added."""
        with self._lock:
            self._flush(0)

    def _flush(self, hold_ns: int) -> None:
        rows, self._rows = self._rows, []
        self._flushed_at = time.monotonic()
        rows.sort()
        until = rows[-1][0] - hold_ns if rows else 0
        ready = [row for row in rows if row[0] <= until]
        if len(rows) - len(ready) < 8 * self.FLUSH_ROWS:
            self._rows[:0] = rows[len(ready) :]
        else:
            ready = rows  # the hold is bounded
        self._flush_at = len(self._rows) + self.FLUSH_ROWS
        fresh = [row for row in ready if row[0] >= self._written_ns]
        self.dropped += len(ready) - len(fresh)
        if not fresh:
            return
        self._written_ns = fresh[-1][0]
        text = "".join(f"{a},{b},{'lost' if c == LOST else c}\n" for a, b, c in fresh).encode()
        if self._size + len(text) > self._part_bytes:
            self._rotate()
            self._path(0).write_bytes(HEADER + b"\n")
            self._size = len(HEADER) + 1
        with self._path(0).open("ab") as file:
            file.write(text)
        self._size += len(text)

    def _rotate(self) -> None:
        self._path(self._num_parts - 1).unlink(missing_ok=True)
        for age in range(self._num_parts - 2, -1, -1):
            if self._path(age).exists():
                self._path(age).replace(self._path(age + 1))

    def _path(self, age: int) -> Path:
        return self._folder / f"{self._name}.packets{f'.{age}' if age else ''}.csv"
