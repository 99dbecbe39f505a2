"""GuideLLM, a public load generator, against `bubbletea serve`: the share of requests that are answered.

    BUBBLETEA_GUIDELLM=/path/to/env/bin/guidellm python bench/load_generator.py [--requests 2000] [--clients 64]

Streamed chat completions of prompts from 1 to 60 words, responses of 4 tokens. GuideLLM never retries a refused
request, so a single refusal is visible. Install it in a separate environment (`pip install guidellm`), because it
brings many packages. Exits with 77 if it is not named. Not covered: workers that die (`tests/bubbletea/serve`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from common.report import Report, not_measured

VARIABLE = "BUBBLETEA_GUIDELLM"
WORDS = ("the", "rain", "in", "spain", "falls", "mainly", "on", "a", "plain", "that", "nobody", "has", "seen")
WORKERS, START_S, LOAD_S = 4, 60.0, 600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=64)
    args = parser.parse_args()
    guidellm = os.environ.get(VARIABLE)
    if guidellm is None:
        return not_measured("load_generator", f"set {VARIABLE} to the guidellm of an environment that has it")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        service = subprocess.Popen(
            [sys.executable, "-m", "bubbletea.cli", "serve", "--alone", str(WORKERS), "--port", "0"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            found = load(guidellm, folder, url_of(service), args.requests, args.clients)
        finally:
            service.send_signal(signal.SIGINT)
            service.communicate(timeout=60)
    figures = Report("GuideLLM's requests", "none lost, none refused")
    figures.figure("answered", found["successful"], "requests", at_least=args.requests)
    figures.figure("refused or failed", found["errored"] + found["incomplete"], "requests", at_most=0)
    figures.figure("a second", found["per_second"], "requests")
    return figures.finish()


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


def load(guidellm: str, folder: Path, url: str, num_requests: int, num_clients: int) -> dict[str, Any]:
    draw, prompts, report = random.Random(0), folder / "prompts.jsonl", folder / "report.json"
    with prompts.open("w") as lines:
        for _ in range(num_requests):
            prompt = " ".join(draw.choices(WORDS, k=draw.randint(1, 60)))
            lines.write(json.dumps({"prompt": prompt, "output_tokens_count": 4}) + "\n")
    subprocess.run(
        [guidellm, "run", "--disable-console-interactive",
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


if __name__ == "__main__":
    sys.exit(main())
