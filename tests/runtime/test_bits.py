"""Every schedule, and every kind of network: losses and weights equal to the bit, and equal to one process's but for
rounding. The short form of bench/bits.py: same Programs, threads instead of processes, few steps, half of the pairs."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from worker_threads import ThreadedRun, run_in_threads

from atlas.cost.table import kind_costs, uniform_costs
from atlas.ir.assemble import with_optimizer
from atlas.ir.program import Layout, Memory, Program
from atlas.runtime.assignment import SHIPPED, DataChoice, ModelChoice, TrainingSetup
from atlas.runtime.models.config import DecoderConfig
from atlas.runtime.recipe import LearningRate, OptimizerSettings
from atlas.runtime.reference import train_alone
from atlas.schedules import SCHEDULES, Setting
from atlas.wan.transport.base import Handle
from atlas.wan.transport.direct import DirectTransport
from atlas.wan.transport.shared_channel import SharedChannel
from atlas.wan.transport.stream_budget import INBOUND_LIMITS, StreamBudget

torch.set_num_threads(1)
MS = 1_000_000
NUM_STEPS = 2
NETWORKS = {
    "gpipe": ("one", "direct"),
    "1f1b": ("many", "turns"),
    "varuna": ("one", "turns"),
    "zero-bubble": ("many", "direct"),
    "atlas": ("turns", "direct"),
}
QWEN = DecoderConfig(
    "qwen3", num_layers=4, width=32, num_heads=4, num_kv_heads=2, head_width=8, ffn_width=64, vocabulary=256,
    max_length=16, qk_norm=True, tied=True,
)  # fmt: skip
TRAINING = TrainingSetup(
    ModelChoice(QWEN, layers_per_stage=(1, 2, 1)),
    DataChoice(16, 2, SHIPPED),
    OptimizerSettings(LearningRate(1e-3, "cosine", 2, 50)),
    max_norm=1.0,
)


def programs() -> dict[str, Program]:
    """Two pipelines of three stages in three datacenters, four microbatches."""
    layout = Layout(2, 3, 4, ("a", "b", "c"))
    per_kind = kind_costs(forward_ns=10 * MS, recompute_ns=10 * MS, input_ns=10 * MS, weight_ns=10 * MS)
    costs = [
        uniform_costs(2, 3, per_kind, wan_boundaries=(0, 1), wan_ns=20 * MS, wan_latency_ns=10 * MS, sharing=sharing)
        for sharing in (False, True)
    ]
    setting = Setting(layout, costs[0], costs[1], Memory(4), recompute=True, budget=20)
    return {name: with_optimizer(SCHEDULES[name].build(setting, None), norm=True) for name in NETWORKS}


def test_every_schedule_and_every_network_learns_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[tuple[str, str], ThreadedRun] = {}
    senders: set[str] = set()
    send = DirectTransport.send

    def noted(transport: DirectTransport, *arguments: Any) -> Handle:
        senders.add(transport.name)
        return send(transport, *arguments)

    monkeypatch.setattr(DirectTransport, "send", noted)
    for name, program in programs().items():
        for network in NETWORKS[name]:
            streams = 1 if network == "one" else 2
            played = replace(program, sharing=network == "turns")
            if network == "direct":  # in one datacenter, on one host
                played = replace(played, rank_dc=("a", "a", "a"))
            found[name, network] = run_in_threads(
                played,
                TRAINING,
                NUM_STEPS,
                change=lambda a, streams=streams: replace(a, streams=streams),  # type: ignore[misc]
            )
            workers = {worker.role.node for worker in found[name, network].workers}
            assert senders == (workers if network == "direct" else set())
            senders.clear()
    first = found["gpipe", "one"]
    for case, trained in found.items():
        assert trained.losses() == first.losses(), case
        for pipeline in range(2):
            for name, weights in trained.weights(pipeline).items():
                assert np.array_equal(weights, first.weights()[name]), (case, name)
    losses, weights = train_alone(TRAINING, 2, 4, NUM_STEPS)
    assert first.losses() == pytest.approx(losses, rel=1e-5)
    for name, expected in weights.items():
        assert np.linalg.norm(first.weights()[name] - expected) <= 1e-5 * np.linalg.norm(expected), name


def test_a_worker_with_too_many_peers_for_threads_of_their_own_learns_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two pipelines that take turns on the WAN: every channel is one that shares threads."""
    program, own = replace(programs()["atlas"], sharing=True), threading.active_count()
    expected = run_in_threads(program, TRAINING, NUM_STEPS)
    for kind in INBOUND_LIMITS:
        monkeypatch.setitem(INBOUND_LIMITS, kind, 0)
    monkeypatch.setattr(StreamBudget, "outgoing", lambda self, kind: 0)
    shared = run_in_threads(program, TRAINING, NUM_STEPS)
    assert all(isinstance(c, SharedChannel) for w in shared.workers for c in w.links.main._channels.values())
    assert shared.losses() == expected.losses()
    for name, weights in shared.weights().items():
        assert np.array_equal(weights, expected.weights()[name]), name
    assert threading.active_count() == own
