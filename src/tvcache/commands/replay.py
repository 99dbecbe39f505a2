"""Count what a cache would have saved on recorded trajectories.

TRAJECTORIES is JSON or JSON lines, also gzipped: objects with `task` or `task_id` and OpenAI `messages` (or `traj`), or
`calls` with name, arguments, output and seconds. Declare which tools change the state: --mutates (all others only
read), or --reads (all others mutate); with neither, all tools mutate. If the file has no seconds, --seconds sets them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tvcache.commands import number
from tvcache.errors import TvcacheError
from tvcache.replay import KEYINGS, Durations, KeyingResult, quantiles, replay, waits_file, without
from tvcache.show import duration
from tvcache.tools import Effect
from tvcache.trajectories import RecordedCall, RecordedRollouts, read

MAX_S = 1e6
"""The longest time that a flag takes: larger numbers are mistakes."""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trajectories", type=Path, metavar="TRAJECTORIES", help="file of recorded trajectories")
    add("--mutates", type=_names, metavar="A,B", help="tools that change the state; others only read")
    add("--reads", type=_names, metavar="A,B", help="tools that only read; others change the state")
    add("--volatile", type=_names, default=frozenset(), metavar="A,B", help="tools whose outputs are never cached")
    add("--seconds", type=_range, metavar="LOW..HIGH", help="assumed seconds of each call, for example 2..20")
    add("--json", action="store_true", help="print the figures as JSON")
    add("--waits", type=Path, metavar="FILE", help="write idle windows for `bubbletea simulate --waits`")
    add(
        "--think",
        type=number(0, MAX_S),
        default=5.0,
        metavar="S",
        help="seconds of generation before each call (default 5)",
    )
    add("--at-once", type=_count, default=1, metavar="N", help="rollouts that share an accelerator (default 1)")


def run(args: argparse.Namespace) -> int:
    recorded = read(args.trajectories)
    if args.waits is not None and args.waits.exists() and args.waits.samefile(args.trajectories):
        raise TvcacheError(f"--waits {args.waits} is the file of trajectories: choose another")
    effect = _effects(args, recorded)
    if args.seconds is None and args.waits is not None and not recorded.timed:
        raise TvcacheError(f"{args.trajectories} has no seconds of calls: add --seconds, for example 2..20")
    seconds: Callable[[RecordedCall], float] = Durations(*(args.seconds or ()))
    timed = args.seconds is not None or recorded.timed
    outcomes = [replay(recorded, effect, keying, seconds) for keying in KEYINGS]
    before = without(recorded, seconds)
    found = _figures(recorded, outcomes, before, timed, args)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        _print(found)
    if args.waits is not None:
        assumed = args.seconds is not None
        made = waits_file(recorded, before, outcomes[0].waits_s, args.think, args.at_once, assumed)
        args.waits.write_text(json.dumps(made), encoding="utf-8")
        print(f"wrote {args.waits}", file=sys.stderr)
    return 0


def _effects(args: argparse.Namespace, recorded: RecordedRollouts) -> Callable[[str], Effect]:
    if args.mutates is not None and args.reads is not None:
        raise TvcacheError("--mutates and --reads exclude each other: each declares all other tools. Give one")
    there = {step.name for one in recorded.trajectories for step in one.steps}
    for flag in ("mutates", "reads", "volatile"):
        unknown = sorted((getattr(args, flag) or frozenset()) - there)
        if unknown:
            raise TvcacheError(
                f"--{flag}: no call of {unknown[0]!r} in the file. Name some of {', '.join(sorted(there))}"
            )

    def effect(name: str) -> Effect:
        if name in args.volatile:
            return "volatile"
        if args.mutates is not None:
            return "mutates" if name in args.mutates else "reads"
        return "reads" if name in (args.reads or ()) else "mutates"

    return effect


def _figures(
    recorded: RecordedRollouts,
    outcomes: list[KeyingResult],
    before: list[list[float]],
    timed: bool,
    args: argparse.Namespace,
) -> dict[str, Any]:
    whole_s = sum(wait for waits in before for wait in waits)
    rows = []
    for one in outcomes:
        row: dict[str, Any] = {
            "key": one.keying,
            "hits": one.hits,
            "hit_rate": one.hits / one.calls,
            "wrong": sum(one.wrong.values()),
            "wrong_tools": {name: count for name, count in sorted(one.wrong.items()) if count},
        }
        if timed:
            saved_s = whole_s - one.total_s
            row |= {"saved_s": saved_s, "saved_share": saved_s / whole_s if whole_s else 0.0}
        rows.append(row)
    found: dict[str, Any] = {
        "source": recorded.source,
        "rollouts": len(recorded.trajectories),
        "tasks": len({one.task for one in recorded.trajectories}),
        "calls": recorded.num_calls,
        "left_out": {name: count for name, count in sorted(recorded.oddities.items()) if count},
        "keys": rows,
    }
    if timed:
        found |= {
            "tool_seconds": whole_s,
            "tool_seconds_assumed": list(args.seconds) if args.seconds else None,
            "waits_without_cache_s": quantiles([wait for waits in before for wait in waits]),
            "waits_with_cache_s": quantiles([wait for waits in outcomes[0].waits_s for wait in waits]),
        }
    return found


def _print(found: dict[str, Any]) -> None:
    print(f"{found['source']}: {found['rollouts']:,} rollouts, {found['tasks']:,} task(s), {found['calls']:,} calls\n")
    timed = "tool_seconds" in found
    head = f"{'cache key':<16}{'hits':>7}{'hit rate':>10}{'wrong outputs':>15}"
    print(head + ("    tool time saved" if timed else ""))
    for row in found["keys"]:
        saved = f"{duration(row['saved_s']):>12} {100 * row['saved_share']:4.0f} %" if timed else ""
        blame = "  wrong: " + ", ".join(f"{name} {count}" for name, count in row["wrong_tools"].items())
        print(
            f"{row['key']:<16}{row['hits']:>7,}{100 * row['hit_rate']:>8.1f} %{row['wrong']:>15,}{saved}"
            f"{blame if row['wrong'] else ''}"
        )
    print()
    if timed:
        for name, key in (("without cache", "waits_without_cache_s"), ("with cache", "waits_with_cache_s")):
            print(f"waits {name:<15}" + "  ".join(f"{q} {duration(s)}" for q, s in found[key].items()))
        assumed = found["tool_seconds_assumed"]
        if assumed:
            print(f"\nSeconds of tools are assumed: {assumed[0]:g} to {assumed[1]:g} per call, equal for equal calls.")
    else:
        print("The file has no seconds of calls: give --seconds, for example 2..20, to see the time saved.")
    for name, count in found["left_out"].items():
        print(f"skipped: {name}, {count:,} times", file=sys.stderr)


def _names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(",") if name.strip())


def _range(text: str) -> tuple[float, float]:
    low, dots, high = text.partition("..")
    try:
        found = float(low), float(high)
    except ValueError:
        found = (1.0, 0.0)
    if not dots or not 0 <= found[0] <= found[1] <= MAX_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of seconds such as 2..20")
    return found


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 1000")
    return int(text)
