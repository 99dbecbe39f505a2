"""Nodes in namespaces (real TCP) or on plain loopback, driven from one place; and lines against bars."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from atlas.wan.emulator.namespace_net import NamespaceNet
from atlas.wan.emulator.paths import Paths

NODE = [sys.executable, "-m", "lab.node"]


class Remote:
    """An actor's process: `remote.send(...)` is its method `send`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def tell(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("a node of the bench has died")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["answer"]

    def __getattr__(self, do: str) -> Any:
        def call(**arguments: Any) -> Any:
            self.tell(do, **arguments)
            return self.hear()

        return call


def both(*remotes: Remote) -> list[Any]:
    return [remote.hear() for remote in remotes]


class Lab:
    """`paths` None: plain loopback. Otherwise a namespace per node."""

    def __init__(self, paths: Paths | None, names: list[str], **options: Any) -> None:
        self.net = NamespaceNet(paths, **options) if paths is not None else None
        here = str(Path(__file__).parent.parent)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([here, str(Path(here).parent / "src")])}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
        self.nodes: dict[str, Remote] = {}
        self.hosts: dict[str, str] = {}
        for name in names:
            process = subprocess.Popen(NODE, **pipes) if self.net is None else self.net.node(name).popen(NODE, **pipes)
            self.nodes[name] = Remote(process)
            self.hosts[name] = "127.0.0.1" if self.net is None else self.net.address(name)
        self.addresses: dict[str, Any] = {}

    def open(self, certs: str | None = None, **settings: Any) -> None:
        for name, node in self.nodes.items():
            self.addresses[name] = node.open(name=name, host=self.hosts[name], certs=certs, settings=settings)

    def connect(self, pairs: list[tuple[str, str]], lanes: list[int] | None = None, order: str = "connect") -> None:
        """Connect the first of each pair to its second, all at once; `join`: as cells."""
        peers: dict[str, dict[str, Any]] = {}
        for source, target in pairs:
            peers.setdefault(source, {})[target] = self.addresses[target]
        for source, targets in peers.items():
            self.nodes[source].tell(order, peers=targets, lanes=lanes or [0])
        both(*(self.nodes[source] for source in peers))

    def close(self) -> None:
        for node in self.nodes.values():
            node.process.kill()
            node.process.wait()
            for pipe in (node.process.stdin, node.process.stdout):
                if pipe:
                    pipe.close()
        if self.net is not None:
            self.net.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Move:
    """Transfers from one node to another, timed by the machine's clock."""

    def __init__(self, lab: Lab, source: str, target: str) -> None:
        self.lab, self.source, self.target, self.number = lab, source, target, 0

    def run(self, count: int, num_bytes: int, turns: list[int] | None = None) -> tuple[int, list[int], list[int]]:
        """The start, the arrival and the acknowledgement of each."""
        a, b = self.lab.nodes[self.source], self.lab.nodes[self.target]
        numbers = list(range(self.number, self.number + count))
        self.number += count
        b.recv(peer=self.source, numbers=numbers, num_bytes=num_bytes)
        a.prepare(num_bytes=num_bytes)
        time.sleep(0.15)
        begin_ns = time.monotonic_ns() + 50_000_000
        a.send(peer=self.target, numbers=numbers, num_bytes=num_bytes, turns=turns or numbers, at_ns=begin_ns)
        a.tell("wait", which="send", timeout_s=60)
        b.tell("wait", which="recv", timeout_s=60)
        acked, arrived = both(a, b)
        return begin_ns, [end for _, end in arrived], [end for _, end in acked]
