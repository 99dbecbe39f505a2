"""The transport against its bars: real TCP between network namespaces (root), a process per node, one run.

    python bench/wan.py [--quick] [--only far,burst,loss,cell,faulty,loopback]

Each line is JSON with its bar; a table follows. A run in which the emulator was late never counts: there are
three tries, then it is void (not measured). Without root, what needs namespaces is not measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from common.host import Others
from lab.lines import Lines, require_quiet
from lab.net import Lab, Move, Remote, both

from atlas.wan.emulator.paths import PathSpec
from atlas.wan.security.certs import make_ca, make_node

MB64 = 64 << 20
A, B = "dc1/a", "dc2/b"
LAN = PathSpec(latency_s=0.0001, window_bytes=None)
AGAINST_TCP, AGAINST_GLOO = "80 ms: against one TCP connection, sustained", "80 ms: against Gloo send/recv, sustained"
CLAIMED = {"far": (AGAINST_TCP, AGAINST_GLOO), "cell": ("cell of 4: first arrival", "cell of 4: last arrival")}
"""The lines of a part that docs/claims.md names."""


def two_nodes(rtt_s: float, rate_bps: float, loss: float = 0.0, **options: object) -> Lab:
    return Lab({(A, B): PathSpec(latency_s=rtt_s / 2, pair_bps=rate_bps, loss=loss)}, [A, B], **options)


def far(lines: Lines, certs: str, *, quick: bool) -> None:
    for rtt_ms in (40,) if quick else (20, 40, 80):
        for grade, rate_bps in (("plain", 2e9), ("TLS", 1e9)):
            name = f"64 MB, {rtt_ms} ms, {rate_bps / 1e9:g} Gbit/s, {grade}"
            lines.attempt(name, lambda n=name, r=rtt_ms / 1e3, b=rate_bps, g=grade: _far(lines, n, r, b, g, certs))
    lines.attempt("against Gloo", lambda: _against_others(lines), AGAINST_TCP, AGAINST_GLOO)


def _far(lines: Lines, name: str, rtt_s: float, rate_bps: float, grade: str, certs: str) -> None:
    with two_nodes(rtt_s, rate_bps) as lab:
        lab.open(certs if grade == "TLS" else None)
        lab.connect([(A, B)])
        move, ideal_s = Move(lab, A, B), rtt_s / 2 + MB64 * 8 / rate_bps
        lab.net.reset_lateness()
        singles = []
        for _ in range(5):
            begin, arrived, _ = move.run(1, MB64)
            singles.append((arrived[0] - begin) / 1e9 / ideal_s)
        begin, arrived, _ = move.run(10, MB64)
        share = 10 * MB64 * 8 / rate_bps / ((max(arrived) - begin) / 1e9 - rtt_s / 2)
        lab.net.certify()
        lines.at_least(f"{name}: ten in flight", share, "of the path", 0.95)
        lines.at_most(f"{name}: one", statistics.median(singles), "x ideal", 1.10, first=round(singles[0], 3))


def _against_others(lines: Lines) -> None:
    """All three over one emulator, which must have been in time for all three."""
    with two_nodes(0.08, 2e9) as lab:
        a, b = lab.nodes[A], lab.nodes[B]
        lab.open()
        lab.connect([(A, B)])
        lab.net.reset_lateness()
        begin, arrived, _ = Move(lab, A, B).run(10, MB64)
        ours_bps = 10 * MB64 * 8 / ((max(arrived) - begin) / 1e9 - 0.04)
        a.tcp_connect(address=b.tcp_listen(host=lab.hosts[B]), congestion="cubic")
        a.tcp_send(num_bytes=MB64)
        tcp_bps = 4 * MB64 * 8 / (a.tcp_send(num_bytes=4 * MB64) - 0.04)
        for node, rank in ((a, 0), (b, 1)):
            node.tell("gloo", rank=rank, host=lab.hosts[A], port=29555, device="wan0")
        both(a, b)
        gloo_bps = 0.0
        for _ in range(2):
            gloo_bps = max(gloo_bps, 3 * MB64 * 8 / _gloo_s(a, b, 3))
        lab.net.certify()
    more = {"mbps": round(ours_bps / 1e6)}
    lines.at_least(AGAINST_TCP, ours_bps / tcp_bps, "x", 6.0, **more)
    lines.at_least(AGAINST_GLOO, ours_bps / gloo_bps, "x", 4.0, **more)


def _gloo_s(a: Remote, b: Remote, count: int) -> float:
    """From the sender's beginning to the receiver's end, as for ours: behind the barrier one of them begins later."""
    for node, rank in ((a, 0), (b, 1)):
        node.tell("gloo_move", rank=rank, num_bytes=MB64, count=count)
    (begin, _), (_, end) = both(a, b)
    return float(end - begin)


def burst(lines: Lines, *, quick: bool) -> None:
    def measure() -> None:
        with two_nodes(0.04, 500e6) as lab:
            lab.open()
            lab.connect([(A, B)])
            move, ratios = Move(lab, A, B), []
            lab.net.reset_lateness()
            for _ in range(13 if quick else 26):
                begin, _, acked = move.run(1, 8_000_000)
                ratios.append((acked[0] - begin) / 1e9 / 0.168)
                time.sleep(0.4)
            lab.net.certify()
            later = sorted(ratios[1:])
            lines.at_most("burst 8 MB, 500 Mbit/s, 40 ms: median", statistics.median(later), "x ideal", 1.10)
            lines.at_most("burst: p95", later[int(0.95 * len(later))], "x ideal", 1.20)
            lines.at_most("burst: first", ratios[0], "x ideal", 1.5)

    lines.attempt("burst", measure)


def loss(lines: Lines) -> None:
    def measure() -> None:
        with two_nodes(0.04, 300e6, 5e-4, gso=False) as lab:
            lab.open()
            lab.connect([(A, B)])
            lab.net.reset_lateness()
            begin, arrived, _ = Move(lab, A, B).run(6, 30_000_000)
            lab.net.certify()
            share = 6 * 30e6 * 8 / 300e6 / ((max(arrived) - begin) / 1e9 - 0.02)
            lines.at_least("0.05 % loss, 300 Mbit/s, 40 ms", share, "of the path", 0.80)

    lines.attempt("loss", measure)


def cells(size: int, rate_bps: float = 100e6) -> Lab:
    """Joined cells, everything connected."""
    here, there = [f"dc1/{i}" for i in range(size)], [f"dc2/{i}" for i in range(size)]
    wan = {(a, b): PathSpec(latency_s=0.02, pair_bps=rate_bps) for a, b in zip(here, there, strict=True)}
    lan = {(x, y): LAN for side in (here, there) for i, x in enumerate(side) for y in side[i + 1 :]}
    lab = Lab({**wan, **lan}, here + there)
    lab.open(max_streams=3)
    for side, other in ((here, there), (there, here)):
        for name in side:
            lab.nodes[name].cell(pairs=dict(zip(side, other, strict=True)))
    both_ways = [pair for a, b in wan for pair in ((a, b), (b, a))]
    lab.connect([pair for a, b in lan for pair in ((a, b), (b, a))], order="join")
    lab.connect(both_ways, order="join")
    lab.connect(list(wan), [0])
    return lab


def _all_at_once(lab: Lab, size: int, number: int, num_bytes: int) -> list[float]:
    """Every node of here sends to its counterpart, turns in order of nodes; seconds until each arrived."""
    here, there = [lab.nodes[f"dc1/{i}"] for i in range(size)], [lab.nodes[f"dc2/{i}"] for i in range(size)]
    for i in range(size):
        there[i].recv(peer=f"dc1/{i}", numbers=[number], num_bytes=num_bytes)
        here[i].prepare(num_bytes=num_bytes)
    time.sleep(0.2)
    begin_ns = time.monotonic_ns() + 100_000_000
    for i, node in enumerate(here):
        turn = number * size + i
        node.tell("send", peer=f"dc2/{i}", numbers=[number], num_bytes=num_bytes, turns=[turn], at_ns=begin_ns)
    both(*here)
    for node in there:
        node.tell("wait", which="recv", timeout_s=30)
    return [(ends[0][1] - begin_ns) / 1e9 for ends in both(*there)]


def cell(lines: Lines, *, quick: bool) -> None:
    num_bytes = 8 << 20
    for size in (4,) if quick else (2, 4):
        names = tuple(f"cell of {size}: {turn} arrival" for turn in ("first", "last"))

        def measure(size: int = size, names: tuple[str, ...] = names) -> None:
            with cells(size) as lab:
                lab.net.reset_lateness()
                for node in lab.nodes.values():
                    node.use(which="endpoint")
                others = Others()
                apart = [_all_at_once(lab, size, n, num_bytes) for n in range(3 if quick else 5)]
                for node in lab.nodes.values():
                    node.use(which="cell")
                shared = [_all_at_once(lab, size, n, num_bytes) for n in range(5 if quick else 7)]
                lab.net.certify()
                require_quiet(others)  # nine processes share the cores: other load would be measured too
                first = statistics.median(min(times) for times in shared)
                last = statistics.median(max(times) for times in shared)
                alone = statistics.median(max(times) for times in apart)
                ideal = 0.02 + num_bytes * 8 / (size * 100e6)
                lines.at_most(names[0], first / ideal, "x ideal", 1.15, ms=round(first * 1e3))
                lines.at_most(names[1], last / alone, "x apart", 1.08, ms=round(last * 1e3))

        lines.attempt(f"cell of {size}", measure, *names)


def faulty(lines: Lines) -> None:
    """One of four paths slow, or cut in the middle of a transfer."""
    num_bytes, rate = 32 << 20, 100e6

    def measure(how: str) -> None:
        with cells(4) as lab:
            for node in lab.nodes.values():
                node.use(which="cell")
            if how == "slow":
                lab.net.change("dc1/2", "dc2/2", pair_bps=rate / 4)
            move = Move(lab, "dc1/0", "dc2/0")
            if how == "slow":
                move.run(1, num_bytes)
            lab.net.reset_lateness()
            cut_ns = list[int]()

            def cut() -> None:
                lab.net.cut("dc1/2", "dc2/2")
                cut_ns.append(time.monotonic_ns())

            if how == "cut":
                threading.Timer(0.55, cut).start()  # some 0.3 s after the transfer has begun, which is 0.9 s long
            begin, arrived, _ = move.run(1, num_bytes)
            lab.net.certify()
            bits = num_bytes * 8
            ideal = bits / (3.25 * rate)
            if how == "cut":
                cut_s = (cut_ns[0] - begin) / 1e9
                ideal = cut_s + (bits - 4 * rate * cut_s) / (3 * rate)
            took = (arrived[0] - begin) / 1e9
            lines.at_most(f"one path of four {how}", took / (ideal + 0.02), "x capacity", 1.15, ms=round(took * 1e3))

    lines.attempt("one path of four slow", lambda: measure("slow"))
    lines.attempt("one path of four cut", lambda: measure("cut"))


def loopback(lines: Lines, certs: str, *, quick: bool) -> None:
    gbps: dict[str, list[float]] = {"gloo": [], "plain": [], "TLS": []}
    cpu: dict[str, float] = {}
    labs = {grade: Lab(None, [A, B]) for grade in ("gloo", "plain", "TLS")}
    try:
        for grade in ("plain", "TLS"):
            labs[grade].open(certs if grade == "TLS" else None)
            labs[grade].connect([(A, B)])
        a, b = labs["gloo"].nodes[A], labs["gloo"].nodes[B]
        for node, rank in ((a, 0), (b, 1)):
            node.tell("gloo", rank=rank, host="127.0.0.1", port=29556, device="lo")
        both(a, b)
        moves = {grade: Move(labs[grade], A, B) for grade in ("plain", "TLS")}
        for _ in range(10 if quick else 20):  # in turns, so that whatever else this machine does hits all alike
            gbps["gloo"].append(MB64 * 8 / _gloo_s(a, b, 1) / 1e9)
            for grade, move in moves.items():
                nodes = labs[grade].nodes
                before = sum(nodes[name].cpu() for name in (A, B))
                begin, arrived, _ = move.run(1, MB64)
                spent = sum(nodes[name].cpu() for name in (A, B)) - before
                cpu[grade] = min(cpu.get(grade, 1e9), spent / (MB64 / 1e9))
                gbps[grade].append(MB64 * 8 / (arrived[0] - begin))
    finally:
        for lab in labs.values():
            lab.close()
    plain, gloo, tls = (statistics.median(gbps[grade]) for grade in ("plain", "gloo", "TLS"))
    best = max(gbps["plain"]) / max(gbps["gloo"])
    more = {"gbps": round(plain, 1), "gloo_gbps": round(gloo, 1), "best_over_best": round(best, 2)}
    lines.at_least("loopback 64 MB against Gloo, plain, median", plain / gloo, "x", 1.3, **more)
    lines.at_least("loopback 64 MB, TLS, median", tls, "Gbit/s", 5.0)
    for grade, spent in cpu.items():
        lines.add(f"loopback {grade}: CPU, both ends", spent, "s per GB", "", None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="loopback,far,burst,loss,cell,faulty", help="parts, separated by commas")
    parser.add_argument("--quick", action="store_true", help="each claim once: under two minutes")
    args = parser.parse_args()
    parts, quick = args.only.split(","), args.quick
    if unknown := sorted(set(parts) - {"loopback", "far", "burst", "loss", "cell", "faulty"}):
        parser.error(f"--only {','.join(unknown)}: no such part. Choose from loopback, far, burst, loss, cell, faulty")
    lines = Lines()
    root = os.geteuid() == 0 and Path("/dev/net/tun").exists()
    print(
        "emulator grade: " + ("network namespaces, real TCP, stock buffers" if root else "none: not root"), flush=True
    )
    with tempfile.TemporaryDirectory() as certs:
        make_ca(Path(certs))
        for name in (A, B):
            make_node(Path(certs), name)
        for part in parts:
            if part != "loopback" and not root:
                for name in CLAIMED.get(part, (part,)):
                    lines.skip(name, "needs root and /dev/net/tun for real TCP over an emulated path")
            elif part in ("far", "loopback"):
                globals()[part](lines, certs, quick=quick)
            elif part in ("burst", "cell"):
                globals()[part](lines, quick=quick)
            else:
                globals()[part](lines)
    return lines.table()


if __name__ == "__main__":
    sys.exit(main())
