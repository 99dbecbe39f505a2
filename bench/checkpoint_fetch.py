"""A checkpoint restored from another datacenter: how much of the path a fetch uses, and what a broken one repeats.

    python bench/checkpoint_fetch.py            4 GB over 80 ms and 1 Gbit/s, encrypted (root: network namespaces)
    python bench/checkpoint_fetch.py --quick    0.5 GB: too short to judge the share of the path or the bytes kept

One process serves the files, another fetches them, each in a namespace of its own; real TCP between them. Then the
fetching process is killed half-way and started again. Nothing is left to a local copy.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common.report import Report, not_measured

from atlas.runtime.checkpoint.calls import OWN
from atlas.runtime.checkpoint.client import CheckpointClient, RemoteStore
from atlas.runtime.checkpoint.fetch import FetchFolder
from atlas.runtime.checkpoint.manifest import Blob, SaveId
from atlas.runtime.checkpoint.server import CheckpointServer
from atlas.runtime.checkpoint.store import LocalStore
from atlas.wan.emulator.namespace_net import NamespaceNet
from atlas.wan.emulator.paths import PathSpec
from atlas.wan.security.certs import make_ca, make_node
from atlas.wan.security.credentials import Credentials, Security
from atlas.wan.transport.base import PeerRoute
from atlas.wan.transport.endpoint import Endpoint

RATE_BPS, RTT_S = 1e9, 0.080
BLOB_BYTES = 64 << 20
SHARE, KEPT = 0.8, 0.25
JUDGED_BYTES = 1 << 32
"""A fetch takes about 5 s until it uses the whole path. SHARE and KEPT are bars for fetches of this size."""
EAST, WEST = "east/site0", "west/site0"
SAVE = SaveId(0, 10)


def node(name: str, host: str, certs: Path) -> Endpoint:
    return Endpoint(name, (host, 0), security=Security(Credentials.of_folder(certs, name)))


def serve(host: str, certs: Path, folder: Path) -> None:
    """Prints its port, reads the client's."""
    endpoint = node(EAST, host, certs)
    server = CheckpointServer(endpoint, {OWN: LocalStore(folder)})
    print(endpoint.address[1], flush=True)
    for line in sys.stdin:
        peer_host, peer_port = json.loads(line)
        server.admit({WEST: PeerRoute((peer_host, peer_port))})
    endpoint.close(0.0)


def fetch(host: str, certs: Path, folder: Path, server: list[Any], blobs: list[Blob]) -> None:
    """Prints its port, and then how long the fetch took."""
    endpoint = node(WEST, host, certs)
    print(endpoint.address[1], flush=True)
    sys.stdin.readline()
    client = CheckpointClient(endpoint, EAST, PeerRoute((server[0], server[1])))
    store, arrived = RemoteStore(client, OWN), sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    began = time.monotonic()
    FetchFolder(folder).fetch(SAVE, [[(store, blob)] for blob in blobs])
    print(json.dumps({"seconds": time.monotonic() - began, "had_bytes": arrived}), flush=True)
    endpoint.close(0.0)


def make_files(folder: Path, total_bytes: int) -> list[Blob]:
    (folder / SAVE.folder).mkdir(parents=True)
    blobs = []
    for number in range(total_bytes // BLOB_BYTES):
        data = os.urandom(BLOB_BYTES // 16) * 16
        name = f"{SAVE.folder}{number}.safetensors"
        (folder / name).write_bytes(data)
        blobs.append(Blob(name, len(data), hashlib.sha256(data).hexdigest()))
    return blobs


class Sites:
    """A server in one namespace; clients in the other."""

    def __init__(self, net: NamespaceNet, base: Path, blobs: list[Blob]) -> None:
        self.net, self.base, self.blobs = net, base, blobs
        self.hosts = {name: net.address(name) for name in (EAST, WEST)}
        self.server = self._popen(EAST, "serve", base / "certs", base / "server")
        self.port = int(self._line(self.server))

    def _popen(self, name: str, role: str, *words: Any) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, "--role", role, self.hosts[name], *map(str, words)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return self.net.node(name).popen(command, **pipes)

    def _line(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline()

    def fetch(self, into: Path) -> subprocess.Popen[str]:
        """A client that has begun."""
        listed = self.base / "blobs.json"
        listed.write_text(json.dumps([blob.__dict__ for blob in self.blobs]))
        server = json.dumps([self.hosts[EAST], self.port])
        client = self._popen(WEST, "fetch", self.base / "certs", into, server, listed)
        port = int(self._line(client))
        assert self.server.stdin is not None
        assert client.stdin is not None
        self.server.stdin.write(json.dumps([self.hosts[WEST], port]) + "\n")
        self.server.stdin.flush()
        time.sleep(0.5)  # the server has admitted it
        client.stdin.write("\n")
        client.stdin.flush()
        return client

    def result(self, client: subprocess.Popen[str]) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._line(client))
        client.wait()
        return found


def measure(base: Path, total_bytes: int) -> Report:
    share, kept_share, rest_share = (SHARE, KEPT, 1.0) if total_bytes >= JUDGED_BYTES else (None, None, None)
    report = Report("Checkpoint fetch", f"a path of {RATE_BPS / 1e9:g} Gbit/s and {RTT_S * 1e3:g} ms")
    blobs = make_files(base / "server", total_bytes)
    make_ca(base / "certs")
    for name in (EAST, WEST):
        make_node(base / "certs", name)
    paths = {(EAST, WEST): PathSpec(latency_s=RTT_S / 2, pair_bps=RATE_BPS)}
    with NamespaceNet(paths) as net:
        whole = Sites(net, base, blobs)
        took = whole.result(whole.fetch(base / "whole"))
        report.figure("fetch: share of the path", total_bytes * 8 / RATE_BPS / took["seconds"], "", at_least=share)
    with NamespaceNet(paths) as net:
        cut = Sites(net, base, blobs)
        client = cut.fetch(base / "cut")
        time.sleep(took["seconds"] / 2)
        client.send_signal(signal.SIGKILL)
        client.wait()
    with NamespaceNet(paths) as net:
        again = Sites(net, base, blobs)
        rest = again.result(again.fetch(base / "cut"))
        kept = rest["had_bytes"] / total_bytes
        report.figure("killed fetch: bytes kept, killed at half its time", kept, "of all", at_least=kept_share)
        report.figure(
            "killed fetch: the rest took", rest["seconds"] / took["seconds"], "of a fetch", at_most=rest_share
        )
    same = all((base / "cut" / blob.name).read_bytes() == (base / "server" / blob.name).read_bytes() for blob in blobs)
    report.figure("killed fetch: files equal", float(same), "", at_least=1)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="0.5 GB")
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        role, host, certs, folder, *more = args.role
        if role == "serve":
            serve(host, Path(certs), Path(folder))
        else:
            blobs = [Blob(**blob) for blob in json.loads(Path(more[1]).read_text())]
            fetch(host, Path(certs), Path(folder), json.loads(more[0]), blobs)
        return 0
    if os.geteuid() != 0:
        return not_measured("checkpoint_fetch", "network namespaces need root")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    with tempfile.TemporaryDirectory(prefix="atlas-fetch-") as folder:
        return measure(Path(folder), (1 << 29) if args.quick else JUDGED_BYTES).finish()


if __name__ == "__main__":
    sys.exit(main())
