"""The transport under faults: cut and stalled connections, garbage connections, invalid certificates, encrypted
streams.

    python bench/wan_faults.py [--quick] [--gigabytes 10] [--faults 1000] [--garbage 10000] [--sealed 1000]

Each line is JSON with its bar; a table follows. Smaller versions of all of it are in `tests/wan`.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing as mp
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from common.host import Others
from lab.lines import OTHERS_CORES, Lines
from lab.net import Lab, Move, both

from atlas.errors import WorkerError
from atlas.wan.emulator.paths import PathSpec
from atlas.wan.emulator.proxy_net import ProxyNet
from atlas.wan.security.certs import make_ca, make_node
from atlas.wan.security.credentials import Credentials, Security
from atlas.wan.transport.base import Key
from atlas.wan.transport.endpoint import Endpoint
from atlas.wan.transport.settings import TransportSettings

A, B, STRANGER = "dc1/a", "dc2/b", "dc3/x"
MESSAGE_BYTES = 10_000_000
SEALED_BYTES = 2 << 20
FLOOD = "speed during the flood (500 Mbit/s, TLS)"
MID_FLIGHT = 8
"""Receives posted ahead of the awaited one."""
STALL_SHARE = 0.1
"""Share of the faults that silence a connection instead of resetting it."""
CORPUS = Path(__file__).parent.parent / "tests" / "wan" / "corpus"
BRISK = TransportSettings(max_streams=8, num_streams=8, stall_s=0.5, handshake_s=5.0, heartbeat_s=0.2, deadline_s=60)


def message(number: int, base: np.ndarray) -> np.ndarray:
    """A message that differs for every number and is fast to generate."""
    data = np.roll(base, number * 7919)
    data[:8] = np.frombuffer(number.to_bytes(8, "big"), np.uint8)
    return data


def base_bytes() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, MESSAGE_BYTES, np.uint8)


def _send(count: int, pipe: Any) -> None:
    address, base = pipe.recv(), base_bytes()
    with Endpoint(A, settings=BRISK) as a:
        a.connect({B: address})
        handles = []
        for n in range(count):
            handles.append(a.send(Key(B, 0, (n, 0, 0, 0)), message(n, base), n))
            if n >= 8:
                handles[n - 8].wait(120)
        for handle in handles:
            handle.wait(120)
        pipe.send(tuple(a.faults))
        pipe.recv()


def _num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def broken_connections(lines: Lines, gigabytes: float, faults: int) -> None:
    """A proxy cuts or stalls a random connection after every so many messages, within the first four fifths of them."""
    context, count = mp.get_context("fork"), int(gigabytes * 1e9 / MESSAGE_BYTES)
    sender_pipe, theirs = context.Pipe()
    sender = context.Process(target=_send, args=(count, theirs), daemon=True)
    sender.start()
    threads, descriptors = threading.active_count(), _num_descriptors()
    base, draw, done = base_bytes(), random.Random(7), {"cut": 0, "stalled": 0}
    with Endpoint(B, settings=BRISK) as b, ProxyNet({("a", "b"): PathSpec(window_bytes=None)}) as net:
        begin = time.monotonic()
        sender_pipe.send(net.listen("a", "b", b.address))
        wrong = 0
        waiting = [b.recv(Key(A, 0, (n, 0, 0, 0))) for n in range(min(8, count))]
        for n in range(count):
            if n + 8 < count:
                waiting.append(b.recv(Key(A, 0, (n + 8, 0, 0, 0))))
            got = waiting[n].wait(120)
            wrong += hashlib.sha256(got or b"").digest() != hashlib.sha256(message(n, base)).digest()
            waiting[n] = None  # type: ignore[call-overload]
            while sum(done.values()) < min(faults, faults * (n + 1) / (0.8 * count)):
                kind = "stalled" if draw.random() < STALL_SHARE else "cut"
                done[kind] += (net.stall if kind == "stalled" else net.cut)(number=-1)
        seconds = time.monotonic() - begin
        replaced, resent, hedged = sender_pipe.recv()
        sender_pipe.send("bye")
        sender.join(20)
        for pipe in (sender_pipe, theirs):
            pipe.close()
    time.sleep(0.5)
    sender.close()
    leaked = threading.active_count() - threads, _num_descriptors() - descriptors
    more = {**done, "replaced": replaced, "resent": resent, "hedged": hedged}
    lines.at_least("connections cut or stalled", sum(done.values()), "", faults, **more)
    lines.at_most("messages that were not what was sent", wrong, f"of {count}", 0, seconds=round(seconds))
    lines.at_most("threads and descriptors leaked", max(0, *leaked), "", 0)


def sealed(lines: Lines, count: int, certs: str) -> None:
    """Encrypted, four streams, receives posted while earlier messages arrive: no stream may break, and the cost must be
    close to that of the same messages with receives posted in advance."""
    found, others = {ahead: [] for ahead in (MID_FLIGHT, count)}, Others()
    for seed in range(3):
        for ahead, runs in found.items():  # alternate, so that other load affects both alike
            runs.append(_sealed_run(count, certs, seed, ahead))
    mid, before = ([float(np.median([run[i] for run in runs])) for i in (4, 5)] for runs in found.values())
    name = f"sealed, 4 streams, {count} messages posted mid-flight"
    replaced, resent, hedged, wrong = (max(run[i] for run in found[MID_FLIGHT]) for i in range(4))
    lines.at_most(f"{name}: streams replaced, worst of 3 runs", replaced, "", 0)
    lines.at_most(f"{name}: chunks resent, worst of 3 runs", resent, "", 0)
    lines.at_most(f"{name}: chunks hedged, worst of 3 runs", hedged, "", count // 200)
    lines.at_most(f"{name}: messages that were not what was sent", wrong, "", 0)
    if (cores := others.cores) > OTHERS_CORES:
        for cost in ("throughput", "CPU per GB"):
            lines.skip(f"{name}: {cost}", f"other processes used {cores:.2f} cores, {OTHERS_CORES:g} allowed")
        return
    lines.at_least(f"{name}: throughput", mid[0] / before[0], "of before", 0.8, gbps=round(mid[0], 2))
    lines.at_most(f"{name}: CPU per GB", mid[1] / before[1], "of before", 1.25, s_per_gb=round(mid[1], 2))


def _sealed_run(count: int, certs: str, seed: int, ahead: int) -> tuple[float, ...]:
    """Streams replaced, chunks resent, chunks hedged, wrong messages; Gbit/s; CPU seconds per GB of both ends."""
    with Lab(None, [A, B]) as lab:
        lab.open(certs, max_streams=4, num_streams=4, staging_bytes=4 << 20)
        lab.connect([(A, B)])
        a, b = lab.nodes[A], lab.nodes[B]
        for node in (a, b):
            node.prepare_many(num_bytes=SEALED_BYTES)
        before_s, begin_ns = a.cpu() + b.cpu(), time.monotonic_ns()
        b.tell("recv_many", peer=A, count=count, num_bytes=SEALED_BYTES, seed=seed, ahead=ahead)
        a.tell("send_many", peer=B, count=count, num_bytes=SEALED_BYTES)
        faults, (wrong, end_ns) = both(a, b)
        gigabytes = count * SEALED_BYTES / 1e9
        spent_s = a.cpu() + b.cpu() - before_s
        return (*faults, wrong, 8e9 * gigabytes / (end_ns - begin_ns), spent_s / gigabytes)


def garbage(lines: Lines, count: int, certs: str) -> None:
    root = os.geteuid() == 0 and Path("/dev/net/tun").exists()
    near = PathSpec(latency_s=0.005, pair_bps=500e6)
    paths = {(A, B): PathSpec(latency_s=0.02, pair_bps=500e6), (STRANGER, B): near} if root else None
    if paths is None:
        lines.skip(FLOOD, "needs root: on loopback the flood's own CPU time is all one measures")
        return
    with Lab(paths, [A, B, STRANGER]) as lab:
        lab.open(certs)
        lab.connect([(A, B)])
        move, x = Move(lab, A, B), lab.nodes[STRANGER]

        def speed() -> float:
            begin, arrived, _ = move.run(12, 32 << 20)
            return 12 * (32 << 20) * 8 / ((max(arrived) - begin) / 1e9)

        speed()
        lab.net.reset_lateness()
        alone = [speed() for _ in range(2)]
        x.flood(address=lab.addresses[B], count=count, corpus=str(CORPUS), per_s=600.0)
        during = []
        while x.flooded() < 0.99 * count and len(during) < 8:
            during.append(speed())
        lab.net.certify()
        ratio = float(np.median(during)) / float(np.median(alone))
        flooded, replaced = x.flooded(), lab.nodes[A].stats(peer=B)["num_replaced"]
        lines.at_least("garbage connections refused while transfers run", flooded, "", 0.99 * count, replaced=replaced)
        lines.at_least(FLOOD, ratio, "of alone", 0.95)


def certificates(lines: Lines, folder: Path) -> None:
    """All of these must be refused, except the valid one."""
    late, early, foreign = folder / "late", folder / "early", folder / "foreign"
    for place, start in ((late, -10.0), (early, 10.0)):
        place.mkdir()
        for name in ("ca.pem", "ca.key"):
            (place / name).write_bytes((folder / name).read_bytes())
        make_node(place, A, days=5, starts_in_days=start)
    make_ca(foreign)
    make_node(foreign, A)
    quick = TransportSettings(max_streams=1, handshake_s=2.0)
    cases = {
        "expired": Credentials.of_folder(late, A),
        "not valid yet": Credentials.of_folder(early, A),
        "of a foreign CA": Credentials.of_folder(foreign, A),
        "of another node": Credentials.of_folder(folder, STRANGER),
        "right": Credentials.of_folder(folder, A),
    }
    judged = {}
    with Endpoint(B, security=Security(Credentials.of_folder(folder, B)), settings=quick) as b:
        for name, credentials in cases.items():
            with Endpoint(A, security=Security(credentials), settings=quick) as a:
                try:
                    a.connect({B: b.address}, timeout_s=1.0)
                    judged[name] = "let in"
                except WorkerError:
                    judged[name] = "refused"
    right = sum(verdict == ("let in" if name == "right" else "refused") for name, verdict in judged.items())
    lines.at_least("certificates judged rightly", right, f"of {len(cases)}", len(cases), judged=judged)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--garbage", type=int, default=10_000)
    parser.add_argument("--sealed", type=int, default=1000, help="messages of 2 MiB over encrypted streams")
    parser.add_argument("--quick", action="store_true", help="each claim once, smaller: under two minutes")
    args = parser.parse_args()
    if args.quick:
        args.gigabytes, args.faults, args.garbage, args.sealed = 1.0, 100, 2000, 1000
    lines = Lines()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_ca(folder)
        for node in (A, B, STRANGER):
            make_node(folder, node)
        broken_connections(lines, args.gigabytes, args.faults)
        certificates(lines, folder)
        sealed(lines, args.sealed, name)
        lines.attempt("garbage connections", lambda: garbage(lines, args.garbage, name), FLOOD, tries=2)
    return lines.table()


if __name__ == "__main__":
    sys.exit(main())
