"""The connections of a worker with many peers."""

from __future__ import annotations

import threading
from pathlib import Path

from atlas.ir.assemble import with_optimizer
from atlas.ir.program import Layout
from atlas.ir.text import to_text
from atlas.runtime.assignment import Assignment, DataChoice, ModelChoice, TrainingSetup
from atlas.runtime.links import WorkerLinks
from atlas.runtime.models.config import gpt
from atlas.runtime.recipe import LearningRate, OptimizerSettings
from atlas.runtime.topology import CONTROL, GRADIENTS, WorkerRole
from atlas.schedules.classic import one_f_one_b
from atlas.wan.transport.shared_channel import SharedChannel

TRAINING = TrainingSetup(
    ModelChoice(gpt(num_layers=2, width=16, num_heads=2, vocabulary=64, max_length=8)),
    DataChoice(8, 2),
    OptimizerSettings(LearningRate(1e-3)),
)
NUM_PIPELINES = 500


def test_threads_and_sockets_of_a_worker_do_not_grow_with_the_number_of_pipelines() -> None:
    """Its neighbours in the pipeline have streams with threads; the other pipelines connect when they are used."""
    program = with_optimizer(one_f_one_b(Layout(1, 2, 2, ("a", "b"))))
    roles = [WorkerRole(program, worker, 0, NUM_PIPELINES) for worker in (0, 1)]
    assignment = Assignment(0, to_text(program), TRAINING, 1, num_cells=NUM_PIPELINES)
    threads, sockets = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    first, second = (WorkerLinks(role, assignment) for role in roles)
    try:
        places = {}
        for role, other in ((roles[0], second), (roles[1], first)):
            links = role.links(tied=False)
            assert sum(link.lane == GRADIENTS for link in links) == NUM_PIPELINES - 1
            places[role.node] = [(x.end, x.peer, x.lane, "127.0.0.1", other.port) for x in links]
        connecting = threading.Thread(target=second.connect, args=(places[roles[1].node],))
        connecting.start()
        first.connect(places[roles[0].node])
        connecting.join()
        lanes = {lane: channel for (_, lane), channel in first.main._channels.items()}
        assert isinstance(lanes[GRADIENTS], SharedChannel)
        assert not any(isinstance(channel, SharedChannel) for lane, channel in lanes.items() if lane != GRADIENTS)
        assert CONTROL in lanes
        # of both workers: 12 + 1 streams with three threads each, and what listens and watches
        assert threading.active_count() - threads < 2 * (3 * 13 + 16)
        assert len(list(Path("/proc/self/fd").iterdir())) - sockets < 2 * (2 * 13 + 24)
    finally:
        first.close()
        second.close()
