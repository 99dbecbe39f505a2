"""Types for argparse that several commands share."""

from __future__ import annotations

import argparse


def positive(text: str) -> float:
    """A number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def share(text: str) -> float:
    """A number between zero and one."""
    value = positive(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: give one such as 0.05")
    return value


def aim_flags(parser: argparse.ArgumentParser, limit: str) -> None:
    """What `admit.aims` knows; `limit` is what the command calls a request's deadline."""
    parser.add_argument(
        "--goal", type=positive, metavar="S", help="who cannot be delivered in S seconds leaves quick lanes to who can"
    )
    parser.add_argument(
        "--late", type=share, default=0.0, metavar="X", help=f"of those let in, who may miss the {limit} (default 0)"
    )
