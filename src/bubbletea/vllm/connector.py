"""The vLLM connector class, named in a server's `--kv-transfer-config`: loads keys and values from BubbleTea.

vLLM uses one class in two roles, which exchange only messages: in the scheduler it selects the blocks of a request to
load (`orders`); in each worker it fetches and writes them (`loader`, `fetching`, `cache`). Tested with vLLM 0.32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from bubbletea.model_identity import model_id
from bubbletea.vllm.cache import PagedCache, heads_of_rank
from bubbletea.vllm.fetching import WantedTokens, fetch
from bubbletea.vllm.loader import KvLoad, Loader, LoadOutcome
from bubbletea.vllm.metrics import ConnectorMetrics, LoadCounts
from bubbletea.vllm.orders import EngineLayout, LoadOrders
from bubbletea.vllm.settings import ConnectorSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass
class LoadMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to the workers, once per step."""

    loads: list[KvLoad]


class BubbleTeaConnector(KVConnectorBase_V1):  # type: ignore[misc]
    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            raise ValueError('write "kv_load_failure_policy": "recompute" into --kv-transfer-config: a load may fail')
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError("this model keeps more than one kind of cache: serve it without the connector")
        self._settings = ConnectorSettings.of(transfer.kv_connector_extra_config)
        self._block_tokens: int = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._orders = LoadOrders(self._terms()) if role == KVConnectorRole.SCHEDULER else None
        self._loader: Loader | None = None
        self._outcome = LoadOutcome()
        self._is_idle = True

    def _terms(self) -> EngineLayout:
        model = self._vllm_config.model_config
        ours = self._settings.model or model_id(Path(model.model), str(model.dtype).removeprefix("torch."))
        return EngineLayout(ours, self._settings.caller, self._block_tokens, frozenset(self._settings.peers))

    def shutdown(self) -> None:
        for part in (self._orders, self._loader):
            if part is not None:
                part.close()

    # ---- beside the scheduler ----------------------------------------------------------------------------------
    @property
    def _ordered(self) -> LoadOrders:
        assert self._orders is not None, "called in a worker"
        return self._orders

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        params = request.kv_transfer_params
        num_tokens = self._ordered.num_loadable(request.request_id, params, _prompt(request), num_computed_tokens)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        block_ids = blocks.get_block_ids()[0]
        self._ordered.place(request.request_id, _prompt(request), num_external_tokens, block_ids)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> LoadMetadata:
        return LoadMetadata(self._ordered.take())

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._ordered.ended(connector_output.finished_recving or ())

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._ordered.finished(request.request_id, request.kv_transfer_params)
        return False, None

    # ---- in a worker -------------------------------------------------------------------------------------------
    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        model = self._vllm_config.model_config
        layers = self._vllm_config.compilation_config.static_forward_context
        rank, num_ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        cache = PagedCache({name: layers[name] for name in kv_caches}, self._block_tokens)
        wanted = WantedTokens(
            layers=tuple(cache.layers),
            heads=heads_of_rank(rank, num_ranks, model.get_total_num_kv_heads()),
            head_width=model.get_head_size(),
            dtype=model.dtype,
            block_tokens=self._block_tokens,
        )
        settings = self._settings
        self._loader = Loader(
            cache, partial(fetch, wanted=wanted, caller=settings.caller, timeout_s=settings.timeout_s)
        )

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, LoadMetadata)
        assert self._loader is not None, "the caches were not registered"
        self._is_idle = forward_context.attn_metadata is None
        for load in metadata.loads:
            self._loader.begin(load)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        assert self._loader is not None, "the caches were not registered"
        self._outcome = self._loader.step(self._is_idle)
        return None, self._outcome.finished

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._outcome.bad_blocks

    def get_kv_connector_stats(self) -> LoadCounts | None:
        if self._orders is not None:
            return None
        counts = LoadCounts(data=dict(self._outcome.counts))
        return None if counts.is_empty() else counts

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request runs only after all its layers have been written."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is sent back."""

    def wait_for_save(self) -> None:
        """Nothing is sent back."""

    # ---- in the server -----------------------------------------------------------------------------------------
    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> LoadCounts:
        return LoadCounts(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> ConnectorMetrics:
        return ConnectorMetrics(*args)


def _prompt(request: Request) -> Sequence[int] | None:
    """None if keys and values depend on more than tokens and model: then nothing is loaded."""
    if request.lora_request is not None or request.mm_features or request.prompt_embeds is not None:
        return None
    tokens: Sequence[int] | None = request.prompt_token_ids
    return tokens
