"""Builds a service from its settings: windows, admission, connections, memory, decoder, HTTP.

The only module that knows all parts. Does not start workers: `command` (or a test) does, with the address and the
token.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from atlas.priority import lower_priority
from atlas.runtime.models.decoder import LayerRange
from atlas.spec.job import Model
from atlas.wan.security.credentials import Security
from bubbletea.admit.aims import Aims
from bubbletea.admit.lanes import build_lanes
from bubbletea.admit.records import PrefillLane
from bubbletea.constants import MIB, SLOWDOWN_BUDGET
from bubbletea.costs import ELEMENT_BYTES, LEAST_TOKENS, PCIE_BYTES_PER_S, LayerTime, PrefillCosts, grain_of
from bubbletea.handoff.decode import DecodeEngine
from bubbletea.handoff.kv_store import KvStore
from bubbletea.kv_server import KvServer
from bubbletea.prefill.arena import WORKSPACE_BYTES, Arena
from bubbletea.prefill.messages import WorkerOrder
from bubbletea.prefill.piece_times import PieceTimes
from bubbletea.prefill.shard import ModelShard, Served
from bubbletea.prefill.warming import warm_up
from bubbletea.serve.api import Api
from bubbletea.serve.auth import ApiKeys
from bubbletea.serve.connections import WorkerConnections
from bubbletea.serve.dispatch import Dispatcher
from bubbletea.serve.metrics import ServiceMetrics
from bubbletea.serve.planner import Planner
from bubbletea.serve.prefix_store import PrefixStore
from bubbletea.serve.roster import Roster
from bubbletea.serve.service import Service
from bubbletea.serve.slowdown_limit import SlowdownLimit
from bubbletea.serve.tokens import ServedTokenizer
from bubbletea.serve.worker_windows import WorkerWindows
from bubbletea.windows.bubbles import Forecast

LEAST_NS = 50_000
"""Shortest time of a layer."""
ASSUMED_NIC_BYTES_PER_S, ASSUMED_HOP_NS = 12.5e9, 1_000_000
"""Of the network between the workers of a lane: 100 Gbit/s, and the latency of a message. Assumed, not measured."""


@dataclass(frozen=True)
class ServiceSettings:
    """The operator's settings; memory in bytes."""

    name: str
    served: Served
    split: int | None = None
    """Workers that share one copy of the model; None: as few as have enough memory."""
    chunk: int = 512
    arena_bytes: int = 256 * MIB
    """Per worker: weights, keys and values, activations between slices."""
    workspace_bytes: int = WORKSPACE_BYTES
    """Per worker: temporaries of a running slice."""
    store_bytes: int = 1024 * MIB
    """Host memory for keys and values until they are decoded or fetched: of the service, or of the workers of a lane
    together."""
    prefix_bytes: int = 256 * MIB
    """Host memory of the service: the prefix cache."""
    decodes: bool = True
    """With an embedded decoder, which holds the whole model; without one, every request is a hand-off."""
    deadline_s: float = 30.0
    """For requests that set none."""
    patience_s: float = 30.0
    """An admitted prefill without progress for this long is restarted."""
    budget: float = SLOWDOWN_BUDGET
    """The share by which prefill may slow training."""
    aims: Aims = field(default_factory=Aims)
    nixl_unencrypted: bool = False
    """Decode engines of other hosts may read keys and values by NIXL, which does not encrypt."""


@dataclass(frozen=True)
class WorkersAt:
    """Where workers of a run connect."""

    host: str = "127.0.0.1"
    port: int = 0
    security: Security | None = None
    """The run's certificates."""


@dataclass
class AssembledService:
    """A service, ready to `start` on a running event loop."""

    settings: ServiceSettings
    token: str
    lanes: list[PrefillLane]
    connections: WorkerConnections
    dispatcher: Dispatcher
    kv_server: KvServer
    service: Service
    api: Api

    async def start(
        self,
        folder: Path,
        handoff: tuple[str, int] = ("127.0.0.1", 0),
        *,
        workers: WorkersAt | None = None,
    ) -> str:
        """Listens for workers (None: in `folder`, private to this user) and for decode engines; returns the workers'
        address."""
        (folder / "token").touch(mode=0o600)
        (folder / "token").write_text(self.token)
        if workers is not None and workers.security is not None:
            self.kv_server.context = workers.security.server_context
        await self.kv_server.start(*handoff)
        self.dispatcher.start()
        if workers is None:
            return await self.connections.start(folder / "workers.sock")
        return await self.connections.listen(workers.host, workers.port, workers.security)

    def step_back(self) -> None:
        """Beside training on the same host: the event loop, whose thread calls this, and the decoder get a low
        priority, and so do threads that they start."""
        torch.set_num_threads(1)  # for copies of keys and values: other threads would spin between two of them
        lower_priority()
        if self.service.decoder is not None:
            lower_priority(self.service.decoder.thread_id)

    async def close(self) -> None:
        await self.dispatcher.close()
        await self.connections.close()
        await self.kv_server.close()
        if self.service.decoder is not None:
            self.service.decoder.close()


def assemble(settings: ServiceSettings, windows: WorkerWindows, keys: ApiKeys, token: str = "") -> AssembledService:
    served = settings.served
    token = token or secrets.token_hex(32)
    layer = windows.pace or windows.layer or calibrated(served, settings.chunk)
    costs = costs_of(served, layer, windows.head_ns)
    # Admission assumes two bytes per element: a model with four needs twice the arena.
    scale = served.torch_dtype.itemsize / ELEMENT_BYTES
    pattern = replace(windows.pattern, memory_bytes=(windows.pattern.memory_bytes / scale).astype("int64"))
    lanes = build_lanes(
        pattern, costs, split=settings.split, num_ranks=windows.num_ranks, chunk=settings.chunk, scale=scale
    )
    slice_ns = costs.layer(settings.chunk, served.config.max_length // 2)
    forecast = Forecast(pattern, budget=settings.budget, slice_ns=slice_ns, guarded=True)
    planner = Planner(
        forecast,
        costs,
        lanes,
        windows.window_of,
        _chunks(settings.chunk),
        learns_costs=windows.pace is None,
        weights=keys.weights,
        aims=settings.aims,
    )
    planner.warm_up()
    orders = _orders(settings, windows, lanes, forecast.risk)
    roster = Roster(orders, windows.numbers, windows.plan, windows.device)
    connections = WorkerConnections(token, roster.find, served.id)
    store, metrics = KvStore(served, settings.store_bytes, keys.weights), ServiceMetrics(settings.name)
    prefixes = PrefixStore(settings.prefix_bytes if settings.decodes else 0, keys.weights)
    limit = SlowdownLimit(settings.budget, metrics.iterations.observe) if windows.trains else None
    dispatcher = Dispatcher(connections, planner, store, prefixes, metrics, settings.patience_s, limit=limit)
    kv_server = KvServer(store, token)
    text = ServedTokenizer.of_folder(served.folder) if served.folder is not None else ServedTokenizer.of_bytes()
    decoder = DecodeEngine(served) if settings.decodes else None
    service = Service(settings.name, served, text, dispatcher, decoder, kv_server, metrics, settings.deadline_s)
    return AssembledService(settings, token, lanes, connections, dispatcher, kv_server, service, Api(service, keys))


def _chunks(longest: int) -> tuple[int, ...]:
    """The longest chunk, and a shorter one for windows that are too short for a layer of it."""
    return (longest, grain_of(longest)) if longest > LEAST_TOKENS else (longest,)


def _orders(
    settings: ServiceSettings, windows: WorkerWindows, lanes: list[PrefillLane], risk: float
) -> dict[int, WorkerOrder]:
    """By worker: its part of the model and its limits."""
    orders: dict[int, WorkerOrder] = {}
    for lane in lanes:
        split = tuple(end - first for first, end in map(lane.layers, range(len(lane.workers))))
        for stage, worker in enumerate(lane.workers):
            orders[worker] = WorkerOrder(
                served=settings.served,
                layers_per_stage=split,
                stage=stage,
                arena_bytes=settings.arena_bytes,
                workspace_bytes=settings.workspace_bytes,
                chunk=settings.chunk,
                risk=risk,
                pace=windows.pace,
                head_ns=windows.head_ns,
                keep_bytes=settings.store_bytes * split[stage] // settings.served.config.num_layers,
                budget=settings.budget,
                sensitivity=windows.sensitivity,
                nixl_unencrypted=settings.nixl_unencrypted,
                waits_ns=windows.waits_ns(worker),
            )
    return orders


def costs_of(served: Served, layer: LayerTime, head_ns: int = 0) -> PrefillCosts:
    """The costs for admission; the network inside a datacenter is assumed to be fast."""
    return PrefillCosts(
        model_of(served),
        layer,
        head_ns,
        pcie_bytes_per_s=PCIE_BYTES_PER_S,
        nic_bytes_per_s=ASSUMED_NIC_BYTES_PER_S,
        hop_latency_ns=ASSUMED_HOP_NS,
    )


def model_of(served: Served) -> Model:
    """Its dimensions in the form of the cost model."""
    config = served.config
    return Model(
        family="llama" if config.gated else "gpt",
        layers=config.num_layers,
        hidden=config.width,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        ffn=config.ffn_width,
        vocab=config.vocabulary,
        seq_len=config.max_length,
    )


def calibrated(served: Served, chunk: int, device: str = "cpu") -> LayerTime:
    """Times one layer with random weights on this host: a first estimate, corrected by the workers' reports."""
    config = replace(served.config, num_layers=1)
    one = replace(served, config=config, folder=None)
    arena = Arena(_layer_bytes(one, chunk), 0, device)
    shard = ModelShard(one, LayerRange(range(1), has_embedding=False, has_head=False), arena)
    pace, threads = PieceTimes(config), torch.get_num_threads()
    torch.set_num_threads(1)  # as in workers: on a busy host several threads mostly wait for each other
    try:
        warm_up(shard, pace, chunk)
    finally:
        torch.set_num_threads(threads)
    token_ns = (pace.flops(2, 0) - pace.flops(1, 0)) / pace.flops_per_ns
    pair_ns = (pace.flops(1, 1) - pace.flops(1, 0)) / pace.flops_per_ns
    return LayerTime(float(max(pace.overhead_ns, LEAST_NS)), float(pace.overhead_ns), token_ns, pair_ns)


def _layer_bytes(served: Served, chunk: int) -> int:
    """Memory for one layer and one chunk, with a margin."""
    config, size = served.config, served.torch_dtype.itemsize
    weights = 4 * config.width * config.num_heads * config.head_width + 3 * config.width * config.ffn_width
    return 2 * (weights + 8 * (config.width + config.ffn_width) + chunk * config.width) * size + (
        2 * chunk * served.kv_bytes_per_layer_token + MIB
    )
