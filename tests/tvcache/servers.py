"""`tvcache serve` as a process, for the tests and the benchmarks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

STARTED = re.compile(r"tvcache: (https?)://(.+):(\d+), ([\d,]+) values")


class Served:
    """A server that listens when this returns. Kill it, start it again on the same port."""

    def __init__(self, log: Path, *flags: str, port: int = 0, env: dict[str, str] | None = None) -> None:
        self.log, self.flags, self.port, self.env = log, flags, port, env
        self.process: subprocess.Popen[str] | None = None
        self.num_values = 0
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "tvcache.cli", "serve", "--log", str(self.log), "--port", str(self.port)]
        errors = self.log.with_suffix(".err").open("a")
        self.process = subprocess.Popen(
            [*command, *self.flags],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **(self.env or {})},
        )
        errors.close()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = STARTED.match(line)
        if found is None:
            raise RuntimeError(f"no server: {line!r} {self.log.with_suffix('.err').read_text()}")
        self.scheme, self.port = found[1], int(found[3])
        self.num_values = int(found[4].replace(",", ""))

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """As `kill -9` does."""
        assert self.process is not None
        self.process.kill()
        self.wait()

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.wait()

    def wait(self) -> int:
        assert self.process is not None
        code = self.process.wait(30)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: Any) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.kill()
