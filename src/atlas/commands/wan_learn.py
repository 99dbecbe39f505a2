"""Learn how a path varies over time from a table of its packets, and write a model for a link's `model:` key.

    atlas wan probe ... --record DIR           record packets (or `atlas train --record-wan DIR`)
    atlas wan learn DIR --out east-west.path   fit capacity, latency, buffer and cross traffic

The model is checked on the last fifth of the rows: the command prints which share of the variance of their delay it
explains. It also prints what these packets cannot show. docs/weather.md explains the figures.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from atlas.commands.path_charts import path_charts
from atlas.console import print_json, remark, require_outputs, say, show
from atlas.errors import MissingExtraError
from atlas.view.path_page import write_path_page
from atlas.weather.fit import PathFit, learn
from atlas.weather.packets import PacketTable, paths_in, read_path
from atlas.weather.path_model import PathModel, save_model


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="a folder with NAME.packets.csv")
    add("--out", type=Path, required=True, metavar="FILE", help="write the model, such as east-west.path")
    add("--path", metavar="NAME", help="which path, if the folder has several")
    add(
        "--method",
        choices=("auto", "constant", "peak", "pairs", "gru"),
        default="auto",
        help="how the path is fitted; peak: capacity from the highest rate; pairs: from packets sent back to back; "
        "constant: the mean rate, no cross traffic; gru: a small neural network, needs torch (default auto: chooses "
        "peak or pairs, and finds out whether cross traffic reacts to the sender)",
    )
    add("--page", type=Path, metavar="FILE", help="write a page: delay and rate, cross traffic")
    add("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    inputs = [file for files in paths_in(args.folder).values() for file in files]
    require_outputs({"--out": args.out, "--page": args.page}, inputs)
    name, table = read_path(args.folder, args.path)
    learnt = learn(table, "pairs" if args.method == "gru" else args.method)
    if args.method == "gru":
        said = "with --method gru, the explained variance is measured with the model of --method pairs"
        learnt = replace(learnt, model=_gru(table), warnings=[*learnt.warnings, said])
    save_model(args.out, learnt.model)
    if args.page is not None:
        charts = path_charts(learnt.model, table)
        write_path_page(args.page, f"Path {name}", page_notes(learnt, table.span_s), charts)
        say(f"wrote {args.page}")
    if args.json:
        print_json(figures(name, learnt))
    else:
        show(*described(name, learnt, table.span_s))
    remark(*(f"{args.folder}/{name}: {warning}" for warning in learnt.warnings))
    say(f"wrote {args.out}")
    return 0


def _gru(table: PacketTable) -> PathModel:
    try:
        from atlas.runtime.weather_fit import fit_gru  # torch: 2 s
    except ModuleNotFoundError as error:
        raise MissingExtraError.of(error, "--method gru") or error from None
    return fit_gru(table)


def figures(name: str, learnt: PathFit) -> dict[str, object]:
    model = learnt.model
    return {
        "path": name,
        "method": model.method,
        "capacity_mbps": model.capacity_bps / 1e6,
        "capacity_is_bound": model.capacity_is_bound,
        "latency_ms": model.rtt_ns / 2e6,
        "buffer_bytes": model.buffer_bytes,
        "buffer_is_bound": model.buffer_is_bound,
        "cross_share": model.mean_share,
        "competing_flows": model.rivals,
        "windows": int(model.recorded.sum()),
        "windows_seen": int(model.known.sum()),
        "explained_ahead": learnt.explained,
        "explained": learnt.followed,
        "warnings": learnt.warnings,
    }


def described(name: str, learnt: PathFit, span_s: float) -> list[str]:
    model = learnt.model
    least, big = ("at least " if flag else "" for flag in (model.capacity_is_bound, model.buffer_is_bound))
    seen = 100 * float(model.known[model.recorded].mean())
    deep_ms = model.buffer_bytes * 8e3 / model.capacity_bps
    peak = float(model.recorded_bps.max()) / model.capacity_bps
    return [
        f"{name}: {span_s:.0f} s of packets, method {model.method}",
        f"  capacity       {least}{model.capacity_bps / 1e6:.4g} Mbit/s",
        f"  latency        {model.rtt_ns / 2e6:.4g} ms one way (half of the shortest round trip)",
        f"  buffer         {big}{model.buffer_bytes / 1e3:.4g} KB, {deep_ms:.3g} ms",
        f"  cross traffic  {100 * model.mean_share:.0f} % of the capacity on average, at most {100 * peak:.0f} %; "
        f"seen in {seen:.0f} % of the time",
        *([f"                 it reacts to the sender like {_flows(model)}"] if model.rivals else []),
        f"  explains       {_explains(learnt)}",
    ]


def _explains(learnt: PathFit) -> str:
    if learnt.explained is None or learnt.followed is None:
        return "nothing to explain: no delay varied in the held-out last fifth"
    return (
        f"{100 * learnt.explained:.0f} % of the variance of delay in the held-out last fifth, given the cross traffic "
        f"of the previous 0.1 s; {100 * learnt.followed:.0f} % given that of the same 0.1 s"
    )


def page_notes(learnt: PathFit, span_s: float) -> list[str]:
    """Sentences for readers who have not read the documentation."""
    model = learnt.model
    least, big = ("at least " if flag else "" for flag in (model.capacity_is_bound, model.buffer_is_bound))
    ahead = "" if learnt.explained is None else (
        f" Given the cross traffic of the previous 0.1 s, the model explains {100 * learnt.explained:.0f} % of the "
        "variance of the delay in the last fifth of the recording, which was not used to fit it."
    )  # fmt: skip
    return [
        f"A model of this path, learnt from {span_s:.0f} s of recorded packets: a link of {least}"
        f"{model.capacity_bps / 1e6:.4g} Mbit/s with a shortest round trip of {model.rtt_ns / 1e6:.4g} ms. A "
        f"queue in front of it holds {big}{model.buffer_bytes / 1e3:.4g} KB, and delays packets by up to "
        f"{model.buffer_bytes * 8e3 / model.capacity_bps:.3g} ms when it is full.",
        f"Other users (cross traffic) take {100 * model.mean_share:.0f} % of the link on average, and at most "
        f"{100 * float(model.recorded_bps.max()) / model.capacity_bps:.0f} %. They were visible in "
        f"{100 * float(model.known[model.recorded].mean()):.0f} % of the time.{ahead}",
        *(
            [f"They react to the sender like {_flows(model)}: when it sends more, they send less."]
            if model.rivals
            else []
        ),
        *(f"Note: {warning}" for warning in learnt.warnings),
    ]


def _flows(model: PathModel) -> str:
    return "a competing TCP flow" if model.rivals == 1 else f"{model.rivals} competing TCP flows"
