"""The page of a run in a process of its own (`python -m` this module), so that clients and searches do not slow the
process that trains. It reads the run's folder, and ends with the process that started it.

Reads one JSON object from stdin. Prints one JSON line with the page's address, or with the error if it cannot start.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atlas.errors import AtlasError
from atlas.lifetime import Closing, Lifeline, end_process, start_module
from atlas.spec import Job
from atlas.ui.run_files import FACTS, PageFacts, write_facts

END_S = 5.0
"""Time that the process of the page has to end before it is killed."""
NICENESS = 15
"""Training goes first: on a contended core the page's server gets 3 % of the time."""


class PageProcess(Closing):
    """`with PageProcess(folder, facts, job, host, port) as page:` serves the run's page; `url` says where."""

    def __init__(self, folder: Path, facts: PageFacts, job: Job, host: str, port: int, *, keep: bool = False) -> None:
        """`keep`: the run may be described in the folder already, by the process that trains."""
        if not (keep and (folder / FACTS).is_file()):
            write_facts(folder, facts, job)
        pipe = subprocess.PIPE
        self._process = start_module("atlas.ui.child", stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"source": str(folder), "host": host, "port": port}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            ended = {"error": "the process that serves the page ended at once"}
            reply: Mapping[str, Any] = json.loads(line) if line else ended
        except BaseException:
            self.close()
            raise
        if "error" in reply:
            self.close()
            raise AtlasError(f"--ui: {reply['error']}")
        self.url = str(reply["url"])

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        end_process(self._process, END_S)


def main() -> int:
    settings = json.loads(sys.stdin.readline())
    Lifeline(sys.stdin.fileno())
    os.nice(NICENESS)
    from atlas.ui.serve import ServedPage  # at the lower priority

    try:
        page = ServedPage(settings["source"], settings["host"], settings["port"])
    except AtlasError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 2
    print(json.dumps({"url": page.url}), flush=True)
    threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
