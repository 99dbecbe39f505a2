"""Keys and values from the prefill workers to a decode engine: how fast, how many bytes pass through the service, and
what happens to hand-offs that fail.

    python bench/handoff_parts.py [--quick]

- Four workers (processes) have 8 layers each of a prompt with the keys and values of Llama-3-8B (128 KiB a token). An
  engine fetches all parts at once, as the vLLM connector does. The same bytes through one process, as before workers
  listened themselves (lab/one_process.py), in turns. The bar: 2.5 times as fast from workers to engine. Where the
  package nixl is installed, the same fetch by NIXL.
- A service with a lane of four workers hands over prompts of 1,000 tokens: bytes between service and workers per token.
  The bar: 1 KiB.
- 200 hand-offs of which a worker is killed in the fetch, the lease has expired, the seal or the layers are wrong: all
  are recomputed with one warning.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import httpx2 as httpx
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "bubbletea" / "vllm"))
import fault_cases
from lab.lines import Lines
from lab.one_process import OneProcess, get_all, put_all
from serving import TINY as SERVICE
from serving import serving
from vllm_lab import Prefiller, make_model

from bubbletea.handoff.fetch import EngineIdentity
from bubbletea.handoff.remote_parts import RemotePart, Ticket
from bubbletea.kv_blocks import KvBlock
from bubbletea.kv_server import KvServer, KvServerThread
from bubbletea.nixl_plane import is_installed
from bubbletea.prefill.kept_parts import KeptParts
from bubbletea.vllm.fetching import WantedTokens, fetch
from bubbletea.vllm.loader import KvLoad

LAYERS, WORKERS, HEADS, WIDTH, CHUNK = 32, 4, 8, 128, 512
CALLER = EngineIdentity("bench")
BLOCK_TOKENS = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter prompts, fewer turns, 40 faults")
    parser.add_argument("--part", choices=("rates", "bytes", "faults"), help="only this part")
    args = parser.parse_args()
    quick, lines = args.quick, Lines()
    if args.part in (None, "rates"):
        _rates(lines, num_tokens=1024 if quick else 4096, turns=3 if quick else 7)
    if args.part in (None, "bytes"):
        _bytes_through_the_service(lines, num_prompts=3 if quick else 10)
    if args.part in (None, "faults"):
        _faults(lines, 40 if quick else 200)
    return lines.table()


# ---- how fast ----------------------------------------------------------------------------------------------------
def _worker(pipe: Connection, first: int, num_tokens: int, one: tuple[str, int]) -> None:
    """Listens for engines; on command, sends the same to the one process."""
    torch.set_num_threads(1)
    layers = range(first, first + LAYERS // WORKERS)
    kv = {layer: torch.randn(2, HEADS, num_tokens, WIDTH).to(torch.bfloat16) for layer in layers}
    kept = KeptParts()
    kept.budget_bytes = 1 << 40
    kept.open("t", (1, 0), num_tokens, layers, 1)
    for layer in layers:
        for at in range(0, num_tokens, CHUNK):
            piece = kv[layer][:, :, at : at + CHUNK].contiguous()
            kept.put((1, 0), KvBlock("t", "m", layer, at, at + piece.shape[2], piece))
    server = KvServerThread(KvServer(kept, CALLER.token), "127.0.0.1")
    pipe.send(server.address)
    while pipe.recv() == "put":
        put_all(one, kv)
        pipe.send("done")
    server.close()


def _one(pipe: Connection, num_tokens: int) -> None:
    torch.set_num_threads(1)

    async def serve() -> None:
        one = OneProcess((2, HEADS, num_tokens, WIDTH), LAYERS)
        server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname())
        await asyncio.to_thread(pipe.recv)

    asyncio.run(serve())


@contextmanager
def _processes(num_tokens: int) -> Iterator[tuple[list[Connection], tuple[str, int], tuple[RemotePart, ...]]]:
    context, pipes, started = multiprocessing.get_context("spawn"), list[Connection](), []
    each = LAYERS // WORKERS

    def start(target: Callable[..., None], *rest: object) -> None:
        ours, theirs = context.Pipe()
        started.append(context.Process(target=target, args=(theirs, *rest), daemon=True))
        started[-1].start()
        pipes.append(ours)

    start(_one, num_tokens)
    one = tuple(pipes[0].recv())
    for index in range(WORKERS):
        start(_worker, index * each, num_tokens, one)
    places = [pipe.recv() for pipe in pipes[1:]]
    parts = tuple(RemotePart(host, port, i * each, (i + 1) * each) for i, (host, port) in enumerate(places))
    try:
        yield pipes[1:], one, parts
    finally:
        for pipe in pipes:
            pipe.send("end")
        for process in started:
            process.join(20)


def _rates(lines: Lines, num_tokens: int, turns: int) -> None:
    torch.set_num_threads(1)
    wanted = WantedTokens(tuple(range(LAYERS)), (0, HEADS), WIDTH, torch.bfloat16, BLOCK_TOKENS)
    num_bytes = num_tokens * LAYERS * HEADS * WIDTH * 4
    seconds: dict[str, list[float]] = {"parts": [], "one process": [], "to it": []}
    with _processes(num_tokens) as (workers, one, parts):
        ticket = Ticket("t", *one, "m", num_tokens, parts)
        load = KvLoad("r", ticket, 0, tuple(range(num_tokens // BLOCK_TOKENS)))
        for turn in range(turns + 1):  # the first is not counted
            began = time.perf_counter()
            for pipe in workers:
                pipe.send("put")
            for pipe in workers:
                pipe.recv()
            put = time.perf_counter()
            before = get_all(one, (2, HEADS, num_tokens, WIDTH))
            got = time.perf_counter()
            spans = fetch(load, wanted, CALLER, 60.0)
            fetched = time.perf_counter()
            times = {"to it": put - began, "one process": got - put, "parts": fetched - got}
            if is_installed():
                read = fetch(load, wanted, replace(CALLER, by_nixl=True), 60.0)
                times["by NIXL"] = time.perf_counter() - fetched
                assert all(torch.equal(a.kv, b.kv) for a, b in zip(spans, read, strict=True))
                del read
            assert sum(span.kv.numel() for span in spans) * 2 == num_bytes
            assert all(
                torch.equal(span.kv, before[span.layer][:, :, span.offset : span.offset + span.kv.shape[2]])
                for span in spans
            ), "both ways give the same bytes"
            for name, value in times.items():
                seconds.setdefault(name, []).extend([value] if turn else [])
    parts_s, one_s, put_s = (statistics.median(seconds[name]) for name in ("parts", "one process", "to it"))
    lines.add("fetch from four workers", num_bytes / parts_s / 1e6, "MB/s", "", None)
    if "by NIXL" in seconds:
        by_nixl = num_bytes / statistics.median(seconds["by NIXL"]) / 1e6
        lines.add("fetch from four workers by NIXL", by_nixl, "MB/s", "", None)
    lines.add("fetch from one process, as before", num_bytes / one_s / 1e6, "MB/s", "", None)
    lines.add("from workers through one process, as before", num_bytes / (put_s + one_s) / 1e6, "MB/s", "", None)
    lines.add("fetch rate, from four workers / from one process", one_s / parts_s, "x", "", None)
    lines.at_least("workers to engine, directly / through one process", (put_s + one_s) / parts_s, "x", 2.5)


# ---- through the service -----------------------------------------------------------------------------------------
def _bytes_through_the_service(lines: Lines, num_prompts: int, length: int = 1000) -> None:
    with serving(replace(SERVICE, split=4), 4, busy=0.0, token=CALLER.token) as service:
        connections, served = service.parts.connections, service.parts.settings.served
        ask = {"model": "tiny", "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        before, draw = connections.num_bytes, random.Random(1)
        for _ in range(num_prompts):
            prompt = [draw.randrange(256) for _ in range(length)]
            httpx.post(f"{service.url}/v1/completions", json=ask | {"prompt": prompt}, timeout=60).raise_for_status()
        used = (connections.num_bytes - before) / (num_prompts * length)
    lines.at_most("bytes between service and workers per handed-over token", used, "bytes", 1024)
    each = served.config.num_layers * served.kv_bytes_per_layer_token
    lines.add("keys and values of a token of this model", each, "bytes", "", None)


# ---- faults ------------------------------------------------------------------------------------------------------
def _faults(lines: Lines, count: int) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="handoff-parts-") as folder,
        Prefiller(make_model(Path(folder)), split=(1, 2, 1)) as prefiller,
    ):
        found = [fault_cases.play(prefiller, random.Random(seed), seed) for seed in range(count)]
    for kind in fault_cases.FAULTS:
        cases = [case for case in found if case.kind == kind]
        right = sum(case.recomputed and len(case.warnings) == 1 for case in cases)
        lines.add(f"{kind}: recomputed with one warning", right, f"of {len(cases)}", "all", right == len(cases))


if __name__ == "__main__":
    sys.exit(main())
