"""The connector's parts without vllm: what is taken and refused, which blocks are asked for, what is written where, and
that nothing heavier than torch is needed to import them.
"""

from __future__ import annotations

import ast
import json
import logging
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import fault_cases
import pytest
import torch
from torch import Tensor
from vllm_lab import CALLER, SRC, TINY, TOKEN, Prefiller, closed_port, led_to, make_model, make_prompts, within

from atlas.errors import WorkerError
from bubbletea.handoff.remote_parts import RemotePart, Ticket
from bubbletea.handoff.signature import require_genuine, require_prompt, seal
from bubbletea.model_identity import model_id
from bubbletea.vllm.cache import PagedCache, heads_of_rank, layer_index
from bubbletea.vllm.fetching import WantedTokens, fetch
from bubbletea.vllm.loader import KvLoad, KvSpan, Loader, LoadOutcome
from bubbletea.vllm.orders import EngineLayout, LoadOrders
from bubbletea.vllm.settings import ConnectorSettings

SIZE = 16
"""Tokens of a block here."""
PROMPT = make_prompts([70])[0]


@pytest.fixture(scope="module")
def prefiller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefiller]:
    with Prefiller(make_model(tmp_path_factory.mktemp("model")), split=(1, 2, 1)) as prefiller:
        yield prefiller


@pytest.fixture
def orders(prefiller: Prefiller) -> Iterator[LoadOrders]:
    orders = LoadOrders(EngineLayout(prefiller.served.id, CALLER, SIZE))
    yield orders
    orders.close()


# ---- the scheduler's side ----------------------------------------------------------------------------------------
def test_whole_blocks_are_loaded_after_those_vllm_has(orders: LoadOrders, prefiller: Prefiller) -> None:
    params = prefiller.prefill(PROMPT, "whole")
    assert orders.num_loadable("r", params, PROMPT, 0) == 64
    assert orders.num_loadable("r", params, PROMPT, 32) == 32
    orders.place("r", PROMPT, 32, [7, 3, 9, 4, 8])
    (load,) = orders.take()
    assert (load.first_token, load.block_ids, load.ticket.id) == (32, (9, 4), "whole")
    assert orders.take() == []
    assert orders.num_loadable("r", params, PROMPT, 0) == 0, "offered once"
    orders.ended({"r", "another's"})
    assert within(5.0, lambda: not prefiller.holds("whole"))


def test_a_prompt_cached_by_vllm_is_released_without_a_fetch(orders: LoadOrders, prefiller: Prefiller) -> None:
    params = prefiller.prefill(PROMPT, "held")
    assert orders.num_loadable("r", params, PROMPT, 64) == 0
    orders.place("r", PROMPT, 0, [1, 2, 3, 4, 5])
    assert orders.take() == []
    assert within(5.0, lambda: not prefiller.holds("held"))


def test_a_request_that_never_ran_releases_its_hand_off(orders: LoadOrders, prefiller: Prefiller) -> None:
    orders.finished("rejected", prefiller.prefill(PROMPT, "rejected"))
    assert within(5.0, lambda: not prefiller.holds("rejected"))


def test_requests_without_a_bubbletea_hand_off_are_ignored(orders: LoadOrders) -> None:
    theirs = {"do_remote_prefill": True, "remote_engine_id": "nixl", "remote_block_ids": [[1]]}
    for params in (None, {}, {"do_remote_decode": True}, theirs):
        assert orders.num_loadable(f"r{params}", params, PROMPT, 0) == 0
        orders.place(f"r{params}", PROMPT, 0, [1])
        orders.finished(f"r{params}", params)
    assert orders.take() == []


def test_a_prompt_with_more_than_tokens_is_computed_by_vllm(orders: LoadOrders, prefiller: Prefiller) -> None:
    assert orders.num_loadable("lora", prefiller.prefill(PROMPT, "lora"), None, 0) == 0


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda p: p | {"remote_port": 1}, "signature of kv_transfer_params is wrong"),
        (lambda p: p | {"remote_seal": None}, "signature of kv_transfer_params is wrong"),
        (lambda p: p | {"remote_num_tokens": "many"}, "without a valid"),
        (lambda p: seal(p, "another token", PROMPT), "same token"),
        (lambda p: seal(p | {"remote_host": "10.0.0.7"}, TOKEN, PROMPT), "not in `peers` of kv_connector_extra_config"),
        (lambda p: seal(p | {"remote_model_id": "0" * 24}, TOKEN, PROMPT), "serve the same on both"),
        (lambda p: seal(p, TOKEN, PROMPT[1:]), "are not the prompt's"),
        (lambda p: p | {"remote_seal": "\udcff"}, "signature of kv_transfer_params is wrong"),
    ],
)
def test_a_hand_off_that_does_not_match_is_refused_with_the_reason(
    orders: LoadOrders, prefiller: Prefiller, spoil: Callable[[dict[str, Any]], dict[str, Any]], said: str, caplog: Any
) -> None:
    params = spoil(prefiller.prefill(PROMPT, f"refused {said} {time.monotonic_ns()}"))
    with caplog.at_level(logging.WARNING, "vllm.bubbletea"):
        assert orders.num_loadable("r", params, PROMPT, 0) == 0
        assert orders.num_loadable("r", params, PROMPT, 0) == 0
    (record,) = caplog.records
    assert said in record.getMessage()


def changed(params: dict[str, Any], layers: list[list[int]]) -> dict[str, Any]:
    """Genuine parameters whose parts have other layers."""
    parts = [part | {"layers": some} for part, some in zip(params["remote_parts"], layers, strict=True)]
    return seal(params | {"remote_parts": parts}, TOKEN, PROMPT)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([[0, 2], [1, 3], [3, 4]], "remote_parts overlap: layer 1 is in two of them"),
        ([[0, 1], [1, 2], [3, 4]], "remote_parts leave out layer 2"),
        ([[1, 2], [2, 3], [3, 4]], "remote_parts start at layer 1"),
        ([[0, 1], [1, 1], [1, 4]], "a part without layers"),
        ([[0, 1], [1, 3], 4], "without a valid"),
    ],
)
def test_parts_that_overlap_or_leave_out_a_layer_are_refused(
    orders: LoadOrders, prefiller: Prefiller, layers: list[Any], said: str, caplog: Any
) -> None:
    params = changed(prefiller.prefill(PROMPT, f"parts {layers}"), layers)
    assert orders.num_loadable("r", params, PROMPT, 0) == 0
    (record,) = caplog.records
    assert said in record.getMessage()


def test_parts_that_leave_out_the_last_layers_or_name_the_wrong_worker_fail(prefiller: Prefiller) -> None:
    params = prefiller.prefill(PROMPT, "wrong layers")
    with pytest.raises(WorkerError, match="remote_parts leave out layer 3"):
        fetch(load_of(changed(params, [[0, 1], [1, 2], [2, 3]])), WANTED, CALLER, 10.0)
    with pytest.raises(WorkerError, match="layer 1 is not here: this worker has layers 0 to 0"):
        fetch(load_of(changed(params, [[0, 2], [2, 3], [3, 4]])), WANTED, CALLER, 10.0)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_to_a_hand_off_it_is_recomputed_with_one_warning(prefiller: Prefiller, seed: int) -> None:
    """`bench/handoff_parts.py` plays 200."""
    found = fault_cases.play(prefiller, random.Random(seed), seed)
    assert found.recomputed
    assert len(found.warnings) == 1, found


def test_a_service_without_parts_is_older_than_the_connector(
    orders: LoadOrders, prefiller: Prefiller, caplog: Any
) -> None:
    params = seal(prefiller.prefill(PROMPT, "old") | {"remote_parts": None}, TOKEN, PROMPT)
    assert orders.num_loadable("r", params, PROMPT, 0) == 0
    assert "the service is older than this connector" in caplog.text


def test_a_listed_peer_is_accepted(prefiller: Prefiller) -> None:
    terms = EngineLayout(prefiller.served.id, CALLER, SIZE, frozenset({"10.0.0.7"}))
    params = seal(prefiller.prefill(PROMPT, "named") | {"remote_host": "10.0.0.7"}, TOKEN, PROMPT)
    assert terms.ticket(params) is not None


def test_a_signature_survives_json_and_covers_a_longer_prompt(prefiller: Prefiller) -> None:
    params = json.loads(json.dumps(prefiller.prefill(PROMPT, "json")))
    require_genuine(params, TOKEN)
    require_prompt(params, [*PROMPT, 5, 6])
    with pytest.raises(WorkerError, match="not the prompt's"):
        require_prompt(params, PROMPT[:-1])


# ---- a worker's side ---------------------------------------------------------------------------------------------
class FakeLayer:
    """An attention layer whose blocks are laid out like no other: only its own update knows where a token lies."""

    def __init__(self, num_blocks: int, num_heads: int) -> None:
        self.impl = self
        self.kv_cache = torch.zeros(num_blocks, num_heads, TINY.head_width, 2, SIZE)

    def do_kv_cache_update(self, layer: FakeLayer, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
        assert layer is self
        assert k.is_contiguous()
        for i, slot in enumerate(slots.tolist()):
            cache[slot // SIZE, :, :, 0, slot % SIZE] = k[i]
            cache[slot // SIZE, :, :, 1, slot % SIZE] = v[i]

    def read(self, block_ids: tuple[int, ...]) -> Tensor:
        """[2, K, L, E]"""
        return torch.cat([self.kv_cache[b].permute(2, 0, 3, 1) for b in block_ids], dim=2)


def fake_layers(num_heads: int = TINY.num_kv_heads) -> dict[str, FakeLayer]:
    return {f"model.layers.{i}.self_attn.attn": FakeLayer(12, num_heads) for i in range(TINY.num_layers)}


WANTED = WantedTokens(tuple(range(TINY.num_layers)), (0, TINY.num_kv_heads), TINY.head_width, torch.float32, SIZE)


NOWHERE = Ticket("t", "127.0.0.1", 1, "m", 70, (RemotePart("127.0.0.1", 1, 0, 4),))


def load_of(params: dict[str, Any], first: int = 16, block_ids: tuple[int, ...] = (9, 2, 5)) -> KvLoad:
    ticket = Ticket.of(params)
    assert ticket is not None
    return KvLoad("r", ticket, first, block_ids)


def run(loader: Loader, load: KvLoad) -> LoadOutcome:
    """What came of the step in which the load ended."""
    loader.begin(load)
    outcomes = list[LoadOutcome]()

    def has_ended() -> bool:
        outcomes.append(loader.step(is_idle=True))
        return bool(outcomes[-1].finished)

    assert within(10.0, has_ended)
    loader.close()
    return outcomes[-1]


@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 1), (0, 2), (1, 2), (3, 4)])
def test_each_rank_gets_its_heads_of_the_requested_blocks(prefiller: Prefiller, rank: int, num_ranks: int) -> None:
    params = prefiller.prefill(PROMPT, f"rank {rank} of {num_ranks}")
    first, stop = heads_of_rank(rank, num_ranks, TINY.num_kv_heads)
    layers, wanted = fake_layers(stop - first), replace(WANTED, heads=(first, stop))
    load = load_of(params)
    loader = Loader(PagedCache(layers, SIZE), lambda load: fetch(load, wanted, CALLER, 10.0))
    outcome = run(loader, load)
    assert (outcome.finished, outcome.bad_blocks) == ({"r"}, set())
    assert outcome.counts == {"loads": 1, "failures": 0, "tokens": 48, "bytes": 48 * 4 * 2 * (stop - first) * 32 * 4}
    for name, layer in layers.items():
        expected = prefiller.kv(load.ticket.id, layer_index(name))[:, first:stop, 16:64]
        assert torch.equal(layer.read(load.block_ids), expected)
        assert not layer.kv_cache[[0, 1, 3, 4, 6, 7, 8, 10, 11]].any(), "blocks of others"


def test_every_head_belongs_to_a_rank() -> None:
    assert [heads_of_rank(r, 4, 8) for r in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [heads_of_rank(r, 4, 2) for r in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]


@pytest.mark.parametrize("fault", ["truncated", "digest", "shape"])
def test_a_failed_load_names_all_its_blocks(prefiller: Prefiller, fault: Any, caplog: Any) -> None:
    params = prefiller.prefill(PROMPT, f"failed {fault}")
    prefiller.set_fault(fault)
    try:
        loader = Loader(PagedCache(fake_layers(), SIZE), lambda load: fetch(load, WANTED, CALLER, 10.0))
        outcome = run(loader, load_of(params))
    finally:
        prefiller.set_fault("")
    assert (outcome.finished, outcome.bad_blocks) == ({"r"}, {9, 2, 5})
    assert outcome.counts == {"loads": 0, "failures": 1, "tokens": 0, "bytes": 0}
    assert "recomputed" in caplog.text


def test_a_load_from_a_closed_port_or_of_a_released_prefill_fails(prefiller: Prefiller) -> None:
    params = prefiller.prefill(PROMPT, "nothing")
    prefiller.release("nothing")
    for wrong in (params, led_to(params, closed_port(), PROMPT)):
        loader = Loader(PagedCache(fake_layers(), SIZE), lambda load: fetch(load, WANTED, CALLER, 10.0))
        assert run(loader, load_of(wrong)).bad_blocks == {9, 2, 5}


def test_an_internal_error_does_not_leave_a_request_waiting() -> None:
    def broken(load: KvLoad) -> list[KvSpan]:
        raise KeyError("a bug")

    loader: Loader = Loader(PagedCache(fake_layers(), SIZE), broken)
    assert run(loader, KvLoad("r", NOWHERE, 0, (1, 2))).bad_blocks == {1, 2}


@pytest.mark.parametrize(
    "wanted",
    [
        WantedTokens(WANTED.layers, (0, 3), TINY.head_width, torch.float32, SIZE),
        WantedTokens(WANTED.layers, WANTED.heads, 64, torch.float32, SIZE),
        WantedTokens(WANTED.layers, WANTED.heads, TINY.head_width, torch.bfloat16, SIZE),
        WantedTokens((*WANTED.layers, 4), WANTED.heads, TINY.head_width, torch.float32, SIZE),
    ],
)
def test_a_block_that_does_not_fit_the_cache_is_refused(prefiller: Prefiller, wanted: WantedTokens) -> None:
    with pytest.raises(WorkerError):
        fetch(load_of(prefiller.prefill(PROMPT, f"{wanted}")), wanted, CALLER, 10.0)


def test_a_load_beyond_the_prefilled_tokens_fails(prefiller: Prefiller) -> None:
    load = load_of(prefiller.prefill(PROMPT, "more"), first=32, block_ids=(1, 2, 3))
    with pytest.raises(WorkerError, match="instead of 80"):
        fetch(load, WANTED, CALLER, 10.0)


def test_writing_does_not_delay_an_engine_step_for_long() -> None:
    """Writing is spread over steps: what does not fit into one goes on in the next, and is reported only when whole."""
    written = list[object]()

    class SlowLayer(FakeLayer):
        def do_kv_cache_update(self, *given: Any) -> None:
            written.append(self)
            time.sleep(0.012)

    layers = {f"layers.{i}": SlowLayer(2, 1) for i in range(4)}
    kv = [KvSpan(i, 0, torch.zeros(2, 1, SIZE, TINY.head_width)) for i in range(4)]
    loader: Loader = Loader(PagedCache(layers, SIZE), lambda load: kv)
    written_by_step = [0]

    def has_ended() -> bool:
        outcome = loader.step(is_idle=False)
        written_by_step.append(len(written))
        return bool(outcome.finished)

    loader.begin(KvLoad("r", NOWHERE, 0, (1,)))
    assert within(5.0, has_ended)
    loader.close()
    assert written_by_step[-1] == 4
    assert max(b - a for a, b in pairwise(written_by_step)) == 1


def test_a_backend_without_a_cache_update_is_refused() -> None:
    class Bare:
        impl = object()

    with pytest.raises(ValueError, match="no method do_kv_cache_update"):
        PagedCache({"model.layers.0.attn": Bare()}, SIZE)
    with pytest.raises(ValueError, match="not one of a plain decoder"):
        layer_index("encoder.attn")


# ---- which model, which settings, which imports ------------------------------------------------------------------
def test_a_models_id_is_that_of_its_weights_config_and_dtype(tmp_path: Path) -> None:
    first, same, other = make_model(tmp_path / "a"), make_model(tmp_path / "b"), make_model(tmp_path / "c", seed=4)
    assert model_id(first, "float32") == model_id(same, "float32")
    assert len({model_id(first, "float32"), model_id(first, "bfloat16"), model_id(other, "float32")}) == 3
    config = same / "config.json"
    config.write_text(config.read_text().replace("10000.0", "20000.0"))
    model_id.cache_clear()
    assert model_id(first, "float32") != model_id(same, "float32")
    (same / "model.safetensors").unlink()
    model_id.cache_clear()
    with pytest.raises(WorkerError, match=r"no \*.safetensors"):
        model_id(same, "float32")


def test_unknown_settings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    settings = ConnectorSettings.of({"token_file": str(tmp_path / "token"), "peers": ["10.0.0.7"]})
    assert (settings.caller.token, settings.peers) == (TOKEN, ("10.0.0.7",))
    with pytest.raises(ValueError, match="'tokenfile' is not one of token_file"):
        ConnectorSettings.of({"tokenfile": "x"})
    with pytest.raises(ValueError, match="name the token_file"):
        ConnectorSettings.of({})


def test_the_connector_imports_nothing_that_a_vllm_environment_lacks() -> None:
    """Installed without its dependencies into vLLM's environment, our package must do with what is there."""
    parts = [path.stem for path in (SRC / "bubbletea" / "vllm").glob("*.py") if not _imports_vllm(path)]
    names = ", ".join(f"bubbletea.vllm.{part}" for part in parts if part != "__init__")
    script = f"import sys, {names}; print(*sorted({{name.split('.')[0] for name in sys.modules}}), *sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "bubbletea.vllm.orders" in loaded
    assert not loaded & {"pydantic", "numba", "yaml", "rich", "safetensors", "fastapi"}
    assert {name for name in loaded if name.startswith("atlas")} == {
        "atlas",
        "atlas.addresses",
        "atlas.callers",
        "atlas.errors",
        "atlas.lifetime",
    }


def _imports_vllm(path: Path) -> bool:
    nodes = ast.walk(ast.parse(path.read_text()))
    return any(isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm.") for node in nodes)


def test_only_two_modules_import_vllm() -> None:
    found = {path.stem for path in (SRC / "bubbletea" / "vllm").glob("*.py") if _imports_vllm(path)}
    assert found == {"connector", "metrics"}
