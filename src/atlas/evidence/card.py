"""The workload card of a data point: CCL-Bench's YAML, version 1. Reading is lenient: text in place of a number ("TBD")
is noted and counts as missing.

`write_card` makes one; `checks` compares it with the traces.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from atlas.errors import SpecError
from atlas.spec.document import read_yaml, shown

VERSION = 1
"""Of the card's format."""
NUMBERS = {
    "workload.model": ("epochs", "iteration"),
    "workload.model.model_arch": ("num_params", "num_params_embedding", "num_layers", "num_heads", "head_dim"),
    "workload.data": ("batch_size", "seq_len", "input_len", "output_len"),
    "workload.hardware.xpu_spec": ("total_count", "count_per_node"),
    "Model-executor.model_plan_parallelization": ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "pp_mb"),
}
"""Keys of CCL-Bench's `workload_card_template.yaml` that have a number, by the key that they are below."""
DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "cp")
"""Their product is the number of devices; experts (ep) share the devices of dp."""


@dataclass(frozen=True)
class ModelShape:
    """The model as the card describes it."""

    num_params: float
    """Active ones, where the card says how many."""
    num_params_embedding: float
    num_layers: float
    num_heads: float
    head_dim: float


@dataclass
class Card:
    """A card as it was read."""

    path: Path
    data: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    """What was odd in it."""

    def get(self, path: str) -> Any:
        """The value at `workload.data.seq_len`; None where there is none."""
        value: Any = self.data
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def text(self, path: str) -> str | None:
        value = self.get(path)
        return None if value is None or isinstance(value, dict | list) else str(value)

    def number(self, path: str) -> float | None:
        """A positive number, or None."""
        value = self.get(path)
        if isinstance(value, str):
            try:
                value = float(value.replace("_", "").replace(",", ""))
            except ValueError:
                return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e30:
            return None
        return float(value)

    @cached_property
    def shape(self) -> ModelShape | None:
        """None where the card lacks a part of it."""
        if self.lacking():
            return None
        values = {key: self._arch(key) or 0.0 for key in ModelShape.__dataclass_fields__}
        values["num_params"] = self._arch("num_params_active") or values["num_params"]
        return ModelShape(**values)

    def lacking(self) -> list[str]:
        """The keys of the model that a FLOP count needs and the card has no number for."""
        needed = ("num_params", "num_layers", "num_heads", "head_dim")
        return [key for key in needed if not self._arch(key)]

    def _arch(self, key: str) -> float | None:
        nested = self.number(f"workload.model.model_arch.{key}")
        return self.number(f"workload.model.{key}") if nested is None else nested

    @property
    def seq_len(self) -> float:
        return self.number("workload.data.seq_len") or 1.0

    @property
    def tokens(self) -> float:
        """Per step."""
        return (self.number("workload.data.batch_size") or 1.0) * self.seq_len

    @property
    def num_devices(self) -> float:
        return self.number("workload.hardware.xpu_spec.total_count") or 1.0

    @property
    def source(self) -> str:
        """ "simulated", "emulated" or "measured", where Atlas wrote the card; else empty."""
        return self.text("atlas.source") or ""

    def degree(self, name: str) -> int | None:
        value = self.number(f"Model-executor.model_plan_parallelization.{name}")
        return None if value is None else int(value)


def read_card(path: Path) -> Card:
    """The card in a file; raises SpecError for what is no YAML mapping (or a YAML bomb)."""
    data = read_yaml(path, key="workload card").data
    if not isinstance(data, dict):
        raise SpecError(
            where=str(path),
            key="workload card",
            value=shown(data),
            rule="is not a mapping of keys",
            remedy="Start from CCL-Bench's workload_card_template.yaml",
        )
    card = Card(path, data)
    if data.get("version", VERSION) != VERSION:
        card.notes.append(f"version {data['version']!r}: this Atlas knows version {VERSION}")
    for key in (f"{section}.{name}" for section, names in NUMBERS.items() for name in names):
        value = card.get(key)
        if value is not None and card.number(key) is None:
            card.notes.append(f"{key} = {shown(value)!r} is not a number: taken as missing")
    return card
