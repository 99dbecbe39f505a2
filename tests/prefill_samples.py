"""Small models and in-memory stages for the tests of prefill and service."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from greedy_decoding import greedy
from loopback_transport import Loopback
from torch import Tensor

from atlas.runtime.device import Device
from atlas.runtime.hardware import make_device
from atlas.runtime.models.block import KvSlab
from atlas.runtime.models.config import DecoderConfig, gpt
from atlas.runtime.models.decoder import Decoder, LayerRange, build
from atlas.runtime.models.generate import run_cut
from bubbletea.prefill.arena import Arena
from bubbletea.prefill.engine import PrefillEngine
from bubbletea.prefill.job import PrefillPiece, PrefillTask
from bubbletea.prefill.shard import ModelShard, Served
from bubbletea.prefill.staging import Staged

LLAMA = DecoderConfig(
    family="llama", num_layers=4, width=64, num_heads=4, num_kv_heads=2, head_width=16, ffn_width=128,
    vocabulary=256, max_length=8192, init_std=0.2,
)  # fmt: skip
QWEN = DecoderConfig(
    family="qwen3", num_layers=4, width=64, num_heads=4, num_kv_heads=2, head_width=16, ffn_width=128,
    vocabulary=256, max_length=8192, qk_norm=True, tied=True, init_std=0.2,
)  # fmt: skip
GPT = gpt(num_layers=4, width=64, num_heads=4, vocabulary=256, max_length=8192)
FAMILIES = {"llama": LLAMA, "qwen3": QWEN, "gpt2": GPT}


@dataclass
class Collector:
    """An outlet that assembles the pieces, like the service."""

    served: Served
    length: int
    slabs: dict[int, Tensor] = field(default_factory=dict)
    logits_V: Tensor | None = None  # noqa: N815
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    """(layer, first, last) in order of arrival."""
    ran_pieces: int = 0
    finished: int = 0
    failures: list[str] = field(default_factory=list)
    is_full: bool = False

    def kv(self, task: PrefillTask, piece: PrefillPiece, kv: Staged) -> None:
        self.spans.append((piece.layer, piece.first, piece.last))
        config = self.served.config
        shape = (2, config.num_kv_heads, self.length + 64, config.head_width)
        slab = self.slabs.setdefault(piece.layer, torch.zeros(shape))
        slab[:, :, piece.first : piece.last] = kv()

    def logits(self, task: PrefillTask, logits: Staged) -> None:
        self.logits_V = logits()

    def ran(self, task: PrefillTask, piece: PrefillPiece, predicted_ns: int, took_ns: int) -> None:
        self.ran_pieces += 1

    def done(self, task: PrefillTask) -> None:
        self.finished += 1

    def failed(self, task: PrefillTask, why: str) -> None:
        self.failures.append(why)


def make_stages(
    served: Served, split: Sequence[int], outlet: Collector, arena_bytes: int = 64 << 20, device: str = "cpu"
) -> list[PrefillEngine]:
    nodes = Loopback.network(*(f"dc/{s}" for s in range(len(split))))
    return [
        PrefillEngine(ModelShard(served, cut, Arena(arena_bytes, 1 << 30, device)), outlet, node)
        for cut, node in zip(served.cuts(tuple(split)), nodes, strict=True)
    ]


def even_ends(length: int, chunk: int) -> tuple[int, ...]:
    """Chunks of `chunk` tokens; the last one may be shorter."""
    return (*range(chunk, length, chunk), length)


def num_tasks(engine: PrefillEngine) -> int:
    return len(engine._offers)


def offer_everywhere(stages: Sequence[PrefillEngine], tokens: Sequence[int], chunk: int, job: int = 1) -> None:
    peers = tuple((f"dc/{s}", "127.0.0.1", 0) for s in range(len(stages)))
    ends = even_ends(len(tokens), chunk)
    for s, stage in enumerate(stages):
        stage.offer(PrefillTask(job, 0, len(tokens), 0, ends, s, 0, peers), tokens if s == 0 else ())


def step(engine: PrefillEngine, fits: Callable[[PrefillPiece], bool] = lambda piece: True) -> bool:
    """Run one piece; False if there was none."""
    device = device_at(str(engine.shard.arena.device))
    flight = engine.step(lambda work, piece: device.begin(work, 0, 0), fits)
    if flight is not None:
        span = flight.running.wait()
        engine.settle(flight, span.end_ns - span.start_ns)
    return flight is not None


def run_all(
    stages: Sequence[PrefillEngine],
    may_run: Callable[[int], bool] = lambda stage: True,
    fits: Callable[[PrefillPiece], bool] = lambda piece: True,
) -> None:
    """Step the stages until no stage has a task. `may_run` is called before every step, `fits` for every piece or part
    of one."""
    for _ in range(100_000):
        if not any(map(num_tasks, stages)):
            return
        for number, stage in enumerate(stages):
            if may_run(number):
                step(stage, fits)
    raise AssertionError("the stages did not finish")


def greedy_alone(decoder: Decoder, tokens: Sequence[int], num_tokens: int) -> list[int]:
    with torch.inference_mode():
        return greedy(decoder, torch.tensor([tokens]), num_tokens)[0, len(tokens) :].tolist()


def greedy_after(collector: Collector, decoder: Decoder, num_tokens: int) -> list[int]:
    """Decode from the handed-over keys and values."""
    assert collector.logits_V is not None
    cache = {i: KvSlab(kv[0][None], kv[1][None], collector.length) for i, kv in collector.slabs.items()}
    found = [int(collector.logits_V.argmax())]
    with torch.inference_mode():
        for at in range(collector.length, collector.length + num_tokens - 1):
            logits = run_cut(decoder, torch.tensor([[found[-1]]]), at, cache)  # type: ignore[arg-type]
            found.append(int(logits.argmax()))
    return found


@functools.cache
def device_at(place: str) -> Device:
    return make_device(place)


@functools.cache
def whole(served: Served) -> Decoder:
    return build(served.config, LayerRange.whole(served.config), seed=served.seed)
