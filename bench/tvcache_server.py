"""The tool cache's server under load on two cores: latency at 256 and 2,000 requests/s, and memory with 10^6 values.

The generator is an open loop: it sends at fixed times over persistent connections, 60 % hits, 20 % misses, 20 % stores
of new values of 300 bytes. Latency counts from the time at which a request was due.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import statistics
import sys
import tempfile
import time
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "tvcache"))
from common.report import Report
from servers import Served

from tvcache.keys import Task, ToolCall, root
from tvcache.log import LogStore
from tvcache.messages import asked
from tvcache.stores import Ask
from tvcache.values import Value

CONNECTIONS = 64
OUTPUT = "x" * 300


def ask(number: int) -> Ask:
    task = Task(f"task {number // 1000}")
    return Ask.of(task, root(task), ToolCall("search", {"query": f"question {number}", "limit": 10}), False)


def filled(path: Path, count: int) -> None:
    """A log with `count` values, as a server writes it; most of them from a template, which is faster."""
    log = LogStore(path)
    for number in range(1000):
        log.put(ask(number), Value(json.dumps({"json": f"{number} {OUTPUT}"}).encode(), 3.0))
    record = next(iter(log.records()))[0]
    log.close()
    assert record["call"]["arguments"] == {"query": "question 0", "limit": 10}
    with path.open("ab") as file:
        for begin in range(1000, count, 1000):
            task = Task(f"task {begin // 1000}")
            state = root(task)
            record |= {"task": [task.name, ""], "state": state.hex()}
            text = (
                json.dumps(record, separators=(",", ":"))
                .replace('\\"0 x', '\\"NUMBER x')
                .replace("question 0", "question NUMBER")
            )
            text = text.replace(record["key"], "KEY").replace(record["id"], "template:NUMBER")
            call = ask(begin).call.canonical.replace(b"question %d" % begin, b"question NUMBER")
            for number in range(begin, begin + 1000):
                digits = str(number)
                key = hashlib.sha256(state + call.replace(b"NUMBER", digits.encode())).hexdigest()
                data = text.replace("NUMBER", digits).replace("KEY", key).encode()
                file.write(b"%08x %s\n" % (zlib.crc32(data), data))


def request(path: str, body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


class Connection(asyncio.Protocol):
    """One request at a time; responses have a Content-Length."""

    def __init__(self) -> None:
        self.buffer, self.done = b"", None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, found, rest = self.buffer.partition(b"\r\n\r\n")
        if found:
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            if len(rest) >= length:
                self.buffer = b""
                if self.done is not None and not self.done.done():
                    self.done.set_result(head.startswith(b"HTTP/1.1 200"))

    async def send(self, data: bytes) -> bool:
        self.done = asyncio.get_running_loop().create_future()
        self.transport.write(data)  # type: ignore[attr-defined]
        return await self.done


async def load(port: int, rate: float, seconds: float, known: int, seed: int) -> tuple[list[float], int]:
    loop, chance = asyncio.get_running_loop(), random.Random(seed)
    free: asyncio.Queue[Connection] = asyncio.Queue()
    for _ in range(CONNECTIONS):
        _, made = await loop.create_connection(Connection, "127.0.0.1", port)
        free.put_nowait(made)
    requests = []
    for number in range(round(rate * seconds)):
        kind = chance.random()
        if kind < 0.6:
            requests.append(request("/v1/begin", asked(ask(chance.randrange(known))) | {"wait_s": 0}))
            continue
        fresh = asked(ask(10_000_000 + seed * 1_000_000 + number))
        if kind < 0.8:
            requests.append(request("/v1/begin", fresh | {"wait_s": 0}))
        else:
            value = {"body": json.dumps({"json": OUTPUT}), "seconds": 3.0}
            requests.append(request("/v1/finish", fresh | {"lease": 0, "value": value}))
    took_s: list[float] = []
    failed = 0

    async def one(data: bytes, due_s: float) -> None:
        nonlocal failed
        connection = await free.get()
        failed += not await connection.send(data)
        took_s.append(loop.time() - due_s)
        free.put_nowait(connection)

    tasks, begin_s = [], loop.time() + 0.05
    for number, data in enumerate(requests):
        due_s = begin_s + number / rate
        delay_s = due_s - loop.time()
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        tasks.append(loop.create_task(one(data, due_s)))
    await asyncio.gather(*tasks)
    return took_s, failed


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10,000 values, two seconds a rate")
    args = parser.parse_args()
    count, seconds = (10_000, 2.0) if args.quick else (1_000_000, 12.0)
    report = Report(f"tvcache serve with {count:,} values", "the bars; the first implementation reports > 1 s at 512/s")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.log"
        filled(path, count)
        began_s = time.perf_counter()
        with Served(path) as served:
            report.figure("start with this log", time.perf_counter() - began_s, "s")
            assert served.num_values == count
            assert served.process is not None
            asyncio.run(load(served.port, 200.0, 1.0, count, 9))
            for rate, bar_ms in ((256, 3.0), (2000, 10.0)):
                took_s, failed = asyncio.run(load(served.port, rate, seconds, count, rate))
                report.figure(f"{rate} requests/s: p50", 1e3 * statistics.median(took_s), "ms")
                p95_s = statistics.quantiles(took_s, n=20)[18]
                report.figure(f"{rate} requests/s: p95", 1e3 * p95_s, "ms", at_most=bar_ms)
                report.figure(f"{rate} requests/s: p99", 1e3 * statistics.quantiles(took_s, n=100)[98], "ms")
                report.figure(f"{rate} requests/s: failed", failed, "", at_most=0)
            report.figure("memory", resident_bytes(served.process.pid) / 1e9, "GB", at_most=1.5)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
