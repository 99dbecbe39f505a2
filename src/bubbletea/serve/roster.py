"""Which workers a service accepts, and the order that each of them gets: workers of the same plan, on the device that
the service prices, with enough memory. A worker that does not fit is refused with one sentence, which its training
shows once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atlas.errors import WorkerError
from bubbletea.constants import MIB
from bubbletea.prefill.messages import WorkerOrder


@dataclass(frozen=True)
class Roster:
    orders: Mapping[int, WorkerOrder]
    """By worker, as the service numbers them: those that are part of a lane."""
    numbers: tuple[int, ...]
    """Of each of the service's workers: its number in the run."""
    plan: str = ""
    """The id of the run's Program; empty: any."""
    device: str = ""
    """Of the workers; empty: any."""

    def find(self, who: Mapping[str, Any]) -> tuple[int, WorkerOrder]:
        """The service's number of a worker, and its order. Raises WorkerError with a sentence for its user."""
        name, number, device = str(who["name"]), int(who["worker"]), str(who.get("device", ""))
        if self.plan and who.get("plan") != self.plan:
            raise WorkerError(
                f"worker {name} runs another plan than this service: give `bubbletea serve` the plan, the --schedule, "
                "the --recipe and the --set of `atlas train`"
            )
        if self.device and device != self.device:
            raise WorkerError(
                f"worker {name} computes on {device or 'an unknown device'}, and this service predicts prefill for "
                f"{self.device}: serve with --device {device}"
            )
        if number not in self.numbers:
            raise WorkerError(f"worker {name} of {who.get('datacenter')} is not one of this service: check its --dc")
        worker = self.numbers.index(number)
        order = self.orders.get(worker)
        if order is None:
            raise WorkerError(f"worker {name} is not needed: no copy of the model in this service uses it")
        memory_bytes = int(who.get("memory_bytes", 0))
        if memory_bytes and memory_bytes < order.arena_bytes:
            raise WorkerError(
                f"worker {name} has reserved {memory_bytes // MIB} MiB, and this service needs "
                f"{order.arena_bytes // MIB}: train with --filler-mib {order.arena_bytes // MIB}, or serve with "
                f"--arena-mib {memory_bytes // MIB}"
            )
        return worker, order
