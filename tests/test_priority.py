"""Scheduling priorities of threads and processes: what is lowered, and what stays."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from atlas.priority import NICENESS, lower_priority

SHORTEN = """
import os
from atlas.priority import shorten_slices
os.nice(3)
for policy in (os.sched_getscheduler(0), os.SCHED_IDLE):
    os.sched_setscheduler(0, policy, os.sched_param(0))
    shorten_slices()
    print(os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0) == policy)
"""


def test_a_thread_that_steps_back_takes_those_it_starts_with_it() -> None:
    before, found = os.getpriority(os.PRIO_PROCESS, 0), list[int]()

    def note() -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, 0))

    def step_back() -> None:
        lower_priority()
        note()
        child = threading.Thread(target=note)
        child.start()
        child.join()

    thread = threading.Thread(target=step_back)
    thread.start()
    thread.join()
    assert found == [NICENESS, NICENESS]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_another_thread_can_be_lowered() -> None:
    over, found, began = threading.Event(), list[int](), threading.Event()

    def work() -> None:
        began.set()
        over.wait(60)
        found.append(os.getpriority(os.PRIO_PROCESS, 0))

    thread = threading.Thread(target=work)
    thread.start()
    began.wait(60)
    lower_priority(thread.native_id or 0)
    over.set()
    thread.join()
    assert found == [NICENESS]


def test_shorter_slices_keep_niceness_and_class() -> None:
    done = subprocess.run([sys.executable, "-c", SHORTEN], capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert len(set(lines)) == 1, (lines, done.stderr)
    assert lines[0].endswith("True")
