"""Flags that several commands share."""

from __future__ import annotations

import argparse

from atlas.console import positive, share


def aim_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `admit.aims`."""
    add = parser.add_argument
    add(
        "--goal",
        type=positive,
        metavar="S",
        help="target time to first token, in seconds: a request that cannot reach it runs on the slowest copy of the "
        "model that meets its deadline, and leaves the faster ones to others",
    )
    add("--late", type=share, default=0.0, metavar="X", help="share of admitted requests that may miss their deadline")
