"""Every worker of a Program, each in a thread of this process, over direct sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from atlas.ir.program import Program
from atlas.ir.text import to_text
from atlas.runtime.assignment import Assignment, TrainingSetup
from atlas.runtime.device import Cpu, Device
from atlas.runtime.record import StepRecord
from atlas.runtime.reference import Weights
from atlas.runtime.waits import Filler
from atlas.runtime.worker import Worker


class ThreadedRun:
    """The workers of a run and their records, after it."""

    def __init__(self, workers: Sequence[Worker], records: Sequence[list[StepRecord]]) -> None:
        self.workers, self.records = workers, records

    def weights(self, pipeline: int = 0) -> Weights:
        mine = [worker for worker in self.workers if worker.role.pipeline == pipeline]
        return {name: p.detach().float().numpy() for worker in mine for name, p in worker.parameters.items()}

    def losses(self) -> list[float]:
        """Mean of each step over all pipelines."""
        num_mb, found = self.workers[0].program.num_microbatches, dict[int, list[float]]()
        for records in self.records:
            for record in records:
                for number, loss in enumerate(record.losses):
                    found.setdefault(record.first_step + number // num_mb, []).append(loss)
        return [sum(losses) / len(losses) for _, losses in sorted(found.items())]


def run_in_threads(
    program: Program,
    training: TrainingSetup,
    num_steps: int = 1,
    *,
    device: Callable[[], Device] = Cpu,
    filler: Callable[[int], Filler | None] = lambda worker: None,
    change: Callable[[Assignment], Assignment] = lambda assignment: assignment,
    num_cells: int = 1,
) -> ThreadedRun:
    num_steps = program.num_iterations if program.num_iterations > 1 else num_steps
    first = Assignment(0, to_text(program), training, num_steps, num_cells=num_cells, streams=1, patience_s=120.0)
    roles = [(cell, w) for cell in range(num_cells) for w in range(program.num_workers)]
    records: list[list[StepRecord]] = [[] for _ in roles]
    workers = [
        Worker(
            change(replace(first, worker=w, cell=cell)), device(), filler=filler(number), on_step=records[number].append
        )
        for number, (cell, w) in enumerate(roles)
    ]
    all_connected = threading.Barrier(len(workers))
    by_node = {worker.role.node: worker for worker in workers}

    def run(worker: Worker) -> None:
        links = worker.role.links(tied=training.model.config.tied)
        ports = [by_node[link.peer].links.port for link in links]
        worker.connect(
            [(link.end, link.peer, link.lane, "127.0.0.1", port) for link, port in zip(links, ports, strict=True)]
        )
        all_connected.wait(120)
        worker.run()

    try:
        with ThreadPoolExecutor(len(workers)) as pool:
            for _ in pool.map(run, workers):
                pass
    finally:
        for worker in workers:
            worker.close()
    return ThreadedRun(workers, records)
