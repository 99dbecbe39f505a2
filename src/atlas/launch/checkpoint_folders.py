"""Where the checkpoints of a run lie, what is there already, and what each datacenter's workers are told of it.

On one machine every datacenter has a folder of its own under one; nothing is shared. The launcher chooses the step to
resume from, once for all. Knows stores and steps, not who trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atlas.errors import AtlasError
from atlas.runtime.assignment import SaveChoice


@dataclass(frozen=True)
class RunCheckpoints:
    """A run's checkpoints, and where it goes on."""

    first_step: int
    """0 where there are none."""
    by_datacenter: dict[str, SaveChoice]


def find_checkpoints(folder: Path, datacenters: Sequence[str], *, every: int = 0, keep: int = 3) -> RunCheckpoints:
    """The newest complete checkpoint under `folder`, whatever plan left it there; or a new beginning."""
    from atlas.runtime.checkpoint import LocalStore, choose, next_attempt

    if folder.exists() and not folder.is_dir():
        raise AtlasError(f"{folder}: not a folder. Choose another place for checkpoints")
    there = [str(path) for path in sorted(folder.iterdir()) if path.is_dir()] if folder.exists() else []
    stores = [LocalStore(path) for path in there]
    found = choose(stores)
    attempt, step = next_attempt(stores), found.step if found is not None else None
    return RunCheckpoints(
        step or 0,
        {
            name: SaveChoice(str(folder / name), every, keep, attempt, tuple(there), step)
            for name in dict.fromkeys(datacenters)
        },
    )
