"""Draw timeline files as an HTML page, a Perfetto trace or a figure.

Without a flag, the page is written next to the first file. Several files share one time axis.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from atlas.console import require_apart, require_outputs, say, show
from atlas.errors import MissingExtraError, SpecError
from atlas.ir.analysis import summary
from atlas.ir.replace import write_whole
from atlas.ir.store import load_timeline, save_timeline
from atlas.ir.timeline import Timeline
from atlas.view import Figure, results_table, write_page, write_trace
from atlas.view.table import GROUP_KEYS, groups_note


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="timeline files of `atlas simulate --save`, or of a run"
    )
    picture_flags(parser)


def run(args: argparse.Namespace) -> int:
    outputs = TimelineOutputs.of(args)
    if not outputs.paths:
        outputs = replace(outputs, page=_beside(args.files[0]))
    outputs.require_writable()
    outputs.require_apart(args.files)
    timelines = [load_timeline(path) for path in args.files]
    title = ", ".join(dict.fromkeys(str(t.meta.get("job", t.program.name)) for t in timelines))
    sources = ", ".join(dict.fromkeys(timeline.source for timeline in timelines))
    rows = [_row(timeline) for timeline in timelines]
    source = f"Times are {sources}."
    show(results_table(rows, title=title, source="\n".join([source, *groups_note(rows, times=False)])))
    outputs.write(timelines, timelines, title, [source, *groups_note(rows)], args.files)
    return 0


def _beside(file: Path) -> Path:
    """The default name of the page, which is never that of the timeline file."""
    if not file.name:
        raise SpecError(
            where="command line", key="FILE", value=str(file), rule="is a folder", remedy="Name a file in it"
        )
    return file.with_name(f"{file.name}.html") if file.suffix == ".html" else file.with_suffix(".html")


def _row(timeline: Timeline) -> dict[str, Any]:
    """The figures of a timeline file. The file may be damaged: a lower bound that is not a number is left out."""
    row = {**summary(timeline), **of_groups(timeline), "tcp": timeline.meta.get("tcp")}
    bound = timeline.meta.get("lower_bound_s")
    if isinstance(bound, float) and bound > 0 and timeline.program.num_iterations == 1:
        row |= {"lower_bound_s": bound, "gap": row["iteration_s"] / bound}
    return row


def of_groups(timeline: Timeline) -> dict[str, Any]:
    """Where a timeline is of one group of a plan: which one, and the time of all. Nothing of a damaged file."""
    found = {key: timeline.meta.get(key) for key in GROUP_KEYS}
    is_whole = isinstance(found["all_groups_s"], float) and found["all_groups_s"] > 0
    return found if is_whole and all(isinstance(found[key], int) for key in GROUP_KEYS[1:]) else {}


# ---- the files of a command with timelines -------------------------------------------------------------------
@dataclass(frozen=True)
class TimelineOutputs:
    """The files to write; None for those that were not asked for."""

    page: Path | None = None
    trace: Path | None = None
    svg: Path | None = None
    png: Path | None = None
    save: Path | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> TimelineOutputs:
        """From the flags of a command."""
        return cls(**{name: getattr(args, name, None) for name in cls.__dataclass_fields__})

    @property
    def paths(self) -> dict[str, Path]:
        """By flag."""
        return {f"--{name}": path for name, path in vars(self).items() if path is not None}

    def require_writable(self) -> None:
        """Raise SpecError for the first file that cannot be written, before anything is computed."""
        require_outputs(self.paths)
        if self.png is not None and find_spec("resvg_py") is None:
            raise MissingExtraError("resvg-py", "png", "--png")

    def require_apart(self, inputs: Iterable[str | Path]) -> None:
        """Raise SpecError where one of them is among the command's `inputs`."""
        require_apart(self.paths, inputs)

    def write(
        self,
        timelines: Sequence[Timeline],
        drawn: Sequence[Timeline],
        title: str,
        notes: Sequence[str],
        inputs: Iterable[str | Path],
        chart: str = "",
    ) -> None:
        """Write all of them: traces and timeline files of `timelines`, pages and figures of `drawn`. `chart`: an SVG
        for the page."""
        require_apart({str(path): path for path in self.written(timelines)}, inputs)
        if self.page is not None:
            write_page(self.page, drawn, title=title, notes=notes, chart=chart)
        if self.svg is not None or self.png is not None:
            figure = Figure(*drawn, title=title)
            if self.svg is not None:
                write_whole(self.svg, figure.svg.encode())
            if self.png is not None:
                write_whole(self.png, figure.png())
        for path, timeline in zip(each(self.trace, timelines), timelines, strict=False):
            write_trace(path, timeline)
        for path, timeline in zip(each(self.save, timelines), timelines, strict=False):
            save_timeline(path, timeline)
        for path in self.written(timelines):
            say(f"wrote {path}")

    def written(self, timelines: Sequence[Timeline]) -> list[Path]:
        """The files that `write` writes."""
        pictures = [path for path in (self.page, self.svg, self.png) if path is not None]
        return pictures + each(self.trace, timelines) + each(self.save, timelines)


def label(timeline: Timeline) -> str:
    """`atlas-many`: a timeline's name as part of a file name, without characters that file names must not have."""
    tcp = timeline.meta.get("tcp")
    name = f"{timeline.program.name}-{tcp}" if tcp else timeline.program.name
    return re.sub(r"[^\w.+-]+", "_", name)[:60]


def each(path: Path | None, timelines: Sequence[Timeline]) -> list[Path]:
    """One path for each timeline: for several timelines, with the schedule in the name; none for None."""
    if path is None:
        return []
    if len(timelines) == 1:
        return [path]
    stem, dot, rest = path.name.partition(".")
    names = [label(timeline) for timeline in timelines]
    if len(set(names)) < len(names):
        names = [f"{name}-{k}" for k, name in enumerate(names)]
    return [path.with_name(f"{stem}-{name}{dot}{rest}") for name in names]


def picture_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of every command with timelines."""
    add = parser.add_argument
    add("--page", type=Path, metavar="FILE", help="write an HTML page, all timelines on one time axis")
    add("--svg", type=Path, metavar="FILE", help="write a figure (SVG)")
    add("--png", type=Path, metavar="FILE", help="write a figure (PNG; needs the extra `png`)")
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write a trace for ui.perfetto.dev, one per timeline (.gz: compressed)",
    )
