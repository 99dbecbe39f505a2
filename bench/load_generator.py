"""GuideLLM, a public load generator, against `bubbletea serve`: the share of requests that are answered.

    BUBBLETEA_GUIDELLM=/path/to/env/bin/guidellm BUBBLETEA_ROUTER=/path/to/env/bin/vllm-router \\
      python bench/load_generator.py [--requests 2000] [--clients 64] [--part alone|router]

- `alone`: four workers without training. GuideLLM never retries a refused request, so a single refusal is visible.
- `router`: a stock vllm-router in front of the services of two datacenters, whose workers train together
  (examples/tiny.yaml, emulated). A worker is killed three times, and once all of them; every time, training restarts
  all workers. The router retries what is refused while there are no workers. Afterwards, through a router that does not
  retry, OpenAI's client asks for more than the bubbles have, and comes back after Retry-After: the share of these
  retries that are admitted.

Streamed chat completions of prompts from 1 to 60 words, responses of 4 tokens. Install GuideLLM and the router in
separate environments (`pip install guidellm`, `pip install vllm-router`), because they bring many packages. Exits with
77 if they are not named.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common.report import Report
from lab.router import TwoSites

VARIABLE, ROUTER = "BUBBLETEA_GUIDELLM", "BUBBLETEA_ROUTER"
WORDS = ("the", "rain", "in", "spain", "falls", "mainly", "on", "a", "plain", "that", "nobody", "has", "seen")
WORKERS, START_S, LOAD_S = 4, 60.0, 600.0
KILLS = (0.15, 0.35, 0.55)
"""A worker is killed when this share of the requests was answered."""
KILL_ALL = 0.75
HURRIED_S = 0.25
"""Deadline of the requests that measure Retry-After: shorter than the queue of that many clients."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--part", choices=("alone", "router"), help="default: both")
    args = parser.parse_args()
    needed = {"alone": (VARIABLE,), "router": (VARIABLE, ROUTER)}
    figures = Report("GuideLLM's requests", "none lost, none refused, none answered twice")
    for part in (args.part,) if args.part else needed:
        if missing := [variable for variable in needed[part] if variable not in os.environ]:
            for line in ("router: answered twice", "router: of these, admitted") if part == "router" else (part,):
                figures.void(line, f"set {missing[0]} to that command of an environment that has it")
            continue
        with tempfile.TemporaryDirectory() as name:
            (_alone if part == "alone" else _router)(figures, Path(name), args.requests, args.clients)
    return figures.finish()


def _alone(figures: Report, folder: Path, num_requests: int, num_clients: int) -> None:
    service = subprocess.Popen(
        [sys.executable, "-m", "bubbletea.cli", "serve", "--alone", str(WORKERS), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        _report(figures, "alone", load(folder, url_of(service), num_requests, num_clients), num_requests)
    finally:
        service.send_signal(signal.SIGINT)
        service.communicate(timeout=60)


def _report(figures: Report, part: str, found: dict[str, Any], num_requests: int) -> None:
    figures.figure(f"{part}: answered", found["successful"], "requests", at_least=num_requests)
    figures.figure(f"{part}: refused or failed", found["errored"] + found["incomplete"], "requests", at_most=0)
    figures.figure(f"{part}: a second", found["per_second"], "requests")


def url_of(service: subprocess.Popen[str]) -> str:
    """The service's URL, once its workers have joined."""
    assert service.stdout is not None
    match = re.search(r"http://[\d.:]+", service.stdout.readline())
    assert match is not None, "the service names its address first"
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{match[0]}/health") as answer:
                if json.load(answer)["lanes"] == WORKERS:
                    return match[0]
        except urllib.error.HTTPError:
            pass  # 503: no workers yet
        time.sleep(0.2)
    raise TimeoutError(f"not {WORKERS} workers within {START_S:g} s")


def load(folder: Path, url: str, num_requests: int, num_clients: int) -> dict[str, Any]:
    draw, prompts, report = random.Random(0), folder / "prompts.jsonl", folder / "report.json"
    with prompts.open("w") as lines:
        for _ in range(num_requests):
            prompt = " ".join(draw.choices(WORDS, k=draw.randint(1, 60)))
            lines.write(json.dumps({"prompt": prompt, "output_tokens_count": 4}) + "\n")
    subprocess.run(
        [os.environ[VARIABLE], "run", "--disable-console-interactive",
         "--backend", f"kind=openai_http,target={url}",
         "--profile", f"kind=concurrent,streams={num_clients}",
         "--constraint", f"kind=max_requests,count={num_requests}",
         "--data", f"kind=json_file,path={prompts}",
         "--output", f"kind=json,path={report}"],
        env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=subprocess.DEVNULL, check=True, timeout=LOAD_S,
    )  # fmt: skip
    found = json.loads(report.read_text())["benchmarks"][0]
    counts = {kind: len(found["requests"][kind] or ()) for kind in ("successful", "errored", "incomplete")}
    return {**counts, "per_second": counts["successful"] / found["duration"]}


# ---- the router over two datacenters ------------------------------------------------------------------------------
def _router(figures: Report, folder: Path, num_requests: int, num_clients: int) -> None:
    with ExitStack() as stack:
        sites = stack.enter_context(TwoSites(folder))
        url = sites.start_router(os.environ[ROUTER], stack, num_retries=60)
        killed = list[int]()
        killer = threading.Thread(target=_kill, args=(sites, num_requests, killed), daemon=True)
        killer.start()
        _report(figures, "router", load(folder, url, num_requests, num_clients), num_requests)
        killer.join(LOAD_S)
        figures.figure("router: workers killed", sum(killed), "", at_least=len(KILLS) + 1)
        answered = sites.counted("vllm:request_success_total")
        figures.figure("router: answered twice", answered - num_requests, "requests", at_most=0)
        sites.wait_for_lanes()
        url = sites.start_router(os.environ[ROUTER], stack, num_retries=0)
        _retries(figures, url, sites, num_clients)


def _kill(sites: TwoSites, num_requests: int, killed: list[int]) -> None:
    draw = random.Random(1)
    for share in (*KILLS, KILL_ALL):
        while sites.counted("vllm:request_success_total") < share * num_requests:
            time.sleep(0.1)
        workers = sites.workers
        for pid in workers if share == KILL_ALL else [draw.choice(workers)]:
            os.kill(pid, signal.SIGKILL)
        killed.append(len(workers) if share == KILL_ALL else 1)
        sites.wait_for_lanes()


def _retries(figures: Report, url: str, sites: TwoSites, num_clients: int) -> None:
    """Of the requests that come back after Retry-After, those that are answered. A client sends each request until it
    is answered."""
    before = Counter(
        {outcome: sites.counted("bubbletea:retries_total", outcome) for outcome in ("admitted", "refused")}
    )
    found = asyncio.run(_ask_all(url, num_requests=6 * num_clients, num_clients=num_clients))
    came_back = {outcome: sites.counted("bubbletea:retries_total", outcome) - before[outcome] for outcome in before}
    figures.figure("router: hurried requests answered", found["answered"], "requests", at_least=6 * num_clients)
    figures.figure("router: refused with Retry-After", found["429"], "times", at_least=num_clients)
    figures.figure("router: retries of a 429", found["retries"], "")
    admitted = 100 * (1 - found["429 again"] / max(1, found["retries"]))
    figures.figure("router: of these, admitted", admitted, "%", at_least=95.0)
    figures.figure("router: counted by the services: came back, admitted", came_back["admitted"], "")
    figures.figure("router: counted by the services: came back, refused", came_back["refused"], "")


async def _ask_all(url: str, num_requests: int, num_clients: int) -> Counter[str]:
    import openai

    found, draw, left = Counter[str](), random.Random(2), iter(range(num_requests))

    async def client(api: openai.AsyncOpenAI) -> None:
        for _ in left:
            prompt = " ".join(draw.choices(WORDS, k=draw.randint(20, 60)))
            last = ""
            while last != "answered":
                found["retries"] += last == "429"
                try:
                    await api.completions.create(
                        model="tiny", prompt=prompt, max_tokens=4, extra_body={"deadline_s": HURRIED_S}
                    )
                    last = "answered"
                except openai.APIStatusError as error:
                    found["429 again"] += last == "429" == str(error.status_code)
                    last = str(error.status_code)
                    await asyncio.sleep(int(error.response.headers.get("retry-after-ms", "1000")) / 1e3)
                found[last] += 1

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as api:
        await asyncio.gather(*(client(api) for _ in range(num_clients)))
    return found


if __name__ == "__main__":
    sys.exit(main())
