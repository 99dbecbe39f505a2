"""Hand-offs that fail on the way, without vLLM: what its scheduler and its workers do with them, and what they log.
`bench/handoff_parts.py` plays 200 of them, the tests some.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm_lab import CALLER, TINY, TOKEN, Prefiller, within

from bubbletea.handoff.signature import seal
from bubbletea.vllm.cache import PagedCache
from bubbletea.vllm.fetching import WantedTokens, fetch
from bubbletea.vllm.loader import Loader, LoadOutcome
from bubbletea.vllm.orders import EngineLayout, LoadOrders

SIZE = 16
WANTED = WantedTokens(tuple(range(TINY.num_layers)), (0, TINY.num_kv_heads), TINY.head_width, torch.float32, SIZE)


@dataclass(frozen=True)
class FaultCase:
    kind: str
    recomputed: bool
    """vLLM is told to compute every token, and no other."""
    warnings: tuple[str, ...]


class NoLayer:
    """An attention layer that forgets what is written."""

    def __init__(self) -> None:
        self.impl, self.kv_cache = self, torch.zeros(1)

    def do_kv_cache_update(self, *given: Any) -> None: ...


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def play(prefiller: Prefiller, draw: random.Random, number: int) -> FaultCase:
    prompt = [draw.randrange(TINY.vocabulary) for _ in range(draw.randrange(20, 300))]
    ticket = f"fault {number}"
    params = prefiller.prefill(prompt, ticket, chunk=draw.choice((16, 50, 96)))
    kind = draw.choice(list(FAULTS))
    params = FAULTS[kind](prefiller, params, prompt, draw)
    warnings, logger = Warnings(), logging.getLogger("vllm.bubbletea")
    logger.addHandler(warnings)
    try:
        recomputed = _engine(prefiller, params, prompt)
    finally:
        logger.removeHandler(warnings)
        prefiller.cut_after(None)
        prefiller.release(ticket)
    return FaultCase(kind, recomputed, tuple(warnings.said))


def _engine(prefiller: Prefiller, params: dict[str, Any], prompt: list[int]) -> bool:
    """Whether everything is computed in the end."""
    orders = LoadOrders(EngineLayout(prefiller.served.id, CALLER, SIZE))
    cache = PagedCache({f"layers.{i}": NoLayer() for i in range(TINY.num_layers)}, SIZE)
    loader = Loader(cache, lambda load: fetch(load, WANTED, CALLER, 10.0))
    try:
        num_tokens = orders.num_loadable("r", params, prompt, 0)
        if not num_tokens:
            return True
        block_ids = list(range(1, 1 + num_tokens // SIZE))
        orders.place("r", prompt, num_tokens, block_ids)
        loader.begin(*orders.take())
        outcomes = list[LoadOutcome]()

        def has_ended() -> bool:
            outcomes.append(loader.step(is_idle=True))
            return bool(outcomes[-1].finished)

        assert within(20.0, has_ended)
        return outcomes[-1].bad_blocks == set(block_ids)
    finally:
        loader.close()
        orders.close()


Params = dict[str, Any]
Spoil = Callable[[Prefiller, Params, list[int], random.Random], Params]


def _killed(prefiller: Prefiller, params: Params, prompt: list[int], draw: random.Random) -> Params:
    """A worker ends after some bytes of its answer."""
    prefiller.cut_after(draw.randrange(2000), draw.randrange(len(prefiller.kept)))
    return params


def _expired(prefiller: Prefiller, params: Params, prompt: list[int], draw: random.Random) -> Params:
    draw.choice(prefiller.kept).lease((1, 0), -1.0)
    return params


def _resealed(prefiller: Prefiller, params: Params, prompt: list[int], draw: random.Random) -> Params:
    name = draw.choice(["remote_seal", "remote_prompt_digest", "remote_parts", "remote_port", "remote_request_id"])
    if name == "remote_parts":
        parts = [dict(part) for part in params["remote_parts"]]
        draw.choice(parts)["port"] += 1
        return params | {"remote_parts": parts}
    return params | {name: params[name] + 1 if name == "remote_port" else params[name][::-1] + "0"}


def _wrong_layers(prefiller: Prefiller, params: Params, prompt: list[int], draw: random.Random) -> Params:
    """Sealed, but not what the workers have."""
    parts = [dict(part) for part in params["remote_parts"]]
    layers = draw.choice(["shifted", "swapped", "overlap", "gap", "short"])
    if layers == "shifted":  # the first worker has layer 0 only
        parts[0]["layers"], parts[1]["layers"] = [0, 2], [2, 3]
    elif layers == "swapped":
        parts[0]["layers"], parts[2]["layers"] = parts[2]["layers"], parts[0]["layers"]
    elif layers == "overlap":
        parts[2]["layers"] = [2, 4]
    elif layers == "gap":
        parts[1]["layers"] = [1, 2]
    else:
        parts.pop()
    return seal(params | {"remote_parts": parts}, TOKEN, prompt)


FAULTS: dict[str, Spoil] = {
    "worker killed": _killed,
    "lease expired": _expired,
    "seal changed": _resealed,
    "wrong layers": _wrong_layers,
}
