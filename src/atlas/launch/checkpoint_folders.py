"""The checkpoints of a run on one machine: a store per datacenter under a common place. Finds the step to resume from,
once for all workers, and what each datacenter's workers need to know. Knows stores and steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from atlas.runtime.assignment import SaveChoice


def find_checkpoints(
    where: str | Path, datacenters: Sequence[str], *, every: int = 0, keep: int = 3
) -> dict[str, SaveChoice]:
    """By datacenter: where it saves, and the newest complete checkpoint under `where`, whatever plan wrote it."""
    from atlas.runtime.checkpoint.load import choose  # torch: 1.9 s
    from atlas.runtime.checkpoint.manifest import next_attempt
    from atlas.runtime.checkpoint.place import below, names_below, store_at

    place = str(where)
    there = [below(place, name) for name in names_below(place)]
    stores = [store_at(path) for path in there]
    found = choose(stores)
    attempt, step = next_attempt(stores), found.step if found is not None else None
    return {name: SaveChoice(below(place, name), every, keep, attempt, tuple(there), step) for name in datacenters}


def first_step(saves: Mapping[str, SaveChoice]) -> int:
    """The first step that a run with these has to do; 0 without a checkpoint."""
    return next((save.resume for save in saves.values()), None) or 0
