"""A model of a path and its file: a `.path` file is an npz archive without pickled objects, with a version.

The model has constants (capacity, least round trip, buffer) and the cross traffic of consecutive windows.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas.errors import SpecError
from atlas.ir.replace import write_whole
from atlas.weather.cell import Floats

VERSION = 3
"""Of the `.path` file's format."""
WINDOW_NS = 100_000_000
"""Cross traffic is constant within such a window."""
MAX_WINDOWS = 10_000_000
"""Of one model: 11 days."""
MAX_FILE_BYTES = 256 << 20
MAX_VALUE = 1e18
"""Of a constant, or of cross traffic, in its unit; a larger one is an error in the file."""
MAX_RIVALS = 16
"""Competing flows of one path."""
MAX_RATIO = 2.0
"""A link's `pair_gbps` and a model's capacity may differ by this factor."""


@dataclass(frozen=True, eq=False)
class PathModel:
    """What was learnt of a path."""

    capacity_bps: float
    rtt_ns: float
    """The least round trip."""
    buffer_bytes: float
    cross_bps: Floats
    """By window of `WINDOW_NS`."""
    known: NDArray[np.bool_]
    """Windows whose cross traffic was seen: the queue was busy. The others repeat the last one seen, as far as the
    capacity allows."""
    start_ns: int = 0
    """Unix time of the first window."""
    capacity_is_bound: bool = False
    """The capacity is at least this."""
    buffer_is_bound: bool = False
    method: str = "pairs"
    rivals: int = 0
    """Cross traffic reacts to a sender like this many TCP flows. 0: it does not react."""
    gap: NDArray[np.bool_] | None = None
    """Windows between recordings: nothing was sent, so nothing is known of them. None: there are none."""

    @property
    def seconds(self) -> float:
        return len(self.cross_bps) * WINDOW_NS / 1e9

    @property
    def recorded(self) -> NDArray[np.bool_]:
        """By window: whether it lies in no gap."""
        return np.ones(len(self.cross_bps), np.bool_) if self.gap is None else ~self.gap

    @property
    def recorded_bps(self) -> Floats:
        """Cross traffic without the gaps."""
        return self.cross_bps if self.gap is None else self.cross_bps[~self.gap]

    @property
    def mean_share(self) -> float:
        """Of the capacity that cross traffic takes."""
        return float(self.recorded_bps.mean()) / self.capacity_bps


def save_model(path: Path, model: PathModel) -> None:
    """Whole or not at all. The same model gives the same bytes."""
    meta = {
        "version": VERSION,
        "window_ns": WINDOW_NS,
        **{key: getattr(model, key) for key in _META},
    }
    text = np.frombuffer(json.dumps(meta, sort_keys=True).encode(), np.uint8)
    buffer = io.BytesIO()
    cross = model.cross_bps.astype("<f8")
    np.savez_compressed(buffer, meta=text, cross_bps=cross, known=model.known, gap=~model.recorded)
    write_whole(path, buffer.getvalue())


_META = (
    *("capacity_bps", "rtt_ns", "buffer_bytes", "start_ns"),
    *("capacity_is_bound", "buffer_is_bound", "method", "rivals"),
)


def load_model(path: Path, key: str = "model") -> PathModel:
    """Checks everything in the file before it is used."""

    def bad(value: object, rule: str, remedy: str = "Make it again with `atlas wan learn`") -> SpecError:
        return SpecError(where=str(path), key=key, value=value, rule=rule, remedy=remedy)

    arrays = _arrays(path, bad)
    try:
        meta = json.loads(bytes(arrays["meta"].astype(np.uint8)))
        version = meta["version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise bad(None, "is not a path model") from None
    if version != VERSION:
        raise bad(version, f"is a path model of another version; this release reads version {VERSION}")
    for name in ("capacity_bps", "rtt_ns", "buffer_bytes"):
        value = meta.get(name)
        if not isinstance(value, int | float) or not math.isfinite(value) or not 0 < value <= MAX_VALUE:
            raise bad(value, f"{name} must be a positive finite number")
    rivals = meta.get("rivals")
    if not isinstance(rivals, int) or isinstance(rivals, bool) or not 0 <= rivals <= MAX_RIVALS:
        raise bad(rivals, f"rivals (competing flows) must be a whole number from 0 to {MAX_RIVALS}")
    cross, known, gap = arrays["cross_bps"], arrays["known"], arrays.get("gap", np.zeros(0))
    typed = cross.dtype == np.float64 and known.dtype == gap.dtype == np.bool_
    if not typed or cross.ndim != 1 or not cross.shape == known.shape == gap.shape:
        raise bad(None, "its arrays have other types or shapes than a path model")
    if not 0 < len(cross) <= MAX_WINDOWS:
        raise bad(len(cross), f"must have 1 to {MAX_WINDOWS:,} windows")
    if gap.all():
        raise bad(None, "has no recorded window")
    if wrong := np.flatnonzero(~(np.isfinite(cross) & (cross >= 0) & (cross <= MAX_VALUE))).tolist():
        raise bad(float(cross[wrong[0]]), f"cross traffic of window {wrong[0]} must be finite and not negative")
    if meta.get("window_ns") != WINDOW_NS:
        raise bad(meta.get("window_ns"), f"windows must have {WINDOW_NS} ns")
    gaps = gap if gap.any() else None
    return PathModel(cross_bps=cross, known=known, gap=gaps, **{name: meta[name] for name in _META if name in meta})


def _arrays(path: Path, bad: Any) -> dict[str, NDArray[Any]]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise bad(None, f"is larger than {MAX_FILE_BYTES >> 20} MiB, which no path model is")
        with zipfile.ZipFile(path) as archive:
            sizes = [info.file_size for info in archive.infolist()]
        if sum(sizes) > MAX_FILE_BYTES:
            raise bad(None, f"holds more than {MAX_FILE_BYTES >> 20} MiB, which no path model does")
        with np.load(path, allow_pickle=False) as data:
            names = ("meta", "cross_bps", "known", "gap")  # older versions have no gaps; the version is checked later
            return {name: data[name] for name in names if name != "gap" or name in data}
    except OSError as error:
        reason = error.strerror or "is damaged"
        raise bad(None, f"cannot be read: {reason}", "Name a file of `atlas wan learn`") from None
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile, NotImplementedError, zipfile.error):
        raise bad(None, "is truncated or not a path model") from None


def require_like(model: PathModel, pair_gbps: float, where: str, key: str) -> None:
    """Raise SpecError if the capacity of the model and the rate of the link differ too much."""
    ratio = model.capacity_bps / (pair_gbps * 1e9)
    too_small = ratio * MAX_RATIO < 1 and not model.capacity_is_bound
    if ratio > MAX_RATIO or too_small:
        raise SpecError(
            where=where,
            key=key,
            value=f"{model.capacity_bps / 1e9:.4g} Gbit/s",
            rule=f"the model's capacity differs from the link's pair_gbps ({pair_gbps:g}) by more than {MAX_RATIO:g}x",
            remedy="Correct pair_gbps, or name the model of this link",
        )
