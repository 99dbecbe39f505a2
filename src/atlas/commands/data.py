"""Tokenize text into shards for `atlas train`, and check shards.

A text file is one document, a .jsonl file one per line ({"text": ...}). Without a tokenizer, tokens are bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from atlas.console import Meter, print_json
from atlas.errors import AtlasError
from atlas.runtime.data.batches import Dataset
from atlas.runtime.data.tokenize import SHARD_TOKENS, sample_text, tokenize
from atlas.runtime.data.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, help="tokenize or check")
    write = actions.add_parser("tokenize", help="write shards", description="Write a folder of shards.")
    write.add_argument(
        "inputs", nargs="*", type=Path, metavar="INPUT", help="text or .jsonl (default: the included text)"
    )
    write.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to create")
    write.add_argument("--tokenizer", type=Path, metavar="FILE", help="a model's tokenizer.json (default: bytes)")
    write.add_argument("--end", metavar="TOKEN", help="the token between documents (default: the tokenizer's own)")
    write.add_argument(
        "--shard-tokens",
        type=int,
        default=SHARD_TOKENS,
        metavar="N",
        help=f"tokens per file (default {SHARD_TOKENS:,})",
    )
    check = actions.add_parser("check", help="verify shards", description="Verify shards and describe them.")
    check.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="folders of shards, or shards")
    for action in (write, check):
        action.add_argument("--json", action="store_true", help="print as JSON")


def run(args: argparse.Namespace) -> int:
    if args.action == "check":
        dataset = Dataset.open(*args.paths, verify=True)
    else:
        with Meter() as meter:
            tokenize(
                args.inputs or [sample_text()],
                args.out,
                _tokenizer(args.tokenizer, args.end),
                shard_tokens=args.shard_tokens,
                progress=meter,
            )
        dataset = Dataset.open(args.out)
    facts = _facts(dataset)
    if args.json:
        print_json(facts)
    else:
        where = ", ".join(map(str, args.paths if args.action == "check" else [args.out]))
        print(f"{where}: {facts['tokens']:,} tokens in {facts['shards']} shard(s), tokenizer {facts['tokenizer']}")
        print(f"vocabulary {facts['vocabulary']:,}, {facts['bytes_per_token']} byte(s) each, digest {facts['digest']}")
    return 0


def _tokenizer(path: Path | None, end: str | None) -> Tokenizer:
    if path is not None:
        return FileTokenizer(path, end)
    if end is not None:
        raise AtlasError(f"--end {end!r}: without --tokenizer, documents end with a zero byte. Leave out --end")
    return ByteTokenizer()


def _facts(dataset: Dataset) -> dict[str, Any]:
    header = dataset.shards[0].header
    return {
        "tokens": dataset.num_tokens,
        "shards": len(dataset.shards),
        "tokenizer": header.tokenizer,
        "vocabulary": header.vocabulary,
        "bytes_per_token": header.dtype.itemsize,
        "digest": dataset.digest,
    }
