"""An environment that is an SQLite database: forked by SQLite's backup API, in memory or as a file.

One tool: `sql`, with a statement and its parameters. It can write, so declare it `reads` only for databases opened
read-only or where every statement is a query.
"""

from __future__ import annotations

import base64
import hashlib
import sqlite3
import tempfile
import threading
from pathlib import Path
from typing import Any

from tvcache.environments import require_tool
from tvcache.errors import TvcacheError


class SqliteEnvironment:
    """`path` None: in memory. Otherwise a file that belongs to the environment and is removed with it."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._open = True
        self._database = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)

    @classmethod
    def copy_of(cls, source: Path, parent: Path | None = None) -> SqliteEnvironment:
        """A rollout's first environment, in memory or as a file in `parent`, from a database that stays as it is."""
        if not source.is_file():
            raise TvcacheError(f"{source}: no such database. Give the path of an SQLite file")
        original = sqlite3.connect(f"{source.resolve().as_uri()}?mode=ro", uri=True)
        try:
            return cls._backup(original, parent)
        finally:
            original.close()

    def fork(self) -> SqliteEnvironment:
        with self._lock:
            return self._backup(self._database, self.path.parent if self.path else None)

    def execute(self, name: str, arguments: Any) -> Any:
        """Rows as lists; a blob as `{"blob": base64}`."""
        require_tool(name, ["sql"])
        with self._lock:
            found = self._database.execute(arguments["statement"], arguments.get("parameters", []))
            return [[_plain(cell) for cell in row] for row in found.fetchall()]

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                self._database.close()
                if self.path is not None:
                    self.path.unlink(missing_ok=True)

    def size_bytes(self) -> int:
        with self._lock:
            pages, size = (
                self._database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size")
            )
        return int(pages * size)

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        with self._lock:
            for line in self._database.iterdump():
                digest.update(line.encode(errors="surrogateescape"))
        return digest.hexdigest()

    @classmethod
    def _backup(cls, source: sqlite3.Connection, parent: Path | None) -> SqliteEnvironment:
        path = None
        if parent is not None:
            with tempfile.NamedTemporaryFile(prefix="tvcache-", suffix=".sqlite", dir=parent, delete=False) as made:
                path = Path(made.name)
        copy = cls(path)
        try:
            source.backup(copy._database)
        except BaseException:
            copy.close()
            raise
        return copy


def _plain(cell: Any) -> Any:
    return {"blob": base64.b64encode(cell).decode()} if isinstance(cell, bytes) else cell
