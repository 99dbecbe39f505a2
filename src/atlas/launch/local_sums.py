"""How gradients are summed in each datacenter. torch.distributed neither encrypts nor authenticates, so it is used on
loopback, where all workers of a datacenter are on one host, and where the recipe says that the network inside the
datacenter is private (`network.private`). Elsewhere the WAN transport sums: it authenticates, with `--trusted` too.

`ordered` and the transport give the same bits. Decides; starts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from atlas.errors import AtlasError
from atlas.launch.prepared_job import PreparedJob
from atlas.runtime.assignment import SumsKind


class LocalSums(NamedTuple):
    """In one datacenter."""

    kind: SumsKind
    on_loopback: bool
    """Whether its workers find each other on loopback, and not at their hosts' addresses."""


def sums_by_datacenter(
    prepared: PreparedJob, hosts: Mapping[str, Any], say: Callable[[str], None]
) -> dict[str, LocalSums]:
    """By datacenter. Reports where it differs from what the recipe says.

    `hosts`: by agent (`west/site0`), what it reported: {"private": whether its network is private}.
    """
    training = prepared.training
    private: dict[str, list[bool]] = {}
    for agent, facts in hosts.items():
        private.setdefault(agent.partition("/")[0], []).append(bool(facts["private"]))
    apart = [dc for dc, hosts_of in private.items() if len(hosts_of) > 1 and not all(hosts_of)]
    found = {dc: LocalSums("transport" if dc in apart else training.sums, len(private[dc]) == 1) for dc in private}
    if not apart or training.sums == "transport":
        return found
    where = ", ".join(apart)
    if training.sums == "fast" or (training.zero and prepared.job.tp > 1):
        what = "sums: fast" if training.sums == "fast" else "zero: 1 with tensor parallelism"
        raise AtlasError(
            f"{what} needs torch.distributed, which neither encrypts nor authenticates, and the recipe does not say "
            f"that the network of {where} is private. Write network.private: true on every host if nobody else can "
            "connect to them or insert packets (SECURITY.md), or write sums: transport and zero: 0"
        )
    say(f"{where}: gradients are summed over the transport, as the recipe has no network.private: true")
    return found
