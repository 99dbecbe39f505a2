"""The scheduler's part: selects the whole blocks of a request to load, and releases them at BubbleTea afterwards.

A request is loaded at most once: after a failed load or a preemption vLLM computes it. Knows the parameters of a
request; not the cache, not vLLM's classes.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from atlas.addresses import is_loopback
from atlas.errors import AtlasError, WorkerError
from bubbletea.handoff.fetch import EngineIdentity, Fetcher
from bubbletea.handoff.remote_parts import Ticket
from bubbletea.handoff.signature import require_genuine, require_prompt
from bubbletea.vllm.loader import KvLoad

log = logging.getLogger("vllm.bubbletea")


@dataclass(frozen=True)
class EngineLayout:
    """Properties of this engine that a hand-off must match."""

    model: str
    """`model_identity` of the model that vLLM runs."""
    caller: EngineIdentity
    block_tokens: int
    peers: frozenset[str] = frozenset()
    """Hosts whose keys and values are accepted besides those of this machine."""

    def ticket(self, params: Mapping[str, Any]) -> Ticket | None:
        """The hand-off of the parameters, or None if it is not BubbleTea's; raises if it must be refused."""
        ticket = Ticket.of(params)
        if ticket is None:
            return None
        require_genuine(params, self.caller.token)
        for host in (ticket.host, *(part.host for part in ticket.parts)):
            if host not in self.peers and not is_loopback(host):
                raise WorkerError(f"a hand-off from {host}, not in `peers` of kv_connector_extra_config: add it")
        if ticket.model != self.model:
            raise WorkerError(
                f"a hand-off of model {ticket.model}, this engine has {self.model}: serve the same on both"
            )
        return ticket


class LoadOrders:
    """Called by vLLM's scheduler, on its thread. Requests are identified by their ids."""

    def __init__(self, terms: EngineLayout) -> None:
        self.terms = terms
        self._verdicts: dict[str, Ticket | None] = {}
        """By running request with a BubbleTea hand-off; None: nothing (more) to load."""
        self._new: list[KvLoad] = []
        self._under_way: dict[str, KvLoad] = {}
        self._releases = ThreadPoolExecutor(1, thread_name_prefix="bubbletea-release")

    def num_loadable(
        self, request_id: str, params: Mapping[str, Any] | None, prompt: Sequence[int] | None, num_computed: int
    ) -> int:
        """Tokens beyond `num_computed` that can be loaded, in whole blocks. `prompt` None: it is not only tokens."""
        if params is None:
            return 0
        if request_id not in self._verdicts:
            self._verdicts[request_id] = self._judge(request_id, params, prompt)
        ticket = self._verdicts[request_id]
        if ticket is None or prompt is None:
            return 0
        return max(0, self._end(ticket, prompt) - num_computed)

    def place(self, request_id: str, prompt: Sequence[int] | None, num_tokens: int, block_ids: Sequence[int]) -> None:
        """The request has its blocks, the first `block_ids` in order, to load `num_tokens` into."""
        ticket = self._verdicts.get(request_id)
        if ticket is None or prompt is None:
            return
        self._verdicts[request_id] = None
        if not num_tokens:
            self._release(ticket)  # everything was in vLLM's own prefix cache
            return
        end = self._end(ticket, prompt)
        first, size = end - num_tokens, self.terms.block_tokens
        load = KvLoad(request_id, ticket, first, tuple(block_ids[first // size : end // size]))
        self._under_way[request_id] = load
        self._new.append(load)

    def take(self) -> list[KvLoad]:
        """The loads to start in this step."""
        taken, self._new = self._new, []
        return taken

    def ended(self, request_ids: Collection[str]) -> None:
        """All workers have ended these loads."""
        for load in [self._under_way.pop(i) for i in request_ids if i in self._under_way]:
            self._release(load.ticket)

    def finished(self, request_id: str, params: Mapping[str, Any] | None) -> None:
        """The request has ended; if it was never scheduled, its hand-off is released."""
        if params is None:
            return
        try:
            ticket = self._verdicts.pop(request_id) if request_id in self._verdicts else self.terms.ticket(params)
        except AtlasError:
            return
        if ticket is not None:
            self._release(ticket)

    def close(self) -> None:
        self._releases.shutdown(wait=False, cancel_futures=True)

    def _judge(self, request_id: str, params: Mapping[str, Any], prompt: Sequence[int] | None) -> Ticket | None:
        try:
            ticket = self.terms.ticket(params)
            if ticket is not None and prompt is not None:
                require_prompt(params, prompt)
            return ticket
        except AtlasError as error:
            log.warning("BubbleTea: request %s is computed here from its first token: %s", request_id, error)
            return None

    def _end(self, ticket: Ticket, prompt: Sequence[int]) -> int:
        """The last token to load; of a whole prompt vLLM computes the last token again."""
        size = self.terms.block_tokens
        return min(ticket.num_tokens, len(prompt)) // size * size

    def _release(self, ticket: Ticket) -> None:
        self._releases.submit(_say_released, ticket, self.terms.caller)


def _say_released(ticket: Ticket, caller: EngineIdentity) -> None:
    try:
        with Fetcher(ticket.host, ticket.port, caller, ticket.service) as fetcher:
            fetcher.release(ticket)
    except (AtlasError, OSError) as error:
        log.debug("BubbleTea: hand-off %s could not be released and will expire: %s", ticket.id, error)
