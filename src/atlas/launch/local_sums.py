"""How gradients are summed in each datacenter. torch.distributed neither encrypts nor authenticates, so it is used on
loopback, where all workers of a datacenter are on one host, and in trusted networks; elsewhere the WAN transport sums.

`ordered` and the transport give the same bits. Decides; starts nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from atlas.errors import AtlasError
from atlas.launch.prepared_job import PreparedJob
from atlas.runtime.assignment import SumsKind
from atlas.wan.security.credentials import Security

LOOPBACK = "127.0.0.1"


class LocalSums(NamedTuple):
    """In one datacenter."""

    kind: SumsKind
    on_loopback: bool
    """Whether its workers find each other on loopback, and not at their hosts' addresses."""


def sums_by_datacenter(
    prepared: PreparedJob, hosts: Mapping[str, Any], say: Callable[[str], None]
) -> dict[str, LocalSums]:
    """By datacenter. Tells the user where it differs from what the recipe says.

    `hosts`: by agent (`west/site0`), what it said of itself: {"trusted": whether its address is in a trusted network}.
    """
    training = prepared.training
    trusted: dict[str, list[bool]] = {}
    for agent, facts in hosts.items():
        trusted.setdefault(agent.partition("/")[0], []).append(bool(facts["trusted"]))
    apart = [dc for dc, hosts_of in trusted.items() if len(hosts_of) > 1 and not all(hosts_of)]
    found = {dc: LocalSums("transport" if dc in apart else training.sums, len(trusted[dc]) == 1) for dc in trusted}
    if not apart or training.sums == "transport":
        return found
    where = ", ".join(apart)
    if training.sums == "fast" or (training.zero and prepared.job.tp > 1):
        what = "sums: fast" if training.sums == "fast" else "zero: 1 with tensor parallelism"
        raise AtlasError(
            f"{what} needs torch.distributed, which neither encrypts nor authenticates, and hosts of {where} are not "
            "in a trusted network. Name it with --trusted (network.trusted in the recipe) on every host, or write "
            "sums: transport and zero: 0"
        )
    say(f"{where}: gradients are summed over the encrypted transport, as its hosts are in no trusted network")
    return found


def is_trusted(security: Security, address: str) -> bool:
    """Whether an address of this host is in a trusted network; a name is not an address."""
    with contextlib.suppress(ValueError):
        return security.trusts(address)
    return False
