"""Weights from a local folder of safetensors (one file, or shards with an index), tensor by tensor: a worker reads
only the tensors of its own layers.

Knows files and names. Refuses, by name, tensors that are missing, of another shape, or unknown to the model.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from atlas.errors import SpecError
from atlas.lifetime import Closing
from atlas.runtime.flat import local_part
from atlas.runtime.models.config import DecoderConfig
from atlas.runtime.models.decoder import TIED_HEAD, Decoder, LayerRange, Sharding, empty
from atlas.runtime.models.names import NOT_WEIGHTS, HfTensor, base_prefix, layer_prefix, source_of
from atlas.runtime.models.shards import Shard, shard_of

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16")
MAX_INDEX_BYTES = 64 * 2**20
"""Of an index file: a broken one is not read into memory."""
CHECK = "Check that config.json and the weights belong together"


class WeightsFolder(Closing):
    """`with WeightsFolder(path) as folder:` opens a shard when one of its tensors is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = ExitStack()
        self._open: dict[str, Any] = {}
        self._file_of: dict[str, str] = self._index()

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def read(self, source: HfTensor, shape: torch.Size, shard: Shard | None = None) -> Tensor:
        """A tensor of ours that must have this shape, or a part of it; nothing else of its file is read."""
        name = source.name
        try:
            found = self._file(self._file_of[name]).get_slice(name)
            if found.get_dtype() not in DTYPES:
                rule = f"its dtype {found.get_dtype()} is not one of {', '.join(DTYPES)}"
                raise self._bad(name, None, rule, "Use weights that are not quantized")
            theirs = found.get_shape() or [1]
            theirs[-1] //= source.num_parts
            ours = theirs[::-1] if source.transposed else theirs
            if ours != list(shape):
                raise self._bad(name, ours, f"the config asks for {list(shape)}", CHECK)
            ends = [slice(0, length) for length in ours]
            if shard is not None:
                ends[shard.dimension] = slice(shard.start, shard.stop)
            ends = ends[::-1] if source.transposed else ends
            begin = source.part * theirs[-1]
            ends[-1] = slice(begin + ends[-1].start, begin + ends[-1].stop)
            tensor: Tensor = found[tuple(ends)]
        except (SafetensorError, OSError) as error:
            raise self._bad(self._file_of[name], None, f"cannot be read ({error})", "Fetch the file again") from None
        return tensor.t() if source.transposed else tensor

    def close(self) -> None:
        self._files.close()
        self._open.clear()

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = self._files.enter_context(safe_open(self.path / name, framework="pt", device="cpu"))
        return self._open[name]

    def _index(self) -> dict[str, str]:
        index = self.path / INDEX
        if not index.is_file():
            if not (self.path / SINGLE).is_file():
                remedy = "Name a folder with safetensors, or leave the weights out to start from random ones"
                raise self._bad("weights", None, f"there is neither {SINGLE} nor {INDEX}", remedy)
            try:
                return dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
            except (SafetensorError, OSError) as error:
                raise self._bad(SINGLE, None, f"cannot be read ({error})", "Fetch the file again") from None
        try:
            if index.stat().st_size > MAX_INDEX_BYTES:
                raise ValueError("too large")
            found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            file_of = {str(name): str(file) for name, file in found.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._bad(INDEX, None, f"is not an index of shards ({error!r})", "Fetch the file again") from None
        for file in set(file_of.values()):
            if Path(file).name != file:
                raise self._bad(INDEX, file, "a shard must lie in the folder itself", "Correct the index")
        return file_of

    def _bad(self, key: str, value: object, rule: str, remedy: str) -> SpecError:
        return SpecError(where=str(self.path), key=key, value=value, rule=rule, remedy=remedy)


def load(
    config: DecoderConfig,
    cut: LayerRange,
    path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    shard: Sharding | None = None,
) -> Decoder:
    """A range of layers with the weights of a Hugging Face folder; with `shard`, this process's part of them."""
    decoder = empty(config, cut, dtype, device, shard)
    with WeightsFolder(path) as folder:
        fill(decoder, folder)
    return decoder


@torch.no_grad()
def fill(decoder: Decoder, folder: WeightsFolder) -> None:
    config, cut = decoder.config, decoder.cut
    present = folder.names
    used = set()
    for name, parameter in decoder.named_parameters():
        if config.tied and name == TIED_HEAD and cut.has_embedding:
            continue  # it shares the embedding's memory
        source = source_of(config, name)
        theirs = _name_in(source.name, config, present)
        if theirs is None:
            raise folder._bad(source.name, None, "the weights do not have it", CHECK)
        used.add(theirs)
        mine = folder.read(replace(source, name=theirs), parameter.shape, shard_of(parameter))
        local_part(parameter).copy_(mine)
    _require_all_used(decoder, folder, used)


def _name_in(name: str, config: DecoderConfig, present: set[str]) -> str | None:
    """Its name in the files: some omit the prefix of the model."""
    short = name.removeprefix(base_prefix(config))
    return next((found for found in (name, short) if found in present), None)


def _require_all_used(decoder: Decoder, folder: WeightsFolder, used: set[str]) -> None:
    """Raise for unknown tensors: ignoring a bias, say, would silently change the model."""
    prefixes = [layer_prefix(decoder.config, i) for i in decoder.cut.layers]
    prefixes += [prefix.removeprefix(base_prefix(decoder.config)) for prefix in prefixes]
    for name in sorted(folder.names - used):
        if name.startswith(tuple(prefixes)) and not name.endswith(NOT_WEIGHTS):
            raise folder._bad(name, None, "the model of config.json has no such tensor", CHECK)
