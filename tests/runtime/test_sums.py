"""Sums of gradients over pipelines: by torch.distributed and over the WAN transport, with and without ZeRO-1."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from worker_threads import ThreadedRun, run_in_threads

from atlas.errors import AtlasError, WorkerError
from atlas.ir.assemble import with_optimizer
from atlas.ir.program import Layout
from atlas.ir.text import to_text
from atlas.runtime.assignment import Assignment, DataChoice, ModelChoice, TrainingSetup
from atlas.runtime.device import Cpu
from atlas.runtime.exchange import SUMS, TransportExchange
from atlas.runtime.flat import FlatParameters
from atlas.runtime.flat_layout import ALIGNMENT
from atlas.runtime.links import WorkerLinks
from atlas.runtime.models.config import DecoderConfig
from atlas.runtime.pipeline_group import PipelineGroup, RankSoftware, require_same
from atlas.runtime.recipe import LearningRate, OptimizerSettings
from atlas.runtime.stage_set import StageSet
from atlas.runtime.sync import GradientSync
from atlas.runtime.topology import WorkerRole
from atlas.runtime.waits import Pending
from atlas.schedules.classic import interleaved, one_f_one_b
from atlas.wan.transport.base import Handle

QWEN = DecoderConfig(
    "qwen3", num_layers=4, width=32, num_heads=4, num_kv_heads=2, head_width=8, ffn_width=64, vocabulary=64,
    max_length=16, qk_norm=True, tied=True,
)  # fmt: skip


# ---- flat memory -----------------------------------------------------------------------------------------------------
def test_slices_of_all_ranks_make_the_whole() -> None:
    shapes, num_ranks = {"a": (10, 10), "b": (1,), "c": (8, 8), "d": (100, 10), "e": (7,)}, 3
    module = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()})
    expected = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    flat = FlatParameters(module, num_ranks)
    assert flat.num_values % (num_ranks * ALIGNMENT) == 0
    rebuilt = {name: torch.zeros_like(weight) for name, weight in expected.items()}
    for rank in range(num_ranks):
        for name, piece in flat.pieces(flat.slice_of(rank)).items():
            rebuilt[name].view(-1)[piece.within] += flat.weights[piece.at]
            assert piece.within.start % ALIGNMENT == 0, "elementwise ops have the same bits as on the whole tensor"
    assert all(torch.equal(rebuilt[name], weight) for name, weight in expected.items())


# ---- whole trainings -------------------------------------------------------------------------------------------------
def training(sums: str, zero: int, dtype: str = "fp32", config: DecoderConfig = QWEN) -> TrainingSetup:
    settings = OptimizerSettings(LearningRate(1e-3))
    model = ModelChoice(config, dtype)  # type: ignore[arg-type]
    return TrainingSetup(model, DataChoice(16, 2), settings, max_norm=0.5, sums=sums, zero=zero)  # type: ignore[arg-type]


def same_bits(one: ThreadedRun, other: ThreadedRun) -> bool:
    same = one.losses() == other.losses()
    for pipeline in range(one.workers[0].role.num_pipelines):
        weights = one.weights(pipeline)
        same = same and all(np.array_equal(w, weights[name]) for name, w in other.weights(pipeline).items())
    return same


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_sums_and_zero_change_no_bit(dtype: str) -> None:
    """Tied ends, clipped gradients, two stages on a worker."""
    program = with_optimizer(interleaved(Layout(2, 4, 2, ("a", "a"), stage_rank=(0, 1, 0, 1))), norm=True)
    first = run_in_threads(program, training("transport", 0, dtype), 2)
    for sums, zero in [("ordered", 0), ("ordered", 1), ("transport", 1)]:
        assert same_bits(run_in_threads(program, training(sums, zero, dtype), 2), first), (sums, zero)


def state_bytes(run: ThreadedRun) -> list[int]:
    """Of weights, gradients and optimizer state, by worker."""
    found = []
    for worker in run.workers:
        kept = [t for slots in worker.stage_set.optimizer.flat_state for t in slots.values()]
        flats = [stage.flat for stage in worker.stages.values()]
        tensors = [*kept, *(flat.weights for flat in flats), *(flat.gradients for flat in flats)]
        found.append(sum(t.numel() * t.element_size() for t in tensors))
    return found


def test_each_pipeline_keeps_the_optimizer_state_of_its_own_slice() -> None:
    config = replace(QWEN, tied=False, width=64, ffn_width=256)
    program = with_optimizer(one_f_one_b(Layout(4, 1, 1, ("a",))), norm=True)
    run = run_in_threads(program, training("ordered", 1, "bf16", config), 1)
    num_parameters = sum(p.numel() for p in run.workers[0].parameters.values())
    for found in state_bytes(run):
        assert found <= 1.03 * (6 + 12 / 4) * num_parameters


# ---- over the WAN transport ------------------------------------------------------------------------------------------
class HeldLinks:
    """Everything arrives at once, as zeros; what is sent stays on its way until `release`."""

    def __init__(self) -> None:
        self.role = WorkerRole(with_optimizer(one_f_one_b(Layout(2, 1, 1, ("a",)))), 0)
        self.patience_s = 10.0
        self.sums_out: list[tuple[Handle, Any]] = []

    def recv_from(self, lane: int, pipeline: int, rank: int, tag: tuple[int, ...], buffer: Any, what: str) -> Handle:
        buffer[:] = 0
        return self._done(what)

    def send_to(self, lane: int, pipeline: int, rank: int, tag: tuple[int, ...], buffer: Any, what: str) -> Handle:
        if tag[-1] != SUMS:
            return self._done(what)
        handle = Handle(what)
        self.sums_out.append((handle, buffer))
        return handle

    def _done(self, what: str) -> Handle:
        handle = Handle(what)
        handle.finish()
        return handle


def held_sync(links: HeldLinks, device: Cpu) -> GradientSync:
    return GradientSync({0: TransportExchange(cast(WorkerLinks, links))}, device, "p0.s0 (a)")


def wait(pending: Sequence[Pending]) -> None:
    for each in pending:
        each.wait(60)


def test_sums_are_given_out_when_the_others_have_them() -> None:
    """They may be clipped in place from then on, and lie in the memory that is sent."""
    links = HeldLinks()
    sync = held_sync(links, Cpu())
    mine = torch.ones(8)
    sync.begin(0, 0, mine)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(sync.finish(0, 0, wait, whole=True)))
    thread.start()
    thread.join(0.2)
    assert not found, "half of the sums is still on its way"
    ((handle, buffer),) = links.sums_out
    assert buffer.view("float32").tolist() == [1.0] * 4
    handle.finish()
    thread.join(60)
    assert found
    assert mine.tolist() == [1.0] * 4 + [0.0] * 4


class Stuck(Cpu):
    """A device off which nothing comes."""

    def download(self, tensor: torch.Tensor, then: Callable[[torch.Tensor], None]) -> None:
        pass


def test_gradients_that_do_not_come_off_the_device_are_an_error_in_time() -> None:
    sync = held_sync(HeldLinks(), Stuck())
    sync.begin(3, 0, torch.empty(6, device="meta"))
    with pytest.raises(WorkerError, match=r"SYNC of step 3 on p0\.s0 .* copied from the device.* within 0\.05 s"):
        sync.finish(3, 0, lambda pending: pending[0].wait(0.05), whole=True)  # type: ignore[arg-type, return-value]


# ---- hosts that do not fit together ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            RankSoftware("b", "2.13.0", "2.28.9"),
            "a has torch 2.11.0 with NCCL 2.28.9, b has torch 2.13.0 with NCCL 2.28.9",
        ),
        (RankSoftware("b", "2.11.0", "2.27.5"), "b has torch 2.11.0 with NCCL 2.27.5"),
        (RankSoftware("b", "2.11.0", ""), "b has torch 2.11.0\\. "),
    ],
)
def test_other_versions_in_a_datacenter_are_refused_with_both_hosts(other: RankSoftware, says: str) -> None:
    first = RankSoftware("a", "2.11.0", "2.28.9")
    require_same(first, first._replace(host="c"))
    with pytest.raises(AtlasError, match=says):
        require_same(first, other)


def test_a_worker_with_another_torch_does_not_join() -> None:
    found = Handle("the address of the store")
    found.finish(buffer=memoryview(json.dumps(["127.0.0.1", 1, "secret", ["there", "1.0", ""]]).encode()))
    program = with_optimizer(one_f_one_b(Layout(2, 1, 1, ("a",))))
    assignment = Assignment(1, to_text(program), training("ordered", 0), 1)
    links = cast(WorkerLinks, SimpleNamespace(role=assignment.role, recv_from=lambda *args: found))
    group = PipelineGroup(assignment, links)
    with pytest.raises(AtlasError, match=r"there has torch 1\.0, .* has torch "):
        group.join(cast(StageSet, SimpleNamespace(open_exchanges=None)))
