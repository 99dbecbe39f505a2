"""A checkpoint of step 0 from a Hugging Face folder: weights, no optimizer state. A run with the same model starts from
it, whatever its optimizer, batch and data. One layer is in memory at a time.

Knows Hugging Face folders and stores.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from atlas.errors import AtlasError
from atlas.runtime.checkpoint.calls import OWN
from atlas.runtime.checkpoint.checkpointer import Checkpointer
from atlas.runtime.checkpoint.export import Progress
from atlas.runtime.checkpoint.manifest import IMPORTED, Meta
from atlas.runtime.checkpoint.object_store import require_object_store
from atlas.runtime.checkpoint.place import below, names_below, store_at
from atlas.runtime.checkpoint.state import states_of
from atlas.runtime.models.config import model_layers
from atlas.runtime.models.decoder import cuts
from atlas.runtime.models.huggingface import read_config
from atlas.runtime.models.weights import load
from atlas.spec.recipe import OBJECT_STORE


def import_hf(folder: Path, place: str, *, progress: Progress = lambda what, done, total: None) -> int:
    """Write a checkpoint to a place for checkpoints that has none yet; the number of its layers."""
    if place.startswith(OBJECT_STORE):
        require_object_store(place, "--out")
    if names_below(place):
        raise AtlasError(f"{place}: is not empty. Name a new place: a folder has the checkpoints of one run")
    config = read_config(folder)
    layers = model_layers(config)
    model = {"config": dataclasses.asdict(config)}
    meta = Meta(samples_seen=0, seed=0, schedule_step=0, config={IMPORTED: True, "model": model})
    store = store_at(below(place, OWN))
    pieces = cuts(config, [1] * config.num_layers)
    for number, cut in enumerate(pieces):
        progress("importing", number, len(pieces))
        decoder = load(config, cut, folder)
        writer = Checkpointer(store, f"import{number}", layers)
        writer.save(0, states_of(decoder.named_parameters()), meta)
        writer.close()
        if writer.failed:
            raise AtlasError(f"{place}: {next(iter(writer.failed.values()))}. Free some space or choose another place")
    return len(layers)
