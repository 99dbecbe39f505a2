"""Send load to a service and measure its responses: `bubbletea bench URL`. Streams completions for many concurrent
clients and counts every request exactly once: answered, refused (with its Retry-After) or failed.

Uses asyncio's sockets directly: no dependencies, and little load on the measured machine. It works with any
OpenAI-compatible service.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import numpy as np

from atlas.console import secret_in
from atlas.errors import AtlasError

TIMEOUT_S = 120.0
"""Of one request, from its connection to its last event; then it counts as failed."""
MAX_LINE_BYTES = 1 << 20
"""Longest line of a response: asyncio's own limit (64 KiB) is too short for an event with a long text."""
VOCABULARY = 256
"""Prompts are random tokens below this; every model has as many."""


@dataclass(frozen=True)
class BenchLoad:
    """The requests to send."""

    url: str
    model: str
    num_requests: int = 200
    num_clients: int = 16
    rate_per_s: float | None = None
    """Random arrivals with this mean rate; None: each client sends the next request after a response."""
    prompt_tokens: tuple[int, int] = (64, 1024)
    shared_tokens: int = 0
    """The number of first tokens that all prompts share."""
    max_tokens: int = 16
    retries: int = 0
    """How often a refused request is sent again, after its Retry-After."""
    key: str = ""
    priority: str = "online"
    seed: int = 0


@dataclass
class BenchOutcome:
    """Of one request."""

    status: int
    first_s: float = 0.0
    whole_s: float = 0.0
    num_tokens: int = 0
    prompt_tokens: int = 0
    retry_s: float | None = None
    why: str = ""


@dataclass
class BenchReport:
    seconds: float
    outcomes: list[BenchOutcome] = field(default_factory=list)

    @property
    def statuses(self) -> dict[str, int]:
        found = Counter(str(o.status) if o.status else f"failed: {o.why}" for o in self.outcomes)
        return dict(sorted(found.items()))

    def to_json(self) -> dict[str, Any]:
        good = [o for o in self.outcomes if o.status == 200]
        return {
            "requests": len(self.outcomes),
            "seconds": round(self.seconds, 3),
            "by_status": self.statuses,
            "requests_per_s": round(len(good) / self.seconds, 3),
            "prompt_tokens_per_s": round(sum(o.prompt_tokens for o in good) / self.seconds, 1),
            "output_tokens_per_s": round(sum(o.num_tokens for o in good) / self.seconds, 1),
            "ttft_ms": _percentiles([o.first_s for o in good]),
            "tpot_ms": _percentiles([(o.whole_s - o.first_s) / (o.num_tokens - 1) for o in good if o.num_tokens > 1]),
            "e2e_ms": _percentiles([o.whole_s for o in good]),
        }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    values = np.percentile(np.array(seconds) * 1e3, [50, 95, 99])
    return {name: round(float(value), 2) for name, value in zip(("p50", "p95", "p99"), values, strict=True)}


# ---- asking ------------------------------------------------------------------------------------------------------
async def bench(load: BenchLoad) -> BenchReport:
    """Sends all requests, and waits for their responses."""
    rng = random.Random(load.seed)
    shared = [rng.randrange(VOCABULARY) for _ in range(load.shared_tokens)]
    lengths = [rng.randint(*load.prompt_tokens) for _ in range(load.num_requests)]
    prompts = [shared[:n] + [rng.randrange(VOCABULARY) for _ in range(n - len(shared[:n]))] for n in lengths]
    outcomes: list[BenchOutcome] = []
    began = at = time.monotonic()

    async def client(waiting: Iterator[list[int]]) -> None:
        for prompt in waiting:
            outcomes.append(await _ask(load, prompt))

    async with asyncio.TaskGroup() as clients:
        if load.rate_per_s:
            for prompt in prompts:
                await asyncio.sleep(max(0.0, at - time.monotonic()))
                clients.create_task(client(iter([prompt])))
                at += rng.expovariate(load.rate_per_s)
        else:
            waiting = iter(prompts)
            for _ in range(load.num_clients):
                clients.create_task(client(waiting))
    return BenchReport(time.monotonic() - began, outcomes)


async def _ask(load: BenchLoad, prompt: list[int]) -> BenchOutcome:
    began, outcome = time.monotonic(), BenchOutcome(0)
    for _ in range(load.retries + 1):
        try:
            async with asyncio.timeout(TIMEOUT_S):
                outcome = await _once(load, prompt, began)
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
            outcome = BenchOutcome(0, why=type(error).__name__)
        if outcome.retry_s is None:
            break
        await asyncio.sleep(outcome.retry_s)
    return outcome


async def _once(load: BenchLoad, prompt: list[int], began: float) -> BenchOutcome:
    body = {
        "model": load.model,
        "prompt": prompt,
        "max_tokens": load.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "priority": load.priority,
    }
    outcome, ended = BenchOutcome(0, prompt_tokens=len(prompt)), False
    async for kind, value in _post(f"{load.url}/v1/completions", body, load.key):
        if kind == "status":
            outcome.status = int(value)
        elif kind == "retry-after-ms":
            outcome.retry_s = int(value) / 1e3
        elif kind == "data" and value == "[DONE]":
            ended = True
        elif kind == "data" and outcome.status == 200:
            event = json.loads(value)
            if event["choices"]:
                outcome.first_s = outcome.first_s or time.monotonic() - began
            else:
                outcome.num_tokens = event["usage"]["completion_tokens"]
    outcome.whole_s = time.monotonic() - began
    if outcome.status == 200 and not ended:
        return BenchOutcome(0, why="cut off")
    return outcome


async def _post(url: str, body: dict[str, Any], key: str) -> AsyncIterator[tuple[str, str]]:
    """("status", ...), headers by name, then ("data", ...) for every event."""
    parts = urlsplit(url)
    data = json.dumps(body).encode()
    head = (
        f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n" + (f"Authorization: Bearer {key}\r\n" if key else "")
    )
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, limit=MAX_LINE_BYTES)
    try:
        writer.write(head.encode() + b"\r\n" + data)
        await writer.drain()
        yield "status", (await reader.readline()).split()[1].decode()
        while line := (await reader.readline()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            yield name.lower(), value.strip()
        async for line in reader:  # chunk sizes stand on lines of their own and begin no event
            if line.startswith(b"data: "):
                yield "data", line[6:].strip().decode()
    finally:
        writer.close()


# ---- the command -------------------------------------------------------------------------------------------------
def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("url", metavar="URL", help="address of the service, such as http://127.0.0.1:8000")
    add("--model", metavar="NAME", help="model name (default: the one the service has)")
    add("--requests", type=int, default=200, metavar="N", help="number of requests")
    add("--clients", type=int, default=16, metavar="N", help="concurrent clients")
    add("--rate", type=float, metavar="R", help="requests per second, at random times, instead of --clients")
    add("--prompt", default="64:1024", metavar="MIN:MAX", help="tokens of a prompt")
    add("--shared", type=int, default=0, metavar="N", help="number of first tokens that all prompts share")
    add("--max-tokens", type=int, default=16, metavar="N", help="tokens of a response")
    add("--retries", type=int, default=0, metavar="N", help="retries of a refused request, after its Retry-After")
    add("--offline", action="store_true", help="requests have no deadline; they use the bubbles that others leave")
    add("--key-file", type=Path, metavar="FILE", help="a file with the API key")
    add("--seed", type=int, default=0, metavar="N", help="random seed of the prompts")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    low, _, high = args.prompt.partition(":")
    if not (low.isdigit() and (high or low).isdigit() and 0 < int(low) <= int(high or low)):
        raise AtlasError(f"--prompt {args.prompt}: give MIN:MAX, such as 64:1024")
    url, key = args.url.rstrip("/"), secret_in(args.key_file, "--key-file") if args.key_file else ""
    if not url.startswith(("http://", "https://")):
        raise AtlasError(f"{url}: not the address of a service. Write it like http://127.0.0.1:8000")
    load = BenchLoad(
        url=url,
        model=args.model or _served_model(url, key),
        num_requests=args.requests,
        num_clients=args.clients,
        rate_per_s=args.rate,
        prompt_tokens=(int(low), int(high or low)),
        shared_tokens=args.shared,
        max_tokens=args.max_tokens,
        retries=args.retries,
        key=key,
        priority="offline" if args.offline else "online",
        seed=args.seed,
    )
    report = asyncio.run(bench(load)).to_json()
    print(json.dumps(report) if args.json else _table(report))
    return 0 if set(report["by_status"]) <= {"200", "429", "503"} else 1


def _served_model(url: str, key: str) -> str:
    try:
        request = Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {})
        with urlopen(request, timeout=10) as response:
            return str(json.load(response)["data"][0]["id"])
    except HTTPError as error:
        raise AtlasError(
            f"{url}/v1/models: HTTP status {error.code}. Check the address; if the service needs a key, give --key-file"
        ) from None
    except (URLError, OSError, ValueError, KeyError, IndexError) as error:
        why = getattr(error, "reason", error)
        why = getattr(why, "strerror", None) or why
        raise AtlasError(f"{url}: no service responds there ({why}). Start one with `bubbletea serve`") from None


def _table(report: dict[str, Any]) -> str:
    lines = [
        f"{report['requests']} requests in {report['seconds']:.1f} s: "
        + ", ".join(f"{count} x {status}" for status, count in report["by_status"].items()),
        f"  answered          {report['requests_per_s']:10.2f} requests/s   "
        f"prompts {report['prompt_tokens_per_s']:.0f} tokens/s   answers {report['output_tokens_per_s']:.0f} tokens/s",
    ]
    names = {"ttft_ms": "first token", "tpot_ms": "each further one", "e2e_ms": "whole answer"}
    for key, name in names.items():
        if report[key]:
            p = report[key]
            lines.append(f"  {name:17} {p['p50']:10.1f} ms p50 {p['p95']:10.1f} ms p95 {p['p99']:10.1f} ms p99")
    return "\n".join(lines)
