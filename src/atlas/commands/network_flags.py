"""The network flags of a launcher, shared by `atlas train --dc` and `atlas wan check`. They replace keys of `network:`
in a recipe. A value for one datacenter (`network.sites`) takes precedence over one for all."""

from __future__ import annotations

import argparse
from pathlib import Path

from atlas.errors import AtlasError
from atlas.launch.site_network import PortRange, SiteNetwork
from atlas.spec.recipe import NetworkRecipe

PORT = 7700
"""Of the rendezvous and the coordinator, unless a flag names another."""


def network_flags(group: argparse._ActionsContainer) -> None:
    add = group.add_argument
    add(
        "--rendezvous",
        metavar="HOST:PORT",
        help=f"an address of the plan's first datacenter, which all others connect to (default 127.0.0.1:{PORT})",
    )
    add("--listen", metavar="ADDRESS", help="address of this host to bind; 0.0.0.0: all of them (default 127.0.0.1)")
    add(
        "--advertise",
        metavar="HOST",
        help="address or name at which other datacenters dial this host; none: they cannot (default: --listen)",
    )
    add("--ports", metavar="LO-HI", help="ports of this host's workers and checkpoint server (default: any)")
    add(
        "--reach",
        action="append",
        default=[],
        metavar="NAME=HOST",
        help="dial datacenter NAME (or its host NAME/1) at HOST; NAME=none: it cannot be dialled",
    )
    add("--node", metavar="I/N", help="this is host I (from 0) of N in the datacenter (default 0/1)")


def security_flags(group: argparse._ActionsContainer) -> None:
    add = group.add_argument
    add("--certs", type=Path, metavar="DIR", help="folder of certificates from `atlas wan certs`")
    add(
        "--trusted",
        action="append",
        default=[],
        metavar="NETWORK",
        help="network inside the datacenter in which traffic may be unencrypted",
    )


def network_of(args: argparse.Namespace, recipe: NetworkRecipe, *, share: tuple[int, int] = (0, 1)) -> SiteNetwork:
    """Of this launcher. `share`: which of how many launchers on this host it is; they divide its ports."""
    site = recipe.sites.get(args.dc)
    places = [place for place in (site, recipe) if place is not None]

    def first(key: str) -> str | None:
        given = [getattr(args, key), *(getattr(place, key) for place in places)]
        return next((value for value in given if value is not None), None)

    reach = {**recipe.reach, **(site.reach if site is not None else {}), **dict(map(_reach, args.reach))}
    private = next((place.private for place in places if place.private is not None), False)
    text = first("ports")
    ports = None if text is None else PortRange.of(text).share(*share)
    return SiteNetwork(first("listen") or SiteNetwork().listen, first("advertise") or "", ports, reach, private)


def rendezvous_of(args: argparse.Namespace) -> tuple[str, int]:
    """Where launchers meet: at `atlas coordinator`, or at the plan's first datacenter."""
    flag = "--rendezvous" if args.coordinator is None else "--coordinator"
    return address_of(flag, args.coordinator or args.rendezvous or f"127.0.0.1:{PORT}")


def address_of(flag: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise AtlasError(f"{flag} {text}: must be HOST:PORT, such as 10.0.0.1:{PORT}")
    return host.strip("[]"), int(port)


def _reach(text: str) -> tuple[str, str]:
    name, equals, host = text.partition("=")
    if not (name and equals and host):
        raise AtlasError(f"--reach {text}: must be NAME=HOST, such as west=10.8.0.5, or NAME/1=HOST for one host")
    return name, host
