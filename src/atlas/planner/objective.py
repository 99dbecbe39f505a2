"""The goal of a plan: fast, cheap, fast within a budget, cheap but fast enough, or done by a deadline.

One number orders all plans; lower is better. Plans that miss a limit come after all plans that meet it, ordered by how
much they miss. Works on single figures and on arrays of estimates. Knows no plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from atlas.errors import SpecError

if TYPE_CHECKING:
    from atlas.spec import Job

OBJECTIVES = {
    "throughput": "most tokens per second (the default)",
    "cost": "fewest dollars per token, rent of GPUs and egress counted",
}
"""What `--objective` may be; a budget, a least throughput or a deadline goes with either."""
MISSED = 1e15
"""Least score of a plan that misses a limit: more than the seconds or dollars of any plan that keeps all limits."""

ROUNDING = 1e-12
"""A limit that is missed by less than this share is met."""
TIE_WEIGHT = 1e-6
"""Weight of the second goal: small enough to decide between equal plans only."""
MAX_AMOUNT = 1e30
"""Amounts that users give are below this."""


@dataclass(frozen=True)
class Objective:
    """What to minimise, and within which limits."""

    minimise: Literal["throughput", "cost"] = "throughput"
    max_usd_per_hour: float | None = None
    max_usd_per_iteration: float | None = None
    min_tokens_per_s: float | None = None
    why: str = ""
    """The limits as the user gave them."""

    @property
    def needs_prices(self) -> bool:
        return self.minimise == "cost" or self.max_usd_per_hour is not None or self.max_usd_per_iteration is not None

    @property
    def has_limits(self) -> bool:
        limits = (self.max_usd_per_hour, self.max_usd_per_iteration, self.min_tokens_per_s)
        return any(limit is not None for limit in limits)

    def score(self, iteration_s: Any, usd: Any, tokens: int, slack: float = 0.0) -> Any:
        """Lower is better. `slack`: the share by which an estimate may miss a limit."""
        base = iteration_s if self.minimise == "throughput" else usd
        # A tie is broken by the other: of two equally fast plans the cheaper, of two equally cheap the faster.
        other = usd if self.minimise == "throughput" else iteration_s
        missed = self.missed(iteration_s, usd, tokens, slack)
        return np.where(missed > 0, MISSED * (1 + missed), base * (1 + TIE_WEIGHT * other / (1 + other)))

    def missed(self, iteration_s: Any, usd: Any, tokens: int, slack: float = 0.0) -> Any:
        """By which share the worst limit is missed; 0 where all are kept."""
        worst = np.zeros(np.shape(iteration_s))
        give = 1 + slack
        if self.max_usd_per_hour is not None:
            worst = np.maximum(worst, usd / iteration_s * 3600 / (self.max_usd_per_hour * give) - 1)
        if self.max_usd_per_iteration is not None:
            worst = np.maximum(worst, usd / (self.max_usd_per_iteration * give) - 1)
        if self.min_tokens_per_s is not None:
            worst = np.maximum(worst, self.min_tokens_per_s / (tokens / iteration_s * give) - 1)
        return np.where(worst > ROUNDING, worst, 0.0)

    def words(self) -> str:
        goal = "the most tokens per second" if self.minimise == "throughput" else "the fewest dollars per token"
        return goal + (f" {self.why}" if self.why else "")


def require_prices(job: Job) -> None:
    """A cost objective needs a rent for every datacenter; one that is written as 0 is a price too."""
    for dc in job.cluster.datacenters:
        if dc.usd_per_gpu_hour == 0 and "usd_per_gpu_hour" not in dc.model_fields_set:
            raise SpecError(
                where=job.where,
                key=f"cluster.datacenters.{dc.name}.usd_per_gpu_hour",
                rule="is missing; a budget needs prices, and so does the objective cost, which is the default with a "
                "minimum throughput or a deadline",
                remedy="Write the rent of one GPU in dollars an hour; 0 if you own it",
            )


def amount(text: str, flag: str, units: dict[str, float], example: str) -> tuple[float, str]:
    """`500/h` -> (500, "h"). The unit is one of `units`; the number is multiplied by what the unit stands for."""
    number = text.strip().lower().replace(",", "").replace("_", "").replace("$", "")
    unit = next((u for u in sorted(units, key=len, reverse=True) if u and number.endswith(u)), "")
    digits = number[: len(number) - len(unit)].strip() if unit else number
    try:
        value = float(digits)
    except ValueError:
        value = -1.0
    if not 0 < value < MAX_AMOUNT or unit not in units:
        known = ", ".join(u for u in units if u)
        rule = f"is not a positive number with one of the units {known}"
        raise SpecError(where=flag, key=flag.lstrip("-"), value=text, rule=rule, remedy=f"Write it like {example}")
    return value * units[unit], unit


def objective_of(
    goal: str,
    *,
    budget: str | None = None,
    min_throughput: str | None = None,
    tokens: str | None = None,
    deadline: str | None = None,
    tokens_per_iteration: int,
) -> Objective:
    """From the command's flags, with units converted."""
    limits: dict[str, float] = {}
    why = []
    if budget is not None:
        value, unit = amount(budget, "--budget", {"/h": 1, "/hour": 1, "/it": 1, "/iteration": 1}, "500/h or 2.5/it")
        hourly = unit in ("/h", "/hour")
        limits["max_usd_per_hour" if hourly else "max_usd_per_iteration"] = value
        why.append(f"for at most ${value:,.6g} {'an hour' if hourly else 'an iteration'}")
    if min_throughput is not None:
        units = {"": float(tokens_per_iteration), "it/s": float(tokens_per_iteration), "tok/s": 1.0, "tokens/s": 1.0}
        value, unit = amount(min_throughput, "--min-throughput", units, "0.03it/s or 50000tok/s")
        limits["min_tokens_per_s"] = value
        why.append(f"at {min_throughput.strip()}{'' if unit else ' it/s'} or more")
    if (tokens is None) != (deadline is None):
        missing = "--deadline" if deadline is None else "--tokens"
        rule, remedy = "--tokens and --deadline must be given together", f"Give {missing} too"
        raise SpecError(where=missing, key=missing.lstrip("-"), rule=rule, remedy=remedy)
    if tokens is not None and deadline is not None:
        count, _ = amount(tokens, "--tokens", {"": 1, "m": 1e6, "b": 1e9, "t": 1e12}, "1T or 300e9")
        seconds, _ = amount(deadline, "--deadline", {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}, "30d or 12h")
        limits["min_tokens_per_s"] = max(limits.get("min_tokens_per_s", 0.0), count / seconds)
        why.append(f"with {tokens.strip()} tokens done in {deadline.strip()}")
    if goal not in OBJECTIVES:
        remedy = f"Give one of {', '.join(OBJECTIVES)}"
        raise SpecError(where="--objective", key="objective", value=goal, rule="no such objective", remedy=remedy)
    minimise: Literal["throughput", "cost"] = "cost" if goal == "cost" else "throughput"
    return Objective(minimise, why=", ".join(why), **limits)
