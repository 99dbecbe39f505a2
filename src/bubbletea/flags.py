"""Flags that several commands share. Who reads them knows what they mean."""

from __future__ import annotations

import argparse

from atlas.console import positive, share


def aim_flags(parser: argparse.ArgumentParser, limit: str) -> None:
    """What `admit.aims` knows; `limit` is what the command calls a request's deadline."""
    parser.add_argument(
        "--goal", type=positive, metavar="S", help="who cannot be delivered in S seconds leaves quick lanes to who can"
    )
    parser.add_argument(
        "--late", type=share, default=0.0, metavar="X", help=f"of those let in, who may miss the {limit} (default 0)"
    )
