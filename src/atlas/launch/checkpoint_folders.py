"""The checkpoints of a run on one machine: a folder per datacenter under a common one. Finds the step to resume from,
once for all workers, and what each datacenter's workers need to know. Knows stores and steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atlas.errors import AtlasError
from atlas.runtime.assignment import SaveChoice


@dataclass(frozen=True)
class RunCheckpoints:
    """Where a run resumes and saves."""

    first_step: int
    """0 where there is no checkpoint."""
    by_datacenter: dict[str, SaveChoice]


def find_checkpoints(folder: Path, datacenters: Sequence[str], *, every: int = 0, keep: int = 3) -> RunCheckpoints:
    """The newest complete checkpoint under `folder`, whatever plan wrote it; or a new run."""
    from atlas.runtime.checkpoint import LocalStore, choose, next_attempt  # torch: 1.9 s

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
