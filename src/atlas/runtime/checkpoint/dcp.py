"""Checkpoints to and from `torch.distributed.checkpoint` (DCP), the format of torchtitan and of other PyTorch trainers.

An export has `model.NAME`, `optimizer.SLOT.NAME` and `step`, with the names and shapes of Hugging Face. An import reads
the weights of such a folder and writes a Hugging Face folder, which `atlas train --model` starts from. The whole model
is in host memory meanwhile. DCP's `.metadata` is a pickle: import only folders that you trust.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from atlas.errors import AtlasError
from atlas.ir.replace import new_folder
from atlas.runtime.checkpoint.export import decoder_of
from atlas.runtime.checkpoint.load import Checkpoint, load_layers
from atlas.runtime.checkpoint.state import LayerState, restore
from atlas.runtime.models.config import DecoderConfig
from atlas.runtime.models.decoder import TIED_HEAD, LayerRange, empty
from atlas.runtime.models.export import hf_tensors
from atlas.runtime.models.huggingface import read_config
from atlas.runtime.models.names import source_of
from atlas.runtime.models.weights import SINGLE

MODEL, OPTIMIZER, STEP = "model", "optimizer", "step"


def export_dcp(checkpoint: Checkpoint, folder: Path) -> int:
    """Write `folder`, which must not exist yet; the number of its tensors."""
    with new_folder(folder) as unfinished:
        config = decoder_of(checkpoint)
        states = load_layers(checkpoint, checkpoint.layers)
        found: dict[str, Any] = {MODEL: _renamed(config, states), STEP: torch.tensor(checkpoint.step)}
        kept = [entries for state in states.values() for entries in state.optimizer.values()]
        entries = {entry for of_parameter in kept for entry, tensor in of_parameter.items() if tensor.dim()}
        if entries:
            found[OPTIMIZER] = {entry: _renamed(config, _of_entry(states, entry)) for entry in sorted(entries)}
        with _quiet():
            save(found, checkpoint_id=str(unfinished), no_dist=True)
    return len(found[MODEL]) * (1 + len(entries))


def import_dcp(folder: Path, config_file: Path, out: Path) -> int:
    """Write a Hugging Face folder `out` from the weights of a DCP folder; the number of tensors."""
    with new_folder(out) as unfinished:
        wanted = _names(read_config(config_file))
        state = _read_weights(folder, wanted)
        save_file({name: state[f"{MODEL}.{name}"] for name in wanted}, unfinished / SINGLE, metadata={"format": "pt"})
        shutil.copy(config_file / "config.json" if config_file.is_dir() else config_file, unfinished / "config.json")
    return len(wanted)


def _read_weights(folder: Path, wanted: Sequence[str]) -> dict[str, Tensor]:
    if not (folder / ".metadata").is_file():
        raise AtlasError(f"{folder}: no .metadata in it. Name a folder of torch.distributed.checkpoint")
    listed = FileSystemReader(folder).read_metadata().state_dict_metadata
    state: dict[str, Tensor] = {
        name: torch.empty(kept.size, dtype=kept.properties.dtype)
        for name, kept in listed.items()
        if name.startswith(f"{MODEL}.") and isinstance(kept, TensorStorageMetadata)
    }
    missing = sorted(name for name in wanted if f"{MODEL}.{name}" not in state)
    if missing:
        raise AtlasError(
            f"{folder}: no tensor {MODEL}.{missing[0]} ({len(missing)} of {len(wanted)} are missing). Export it with "
            "the names of Hugging Face, or give the config.json that belongs to it"
        )
    with _quiet():
        load(state, checkpoint_id=str(folder), no_dist=True)
    return state


def _of_entry(states: Mapping[str, LayerState], entry: str) -> dict[str, LayerState]:
    """One entry of the optimizer in place of the parameters."""
    return {
        layer: LayerState({name: state.optimizer[name][entry] for name in state.parameters if name in state.optimizer})
        for layer, state in states.items()
    }


def _renamed(config: DecoderConfig, states: Mapping[str, LayerState]) -> dict[str, Tensor]:
    """With the names and shapes of Hugging Face: a decoder is filled with them and written as one."""
    tensors = [tensor for state in states.values() for tensor in state.parameters.values()]
    decoder = empty(config, LayerRange.whole(config), tensors[0].dtype, "cpu")
    restore(states, decoder.named_parameters())
    return hf_tensors(decoder)


def _names(config: DecoderConfig) -> list[str]:
    decoder = empty(config, LayerRange.whole(config), torch.float32, "meta")
    names = (name for name, _ in decoder.named_parameters() if not (config.tied and name == TIED_HEAD))
    return list(dict.fromkeys(source_of(config, name).name for name in names))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warning that it assumes a single process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
