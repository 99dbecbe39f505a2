"""Numbers on a command line: types for argparse that refuse what is out of range, and say what the range is."""

from __future__ import annotations

import argparse
import math
from typing import Any


def whole(low: int, high: int) -> Any:
    """A whole number from `low` to `high`."""

    def value_of(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return value

    return value_of


def number(low: float, high: float) -> Any:
    """A number from `low` to `high`; NaN is not allowed."""

    def value_of(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low:g} to {high:g}")
        return value

    return value_of


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
        raise argparse.ArgumentTypeError(f"{text!r} must be between 0 and 1, such as 0.05")
    return value
