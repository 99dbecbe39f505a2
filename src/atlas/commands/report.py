"""Write a report of a run, or of several side by side: one self-contained HTML page.

RUN is a data point (a folder of `atlas card` or `atlas train --evidence`), a timeline file, or the folder of a run with
a timeline and a step log (`run.jsonl`) in it. Every figure says whether it is simulated, emulated or measured.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from atlas.console import Meter, remark, require_outputs, show, write_text
from atlas.evidence.report_page import report_page, verdict
from atlas.evidence.run_summary import run_summary


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="a data point, a timeline file, or the folder of a run")
    add("--out", type=Path, default=Path("report.html"), metavar="FILE", help="the page to write")
    add("--title", default="", metavar="WORDS", help="title of the page (default: the runs' names)")
    add("--salvage", action="store_true", help="read truncated traces up to the damage")


def run(args: argparse.Namespace) -> int:
    require_outputs({"--out": args.out}, args.runs)
    with Meter() as meter:
        found = [run_summary(source, salvage=args.salvage, progress=meter) for source in args.runs]
    show(verdict(found))
    remark(*(note for one in found for note in one.notes))
    write_text(args.out, report_page(found, args.title))
    return 0
