"""Prefill beside a paced worker runs in a process of its own, with a low priority, and never holds training up."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import logging, os, pathlib, signal, tempfile, threading, time
from types import SimpleNamespace
from atlas.errors import WorkerError
from atlas.runtime.device import Paced
from atlas.runtime.waits import Arrival, Position, SharedDevice
from atlas.wan.security.credentials import Security
from atlas.wan.transport.base import Handle
from bubbletea.prefill import prefill_process
from bubbletea.prefill.plugin import BubbleTea

MS = 1_000_000
folder = pathlib.Path(tempfile.mkdtemp())
usual = os.getpriority(os.PRIO_PROCESS, 0)


def compute():
    (folder / "begun").touch()
    time.sleep(30)
    (folder / "ended").touch()


class SlowWorker:
    # Stands for a PrefillWorker: its arithmetic takes 30 s, the paced device 20 ms.
    def __init__(self, settings):
        self.settings = settings

    def open(self, me, device, host, *, trains):
        self.device = device

    def fill(self, position, arrived, began_ns):
        self.device.run(compute, 20 * MS)

    def waited(self, position, began_ns, ended_ns):
        pass

    def close(self):
        pass


prefill_process.PrefillWorker = SlowWorker
spans, device = [], Paced()
filler = process = BubbleTea({"device": "paced"})
assert isinstance(process, prefill_process.PrefillProcess)
facts = SimpleNamespace(name="p0.s0", datacenter="a", worker=0, plan="", host="127.0.0.1", security=Security())
filler.attach(facts, SharedDevice(device, spans.append))
assert os.getpriority(os.PRIO_PROCESS, process.prefill_pid) == max(10, usual)
assert os.getpriority(os.PRIO_PROCESS, 0) == usual

handle, began_ns = Handle("input"), time.monotonic_ns()
filler.fill(Position(0, 0), Arrival([handle]))
while not (folder / "begun").exists():
    time.sleep(0.01)
handle.finish()
filler.waited(Position(0, 0), began_ns, handle.end_ns)
assert not (folder / "ended").exists(), "training must not wait for the arithmetic"
assert [span.end_ns - span.start_ns for span in spans] == [20 * MS], spans
assert device.free_ns == spans[0].end_ns, "the paced device is busy with the piece"

threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
assert not isinstance(BubbleTea({"device": "paced"}), prefill_process.PrefillProcess), "there are threads"
filler.close()
print("closed")
"""

RESTARTS = """
logging.basicConfig(format="%(message)s")


def wait_of_training(step, is_over):
    # Training has one wait after another, and none of them raises.
    handle, began_ns = Handle("input"), time.monotonic_ns()
    filler.fill(Position(step, 0), Arrival([handle]))
    until = time.monotonic() + 0.1
    while not is_over() and time.monotonic() < until:
        time.sleep(0.005)
    handle.finish()
    filler.waited(Position(step, 0), began_ns, handle.end_ns)


def train_until(is_over):
    step, until = 0, time.monotonic() + 120
    while not is_over() and time.monotonic() < until:
        wait_of_training(step, is_over)
        step += 1


begun, pids = folder / "begun", []
train_until(begun.exists)
for _ in range(prefill_process.MAX_RESTARTS):
    begun.unlink()
    pids.append(process.prefill_pid)
    os.kill(pids[-1], signal.SIGKILL)
    train_until(begun.exists)
    assert begun.exists(), "prefill runs again"
    assert os.getpriority(os.PRIO_PROCESS, process.prefill_pid) == max(10, usual)
assert len({*pids, process.prefill_pid}) == prefill_process.MAX_RESTARTS + 1, pids
assert len(spans) >= 2, "the device is busy with pieces of the new process"
os.kill(process.prefill_pid, signal.SIGKILL)
try:
    train_until(lambda: False)
except (WorkerError, OSError):
    print("given up")
"""


def test_prefill_of_a_paced_worker_has_a_process_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr


def test_a_prefill_process_that_dies_is_started_again_a_few_times() -> None:
    lines = SCRIPT.partition("handle, began_ns")[0] + RESTARTS
    lines = lines.replace("spans, device =", "prefill_process.RESTART_S = 0.01\nspans, device =")
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "given up\n"), done.stderr
    assert done.stderr.count("was killed by SIGKILL; it is started again") == 5, done.stderr
    assert done.stderr.count("was killed by SIGKILL; it is not started again") == 1, done.stderr


def test_it_ends_with_its_worker() -> None:
    lines = (
        SCRIPT.partition("handle, began_ns")[0] + "print(process.prefill_pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=300)
    # stderr is at its end, so nobody has it open any more.
    assert done.stdout.strip().isdigit(), done.stderr
