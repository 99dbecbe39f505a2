"""The ranges of numbers that commands and the Python API both take. A flag and the argument of the same name have the
same range. `require_arguments` of evaluate.py and `ranged` of console.py apply them."""

from __future__ import annotations

from collections.abc import Mapping

WHOLE: Mapping[str, tuple[int, int]] = {
    "tries": (1, 1_000_000),
    "plan.tries": (0, 1_000_000),
    "seed": (0, 2**32 - 1),
    "weather_seed": (0, 2**32 - 1),
    "iterations": (1, 1000),
    "jitter_runs": (1, 100_000),
    "monte_carlo": (1, 100_000),
    "global_batch": (1, 10**9),
    "steps": (1, 10**9),
    "slower": (1, 1000),
    "save_every": (0, 10**9),
}
NUMBERS: Mapping[str, tuple[float, float]] = {
    "wan_sigma": (0, 3),
    "confidence": (0.5, 0.999),
    "clip": (1e-12, 1e12),
    "learning_rate": (0, 1e6),
    "grace_s": (0.1, 1e6),
    "gather_s": (0.1, 1e6),
    "patience_s": (0.1, 1e6),
}
CHOICES: Mapping[str, tuple[str, ...]] = {"tcp": ("one", "many")}
TEXTS = ("schedule", "sweeps")
"""Arguments that are a string or several."""
OPTIONAL = (
    "jitter_runs",
    "monte_carlo",
    "schedule",
    "tries",
    "global_batch",
    "wan_sigma",
    "confidence",
    "clip",
    "learning_rate",
    "tcp",
)
"""Arguments that may be None."""
