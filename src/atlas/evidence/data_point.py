"""A data point: a folder with one workload card and a trace per rank; or a bare folder of Kineto traces; or one trace.

Finds and reads the files; `checks` has the rules. Archives are not unpacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from atlas.errors import AtlasError, SpecError
from atlas.evidence.card import Card, read_card
from atlas.evidence.ccl import RankFigures, ccl_metrics, rank_figures
from atlas.evidence.checks import findings, require_plausible
from atlas.evidence.events import NotATraceError
from atlas.evidence.metric import Metric
from atlas.evidence.own import OwnFigures, own_figures, own_metrics
from atlas.evidence.rank_trace import rank_of, read_rank

_TRACE_ENDINGS = (".json", ".json.gz")
_ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")


@dataclass(frozen=True)
class PointFiles:
    """The files of a data point."""

    folder: Path
    card: Card | None
    traces: tuple[Path, ...]
    """In the order of their names, as CCL-Bench reads them."""
    named: bool
    """Whether the files are named by rank; else any JSON file may be a trace, or not."""


@dataclass(frozen=True)
class DataPoint:
    """A data point that was read."""

    found: PointFiles
    ccl: list[Metric]
    """CCL-Bench's metrics by its definitions."""
    own: list[Metric]
    findings: list[str]
    """What is odd in the card or the traces, for people."""
    ranks: list[RankFigures] = field(repr=False)
    own_ranks: list[OwnFigures] = field(repr=False)

    @property
    def name(self) -> str:
        return self.found.folder.resolve().name

    @property
    def source(self) -> str:
        """ "simulated", "emulated" or "measured", where Atlas wrote it; "trace" where another profiler did."""
        card = self.found.card
        return (card.source if card is not None else "") or "trace"

    @property
    def slower(self) -> float:
        """What every duration of an emulated run was multiplied by."""
        card = self.found.card
        return (card.number("atlas.slower") if card is not None else None) or 1.0

    def value(self, name: str) -> float | None:
        return next((metric.value for metric in (*self.ccl, *self.own) if metric.name == name), None)


def find_data_point(folder: Path) -> PointFiles:
    """The card and the traces of a folder, or one trace file. Raises AtlasError where there is none."""
    if folder.name.endswith(_ARCHIVES) and folder.is_file():
        raise AtlasError(f"{folder}: is an archive, which is not unpacked here. Unpack it and name the folder")
    if folder.is_file():
        return PointFiles(folder, None, (folder,), named=True)
    if not folder.is_dir():
        raise AtlasError(f"{folder}: there is no such folder. Name a folder with rank0_trace.json, or a trace file")
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    ranked = [path for path in files if rank_of(path) is not None]
    kineto = [path for path in ranked if path.name.startswith("kineto_")]
    ranked = kineto or ranked  # CCL-Bench prefers them where both exist
    traces = ranked or [path for path in files if path.name.endswith(_TRACE_ENDINGS)]
    if not traces:
        raise AtlasError(
            f"{folder}: has no trace. Expected rank0_trace.json, kineto_trace_0.json or another .json[.gz]"
        )
    _require_once(folder, ranked)
    return PointFiles(folder, _card(folder, files), tuple(traces), named=bool(ranked))


def _require_once(folder: Path, ranked: Sequence[Path]) -> None:
    by_rank: dict[int, Path] = {}
    for path in ranked:
        other = by_rank.setdefault(rank_of(path) or 0, path)
        if other is not path:
            raise AtlasError(f"{folder}: {other.name} and {path.name} are of the same rank. Keep one of them")


def _card(folder: Path, files: Sequence[Path]) -> Card | None:
    cards = [read_card(path) for path in files if path.suffix in (".yaml", ".yml")]
    cards = [card for card in cards if "workload" in card.data]
    if len(cards) > 1:
        names = " and ".join(card.path.name for card in cards[:3])
        raise SpecError(
            where=str(folder),
            key="workload card",
            rule=f"a data point has one card, but {names} are there",
            remedy="Keep the card of these traces",
        )
    return cards[0] if cards else None


def read_data_point(
    folder: Path, *, salvage: bool = False, progress: Callable[[str, int, int], None] | None = None
) -> DataPoint:
    """Read every trace, one after another, and compute all metrics."""
    found = find_data_point(folder)
    ranks: list[RankFigures] = []
    own: list[OwnFigures] = []
    skipped: list[str] = []
    for number, path in enumerate(found.traces):
        if progress is not None:
            progress(f"reading {path.name}", number, len(found.traces))
        try:
            trace = read_rank(path, salvage=salvage)
        except NotATraceError as error:
            if found.named:
                raise
            skipped.append(str(error))
            continue
        ranks.append(rank_figures(trace))
        own.append(own_figures(trace))
    if not ranks:
        raise AtlasError(skipped[0])
    ccl, ours = ccl_metrics(ranks, found.card), own_metrics(own, found.card)
    require_plausible(found.card, found.traces[0], (*ccl, *ours))
    notes = [f"skipped: {reason}" for reason in skipped]
    return DataPoint(found, ccl, ours, [*findings(found.card, ranks), *notes], ranks, own)
