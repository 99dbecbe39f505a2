"""Hand-off to an unmodified vLLM server on the CPU: equal tokens, and the time it saves.

    BUBBLETEA_VLLM_PYTHON=/path/to/vllm-env/bin/python python bench/vllm_handoff.py [--dtypes float32,bfloat16]
    ... --faults 200

Twenty prompts of 129 to 1,000 tokens, 24 greedy tokens each, with and without the hand-off, in one server per dtype. In
bfloat16 two correct engines already disagree on a random model's tokens, so there the figure is the distance of the
first token's log-probabilities from vLLM's own: handed over, from our own prefill, and with corrupted keys. Exits with
77 if no vLLM is named.

In float32 also 200 hand-offs of which a worker is killed in the fetch, the lease has expired, the seal or the layers
are wrong. vLLM must compute them itself: the same tokens, and one warning each. `--faults N`: only N of these.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "bubbletea" / "vllm"))
import fault_cases
from common.report import not_measured
from greedy_decoding import make_slabs, prefill
from lab.lines import Lines
from vllm_lab import (
    BLOCK,
    PYTHON_VARIABLE,
    TINY,
    TOKEN,
    Prefiller,
    VllmServer,
    make_model,
    make_prompts,
    transfer_config,
    vllm_server,
    within,
)

LENGTHS = [129, 130, 200, 255, 256, 257, 300, 383, 384, 385, 400, 511, 512, 513, 600, 700, 777, 896, 950, 1000]
NUM_TOKENS, NUM_FAULTS = 24, 200
LONG = 1900
WARNING = "BubbleTea: "


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", default="float32,bfloat16", metavar="A,B", help="default: float32,bfloat16")
    parser.add_argument("--faults", type=int, metavar="N", help="only N failing hand-offs, in float32")
    args = parser.parse_args()
    dtypes = args.dtypes.split(",") if args.faults is None else ["float32"]
    python = os.environ.get(PYTHON_VARIABLE)
    if python is None:
        return not_measured("vllm_handoff", f"set {PYTHON_VARIABLE} to a Python that has vllm (docs/vllm.md)")
    lines = Lines()
    for dtype in dtypes:
        with tempfile.TemporaryDirectory(prefix="vllm-handoff-") as name:
            _measure(lines, python, Path(name), dtype, args.faults)
    return lines.table()


def _measure(lines: Lines, python: str, work: Path, dtype: str, num_faults: int | None) -> None:
    (work / "token").write_text(TOKEN)
    folder = make_model(work / "model", dtype=getattr(torch, dtype))
    options = ["--kv-transfer-config", transfer_config(work / "token"), "--max-logprobs", str(TINY.vocabulary)]
    began = time.monotonic()
    with (
        Prefiller(folder, dtype, split=(1, 2, 1)) as prefiller,
        vllm_server(python, folder, work / "log", *options, dtype=dtype) as server,
    ):
        lines.add(f"{dtype}: server up", time.monotonic() - began, "s", "", None)
        if num_faults is not None:
            _faults(lines, server, prefiller, num_faults)
            return
        _tokens(lines, server, prefiller, dtype)
        _distances(lines, server, prefiller, dtype)
        _times(lines, server, prefiller, dtype)
        if dtype == "float32":
            _faults(lines, server, prefiller, NUM_FAULTS)


def _faults(lines: Lines, server: VllmServer, prefiller: Prefiller, count: int) -> None:
    counts = Counter[str]()
    for number in range(count):
        draw = random.Random(number)
        prompt = [draw.randrange(TINY.vocabulary) for _ in range(draw.randrange(BLOCK + 1, 6 * BLOCK))]
        kind, num_tokens = draw.choice(list(fault_cases.FAULTS)), 8
        plain = server.complete(prompt, num_tokens, f"fault, plain {number}")
        params = prefiller.prefill(prompt, f"fault {number}", chunk=draw.choice((50, 96, 256)))
        params = fault_cases.FAULTS[kind](prefiller, params, prompt, draw)
        before = server.log.count(WARNING)
        handed = server.complete(prompt, num_tokens, f"fault, handed {number}", params)
        prefiller.cut_after(None)
        prefiller.release(f"fault {number}")
        counts[kind] += 1
        counts[f"{kind}, right"] += handed == plain
        counts[f"{kind}, one warning"] += within(5.0, lambda: server.log.count(WARNING) > before) and (  # noqa: B023
            server.log.count(WARNING) == before + 1
        )
    for kind in fault_cases.FAULTS:
        for what in ("right", "one warning"):
            found, whole = counts[f"{kind}, {what}"], counts[kind]
            name = "same tokens" if what == "right" else what
            lines.add(f"{kind}: recomputed by vLLM, {name}", found, f"of {whole}", "all", found == whole)


def _tokens(lines: Lines, server: VllmServer, prefiller: Prefiller, dtype: str) -> None:
    prompts = make_prompts(LENGTHS)
    plain = [server.complete(prompt, NUM_TOKENS, f"plain {i}") for i, prompt in enumerate(prompts)]
    handed = [
        server.complete(prompt, NUM_TOKENS, f"handed {i}", prefiller.prefill(prompt, f"handed {i}"))
        for i, prompt in enumerate(prompts)
    ]
    ours = [prefiller.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    exact = dtype == "float32"
    for name, others in (("vLLM's own", plain), ("ours", ours)):
        same = sum(a == b for a, b in zip(handed, others, strict=True))
        bar, ok = (f">= {len(prompts)}", same == len(prompts)) if exact else ("", None)
        lines.add(f"{dtype}: handed over, tokens equal {name}", same, "prompts", bar, ok)
    if not exact:
        same = sum(a == b for a, b in zip(plain, ours, strict=True))
        lines.add(f"{dtype}: without hand-off, vLLM's tokens equal ours", same, "prompts", "", None)
    found = server.metrics()
    lines.at_least(f"{dtype}: hand-offs loaded", found["bubbletea:handoff_loads_total"], "", len(prompts))
    lines.add(f"{dtype}: tokens injected", found["bubbletea:handoff_tokens_total"], "tokens", "", None)


def _distances(lines: Lines, server: VllmServer, prefiller: Prefiller, dtype: str) -> None:
    """Mean difference of log-probabilities from vLLM's own, over the vocabulary and four prompts."""
    far: dict[str, list[float]] = {"handed over": [], "our own prefill": [], "spoilt keys": []}
    for prompt in make_prompts([129, 300, 512, 1000], seed=2):
        plain = _log_probs(server, prompt, "distance plain")
        handed = _log_probs(server, prompt, "distance handed", prefiller.prefill(prompt, f"far {len(prompt)}"))
        params = prefiller.prefill(prompt, f"spoilt {len(prompt)}")
        prefiller.spoil(f"spoilt {len(prompt)}")
        spoilt = _log_probs(server, prompt, "distance spoilt", params)
        slabs = make_slabs(prefiller.decoder, 1, len(prompt))
        logits = prefill(prefiller.decoder, torch.tensor([prompt]), slabs)[0]
        for name, found in (("handed over", handed), ("our own prefill", logits.float().log_softmax(-1))):
            far[name].append(float((found - plain).abs().mean()))
        far["spoilt keys"].append(float((spoilt - plain).abs().mean()))
    for name, values in far.items():
        lines.add(f"{dtype}: distance from vLLM's log-probabilities, {name}", statistics.mean(values), "nat", "", None)
    ratio = statistics.mean(far["spoilt keys"]) / max(1e-9, statistics.mean(far["handed over"]))
    lines.at_least(f"{dtype}: spoilt is farther than handed over by", ratio, "x", 5)


def _log_probs(
    server: VllmServer, prompt: list[int], salt: str, params: dict[str, object] | None = None
) -> torch.Tensor:
    answer = server.ask(
        prompt, 1, f"{salt} {len(prompt)}", params, logprobs=TINY.vocabulary, return_tokens_as_token_ids=True
    )
    found = torch.empty(TINY.vocabulary)
    for name, value in answer["choices"][0]["logprobs"]["top_logprobs"][0].items():
        found[int(name.removeprefix("token_id:"))] = value
    return found


def _times(lines: Lines, server: VllmServer, prefiller: Prefiller, dtype: str) -> None:
    """Time of vLLM's response with one token, best of five, each with a new prompt."""
    plain, handed = list[float](), list[float]()
    for i, prompt in enumerate(make_prompts([LONG] * 6, seed=7)):
        params = prefiller.prefill(prompt, f"long {i}")
        for salt, given, seconds in (("a", None, plain), ("b", params, handed)):
            began = time.perf_counter()
            server.complete(prompt, 1, f"long {salt} {i}", given)
            seconds.append(time.perf_counter() - began)
    lines.add(f"{dtype}: one token behind {LONG}, vLLM alone", min(plain[1:]) * 1e3, "ms", "", None)
    lines.add(f"{dtype}: one token behind {LONG}, handed over", min(handed[1:]) * 1e3, "ms", "", None)


if __name__ == "__main__":
    sys.exit(main())
