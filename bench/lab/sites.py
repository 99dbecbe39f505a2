"""Datacenters in network namespaces behind real NAT: a gateway on the emulated WAN, and behind it, where the site has
one, a host with a private address. nftables in the gateway translates or filters. Needs root, `ip` and `nft`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from atlas.wan.emulator.namespace_net import NamespaceNet, NamespaceNode
from atlas.wan.emulator.paths import PathSpec

PUBLIC, DNAT, MASQUERADE, FILTERED = "public", "1:1 NAT with a port range", "masquerade", "filtered"
PORTS = (7710, 7719)
FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
"""Of the network namespace of the thread that writes it."""


def missing() -> str:
    """What this host lacks for it; empty: nothing."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    absent = [tool for tool in ("ip", "nft", "ss") if shutil.which(tool) is None]
    return f"needs {', '.join(absent)}" if absent else ""


@dataclass
class Site:
    """Where one datacenter's processes run, and how others reach it."""

    name: str
    kind: str
    gateway: NamespaceNode
    netns: str = ""
    """Of the host behind the gateway; empty: processes run on the gateway."""

    @property
    def advertise(self) -> str:
        return "none" if self.kind == MASQUERADE else self.gateway.address

    @property
    def listen(self) -> str:
        return "0.0.0.0" if self.netns else self.gateway.address

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        if not self.netns:
            return self.gateway.popen(command, **options)
        return subprocess.Popen(["ip", "netns", "exec", self.netns, *command], **options)

    def cut(self, seconds: float) -> None:
        """Takes the link between the host and its gateway down for a while."""
        for state in ("down", "up"):
            self.gateway.run(lambda state=state: _run("ip", "link", "set", "lan0", state))
            time.sleep(seconds if state == "down" else 0.0)

    def listening(self) -> set[tuple[str, int]]:
        """The addresses and TCP ports on which anything listens at this site (`ss`)."""
        found = self.popen(["ss", "-H", "-ltn"], stdout=subprocess.PIPE, text=True)
        text, _ = found.communicate(timeout=10)
        places = (line.split()[3].rpartition(":") for line in text.splitlines())
        return {(host.strip("[]"), int(port)) for host, _, port in places}


def is_local(host: str) -> bool:
    """Whether only processes of the host itself reach it."""
    return host.startswith("127.") or host == "::1"


class Sites:
    """`kinds` by name. `nat` False: the same paths without translation, processes on the gateways."""

    def __init__(self, kinds: dict[str, str], path: PathSpec, *, nat: bool = True) -> None:
        self.net = NamespaceNet(dict.fromkeys(combinations(kinds, 2), path))
        self.sites: dict[str, Site] = {}
        try:
            for number, (name, kind) in enumerate(kinds.items(), 1):
                site = self.sites[name] = Site(name, kind if nat else PUBLIC, self.net.node(name))
                if site.kind in (DNAT, MASQUERADE):
                    self._put_behind(site, f"10.{number}.0")
                elif site.kind == FILTERED:
                    _nft(site.gateway, _filter(f"tcp dport {PORTS[0]}-{PORTS[1]} drop", hook="input"))
        except BaseException:
            self.close()
            raise

    def _put_behind(self, site: Site, network: str) -> None:
        site.netns = f"atlas-{os.getpid()}-{site.name}"
        _run("ip", "netns", "add", site.netns)
        gateway = f"/proc/{os.getpid()}/fd/{site.gateway._namespace.fd}"
        _run("ip", "link", "add", "lan0", "netns", site.netns, "type", "veth", "peer", "name", "lan0", "netns", gateway)
        inside: Callable[..., None] = lambda *words: _run("ip", "netns", "exec", site.netns, *words)  # noqa: E731
        inside("ip", "link", "set", "lo", "up")
        inside("ip", "addr", "add", f"{network}.2/24", "dev", "lan0")
        inside("ip", "link", "set", "lan0", "up")
        inside("ip", "route", "add", "default", "via", f"{network}.1")
        for words in (("ip", "addr", "add", f"{network}.1/24", "dev", "lan0"), ("ip", "link", "set", "lan0", "up")):
            site.gateway.run(lambda words=words: _run(*words))
        site.gateway.run(lambda: FORWARD.write_text("1"))
        rules = ["add chain ip nat post { type nat hook postrouting priority 100 ; }"]
        rules.append('add rule ip nat post oifname "wan0" masquerade')
        opened = ""
        if site.kind == DNAT:
            ports = f"{PORTS[0]}-{PORTS[1]}"
            rules.append("add chain ip nat pre { type nat hook prerouting priority -100 ; }")
            rules.append(f'add rule ip nat pre iifname "wan0" tcp dport {ports} dnat to {network}.2')
            opened = "ct status dnat accept"
        _nft(site.gateway, ["add table ip nat", *rules, *_filter('iifname "wan0" drop', before=opened)])

    def close(self) -> None:
        self.net.close()
        for site in self.sites.values():
            if site.netns:
                subprocess.run(["ip", "netns", "del", site.netns], check=False)

    def __enter__(self) -> Sites:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _filter(last: str, *, hook: str = "forward", before: str = "") -> list[str]:
    """Lets answers pass, then `before`, then applies the `last` rule."""
    lines = ["add table ip filter", f"add chain ip filter guard {{ type filter hook {hook} priority 0 ; }}"]
    rules = ["ct state established,related accept", *([before] if before else []), last]
    return lines + [f"add rule ip filter guard {rule}" for rule in rules]


def _nft(node: NamespaceNode, lines: list[str]) -> None:
    text = "\n".join(lines)
    node.run(lambda: subprocess.run(["nft", "-f", "-"], input=text, text=True, check=True))


def _run(*words: str) -> None:
    subprocess.run(list(words), check=True)


def certificates(folder: Path, names: Sequence[str]) -> None:
    from atlas.wan.security.certs import make_ca, make_node

    make_ca(folder)
    for name in names:
        make_node(folder, name)
