"""How gradients are summed in each datacenter: torch.distributed only where nobody else can listen or connect."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from atlas.addresses import is_loopback
from atlas.errors import AtlasError
from atlas.launch.local_sums import LocalSums, sums_by_datacenter
from atlas.launch.prepared_job import PreparedJob
from atlas.launch.site_network import SiteNetwork
from atlas.runtime.assignment import stand_in

HOSTS = {"east/site0": {"private": False}, "west/site0": {"private": True}, "west/site1": {"private": False}}


def prepared(tp: int = 1, **changes: object) -> PreparedJob:
    """As far as it matters here."""
    training = replace(stand_in(), **changes)  # type: ignore[arg-type]
    return cast(PreparedJob, SimpleNamespace(training=training, job=SimpleNamespace(tp=tp)))


def test_hosts_sum_over_the_transport_unless_their_network_is_private() -> None:
    said: list[str] = []
    found = sums_by_datacenter(prepared(), HOSTS, said.append)
    assert found == {"east": LocalSums("ordered", True), "west": LocalSums("transport", False)}
    assert "west: gradients are summed over the transport" in said[0]
    private = {host: {"private": True} for host in HOSTS}
    assert sums_by_datacenter(prepared(), private, said.append)["west"] == LocalSums("ordered", False)
    assert len(said) == 1


@pytest.mark.parametrize(("changes", "tp"), [({"sums": "fast"}, 1), ({"zero": 1}, 2)])
def test_what_only_torch_can_do_is_refused_there(changes: dict[str, object], tp: int) -> None:
    with pytest.raises(AtlasError, match="the network of west is private"):
        sums_by_datacenter(prepared(tp, **changes), HOSTS, print)


@pytest.mark.parametrize(
    ("network", "local", "private"),
    [
        (SiteNetwork(), "127.0.0.1", True),
        (SiteNetwork(), "10.0.0.5", False),
        (SiteNetwork(), "host.example.com", False),
        (SiteNetwork(private=True), "10.0.0.5", True),
    ],
)
def test_a_trusted_network_is_not_private_unless_the_recipe_says_so(
    network: SiteNetwork, local: str, private: bool
) -> None:
    """`--trusted` drops encryption, never authentication."""
    assert (network.private or is_loopback(local)) is private
