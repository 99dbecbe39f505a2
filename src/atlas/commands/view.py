"""Draw timeline files: an HTML page, a Perfetto trace, a figure.

Without a flag the page is written beside the first file. Several files share one time axis.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from atlas.commands.files import Outputs, picture_flags
from atlas.commands.terminal import say, show
from atlas.errors import SpecError
from atlas.ir.analysis import summary
from atlas.ir.store import load_timeline
from atlas.ir.timeline import Timeline
from atlas.view import results_table


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="timeline files of `atlas simulate --save`, or of a run"
    )
    picture_flags(parser)


def run(args: argparse.Namespace) -> int:
    outputs = Outputs.of(args)
    if not outputs.paths:
        outputs = replace(outputs, page=_beside(args.files[0]))
    outputs.require_writable()
    outputs.require_apart(args.files)
    timelines = [load_timeline(path) for path in args.files]
    title = ", ".join(dict.fromkeys(str(t.meta.get("job", t.program.name)) for t in timelines))
    sources = ", ".join(dict.fromkeys(timeline.source for timeline in timelines))
    show(results_table([_row(timeline) for timeline in timelines], title=title, source=f"Times are {sources}."))
    outputs.write(timelines, timelines, title, [f"Times are {sources}."], args.files)
    for path in outputs.written(timelines):
        say(f"wrote {path}")
    return 0


def _beside(file: Path) -> Path:
    """The page's name where none was given; never the file's own."""
    if not file.name:
        raise SpecError(where="atlas view", key="FILE", value=str(file), rule="is a folder", remedy="Name a file in it")
    return file.with_name(f"{file.name}.html") if file.suffix == ".html" else file.with_suffix(".html")


def _row(timeline: Timeline) -> dict[str, Any]:
    """The figures of a file. Its notes are a stranger's: a bound that is no number is left out."""
    row = {**summary(timeline), "tcp": timeline.meta.get("tcp")}
    bound = timeline.meta.get("lower_bound_s")
    if isinstance(bound, float) and bound > 0 and timeline.program.num_iterations == 1:
        row |= {"lower_bound_s": bound, "gap": row["iteration_s"] / bound}
    return row
