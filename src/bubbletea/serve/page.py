"""BubbleTea's part of the live page of a run: which of its metrics are shown, and where the page finds them.

The service writes `service.json` into the folder of the run, so that the page of `atlas train --ui` shows it too. Knows
names of metrics; the page is `atlas.ui`'s.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atlas.launch.train_options import TrainOptions
from atlas.spec import Job
from atlas.ui.child import PageProcess
from atlas.ui.run_files import PageFacts, announced_service
from atlas.ui.server import page_address

CARDS = (
    {"label": "time to first token", "unit": "s", "kind": "mean", "series": "vllm:time_to_first_token_seconds"},
    {"label": "requests waiting", "kind": "value", "series": "vllm:num_requests_waiting"},
    {"label": "bubbles filled", "unit": "%", "kind": "value", "scale": 100, "series": "bubbletea:fill_ratio"},
    {"label": "prefilled", "unit": "tokens/s", "kind": "rate", "series": "vllm:prompt_tokens_total"},
)


@contextmanager
def live_page(args: argparse.Namespace, job: Job, options: TrainOptions, service_port: int) -> Iterator[str]:
    """Serve the page until the block is left; gives its address."""
    host, port = page_address(args.ui_at or "0", "--ui-at")
    folder = args.runs or Path("runs") / job.name
    facts = PageFacts(job.name, options.schedule, options.tcp, slower=args.slower, device=args.device)
    service_host = "127.0.0.1" if args.host in ("0.0.0.0", "::") else args.host
    service = {"metrics": f"http://{service_host}:{service_port}/metrics", "cards": list(CARDS)}
    with announced_service(folder, service), PageProcess(folder, facts, job, host, port, keep=True) as page:
        yield page.url
