"""The two users of one device: a stage of GPT-B that trains, and unlimited prefill of a Llama-3-8B. Tiny versions of
both for a trial on the CPU.

It has models and memory, not the times at which they run.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import torch
from torch import Tensor

from atlas.ir.program import Kind, Op
from atlas.runtime.device import Device, Span
from atlas.runtime.models.config import DecoderConfig, gpt
from atlas.runtime.models.task import DecoderTask
from atlas.runtime.optimizer import FlatSlice, make_optimizer
from atlas.runtime.recipe import LearningRate, OptimizerSettings
from atlas.runtime.stage import Stage
from atlas.runtime.waits import SharedDevice
from bubbletea.prefill.arena import Arena
from bubbletea.prefill.engine import PrefillEngine
from bubbletea.prefill.filling import WaitFilling
from bubbletea.prefill.guard import Guard
from bubbletea.prefill.job import PrefillPiece, PrefillTask
from bubbletea.prefill.piece_times import PieceTimes
from bubbletea.prefill.shard import ModelShard, Served
from bubbletea.prefill.staging import Staged
from bubbletea.prefill.throttle import Throttle
from bubbletea.prefill.warming import warm_up
from bubbletea.windows.bubbles import MAX_RISK, SWITCH_NS
from common.rhythm import MICROBATCHES, MIDDLE, STAGES, Rhythm

QUEUED = 8
BUDGET, PIECE_NS = 0.005, 5_000_000
"""The share by which training may become slower, and the most that a wait that ends early can cost."""


@dataclass(frozen=True)
class Scene:
    """The models that are trained and served."""

    device: str
    trained: DecoderConfig
    length: int
    """Length of the training sequences."""
    dtype: torch.dtype
    served: Served
    prompt: int
    chunk: int
    arena_bytes: int
    workspace_bytes: int


GPT_B = gpt(num_layers=12, width=8192, num_heads=64, vocabulary=50257, max_length=6144)
LLAMA_3_8B = DecoderConfig(
    family="llama", num_layers=32, width=4096, num_heads=32, num_kv_heads=8, head_width=128, ffn_width=14336,
    vocabulary=128256, max_length=8192, norm="rms", norm_eps=1e-5, positions="rope", qkv_bias=False, out_bias=False,
    mlp_bias=False, gated=True, activation="silu", tied=False, rope_theta=500000.0,
)  # fmt: skip
REAL = Scene(
    "cuda:0", GPT_B, 6144, torch.bfloat16, Served(LLAMA_3_8B, dtype="bfloat16"), 4096, 2048, 24 << 30, 4 << 30
)  # fmt: skip
TINY = Scene(
    "cpu",
    gpt(num_layers=12, width=128, num_heads=4, vocabulary=256, max_length=512),
    512,
    torch.float32,
    Served(replace(LLAMA_3_8B, width=64, num_heads=2, num_kv_heads=1, head_width=32, ffn_width=128, vocabulary=256)),
    256,
    128,
    64 << 20,
    64 << 20,
)


class Trainer:
    """The middle stage. Its inputs are a few random tensors, reused: their values do not matter."""

    def __init__(self, scene: Scene, device: Device) -> None:
        self.device = device
        task = DecoderTask(
            scene.trained, (4, 4, 4), 1, scene.length, MICROBATCHES, _no_data, dtype=scene.dtype, device=device.place
        )  # fmt: skip
        self.stage = Stage(task, MIDDLE, STAGES, 0, 1.0 / MICROBATCHES)
        settings, slices = OptimizerSettings(LearningRate(1e-5), "adamw"), [FlatSlice.whole(self.stage.flat)]
        self.optimizer = make_optimizer(settings, self.stage.named_parameters, slices)
        shape = (1, scene.length, scene.trained.width)
        self.x = torch.randn(shape, device=device.place).to(scene.dtype)
        self.gradient = torch.randn(shape, device=device.place).to(scene.dtype) * 1e-4
        self._slots = 0

    def op(self, op: Op) -> Span:
        slot, stage = op.microbatch + self._slots, self.stage
        work = {
            Kind.F: lambda: stage.forward(slot, self.x.clone(), keep=False),
            Kind.R: lambda: stage.recompute(slot),
            Kind.B: lambda: stage.backward(slot, self.gradient),
            Kind.I: lambda: stage.backward_input(slot, self.gradient),
            Kind.W: lambda: stage.backward_weight(slot),
        }[op.kind]
        return self._ran(work)

    def step(self) -> Span:
        def update() -> None:
            self.stage.adopt()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._slots += MICROBATCHES
            self.stage.gradients.begin(self._slots)

        return self._ran(update)

    def _ran(self, work: Callable[[], object]) -> Span:
        running = self.device.begin(work, 0, 0)
        span = running.wait()
        self.device.ran(span)
        return span


def _no_data(slot: int, pipeline: int) -> tuple[Tensor, Tensor]:
    raise AssertionError("a middle stage reads no data")


def measure_ops(trainer: Trainer, repeats: int = 3) -> dict[Kind, int]:
    """How long each kind of op takes, alone on the GPU."""
    took: dict[Kind, list[int]] = defaultdict(list)
    for number in range(repeats + 1):
        for m in range(MICROBATCHES):
            kinds = [Kind.F, Kind.R, Kind.B] if m % 2 else [Kind.F, Kind.R, Kind.I, Kind.W]
            for kind in kinds:
                span = trainer.op(Op(kind, MIDDLE, m))
                if number:
                    took[kind].append(span.end_ns - span.start_ns)
        span = trainer.step()
        took[Kind.STEP].append(span.end_ns - span.start_ns)
    return {kind: int(statistics.median(spans)) for kind, spans in took.items()}


class Mouth:
    """Receives the results: waits for every copy of keys and values, like the sending thread, and counts."""

    def __init__(self) -> None:
        self.kv_bytes = self.prompts = 0
        self._lock = threading.Condition()
        self._staged: list[Staged] = []
        threading.Thread(target=self._swallow, daemon=True).start()

    @property
    def is_full(self) -> bool:
        return False

    def kv(self, task: PrefillTask, piece: PrefillPiece, kv: Staged) -> None:
        with self._lock:
            self._staged.append(kv)
            self._lock.notify()

    def _swallow(self) -> None:
        while True:
            with self._lock:
                while not self._staged:
                    self._lock.wait()
                batch, self._staged = self._staged, []
            for staged in batch:
                self.kv_bytes += staged().nbytes

    def logits(self, task: PrefillTask, logits: Staged) -> None: ...

    def ran(self, task: PrefillTask, piece: PrefillPiece, predicted_ns: int, took_ns: int) -> None: ...

    def done(self, task: PrefillTask) -> None:
        self.prompts += 1

    def failed(self, task: PrefillTask, why: str) -> None:
        raise AssertionError(why)


class Prefill:
    """Unlimited prompts."""

    def __init__(self, scene: Scene, device: Device) -> None:
        served = scene.served
        arena = Arena(scene.arena_bytes, scene.workspace_bytes, device.place)
        shard = ModelShard(served, served.cuts((served.config.num_layers,))[0], arena)
        pace = PieceTimes(served.config)
        warm_up(shard, pace, scene.chunk)
        self.scene, self.mouth = scene, Mouth()
        self.engine = PrefillEngine(shard, self.mouth, pace=pace)
        self.spans: list[Span] = []
        self._shared = SharedDevice(device, self.spans.append)
        threading.Thread(target=self._offer, daemon=True).start()

    def filling(self, rhythm: Rhythm, throttle: Throttle | None) -> WaitFilling:
        """A new guard, as cautious as in the service."""
        risk = min(MAX_RISK, BUDGET * rhythm.period_ns / (rhythm.num_waits * PIECE_NS))
        return WaitFilling(self.engine, Guard(risk), self._shared, SWITCH_NS, throttle=throttle)

    @property
    def kv_bytes_per_token(self) -> int:
        return self.scene.served.config.num_layers * self.scene.served.kv_bytes_per_layer_token

    def _offer(self) -> None:
        """Offer prompts from another thread, like the service."""
        length, chunk = self.scene.prompt, self.scene.chunk
        ends = (*range(chunk, length, chunk), length)
        prompts = np.random.default_rng(0).integers(0, self.scene.served.config.vocabulary, (16, length)).tolist()
        for number in count():
            while number - self.mouth.prompts >= QUEUED:
                time.sleep(0.01)
            task = PrefillTask(number, 0, length, 0, ends, 0, number)
            self.engine.offer(task, prompts[number % len(prompts)])
