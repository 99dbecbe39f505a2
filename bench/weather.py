"""How well a learnt path predicts senders that it was not learnt from.

Real kernel TCP between network namespaces (needs root). Random paths from a seed: 20 to 100 Mbit/s, round trips of 20
to 80 ms, buffers of 0.25 to 2 bandwidth-delay products; cross traffic on and off, ramps or bursts. A model is fitted on
cubic; then reno and bbr run over the true path and over each model, at the same time, over the same cross traffic.

    constant   one rate: cubic's mean throughput
    replay     cubic's own throughput over time as the rate of the link
    peak       iBoxNet-like: least delay, peak rate, cross traffic by conservation
    pairs      the same with the capacity of packet pairs: the default of `atlas wan learn`
    gru        the learnt model (torch)

Figures are medians of the absolute relative error over paths and senders. A batch in which the emulator was late is
repeated, at most three times, and is void otherwise. `--quick`: 2 paths, 8 s.
"""

from __future__ import annotations

import argparse
import random
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from lab.lines import Lines

from atlas.errors import AtlasError
from atlas.wan.emulator.lateness import EmulatorLateError
from atlas.wan.emulator.namespace_net import NamespaceNet
from atlas.wan.emulator.paths import PathSpec, Trunk
from atlas.weather.draw import drawn_rows
from atlas.weather.fit import learn
from atlas.weather.packets import PacketTable
from atlas.weather.path_model import WINDOW_NS, PathModel

PORT, TRIES = 5001, 3
NOTSENT_BYTES = 65_536
TESTED = ("reno", "bbr")
Sender = tuple[str, PathSpec, str]
"""Name, path and congestion control."""


# ---- paths -------------------------------------------------------------------------------------------------------
def random_path(rng: random.Random, seconds: float) -> PathSpec:
    bps, rtt_s = rng.uniform(20e6, 100e6), rng.uniform(0.02, 0.08)
    queue = max(30_000, round(rng.uniform(0.25, 2.0) * bps / 8 * rtt_s))
    return PathSpec(rtt_s / 2, None, bps, queue_bytes=queue, cross=random_cross(rng, round(seconds * 10) + 20))


def random_cross(rng: random.Random, num: int) -> tuple[float, ...]:
    kind, high = rng.choice(("on-off", "ramp", "bursts")), rng.uniform(0.3, 0.7)
    if kind == "on-off":
        turn = rng.randint(10, 40)
        return tuple(high * (k // turn % 2) for k in range(num))
    if kind == "ramp":
        turn = rng.randint(40, 120)
        return tuple(high * (k % turn) / turn for k in range(num))
    share, found = 0.0, []
    for _ in range(num):
        share = rng.choice((0.0, high)) if rng.random() < 0.15 else share
        found.append(share)
    return tuple(found)


def path_of(model: PathModel) -> PathSpec:
    """A model as a path of the emulator."""
    cross = tuple((model.cross_bps / model.capacity_bps).tolist()) if model.cross_bps.any() else ()
    queue = max(3000, round(model.buffer_bytes))
    return PathSpec(model.rtt_ns / 2e9, None, model.capacity_bps, queue_bytes=queue, cross=cross)


def replayed(table: PacketTable) -> PathModel:
    """The sender's own rate over time as what the link carries."""
    base = learn(table, "peak").model
    arrived = ~table.lost
    window = (table.sent_ns[arrived] - table.sent_ns[0]) // WINDOW_NS
    rate = np.bincount(window, table.num_bytes[arrived]) * (8e9 / WINDOW_NS)
    cross = np.maximum(0.0, base.capacity_bps - np.maximum(rate, 0.02 * base.capacity_bps))
    return PathModel(**{**vars(base), "cross_bps": cross, "known": cross >= 0, "method": "replay"})


def gru_model(table: PacketTable) -> PathModel | None:
    try:
        from atlas.runtime.weather_fit import fit_gru
    except ImportError:
        return None
    return fit_gru(table)


METHODS: dict[str, Callable[[PacketTable], PathModel | None]] = {
    "constant": lambda table: learn(table, "constant").model,
    "replay": replayed,
    "peak": lambda table: learn(table, "peak").model,
    "pairs": lambda table: learn(table, "pairs").model,
    "gru": gru_model,
}


# ---- senders -------------------------------------------------------------------------------------------------------
def run_senders(senders: list[Sender], seconds: float) -> dict[str, PacketTable]:
    """All at once, each on a path of its own; what became of their packets, by name."""
    for last in (False,) * (TRIES - 1) + (True,):
        try:
            return _run_senders(senders, seconds)
        except EmulatorLateError as error:
            print(f"# {error}", flush=True)
            if last:
                raise
    raise AssertionError


def _run_senders(senders: list[Sender], seconds: float) -> dict[str, PacketTable]:
    paths = {(f"a-{i}", f"b-{i}"): path for i, (_, path, _) in enumerate(senders)}
    with NamespaceNet(paths, gso=False) as net:
        servers = [net.node(b).run(lambda b=b: socket.create_server((net.address(b), PORT))) for _, b in paths]
        threads = [threading.Thread(target=_drain, args=(server,), daemon=True) for server in servers]
        for thread in threads:
            thread.start()
        net.record_packets(round(len(senders) * seconds * 20_000))
        net.restart_weather()
        net.reset_lateness()
        pouring = [
            threading.Thread(target=net.node(a).run, args=(lambda b=b, cc=cc: _pour(net.address(b), cc, seconds),))
            for (a, b), (_, _, cc) in zip(paths, senders, strict=True)
        ]
        for thread in pouring:
            thread.start()
        for thread in (*pouring, *threads):
            thread.join(seconds + 60)
        net.certify()
        tables = net.packets()
    return {name: tables[pair] for pair, (name, _, _) in zip(paths, senders, strict=True)}


def _drain(server: socket.socket) -> None:
    with server, server.accept()[0] as sock:
        while sock.recv(1 << 20):
            pass


def _pour(address: str, control: str, seconds: float) -> None:
    with socket.socket() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
        sock.connect((address, PORT))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOTSENT_BYTES)
        sock.settimeout(30)
        block, end = bytes(NOTSENT_BYTES), time.monotonic() + seconds
        while time.monotonic() < end:
            sock.send(block)


def figures(table: PacketTable, seconds: float) -> dict[str, float]:
    arrived = ~table.lost & (table.sent_ns - table.sent_ns[0] < seconds * 1e9)
    delay = table.rtt_ns[arrived]
    return {
        "mean delay": float(delay.mean()),
        "p95 delay": float(np.percentile(delay, 95)),
        "throughput": float(table.num_bytes[arrived].sum()),
    }


# ---- the lines -----------------------------------------------------------------------------------------------------
BARS = {"mean delay": 0.06, "p95 delay": 0.08, "throughput": 0.05}


def held_out_senders(lines: Lines, num_paths: int, seconds: float, methods: list[str]) -> None:
    errors: dict[tuple[str, str], list[float]] = {}
    worse, cells, void = 0, 0, 0
    for number in range(num_paths):
        path = random_path(random.Random(1000 + number), seconds)
        try:
            seen = run_senders([("cubic", path, "cubic")], seconds)["cubic"]
            fitted = {name: METHODS[name](seen) for name in methods}
            models = {name: path_of(model) for name, model in fitted.items() if model is not None}
            for control in TESTED:
                found = run_senders([(n, p, control) for n, p in {"true": path, **models}.items()], seconds)
                true = figures(found.pop("true"), seconds)
                off = {n: {k: abs(v / true[k] - 1) for k, v in figures(t, seconds).items()} for n, t in found.items()}
                for name, one in off.items():
                    for key, value in one.items():
                        errors.setdefault((name, key), []).append(value)
                for key in BARS:
                    cells += 1
                    worse += off["pairs"][key] > off["peak"][key] + 0.01
                print(
                    f"path {number} {control}: " + "; ".join(f"{n} {_said(o)}" for n, o in off.items()), file=sys.stderr
                )
        except EmulatorLateError:
            void += 1
    if not errors:
        raise AtlasError("every batch was void: the emulator was late")
    middle = {key: statistics.median(values) for key, values in errors.items()}
    for key, bar in BARS.items():
        beside = ", ".join(f"{name} {100 * middle[name, key]:.1f} %" for name in models)
        note = f"medians of {cells // len(BARS)} runs: {beside}; {void} paths void"
        lines.at_most(
            f"fitted on cubic, judged on reno and bbr: {key}", 100 * middle["pairs", key], "%", 100 * bar, note=note
        )
    gain = middle["constant", "mean delay"] / max(1e-9, middle["pairs", "mean delay"])
    lines.at_least("mean delay: error of a constant rate over that of the model", gain, "x", 3.0)
    lines.at_most(f"cells of {cells} in which the default is worse than iBoxNet-like (by 1 %)", worse, "cells", 0)


def reactive(lines: Lines, num_paths: int, seconds: float) -> None:
    """A competing cubic flow in the same queue in place of fixed cross traffic: it yields to a sender that takes more,
    the models' cross traffic does not."""
    off: dict[str, list[float]] = {"pairs": [], "replay": []}
    void = 0
    for number in range(num_paths):
        rng = random.Random(2000 + number)
        bps, rtt_s = rng.uniform(20e6, 100e6), rng.uniform(0.02, 0.08)
        queue = max(30_000, round(rng.uniform(0.25, 2.0) * bps / 8 * rtt_s))
        path = PathSpec(rtt_s / 2, None, None, Trunk("shared", bps), queue_bytes=queue)
        rival = ("rival", path, "cubic")
        try:
            seen = run_senders([("cubic", path, "cubic"), rival], seconds)["cubic"]
            models = {name: path_of(model) for name in off if (model := METHODS[name](seen)) is not None}
            for control in TESTED:
                senders = [("true", path, control), rival, *((n, p, control) for n, p in models.items())]
                got = {n: figures(t, seconds)["throughput"] for n, t in run_senders(senders, seconds).items()}
                for name, values in off.items():
                    values.append(abs(got[name] / got["true"] - 1))
                said = ", ".join(f"{name} {100 * values[-1]:.1f} %" for name, values in off.items())
                print(f"path {number} {control}, reactive: {said}", file=sys.stderr)
        except EmulatorLateError:
            void += 1
    if not off["pairs"]:
        raise AtlasError("every batch was void: the emulator was late")
    ours, replay = (100 * statistics.median(values) for values in off.values())
    note = f"median of {len(off['pairs'])} runs; replay {replay:.1f} %; {void} paths void"
    lines.at_most("reactive cross traffic: throughput off by", ours, "%", 12, note=note)
    lines.at_least("the same: error of replay over that of the model", replay / max(1e-9, ours), "x", 1.5)


def _said(one: dict[str, float]) -> str:
    return "/".join(f"{100 * value:.1f}" for value in one.values())


def speed(lines: Lines) -> None:
    """The fit of 250,000 packets, and an hour of rows."""
    rng = np.random.default_rng(0)
    sent = np.cumsum(rng.integers(50_000, 200_000, 250_000)) + 10**18
    # A queue that grows and is emptied again every second.
    rtt = 40_000_000 + (sent - sent[0]) % 10**9 // 50
    began = time.process_time()
    model = learn(PacketTable("t", sent, np.full(250_000, 1448), rtt, 250_000)).model
    lines.at_most("fit of 250,000 packets", time.process_time() - began, "s of CPU", 60)
    began = time.process_time()
    drawn_rows(model, 0, (), 36_000)
    lines.at_most("rows for one hour", time.process_time() - began, "s of CPU", 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--paths", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--method", action="append", choices=METHODS)
    parser.add_argument("--part", action="append", choices=("speed", "senders", "reactive"))
    args = parser.parse_args()
    num_paths, seconds = (2, 8.0) if args.quick else (args.paths, args.seconds)
    lines, parts = Lines(), args.part or ["speed", "senders", "reactive"]
    if "speed" in parts:
        speed(lines)
    if "senders" in parts:
        held_out_senders(lines, num_paths, seconds, args.method or list(METHODS))
    if "reactive" in parts:
        reactive(lines, num_paths, seconds)
    return lines.table()


if __name__ == "__main__":
    sys.exit(main())
