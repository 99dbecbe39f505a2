"""The flags of a command whose run can be watched, and what they ask for (`launch.report`)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from atlas.launch.report import ReportChoice


def watch_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-bar", action="store_true", help="no progress bar")
    parser.add_argument("--log", type=Path, metavar="FILE", help="append a line of JSON for every step")
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE", help="append every step's timeline; `atlas view` opens it at any time"
    )
    parser.add_argument("--metrics-port", type=int, metavar="PORT", help="serve /metrics for Prometheus (0: any port)")
    parser.add_argument(
        "--metrics-host", default="127.0.0.1", metavar="ADDRESS", help="where to serve it (default: 127.0.0.1 only)"
    )


def watched(args: argparse.Namespace, labels: Mapping[str, str]) -> ReportChoice:
    """What was asked for."""
    return ReportChoice(
        bar=not args.no_bar,
        lines=args.log,
        timeline=args.timeline,
        metrics_port=args.metrics_port,
        metrics_host=args.metrics_host,
        labels=labels,
    )
