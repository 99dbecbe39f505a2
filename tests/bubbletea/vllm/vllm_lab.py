"""Both ends of a hand-off on this machine: BubbleTea's (our prefill, the store and the KV server) in a thread of this
process, and a stock vLLM server in one of its own, from the Python that BUBBLETEA_VLLM_PYTHON names.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from greedy_decoding import greedy, make_slabs, prefill

from atlas.runtime.models import weights
from atlas.runtime.models.block import KvSlab
from atlas.runtime.models.config import DecoderConfig
from atlas.runtime.models.decoder import Decoder, LayerRange, build
from atlas.runtime.models.export import export_stage, finish_export
from bubbletea.frames import WireFrame, pack, write
from bubbletea.handoff.fetch import EngineIdentity
from bubbletea.handoff.remote_parts import RemotePart, Ticket, transfer_params
from bubbletea.handoff.signature import seal
from bubbletea.kv_blocks import FETCH, KV, KvBlock, pack_block
from bubbletea.kv_server import KvServer, KvServerThread, WantedBlocks
from bubbletea.prefill.kept_parts import KeptParts
from bubbletea.prefill.shard import Served

LIBC = ctypes.CDLL(None)
PYTHON_VARIABLE = "BUBBLETEA_VLLM_PYTHON"
ROUTER_VARIABLE = "BUBBLETEA_ROUTER"
SRC = Path(__file__).parents[3] / "src"
TOKEN = "a token for tests"
CALLER = EngineIdentity(TOKEN)
START_S = 300.0
BLOCK = 128
"""Tokens of a block on the CPU."""
TINY = DecoderConfig(
    family="llama",
    num_layers=4,
    width=128,
    num_heads=4,
    num_kv_heads=2,
    head_width=32,
    ffn_width=256,
    vocabulary=512,
    max_length=2048,
    init_std=0.1,  # smaller weights would say the same token whatever they are asked
)
Fault = Literal["", "truncated", "digest", "silent", "shape"]


def make_model(folder: Path, seed: int = 3, dtype: torch.dtype = torch.float32) -> Path:
    export_stage(folder, build(TINY, LayerRange.whole(TINY), seed=seed, dtype=dtype), 0, 1)
    finish_export(folder, TINY, 1, dtype)
    return folder


def make_prompts(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(TINY.vocabulary) for _ in range(length)] for length in lengths]


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if holds():
            return True
        time.sleep(0.005)
    return False


# ---- BubbleTea's end ---------------------------------------------------------------------------------------------
class FaultyKvServer(KvServer):
    """A KV server that fails on request, in the ways that networks and other releases do."""

    fault: Fault = ""
    cut_bytes: int | None = None
    """Ends after so many bytes, as if it were killed."""
    num_answered: int = 0
    """Fetches without a fault."""

    async def _answer(self, frame: WireFrame, writer: asyncio.StreamWriter) -> Sequence[KvBlock]:
        if self.cut_bytes is not None and frame.kind == FETCH:
            for block in self.holder.blocks(WantedBlocks.of(frame.fields)):
                fields, payload = pack_block(block)
                writer.write((pack(KV, fields, payload) + bytes(payload))[: self.cut_bytes])
                break
            await writer.drain()
            writer.close()
            return ()
        if not self.fault:
            offered = await super()._answer(frame, writer)
            self.num_answered += frame.kind == FETCH
            return offered
        if self.fault == "silent":
            await asyncio.sleep(3600)
        for block in self.holder.blocks(WantedBlocks.of(frame.fields))[:2]:
            kv = block.kv[:, :, :, :8] if self.fault == "shape" else block.kv
            fields, payload = pack_block(KvBlock(block.ticket, block.model, block.layer, block.start, block.stop, kv))
            if self.fault == "digest":
                fields["checksums"][0] ^= 1
            write(writer, KV, fields, payload)
        await writer.drain()
        writer.close()  # "truncated": two layers of four
        return ()


class FirstParts(KeptParts):
    """Of the worker that takes the releases, for all of them, as the service does."""

    def __init__(self, others: Sequence[KeptParts]) -> None:
        super().__init__()
        self._others = others

    def release(self, ticket: str) -> None:
        super().release(ticket)
        for other in self._others:
            other.release(ticket)


class Prefiller:
    """Prefills a prompt in chunks. Its layers are on as many workers as `split` says; each keeps its part for whoever
    fetches it."""

    def __init__(self, folder: Path, dtype: str = "float32", split: Sequence[int] = (TINY.num_layers,)) -> None:
        self.served = Served.of_folder(folder, dtype)
        config = self.served.config
        self.decoder: Decoder = weights.load(config, LayerRange.whole(config), folder, dtype=self.served.torch_dtype)
        self.layers = [cut.layers for cut in self.served.cuts(tuple(split))]

    def __enter__(self) -> Prefiller:
        others = [KeptParts() for _ in self.layers[1:]]
        self.kept = [FirstParts(others), *others]
        for kept in self.kept:
            kept.budget_bytes = 1 << 30
        self.kv_servers = [FaultyKvServer(kept, TOKEN) for kept in self.kept]
        self._threads = [KvServerThread(server, "127.0.0.1") for server in self.kv_servers]
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.close()

    @property
    def parts(self) -> tuple[RemotePart, ...]:
        return tuple(
            RemotePart(*thread.address, layers.start, layers.stop)
            for thread, layers in zip(self._threads, self.layers, strict=True)
        )

    def set_fault(self, fault: Fault) -> None:
        for server in self.kv_servers:
            server.fault = fault

    def cut_after(self, num_bytes: int | None, worker: int = 0) -> None:
        """The worker ends after so many bytes of its next answer; None: no worker does."""
        for index, server in enumerate(self.kv_servers):
            server.cut_bytes = num_bytes if index == worker else None

    def holds(self, ticket: str) -> bool:
        """Whether a release has not reached it."""
        return any(ticket in kept._parts for kept in self.kept)

    def release(self, ticket: str) -> None:
        self.kept[0].release(ticket)

    def prefill(self, prompt: list[int], ticket: str, chunk: int = 96) -> dict[str, Any]:
        """What the prefill role answers in `kv_transfer_params`. The first worker takes the releases."""
        cache = make_slabs(self.decoder, 1, len(prompt))
        prefill(self.decoder, torch.tensor([prompt]), cache, chunk)
        for kept, layers in zip(self.kept, self.layers, strict=True):
            assert kept.open(ticket, (1, 0), len(prompt), layers, 0)
            for layer in layers:
                slab = cache[layer]
                assert isinstance(slab, KvSlab)
                kv = torch.cat([slab.k_BKTE, slab.v_BKTE])
                for at in range(0, len(prompt), chunk):
                    part = kv[:, :, at : at + chunk].contiguous()
                    kept.put((1, 0), KvBlock(ticket, self.served.id, layer, at, at + part.shape[2], part))
        return transfer_params(self.ticket(ticket, len(prompt)), TOKEN, prompt)

    def ticket(self, ticket: str, num_tokens: int) -> Ticket:
        return Ticket(ticket, *self._threads[0].address, self.served.id, num_tokens, self.parts)

    def kv(self, ticket: str, layer: int) -> torch.Tensor:
        """[2, K, tokens, E]"""
        (kept,) = (kept for kept, layers in zip(self.kept, self.layers, strict=True) if layer in layers)
        return torch.cat([block.kv for block in kept._parts[ticket].blocks[layer]], dim=2)

    def spoil(self, ticket: str) -> None:
        """Other numbers, honestly sealed: what an engine must notice by its tokens if it reads them at all."""
        noise = torch.Generator().manual_seed(9)
        for kept in self.kept:
            for blocks in kept._parts[ticket].blocks.values():
                for index, block in enumerate(blocks):
                    kv = block.kv + torch.randn(block.kv.shape, generator=noise).to(block.kv.dtype)
                    blocks[index] = replace(block, kv=kv, checksums=()).checked()

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        return [int(t) for t in greedy(self.decoder, torch.tensor([prompt]), num_tokens)[0, len(prompt) :]]


def led_to(params: dict[str, Any], port: int, prompt: list[int]) -> dict[str, Any]:
    """Genuine parameters that lead to another port."""
    parts = [part | {"port": port} for part in params["remote_parts"]]
    return seal(params | {"remote_port": port, "remote_parts": parts}, TOKEN, prompt)


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---- vLLM's end --------------------------------------------------------------------------------------------------
class VllmServer:
    """`log` is what it has printed so far."""

    def __init__(self, port: int, log_path: Path) -> None:
        self.port, self._log_path = port, log_path

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def complete(
        self, prompt: list[int], num_tokens: int, salt: str, params: dict[str, Any] | None = None
    ) -> list[int]:
        """Greedy tokens."""
        tokens: list[int] = self.ask(prompt, num_tokens, salt, params)["choices"][0]["token_ids"]
        return tokens

    def ask(
        self, prompt: list[int], num_tokens: int, salt: str, params: dict[str, Any] | None = None, **more: Any
    ) -> dict[str, Any]:
        """The whole answer. `salt` keeps vLLM's own prefix cache from answering one request with another's blocks."""
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_salt": salt,
            **more,
        }
        if params is not None:
            body["kv_transfer_params"] = params
        answer: dict[str, Any] = json.loads(self._get("/v1/completions", json.dumps(body).encode()))
        return answer

    def metrics(self) -> dict[str, float]:
        """Every sample, summed over its labels."""
        found: dict[str, float] = {}
        for line in self._get("/metrics").decode().splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def is_up(self) -> bool:
        try:
            self._get("/health", timeout_s=5.0)
        except OSError:
            return False
        return True

    def _get(self, path: str, body: bytes | None = None, timeout_s: float = 120.0) -> bytes:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            answer: bytes = response.read()
        return answer


def transfer_config(token_file: Path, **extra: Any) -> str:
    """What an operator passes as --kv-transfer-config."""
    return json.dumps(
        {
            "kv_connector": "BubbleTeaConnector",
            "kv_connector_module_path": "bubbletea.vllm.connector",
            "kv_role": "kv_consumer",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"token_file": str(token_file), **extra},
        }
    )


@contextlib.contextmanager
def vllm_server(
    python: str, folder: Path, log_path: Path, *options: str, dtype: str = "float32"
) -> Iterator[VllmServer]:
    """A stock server with the model of `folder`, once it answers; gone with everything it started afterwards."""
    server = VllmServer(closed_port(), log_path)
    words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "tiny"]
    words += ["--skip-tokenizer-init", "--enforce-eager", "--dtype", dtype, "--max-model-len", str(TINY.max_length)]
    words += ["--host", "127.0.0.1", "--port", str(server.port), *options]
    environment = {**os.environ, "PYTHONPATH": str(SRC), "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            words, env=environment, stdout=log, stderr=log, start_new_session=True, preexec_fn=_end_with_parent
        )
    try:
        until = time.monotonic() + START_S
        while not server.is_up():
            if process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"vLLM did not come up:\n{server.log[-4000:]}")
            time.sleep(1.0)
        yield server
    finally:
        _stop(process)


@contextlib.contextmanager
def stock_router(prefill_url: str, decode_url: str, log_path: Path) -> Iterator[VllmServer]:
    """vllm-router, once it passes requests on; takes the same requests as a vLLM server."""
    server = VllmServer(closed_port(), log_path)
    words = [os.environ[ROUTER_VARIABLE], "--vllm-pd-disaggregation", "--prefill", prefill_url, "--decode", decode_url]
    words += ["--policy", "round_robin", "--port", str(server.port), "--prometheus-port", str(closed_port())]
    words += ["--worker-startup-check-interval", "1", "--disable-retries"]
    with log_path.open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True, preexec_fn=_end_with_parent)
    try:
        assert within(60.0, lambda: server.is_up() or process.poll() is not None), server.log[-4000:]
        assert process.poll() is None, server.log[-4000:]
        yield server
    finally:
        _stop(process)


def _end_with_parent() -> None:
    """Asks the kernel (Linux) to end the server with us, should we be killed."""
    if hasattr(LIBC, "prctl"):
        LIBC.prctl(1, signal.SIGTERM)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its engine and its workers, where they outlived it
    process.wait(10)
