"""The flags for reports of a run (`launch.report`)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from atlas.launch.report import ReportChoice
from atlas.spec.recipe import LoggingRecipe


def watch_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-bar", action="store_true", help="no progress bar")
    parser.add_argument("--log", type=Path, metavar="FILE", help="append a JSON line for every step")
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE", help="append the timeline of every step, for `atlas view`"
    )
    parser.add_argument("--metrics-port", type=int, metavar="PORT", help="serve /metrics for Prometheus (0: any port)")
    parser.add_argument(
        "--metrics-host", default="127.0.0.1", metavar="ADDRESS", help="address of /metrics (default: 127.0.0.1 only)"
    )


def watched(args: argparse.Namespace, logging: LoggingRecipe, labels: Mapping[str, str]) -> ReportChoice:
    """The reports that the recipe and the flags choose."""
    return ReportChoice(
        bar=not args.no_bar,
        lines=Path(logging.lines) if logging.lines is not None else None,
        timeline=Path(logging.timeline) if logging.timeline is not None else None,
        metrics_port=logging.metrics_port,
        metrics_host=args.metrics_host,
        labels=labels,
    )
