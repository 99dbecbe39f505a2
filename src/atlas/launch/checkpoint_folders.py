"""The checkpoints of a run on one machine: a store per datacenter under a common place. Finds the step to resume from,
once for all workers, and what each datacenter's workers need to know. Knows stores and steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atlas.runtime.assignment import SaveChoice


@dataclass(frozen=True)
class RunCheckpoints:
    """Where a run resumes and saves."""

    first_step: int
    """0 where there is no checkpoint."""
    by_datacenter: dict[str, SaveChoice]


def find_checkpoints(where: str | Path, datacenters: Sequence[str], *, every: int = 0, keep: int = 3) -> RunCheckpoints:
    """The newest complete checkpoint under `where`, whatever plan wrote it; or a new run."""
    from atlas.runtime.checkpoint import choose, next_attempt, store_at  # torch: 1.9 s
    from atlas.runtime.checkpoint.place import below, names_below

    place = str(where)
    there = [below(place, name) for name in names_below(place)]
    stores = [store_at(path) for path in there]
    found = choose(stores)
    attempt, step = next_attempt(stores), found.step if found is not None else None
    return RunCheckpoints(
        step or 0,
        {
            name: SaveChoice(below(place, name), every, keep, attempt, tuple(there), step)
            for name in dict.fromkeys(datacenters)
        },
    )
