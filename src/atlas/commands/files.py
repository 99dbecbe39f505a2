"""The files a command leaves behind: whether they can be written is asked before anything is computed, and that none
is a file that the command reads.

Each file is written whole or not at all (`ir.replace`).
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from atlas.errors import AtlasError, MissingExtraError, SpecError
from atlas.ir.store import save_timeline
from atlas.ir.timeline import Timeline
from atlas.view import write_page, write_png, write_svg, write_trace


@dataclass(frozen=True)
class Outputs:
    """Where to put what; None where it is not wanted."""

    page: Path | None = None
    trace: Path | None = None
    svg: Path | None = None
    png: Path | None = None
    save: Path | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> Outputs:
        """From a command's flags, those it has."""
        return cls(**{name: getattr(args, name, None) for name in cls.__dataclass_fields__})

    @property
    def paths(self) -> dict[str, Path]:
        """By flag."""
        return {f"--{name}": path for name, path in vars(self).items() if path is not None}

    def require_writable(self) -> None:
        """Raise for the first file that could not be written. Asked before anything is read."""
        for flag, path in self.paths.items():
            require_writable(path, flag)
        require_apart(self.paths)
        if self.png is not None and find_spec("resvg_py") is None:
            raise MissingExtraError("resvg-py", "png", "--png")

    def require_apart(self, inputs: Iterable[str | Path]) -> None:
        """Raise where one of them is among the command's `inputs`."""
        require_apart(self.paths, inputs)

    def write(
        self,
        timelines: Sequence[Timeline],
        drawn: Sequence[Timeline],
        title: str,
        notes: Sequence[str],
        inputs: Iterable[str | Path],
    ) -> None:
        """All of them: traces and timeline files hold `timelines`, pictures show `drawn`."""
        require_apart({str(path): path for path in self.written(timelines)}, inputs)
        if self.page is not None:
            write_page(self.page, drawn, title=title, notes=notes)
        if self.svg is not None:
            write_svg(self.svg, drawn, title=title)
        if self.png is not None:
            write_png(self.png, drawn, title=title)
        for path, timeline in zip(each(self.trace, timelines), timelines, strict=False):
            write_trace(path, timeline)
        for path, timeline in zip(each(self.save, timelines), timelines, strict=False):
            save_timeline(path, timeline)

    def written(self, timelines: Sequence[Timeline]) -> list[Path]:
        """What `write` leaves behind."""
        pictures = [path for path in (self.page, self.svg, self.png) if path is not None]
        return pictures + each(self.trace, timelines) + each(self.save, timelines)


def label(timeline: Timeline) -> str:
    """`atlas-many`: a timeline's name in the name of a file. It may be a stranger's: what names no file is left out."""
    tcp = timeline.meta.get("tcp")
    name = f"{timeline.program.name}-{tcp}" if tcp else timeline.program.name
    return re.sub(r"[^\w.+-]+", "_", name)[:60]


def each(path: Path | None, timelines: Sequence[Timeline]) -> list[Path]:
    """One file for each timeline: the name as given for one, with the schedule in it for several; none for None."""
    if path is None:
        return []
    if len(timelines) == 1:
        return [path]
    stem, dot, rest = path.name.partition(".")
    names = [label(timeline) for timeline in timelines]
    if len(set(names)) < len(names):
        names = [f"{name}-{k}" for k, name in enumerate(names)]
    return [path.with_name(f"{stem}-{name}{dot}{rest}") for name in names]


def require_writable(path: Path, flag: str) -> None:
    """Raise where a file of this name could not be written."""
    folder = path.parent
    if path.is_dir():
        raise SpecError(where=flag, key="file", value=str(path), rule="is a folder", remedy="Name a file in it")
    if path.exists() and not path.is_file() and os.access(path, os.W_OK):
        return  # a device or a pipe, whatever may be done to its folder
    if not folder.is_dir():
        remedy = f"Create it first: mkdir -p {folder}"
        raise SpecError(where=flag, key="file", value=str(path), rule=f"there is no folder {folder}", remedy=remedy)
    if not os.access(folder, os.W_OK):
        rule = f"folder {folder} cannot be written to"
        raise SpecError(where=flag, key="file", value=str(path), rule=rule, remedy="Choose another place")


def require_apart(paths: Mapping[str, Path], inputs: Iterable[str | Path] = ()) -> None:
    """Raise where two flags name one file: the second would replace what the first wrote; and where one names a file
    that the command reads, by whatever name: what it was made from would be lost."""
    sources = [path for path in map(Path, inputs) if path.is_file()]
    taken: dict[Path, str] = {}
    for flag, path in paths.items():
        rule = ""
        if (other := taken.setdefault(path.absolute(), flag)) != flag:
            rule = f"{other} writes to the same file"
        elif path.is_file() and any(path.samefile(source) for source in sources):
            rule = "is read by this command, and would be lost"
        if rule:
            raise SpecError(where=flag, key="file", value=str(path), rule=rule, remedy="Choose another name")


def require_drawable(path: Path, flag: str) -> None:
    """Raise where a chart of this name could not be written, or would not be what its name says."""
    if path.suffix.lower() not in (".svg", ".html", ".htm"):
        rule = "a chart is written as SVG, or as a page that holds it"
        raise SpecError(where=flag, key="file", value=str(path), rule=rule, remedy="End its name in .svg or .html")
    require_writable(path, flag)


def require_folder(path: Path, flag: str) -> None:
    """Raise where a folder of this name neither is there, writable, nor could be made."""
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        rule = f"{there} is no folder that can be written to"
        raise SpecError(where=flag, key="folder", value=str(path), rule=rule, remedy="Choose another place")


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AtlasError(f"{path}: cannot be made: {error.strerror}. Choose another place") from error


def picture_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that every command with timelines has."""
    parser.add_argument("--page", type=Path, metavar="FILE", help="write an HTML page, schedules above each other")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a figure")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a figure as pixels (needs the extra `png`)")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write a trace for ui.perfetto.dev (.gz: compressed), one per schedule",
    )
