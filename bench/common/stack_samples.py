"""Where the threads of worker processes spend their time: samples of their Python stacks, printed as a table.

Workers are forked by another process, so the sampler enters it by `sitecustomize` and starts in every fork.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

EVERY_S = 0.02
SAMPLER = f"""
import json, os, sys, threading, time

def sample(file):
    began = last = time.monotonic()
    while True:
        time.sleep({EVERY_S})
        now = time.monotonic()
        took, last = round(now - last, 3), now
        names = {{thread.ident: thread.name for thread in threading.enumerate()}}
        for ident, frame in sys._current_frames().items():
            if ident == threading.get_ident():
                continue
            stack = []
            while frame is not None:
                code = frame.f_code
                stack.append(code.co_filename.split("site-packages/")[-1].split("src/")[-1] + ":" + code.co_name)
                frame = frame.f_back
            file.write(json.dumps([round(now - began, 2), took, names.get(ident, "?"), stack[::-1]]) + "\\n")
        file.flush()

def begin():
    file = open(os.path.join(os.environ["ATLAS_STACKS"], str(os.getpid()) + ".jsonl"), "w")
    threading.Thread(target=sample, args=(file,), daemon=True, name="sampler").start()

if "ATLAS_STACKS" in os.environ:
    os.register_at_fork(after_in_child=begin)
"""


def sample_workers(folder: Path) -> None:
    """From now on; the fork server must not have started."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(SAMPLER)
    os.environ["ATLAS_STACKS"] = str(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def newest(folder: Path) -> Path:
    return max(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime)


def table(path: Path, *, at_least_s: float = 0.15, depth: int = 60) -> Iterator[str]:
    """By thread: seconds in each call, below its caller. Threads that only wait are left out."""
    trees: dict[str, defaultdict[tuple[str, ...], float]] = {}
    first: dict[str, dict[tuple[str, ...], float]] = {}
    for line in path.read_text().splitlines():
        try:
            at_s, took_s, thread, stack = json.loads(line)
        except ValueError:  # the process was killed while it wrote
            continue
        if thread != "MainThread" and stack[-1].split(":")[-1] in ("wait", "_worker", "get", "accept", "readline"):
            continue
        thread = thread.split("-")[0]
        tree, seen = trees.setdefault(thread, defaultdict(float)), first.setdefault(thread, {})
        for length in range(1, min(len(stack), depth) + 1):
            tree[tuple(stack[:length])] += took_s
            seen.setdefault(tuple(stack[:length]), at_s)
    for thread, tree in trees.items():
        yield f"thread {thread}"
        for stack in sorted(tree):
            alike = [s for s in tree if len(s) == len(stack) + 1 and s[:-1] == stack]
            if tree[stack] < at_least_s or (len(alike) == 1 and tree[alike[0]] > 0.95 * tree[stack]):
                continue
            words = f"{tree[stack]:6.2f} s from {first[thread][stack]:5.2f} {stack[-1]}"
            yield textwrap.indent(words, "  " * (1 + len(stack) // 4))
