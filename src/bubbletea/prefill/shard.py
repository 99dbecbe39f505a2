"""A worker's part of the served model: a range of its layers with the weights in the arena, run one layer at a time.

Knows the model and its memory; not prompts, bubbles or other workers. Shape letters as in
`atlas.runtime.models.block`: L new tokens, T all tokens, D width, K heads of keys and values, E head width.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from atlas.runtime.models.block import KvSlab, PackedSlabs
from atlas.runtime.models.config import DecoderConfig
from atlas.runtime.models.decoder import TIED_HEAD, Decoder, LayerRange, cuts, initialize
from atlas.runtime.models.huggingface import read_config
from atlas.runtime.models.weights import WeightsFolder, fill
from bubbletea.kv_blocks import DTYPES
from bubbletea.model_identity import model_id
from bubbletea.prefill.arena import Allocation, Arena, aligned

FOR_ANY_SHAPE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Attention for prompts of any length: without cuDNN, which compiles a kernel for every new shape."""
TINY = Path(__file__).parents[1] / "tiny"
"""The folder of the model that is served where none is named: 0.66 million parameters, trained by
`examples/train_tiny.py`."""


@dataclass(frozen=True)
class Served:
    """The served model: its config, and a folder with its weights or the seed of random weights."""

    config: DecoderConfig
    folder: Path | None = None
    seed: int = 0
    dtype: str = "float32"

    @classmethod
    def of_folder(cls, folder: Path, dtype: str = "float32") -> Served:
        return cls(read_config(folder), folder, dtype=dtype)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def id(self) -> str:
        """Equal on every worker and in a decode engine with a copy of the folder; differs with dimensions, dtype or
        weights."""
        if self.folder is not None:
            return model_id(self.folder, self.dtype)
        shape = json.dumps(asdict(self.config), sort_keys=True, default=str)
        return hashlib.blake2b(f"{self.dtype} {self.seed} {shape}".encode(), digest_size=12).hexdigest()

    @property
    def kv_bytes_per_layer_token(self) -> int:
        return 2 * self.config.num_kv_heads * self.config.head_width * self.torch_dtype.itemsize

    def cuts(self, layers_per_stage: tuple[int, ...]) -> list[LayerRange]:
        return cuts(self.config, layers_per_stage)


class ModelShard:
    """One range of layers, loaded. Uses `weights_bytes` of its arena permanently."""

    def __init__(self, served: Served, cut: LayerRange, arena: Arena) -> None:
        self.served, self.cut, self.arena = served, cut, arena
        self.config, self.dtype = served.config, served.torch_dtype
        with torch.device("meta"):
            decoder = Decoder(self.config, cut).to(self.dtype)
        shared = self.config.tied and cut.has_embedding and cut.has_head
        named = {n: p for n, p in decoder.named_parameters() if not (shared and n == TIED_HEAD)}
        self.weights_bytes = sum(aligned(p.numel() * self.dtype.itemsize) for p in named.values())
        allocation = arena.require(self.weights_bytes, f"the weights of {len(cut.layers)} layers")
        memory = arena.tensors(allocation, self.dtype, *(tuple(p.shape) for p in named.values()))
        for name, tensor in zip(named, memory, strict=True):
            owner, _, last = name.rpartition(".")
            setattr(decoder.get_submodule(owner), last, nn.Parameter(tensor, requires_grad=False))
        decoder.retie()
        self.decoder = decoder.eval()
        self._read()

    def _read(self) -> None:
        if self.served.folder is not None:
            with WeightsFolder(self.served.folder) as folder:
                fill(self.decoder, folder)
            return
        initialize(self.decoder, self.served.seed)

    # ---- running -----------------------------------------------------------------------------------------------
    @torch.inference_mode()
    def embed(self, tokens: Tensor, start: int) -> Tensor:
        """[L] -> [1, L, D]"""
        assert self.decoder.embedding is not None, "the embedding is another worker's"
        positions = torch.arange(start, start + len(tokens), device=self.arena.device)
        there = tokens[None].to(self.arena.device, non_blocking=True)
        x: Tensor = self.decoder.embedding(there, positions)
        return x

    @torch.inference_mode()
    def layer(self, index: int, x: Tensor, slab: KvSlab) -> Tensor:
        """One layer of one chunk; appends the chunk's keys and values to the slab."""
        return self.layers(index, [x], [slab])[0]

    @torch.inference_mode()
    def layers(self, index: int, xs: Sequence[Tensor], slabs: Sequence[KvSlab]) -> Sequence[Tensor]:
        """One layer of chunks of one or several prompts."""
        lengths, is_one = [x.shape[1] for x in xs], len(xs) == 1
        starts = [
            torch.arange(s.length, s.length + n, device=self.arena.device) for s, n in zip(slabs, lengths, strict=True)
        ]
        with self.arena.workspace(), sdpa_kernel(FOR_ANY_SHAPE):
            x, kv = (xs[0], slabs[0]) if is_one else (torch.cat(list(xs), dim=1), PackedSlabs(slabs, lengths))
            y: Tensor = self.decoder.layers[str(index)](x, torch.cat(starts), kv)[0]
        return torch.split(y, lengths, dim=1)

    @torch.inference_mode()
    def logits(self, *xs: Tensor) -> Tensor:
        """[1, L, D] of each prompt -> [prompts, V] of its last position, in float32."""
        assert self.decoder.head is not None, "the head is another worker's"
        with self.arena.workspace():
            found: Tensor = self.decoder.head(torch.cat([x[:, -1:] for x in xs], dim=1))[0].float()
        return found

    # ---- memory ------------------------------------------------------------------------------------------------
    def job_bytes(self, length: int, chunk: int) -> int:
        """Arena memory of one prompt: keys and values of all its tokens, activations of a chunk."""
        return sum(aligned(math.prod(shape) * self.dtype.itemsize) for shape in self._shapes(length, chunk))

    def lay_out(self, allocation: Allocation, length: int, chunk: int) -> tuple[dict[int, KvSlab], Tensor]:
        """The slabs by layer and a chunk's activations [1, chunk, D], in an allocation of `job_bytes`."""
        kv, x = self.arena.tensors(allocation, self.dtype, *self._shapes(length, chunk))
        return {layer: KvSlab(k, v) for layer, (k, v) in zip(self.cut.layers, kv, strict=True)}, x

    def _shapes(self, length: int, chunk: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        config = self.config
        kv = (len(self.cut.layers), 2, 1, config.num_kv_heads, length, config.head_width)
        return kv, (1, chunk, config.width)

    def workspace_bytes(self, num_new: int, num_all: int) -> int:
        """An upper bound of a layer's temporaries for this chunk: projections, MLP, mask, and attention scores without
        a fused kernel (on the CPU)."""
        config, size = self.config, self.dtype.itemsize
        heads = (2 * config.num_heads + 6 * config.num_kv_heads) * config.head_width
        scores = num_new * num_all * (config.num_heads * 4 if self.arena.device.type == "cpu" else 0)
        return num_new * (6 * config.width + heads + 4 * config.ffn_width) * size + scores + 2 * num_new * num_all
