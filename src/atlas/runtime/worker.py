"""The worker: executes its ops of a Program in order, repeatedly, and nothing else. Every decision was made before it
started.

It waits for inputs, runs ops on its device, sends outputs and records times. It knows its own ops, stages and role; not
the cluster, not the costs of others, not who started it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from atlas.errors import DivergedRunError, ProgramError
from atlas.ir.program import BACKWARD, BACKWARDS, FORWARD, NUM_KINDS, PER_MICROBATCH, Kind, Op
from atlas.ir.text import program_id
from atlas.runtime.assignment import Assignment
from atlas.runtime.checkpoint.manifest import SaveId
from atlas.runtime.circuits import WorkerCircuits
from atlas.runtime.device import Device, Span
from atlas.runtime.kineto import named
from atlas.runtime.links import PeerAddress, WorkerLinks
from atlas.runtime.models.decoder import TIED_EMBEDDING, TIED_HEAD
from atlas.runtime.op_queue import OpQueue
from atlas.runtime.pipeline_group import PipelineGroup
from atlas.runtime.record import Recorder, StepRecord
from atlas.runtime.saving import CheckpointSaving, resume
from atlas.runtime.stage_set import StageSet
from atlas.runtime.start_times import StartTimes
from atlas.runtime.sync import GlobalNorm, TiedEnds
from atlas.runtime.topology import require_runnable
from atlas.runtime.transfers import StageInput, Transfers
from atlas.runtime.waits import Filler, Pending, Position, Wait, Waits, WorkerFacts

if TYPE_CHECKING:
    from atlas.runtime.tensor_parallel.leader import Followers

T = TypeVar("T")


class ProgramPass(NamedTuple):
    """One pass through the Program."""

    number: int
    first_step: int
    """Of the training."""
    start_ns: int
    """No op begins earlier; 0 after the first pass."""
    record: StepRecord


class Worker:
    """Listens at once, so that peers can connect; then `connect`, then `run`."""

    def __init__(
        self,
        assignment: Assignment,
        device: Device,
        *,
        followers: Followers | None = None,
        filler: Filler | None = None,
        on_step: Callable[[StepRecord], None] = lambda record: None,
        on_saved: Callable[[SaveId], None] = lambda id: None,
        on_copied: Callable[[SaveId], None] = lambda id: None,
        circuits: WorkerCircuits | None = None,
        times: StartTimes | None = None,
    ) -> None:
        """`followers`: the other processes that share its stages, with tensor parallelism. `times`: of its start."""
        self.assignment, self.device, self.training = assignment, device, assignment.training
        self.circuits = circuits if circuits is not None and circuits.has_ring else None
        self._on_copied = on_copied
        self.role = assignment.role
        self.program = program = self.role.program
        require_runnable(program)
        self.ops = program.ops(assignment.worker)
        self._has_norm = any(op.kind == Kind.NORM for op in self.ops)
        self._require_norm()
        self.compute_ns = np.array(assignment.compute_ns, np.int64).reshape(-1, NUM_KINDS)
        if not len(self.compute_ns):
            self.compute_ns = np.zeros((program.num_stages, NUM_KINDS), np.int64)
        self.times = times or StartTimes()
        self.stage_set = self._hold(followers)
        self.times.note("stages")
        self.task, self.stages = self.stage_set.task, self.stage_set.stages
        self.saving = None
        if assignment.save is not None:
            resume(assignment.save, self.stage_set)
            self.saving = CheckpointSaving(assignment.save, self.stage_set, on_saved)
            self.times.note("checkpoint")
        self.links = WorkerLinks(self.role, assignment, direct=device.is_thread and filler is None and circuits is None)
        shape, dtype = self.task.activation_shape, self.task.dtype
        self.transfers = Transfers(self.links, device, shape, dtype, self._needs(), circuits)
        self.pipeline_group = PipelineGroup(assignment, self.links)
        self.tied, self.norm = TiedEnds(self.links), GlobalNorm(self.links)
        self.waits = Waits(assignment.patience_s, filler)
        self.recorder = Recorder(on_step)
        self.last_step = assignment.first_step + assignment.num_steps - 1
        """May be lowered while it runs, but not below a step that has begun (`next_step`)."""
        self.next_step = assignment.first_step
        """The first step that has not begun."""
        self._recomputed = {(op.stage, op.microbatch) for op in self.ops if op.kind == Kind.R}
        self._queue = OpQueue(device)
        self.names_ops = False
        """Whether torch.profiler records its ops by name."""
        self._dispatch: dict[Kind, Callable[[Op, int, ProgramPass], None]] = {
            Kind.F: self._forward,
            Kind.R: self._recompute,
            Kind.B: self._backward,
            Kind.I: self._backward,
            Kind.W: self._backward_weight,
            Kind.SYNC: self._sync,
            Kind.NORM: self._norm,
            Kind.STEP: self._step,
        }

    def _require_norm(self) -> None:
        if self.training.max_norm is not None and not self._has_norm:
            raise ProgramError(
                f"program {self.program.name!r}: gradients are clipped at {self.training.max_norm:g}, but no NORM "
                "computes their norm: add one before each STEP (with_optimizer(..., norm=True)), or do not clip"
            )

    def _hold(self, followers: Followers | None) -> StageSet:
        if followers is None:
            return StageSet(self.assignment, self.role, self.device)
        # DTensor: 1 s, and most workers do not need it.
        from atlas.runtime.tensor_parallel.leader import LeaderStageSet

        return LeaderStageSet(self.assignment, self.role, self.device, followers)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """This process's part of them, by name."""
        return self.stage_set.parameters

    # ---- start, run and end ------------------------------------------------------------------------------------------
    def connect(self, places: Sequence[PeerAddress], dial_for: Sequence[PeerAddress] = ()) -> None:
        self.links.connect(places, dial_for)
        self.pipeline_group.join(self.stage_set)
        if self.saving is not None:
            self.saving.start_copying(self.links, self._on_copied)
        self.times.note("connections")
        self.stage_set.warm_up()
        self.times.note("warm-up")
        role, filler, id = self.role, self.assignment.filler, program_id(self.assignment.program)
        host, security = "127.0.0.1" if filler is None else filler.host, self.links.main.security
        facts = WorkerFacts(
            role.name, role.datacenter, role.number, self.program, self.ops, self.compute_ns, id, host, security
        )
        self.waits.attach(facts, self.device, lambda span: self.recorder.current.note_fill(span))

    def run(self, start_ns: int = 0, may_begin: Callable[[int], None] = lambda step: None) -> None:
        """Run all steps, from `start_ns` on the monotonic clock. All peers must have connected.

        `may_begin` is called before each step and may block.
        """
        self.transfers.post_ahead()
        time.sleep(max(0, start_ns - time.monotonic_ns()) / 1e9)
        number = 0
        while self.next_step <= self.last_step:
            may_begin(self.next_step)
            if self.next_step > self.last_step:
                break
            self._run_pass(number, start_ns if number == 0 else 0)
            number += 1
        self._queue.settle()
        self.recorder.finish(self.waits.patience_s)
        self.waits.close()
        if self.saving is not None:
            if number:
                self.saving.save(self.next_step)
            self.saving.close()

    def _run_pass(self, number: int, start_ns: int) -> None:
        now = ProgramPass(number, self.next_step, start_ns, self.recorder.begin(self.next_step))
        self.next_step += self.program.num_iterations
        if self.ops and self.ops[0].stage > 0:  # it first waits for another worker
            self._read_ahead(now.first_step)
        for index, op in enumerate(self.ops):
            self._dispatch[op.kind](op, index, now)
            self.transfers.raise_failed()
            self.recorder.flush()
        self._end_pass(now)

    def _read_ahead(self, step: int) -> None:
        """Read the data of a step of the run, while the device computes or waits."""
        if step <= self.last_step:
            first = step * self.program.num_microbatches
            for stage in self.stages.values():
                stage.look_ahead(range(first, first + self.program.num_microbatches))

    def _end_pass(self, now: ProgramPass) -> None:
        """Report the pass when its last op is done; the losses are copied to the host without waiting for them."""
        stage = self.stages.get(self.program.num_stages - 1)
        losses = [] if stage is None else stage.pop_losses(self.next_step * self.program.num_microbatches - 1)
        host = self.device.buffer((len(losses),), torch.float32)

        def copy() -> None:
            if losses:
                host.copy_(torch.stack(losses), non_blocking=True)

        def report(span: Span) -> None:
            now.record.losses = host.tolist()
            _require_finite(now.record.losses, now.first_step + 1)
            now.record.tokens = len(losses) * self.task.microbatch_size * self.task.length
            self.recorder.end(now.record)

        self._queue.launch(copy, 0, 0, report)

    def close(self) -> None:
        """Close every connection at once."""
        self.pipeline_group.close()
        self.links.close()
        self.device.close()

    # ---- ops: each waits for its input, runs, sends its output -------------------------------------------------------
    def _forward(self, op: Op, index: int, now: ProgramPass) -> None:
        stage, slot, x, ready_ns = self.stages[op.stage], self._slot(op, now), None, now.start_ns
        if op.stage > 0:
            x, ready_ns = self._receive(op, FORWARD, index, now)
        keep = (op.stage, op.microbatch) not in self._recomputed
        y = self._launch(op, index, now, ready_ns, lambda: stage.forward(slot, x, keep=keep), sends=not stage.is_last)
        if not stage.is_last:
            self.transfers.send(op, slot, now.number, y, now.record)

    def _recompute(self, op: Op, index: int, now: ProgramPass) -> None:
        stage, slot = self.stages[op.stage], self._slot(op, now)
        self._launch(op, index, now, now.start_ns, lambda: stage.recompute(slot))

    def _backward(self, op: Op, index: int, now: ProgramPass) -> None:
        stage, slot, gradient, ready_ns = self.stages[op.stage], self._slot(op, now), None, now.start_ns
        if not stage.is_last:
            gradient, ready_ns = self._receive(op, BACKWARD, index, now)
        half = stage.backward if op.kind == Kind.B else stage.backward_input
        sends = not stage.is_first
        x_gradient = self._launch(op, index, now, ready_ns, lambda: half(slot, gradient), sends=sends)
        if x_gradient is not None:
            self.transfers.send(op, slot, now.number, x_gradient, now.record)
        self._begin_sync(op, now)

    def _backward_weight(self, op: Op, index: int, now: ProgramPass) -> None:
        stage, slot = self.stages[op.stage], self._slot(op, now)
        self._launch(op, index, now, now.start_ns, lambda: stage.backward_weight(slot))
        self._begin_sync(op, now)

    # ---- the end of an iteration -------------------------------------------------------------------------------------
    def _begin_sync(self, op: Op, now: ProgramPass) -> None:
        """Start to sum a stage's gradients when its last one is computed; if circuits change, at SYNC."""
        if self.circuits is None and self.stages[op.stage].gradients.num_added == self.program.num_microbatches:
            step = now.first_step + op.microbatch // self.program.num_microbatches
            self.stage_set.begin_sum(step, op.stage)

    def _sync(self, op: Op, index: int, now: ProgramPass) -> None:
        step, wait, moments = now.first_step + op.microbatch, self._waiter(index, now), [now.start_ns]
        if self.circuits is not None:
            self._queue.settle()
            ring = self.circuits.ring(step)
            wait([ring])
            moments.append(ring.end_ns)
            for number in self.stages:
                self.stage_set.begin_sum(step, number)
        for number, stage in self.stages.items():
            if stage.gradients.num_added != self.program.num_microbatches:
                raise ProgramError(f"{self._who(op)}: its backwards of stage {number} come later; put them before it")
            moments.append(self.stage_set.finish_sum(step, number, wait))
        if self.training.model.config.tied:
            moments.append(self._join_tied(step, wait))
        work = self.stage_set.begin_norm if self._has_norm else (lambda: None)
        self._launch(op, index, now, max(moments), work)
        self._give_back_ring(op, step)

    def _give_back_ring(self, op: Op, step: int) -> None:
        """After SYNC; with ZeRO-1 after STEP, which exchanges weights, and the optimizer state for a save."""
        if self.circuits is not None and (op.kind == Kind.STEP) == self.stage_set.zero:
            self._queue.settle()
            self.circuits.summed(step)

    def _join_tied(self, step: int, wait: Wait) -> int:
        here = [name for name in (TIED_EMBEDDING, TIED_HEAD) if name in self.parameters]
        if len(here) == 2:
            self.stage_set.join_tied()
        if len(here) != 1:
            return 0
        whole, arrived_ns = self.tied.join(step, here[0], self.stage_set.tied_gradient(here[0]), wait)
        self.stage_set.adopt_tied(here[0], whole)
        return arrived_ns

    def _norm(self, op: Op, index: int, now: ProgramPass) -> None:
        step = now.first_step + op.microbatch
        self._read_ahead(step + 1)
        self._queue.settle()
        norm, arrived_ns = self.norm.take(step, self.stage_set.squares(), self._waiter(index, now))
        now.record.norms.append(norm)
        if not math.isfinite(norm):
            raise _diverged(step + 1, f"the gradients' global norm is {norm}")
        limit = self.training.max_norm
        work = (lambda: None) if limit is None else (lambda: self.stage_set.clip(norm, limit))
        self._launch(op, index, now, max(now.start_ns, arrived_ns), work)

    def _step(self, op: Op, index: int, now: ProgramPass) -> None:
        if any(parameter.grad is None for parameter in self.parameters.values()):
            raise ProgramError(f"{self._who(op)}: no SYNC before it; every STEP needs one (see `with_optimizer`)")
        num_done = now.first_step + op.microbatch + 1
        saving = self.saving if self.saving is not None and self.saving.is_due(num_done) else None
        if saving is not None:
            self._require_finite(num_done)
        self._launch(op, index, now, now.start_ns, lambda: self.stage_set.step(num_done))
        if saving is not None:
            saving.save(num_done)
        self._give_back_ring(op, num_done - 1)

    def _require_finite(self, step: int) -> None:
        """Raise before a save of a step whose loss is not finite: this worker's part of it is then never written, so no
        such save is complete. Waits for the device."""
        stage = self.stages.get(self.program.num_stages - 1)
        if stage is not None:
            _require_finite(stage.losses.values(), step)

    # ---- inputs ------------------------------------------------------------------------------------------------------
    def _receive(self, op: Op, direction: int, index: int, now: ProgramPass) -> tuple[Tensor, int]:
        need = StageInput(direction, op.stage, self._slot(op, now))
        arrival = self.transfers.arrival(need)
        if arrival is not None:
            self._wait(index, now, [arrival])
        tensor, arrive_ns = self.transfers.take(need)
        self.transfers.post_ahead()
        now.record.arrive_ns[self.transfers.transfer(direction, need.boundary, op.microbatch)] = arrive_ns
        return tensor, max(now.start_ns, arrive_ns)

    def _needs(self) -> Iterator[StageInput]:
        """The inputs from the network over all steps, in the order in which ops need them."""
        program, last = self.program, self.program.num_stages - 1
        step, end = self.assignment.first_step, self.assignment.first_step + self.assignment.num_steps
        while step < end:
            for op in self.ops:
                slot = op.microbatch + step * program.num_microbatches
                if op.kind == Kind.F and op.stage > 0 and program.stage_rank[op.stage - 1] != self.role.rank:
                    yield StageInput(FORWARD, op.stage, slot)
                elif op.kind in BACKWARDS and op.stage < last and program.stage_rank[op.stage + 1] != self.role.rank:
                    yield StageInput(BACKWARD, op.stage, slot)
            step += program.num_iterations

    def _waiter(self, index: int, now: ProgramPass) -> Wait:
        return lambda handles: self._wait(index, now, handles)

    def _wait(self, index: int, now: ProgramPass, handles: Sequence[Pending]) -> None:
        """A filler gets a device that is idle."""
        if self.waits.has_filler:
            self._queue.settle()
        self.waits.until(Position(now.first_step, index), handles)

    # ---- helpers -----------------------------------------------------------------------------------------------------
    def _launch(
        self, op: Op, index: int, now: ProgramPass, ready_ns: int, work: Callable[[], T], *, sends: bool = False
    ) -> T:
        """Queue an op on the device; its span is noted when it is done. `sends`: its output goes to another stage."""

        def note(span: Span) -> None:
            now.record.note_op(span)
            if sends:
                self.transfers.note_ready(op, span.end_ns, now.record)
            self.waits.ran(Position(now.first_step, index), span)

        if self.names_ops:
            work = named(str(op), work)
        return self._queue.launch(work, int(self.compute_ns[op.stage, op.kind]), ready_ns, note)

    def _slot(self, op: Op, now: ProgramPass) -> int:
        """The number of a microbatch over all steps of the training."""
        assert op.kind in PER_MICROBATCH
        return op.microbatch + now.first_step * self.program.num_microbatches

    def _who(self, op: Op) -> str:
        return f"{op} on {self.role.who}"


def _diverged(step: int, what: str) -> DivergedRunError:
    return DivergedRunError(f"the training has diverged at step {step}: {what}", step)


def _require_finite(losses: Iterable[float], step: int) -> None:
    wrong = next((loss for loss in losses if not math.isfinite(loss)), None)
    if wrong is not None:
        raise _diverged(step, f"the loss is {wrong}")
