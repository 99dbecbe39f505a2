"""Arrivals of requests: files of public traces, a synthetic trace, and both at another rate.

Azure's LLM inference traces (CSV with TIMESTAMP, ContextTokens, GeneratedTokens), Mooncake's (JSON lines with timestamp
in ms, input_length, hash_ids of 512-token blocks). Files stay where the user has them. Knows no windows.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atlas.errors import AtlasError, SpecError
from bubbletea.admit.prefix_index import BLOCK_TOKENS

Floats = NDArray[np.float64]
MEAN_TOKENS, MEAN_PER_S = 1150, 5.0
"""Of the synthetic trace: tokens of a prompt, and requests. A replay stretches time to reach its load."""


@dataclass(frozen=True, eq=False)
class RequestTrace:
    """Arrivals in order."""

    name: str
    at_s: Floats
    """Seconds since the first arrival."""
    tokens: NDArray[np.int64]
    blocks: tuple[tuple[int, ...], ...] = ()
    """By request: hashes of its 512-token blocks, if the trace has them."""

    def __len__(self) -> int:
        return len(self.at_s)

    @property
    def span_s(self) -> float:
        """From the first arrival to one mean interval after the last."""
        return float(self.at_s[-1]) * len(self) / max(1, len(self) - 1)

    def resized(self, tokens: int) -> RequestTrace:
        """The same arrivals with all prompts scaled to `tokens` on average."""
        scaled = np.maximum(1, np.round(self.tokens * (tokens / self.tokens.mean()))).astype(np.int64)
        return RequestTrace(f"{self.name} at {tokens} tokens", self.at_s, scaled)

    def played(self, tokens_per_s: float, until_s: float) -> Iterator[tuple[float, int, tuple[int, ...]]]:
        """(second, tokens, blocks) at another rate, repeated until `until_s`.

        Time is compressed, so bursts stay bursts; the part of the trace that is played has the rate on average."""
        wanted, sums = tokens_per_s * until_s, np.cumsum(self.tokens)
        laps, rest = divmod(wanted, float(sums[-1]))
        end_s = laps * self.span_s + float(self.at_s[min(len(self) - 1, int(np.searchsorted(sums, rest)))])
        factor, span, lap = until_s / max(end_s, 1e-9), self.span_s, 0
        while True:
            for k in range(len(self)):
                at = (lap * span + float(self.at_s[k])) * factor
                if at >= until_s:
                    return
                yield at, int(self.tokens[k]), self.blocks[k] if self.blocks else ()
            lap += 1


def load_trace(path: str | Path) -> RequestTrace:
    """Reads a trace file; the first line determines its format."""
    path = Path(path)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first = file.readline()
            file.seek(0)
            rows = list(_mooncake(file) if first.lstrip().startswith("{") else _azure(file))
    except FileNotFoundError:
        raise AtlasError(
            f"{path}: no such trace file. Give an Azure CSV, a Mooncake JSON-lines file or 'synthetic'"
        ) from None
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise SpecError(
            where=str(path),
            key="trace",
            rule=f"is neither an Azure CSV (TIMESTAMP, ContextTokens) nor a Mooncake file ({error})",
            remedy="Give one of those, or 'synthetic'",
        ) from None
    if len(rows) < 2:
        raise SpecError(where=str(path), key="trace", value=len(rows), rule="needs two requests", remedy="Give more")
    rows.sort(key=lambda row: row[0])
    at = np.array([row[0] for row in rows])
    blocks = tuple(row[2] for row in rows) if any(row[2] for row in rows) else ()
    return RequestTrace(path.stem, at - at[0], np.array([row[1] for row in rows], np.int64), blocks)


Row = tuple[float, int, tuple[int, ...]]


def _azure(file: Iterator[str]) -> Iterator[Row]:
    for row in csv.DictReader(file):
        stamp = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26])  # datetime takes at most six digits of a second
        yield stamp.timestamp(), max(1, int(row["ContextTokens"])), ()


def _mooncake(file: Iterator[str]) -> Iterator[Row]:
    for line in file:
        if line.strip():
            row = json.loads(line)
            yield float(row["timestamp"]) / 1e3, max(1, int(row["input_length"])), tuple(row.get("hash_ids", ()))


def synthetic(num_requests: int = 4000) -> RequestTrace:
    """Poisson arrivals; log-normal prompt lengths as in chats; every fourth continues an earlier conversation."""
    random = np.random.default_rng(0)
    at = np.cumsum(random.exponential(1 / MEAN_PER_S, num_requests))
    tokens = np.clip(random.lognormal(np.log(MEAN_TOKENS) - 0.5, 1.0, num_requests), 16, 14_000).astype(np.int64)
    blocks: list[tuple[int, ...]] = []
    fresh = 0
    for k in range(num_requests):
        count = int(tokens[k]) // BLOCK_TOKENS
        old = blocks[int(random.integers(k))] if k and random.random() < 0.25 else ()
        own = old[:count] + tuple(range(fresh, fresh + max(0, count - len(old))))
        fresh += max(0, count - len(old))
        blocks.append(own)
    return RequestTrace("synthetic", at - at[0], tokens, tuple(blocks))
