"""`make demo`: one job over three datacenters under every schedule, a table, a picture, and what to see in them.

The same as `atlas simulate examples/three-dcs.yaml --page out/three-dcs.html`, written with the library.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from atlas.commands.terminal import Meter
from atlas.commands.words import headline, notes, page_notes
from atlas.errors import AtlasError
from atlas.plan.evaluate import Result, default_choices, evaluate_all, rows
from atlas.spec import load_job
from atlas.view import results_table, write_page

JOB = Path(__file__).with_name("three-dcs.yaml")
PAGE = Path("out/three-dcs.html")
SEARCHED = ("zero-bubble", "atlas")


def main() -> None:
    job = load_job(JOB)
    with Meter() as meter:
        results, _ = evaluate_all(job, default_choices(), progress=meter)
    found = rows(results)
    drawn = [result for result in results if result.tcp == "many"]
    PAGE.parent.mkdir(exist_ok=True)
    write_page(PAGE, [result.timeline for result in drawn], title=job.name, notes=page_notes(results, drawn))

    console = Console(highlight=False)
    console.print(results_table(found, title=headline(results[0]), source="\n".join(notes(found))))
    console.print("\n" + what_one_sees(results))
    console.print(f"\nThe timeline page: {PAGE.absolute().as_uri()}", soft_wrap=True)


def what_one_sees(results: list[Result]) -> str:
    """Three sentences: connections, turns and order, what is left."""
    time = {(result.schedule, result.tcp): result.row()["iteration_s"] for result in results}
    atlas = next(result.row() for result in results if (result.schedule, result.tcp) == ("atlas", "many"))
    over = {name: [time[base, "many"] / time[name, "many"] for base in ("1f1b", "varuna")] for name in SEARCHED}
    return (
        f"Many TCP connections instead of one make 1F1B {time['1f1b', 'one'] / time['1f1b', 'many']:.1f}x faster: one "
        "connection carries only its window per round trip. On the same many connections, a searched order with the "
        f"backward split in two is {over['zero-bubble'][0]:.2f}x faster than 1F1B and {over['zero-bubble'][1]:.2f}x "
        "faster than Varuna; when the pipelines also take turns on the WAN, "
        f"{over['atlas'][0]:.2f}x and {over['atlas'][1]:.2f}x. No order of this work could take less than "
        f"{atlas['lower_bound_s']:.2f} s, {100 * (1 - 1 / atlas['gap']):.1f}% less than what was found."
    )


if __name__ == "__main__":
    try:
        main()
    except AtlasError as error:
        sys.exit(f"atlas: {error}")
