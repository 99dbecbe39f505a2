"""Checkpoints: written in the background by each worker, layer by layer, and resumed by any plan.

docs/checkpoints.md describes the format and the order of events. Nothing here is a pickle.
"""

from atlas.runtime.checkpoint.calls import OWN, copies_of
from atlas.runtime.checkpoint.checkpointer import Checkpointer, Pause
from atlas.runtime.checkpoint.client import CheckpointClient, RemoteStore, behind
from atlas.runtime.checkpoint.copied_parts import forget_targets
from atlas.runtime.checkpoint.load import Checkpoint, choose, load_layers, verify
from atlas.runtime.checkpoint.manifest import Meta, SaveId, complete_ids, next_attempt
from atlas.runtime.checkpoint.place import store_at
from atlas.runtime.checkpoint.replicate import Replicator
from atlas.runtime.checkpoint.retention import Retention
from atlas.runtime.checkpoint.server import CheckpointServer
from atlas.runtime.checkpoint.state import LayerState, restore, share, states_of
from atlas.runtime.checkpoint.store import BlobStore, LocalStore, PlaceStore

__all__ = [
    "OWN",
    "BlobStore",
    "Checkpoint",
    "CheckpointClient",
    "CheckpointServer",
    "Checkpointer",
    "LayerState",
    "LocalStore",
    "Meta",
    "Pause",
    "PlaceStore",
    "RemoteStore",
    "Replicator",
    "Retention",
    "SaveId",
    "behind",
    "choose",
    "complete_ids",
    "copies_of",
    "forget_targets",
    "load_layers",
    "next_attempt",
    "restore",
    "share",
    "states_of",
    "store_at",
    "verify",
]
