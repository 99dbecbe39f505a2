"""Where a launcher listens, what others dial, and who dials whom. Wrong values are refused before anything starts."""

from __future__ import annotations

import json
import queue
import socket
from dataclasses import asdict
from pathlib import Path

import pytest
from free_ports import free_ports
from multi_dc_runs import job_text

from atlas.cli import main
from atlas.commands.network_flags import network_of
from atlas.errors import AtlasError
from atlas.launch import site_network
from atlas.launch.rendezvous import AgentName
from atlas.launch.site_network import (
    PortRange,
    SiteFacts,
    SiteNetwork,
    own_address,
    require_apart,
    require_connected,
)
from atlas.launch.site_security import expiry_watch
from atlas.runtime.assignment import read
from atlas.spec.recipe import load_recipe
from atlas.wan.security.certs import expiry_warnings, make_ca, make_node, require_current
from atlas.wan.transport.base import PeerRoute


def site(host: str, advertise: str | None, local: str = "10.0.0.1", **others: object) -> SiteFacts:
    datacenter, _, part = host.partition("/")
    return SiteFacts(datacenter, int(part or 0), local, advertise, **others)  # type: ignore[arg-type]


def test_the_side_that_can_dial_dials_for_both() -> None:
    public, hidden = site("east", "203.0.113.1"), site("west", None)
    assert public.route(hidden, 7711) == PeerRoute(None, dial_for=False)
    assert hidden.route(public, 7712) == PeerRoute(("203.0.113.1", 7712), dial_for=True)
    assert read(SiteFacts, json.loads(json.dumps(asdict(hidden)))) == hidden


def test_hosts_of_one_datacenter_dial_its_own_addresses() -> None:
    one, other = site("west/0", None), site("west/1", None, "10.0.0.2", ports=PortRange(1, 2))
    assert one.route(other, 5) == PeerRoute(("10.0.0.2", 5))
    assert read(SiteFacts, json.loads(json.dumps(asdict(other)))) == other


def test_reach_replaces_what_the_other_side_advertises() -> None:
    reach = {"west": "10.8.0.5", "west/1": "10.8.0.6", "south": "none"}
    here = site("east", "203.0.113.1", reach=reach)
    assert here.dials(site("west/0", None)) == "10.8.0.5"
    assert here.dials(site("west/1", "198.51.100.7")) == "10.8.0.6"
    assert here.dials(site("south", "192.0.2.3")) is None
    assert here.dials(site("north", "192.0.2.4")) == "192.0.2.4"


def test_a_pair_of_which_neither_can_dial_is_refused() -> None:
    with pytest.raises(AtlasError, match=r"west/0 and south/0 .* neither can dial the other .* at least one must"):
        require_connected([(site("west", None), site("south", None))])
    require_connected([(site("west", None), site("south", "192.0.2.1"))])


def test_overlapping_ranges_at_one_address_are_refused() -> None:
    first, second = PortRange(7710, 7719), PortRange(7715, 7724)
    behind = site("east/0", "203.0.113.1", ports=first), site("east/1", "203.0.113.1", "10.0.0.2", ports=second)
    with pytest.raises(AtlasError, match=r"east/0 and east/1 are both dialled at 203.0.113.1, .* overlap"):
        require_apart(behind)
    on_one_host = site("east/0", None, ports=first), site("east/1", None, ports=first)
    with pytest.raises(AtlasError, match=r"both dialled at 10.0.0.1"):
        require_apart(on_one_host)
    require_apart((site("east", None, ports=first), site("west", None, ports=first)))


def test_overlapping_ranges_on_one_machine_are_refused_whatever_the_datacenters() -> None:
    """By what they bind: a wildcard, or the same address. Network namespaces have ports of their own."""
    ports, others = PortRange(7710, 7719), PortRange(7720, 7729)

    def launcher(name: str, listen: str, network: str = "boot/1", ports: PortRange = ports) -> SiteFacts:
        return site(name, None, listen, listen=listen, network=network, ports=ports)

    east = launcher("east", "127.0.0.1")
    for listen in ("127.0.0.1", "0.0.0.0"):
        with pytest.raises(AtlasError, match=r"east/0 and west/0 are on one host, and their --ports 7710-7719 .*own"):
            require_apart((east, launcher("west", listen)))
    require_apart((east, launcher("west", "127.0.0.2")))
    require_apart((east, launcher("west", "127.0.0.1", "boot/2")))
    require_apart((east, launcher("west", "127.0.0.1", ports=others)))
    here = [SiteNetwork(ports=ports).facts(AgentName(name), ("127.0.0.1", 1)) for name in ("east", "west")]
    with pytest.raises(AtlasError, match="on one host"):
        require_apart(here)


def test_a_range_too_small_says_how_many_it_needs() -> None:
    with pytest.raises(AtlasError, match=r"--ports 7710-7712: 3 port\(s\) .* needs 5 \(4 worker\(s\) and a checkpoint"):
        SiteNetwork(ports=PortRange(7710, 7712)).require_ports(4, saves=True)
    shared = PortRange(7710, 7712).share(1, 2)
    assert shared == PortRange(7711, 7711)
    with pytest.raises(AtlasError, match="2 launchers on this host share it: 4 in all"):
        SiteNetwork(ports=shared).require_ports(1, saves=True, launchers=2)


def test_a_port_of_the_range_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_network, "FREE_S", 0.0)
    (first,) = free_ports(3, 1)
    network = SiteNetwork(ports=PortRange(first, first + 2))
    with socket.create_server(("127.0.0.1", first + 1)):
        network.require_ports(1, saves=False)
        with pytest.raises(AtlasError, match=f"port {first + 1} at 127.0.0.1 cannot be used: Address already in use"):
            network.require_ports(2, saves=False)
    with socket.create_server(("127.0.0.1", first)):
        network.require_ports(2, saves=True, serves=True)  # its own checkpoint server


def test_a_wildcard_is_sent_to_mates_as_the_outgoing_address() -> None:
    facts = SiteNetwork("0.0.0.0", "none").facts(AgentName("west"), ("127.0.0.1", 7700))
    assert facts.advertise is None
    assert facts.local == own_address(("127.0.0.1", 7700)) != "0.0.0.0"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--listen", "203.0.113.77"], "not an address of this host"),
        (["--listen", "0.0.0.0"], "Give --advertise HOST"),
        (["--advertise", "no.such.name.invalid"], "--advertise no.such.name.invalid: does not resolve"),
        (["--advertise", "0.0.0.0"], "others cannot dial that"),
        (["--ports", "7719-7710"], "must be LO-HI"),
        (["--ports", "7710"], "must be LO-HI"),
        (["--ports", "7700-7709"], "the rendezvous has port 7700"),
        (["--reach", "west"], "must be NAME=HOST"),
        (["--reach", "moon=10.8.0.1"], "the plan has no such datacenter; it has east, west"),
        (["--reach", "west/x=10.8.0.1"], "'x' is not the number of a host"),
        (["--reach", "west=no.such.name.invalid"], "does not resolve"),
    ],
)
def test_flags_that_cannot_work(
    flags: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text(job_text("east", "west"))
    assert main(["train", str(tmp_path / "job.yaml"), "--dc", "east", "--device", "cpu", *flags]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said


def test_flags_come_before_the_recipe_and_a_site_before_all(tmp_path: Path) -> None:
    from argparse import Namespace

    file = tmp_path / "recipe.yaml"
    file.write_text(
        "network:\n  ports: 7710-7719\n  listen: 0.0.0.0\n  reach: {west: 10.8.0.5, south: none}\n"
        "  sites:\n    east: {advertise: east.example.com, reach: {west: 10.9.0.5}}\n"
    )
    recipe = load_recipe(file).network
    none = Namespace(dc="east", listen=None, advertise=None, ports=None, reach=[])
    reach = {"west": "10.9.0.5", "south": "none"}
    assert network_of(none, recipe) == SiteNetwork("0.0.0.0", "east.example.com", PortRange(7710, 7719), reach)
    given = Namespace(dc="west", listen="127.0.0.1", advertise="none", ports="1-4", reach=["south=10.1.1.1"])
    found = network_of(given, recipe, share=(1, 2))
    assert found == SiteNetwork("127.0.0.1", "none", PortRange(3, 4), {"west": "10.8.0.5", "south": "10.1.1.1"})
    file.write_text("network:\n  sites:\n    east: {advertize: x}\n")
    with pytest.raises(AtlasError, match="advertise"):
        load_recipe(file)


def test_a_certificate_that_has_expired_or_soon_will(tmp_path: Path) -> None:
    make_ca(tmp_path)
    make_node(tmp_path, "west", days=5)
    require_current(tmp_path, "west")
    (warning,) = expiry_warnings(tmp_path, "west")
    assert "west.pem expires in" in warning
    make_node(tmp_path, "east", days=5, starts_in_days=-10)
    with pytest.raises(AtlasError, match=r"east.pem expired on .* Make a new one with `atlas wan certs`"):
        require_current(tmp_path, "east")
    make_node(tmp_path, "east.p0", starts_in_days=10)
    make_node(tmp_path, "east", days=50)
    with pytest.raises(AtlasError, match=r"east.p0.pem is valid from"):
        require_current(tmp_path, "east")


def test_a_launcher_warns_while_it_runs(tmp_path: Path) -> None:
    """The certificate had more than 14 days left when it started; a renewed one ends the warnings."""
    make_ca(tmp_path)
    make_node(tmp_path, "east", days=60)
    said: queue.Queue[str] = queue.Queue()
    with expiry_watch(tmp_path, "east", said.put, every_s=0.02):
        assert said.empty()
        make_node(tmp_path, "east", days=10)
        while "east.pem expires in 9 days: make a new one" not in said.get(timeout=60):
            pass  # a file that is half written cannot be read, which is said too
        make_node(tmp_path, "east", days=1, starts_in_days=-2)
        while "east.pem has expired" not in said.get(timeout=60):
            pass
    with expiry_watch(None, "east", said.put, every_s=0.02):
        pass
