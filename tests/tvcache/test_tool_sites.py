"""Sites: each has its server; values travel in the background, over HTTPS with the user's certificates."""

from __future__ import annotations

import datetime
import ipaddress
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from servers import Served

from tvcache.client import Client
from tvcache.endpoint import Certificates
from tvcache.keys import Task, ToolCall, root
from tvcache.stores import Ask, Lease
from tvcache.values import Value


def ask(name: str) -> Ask:
    return Ask.of(Task("t"), root(Task("t")), ToolCall(name, {}), False)


def eventually(holds: Callable[[], bool], limit_s: float = 30.0) -> None:
    until_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until_s, "not within the limit"
        time.sleep(0.02)


def make_certificates(folder: Path, name: str = "127.0.0.1") -> Certificates:
    """An authority, and one certificate of it for every site; for an address, or a URI as `atlas wan certs` writes."""
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    now = datetime.datetime.now(datetime.UTC)
    uri = "://" in name
    who = x509.UniformResourceIdentifier(name) if uri else x509.IPAddress(ipaddress.ip_address(name))
    names = {part: x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, part)]) for part in ("authority", "site")}
    keys = {part: ec.generate_private_key(ec.SECP256R1()) for part in names}
    for part in names:
        builder = (
            x509.CertificateBuilder()
            .subject_name(names[part])
            .issuer_name(names["authority"])
            .public_key(keys[part].public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=part == "authority", path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([who]), critical=False)
        )
        made = builder.sign(keys["authority"], hashes.SHA256())
        (folder / f"{part}.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
        (folder / f"{part}.key").write_bytes(
            keys[part].private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
    return Certificates(folder / "authority.pem", folder / "site.pem", folder / "site.key")


@pytest.mark.parametrize("name", ["127.0.0.1", "atlas://site-a/0"])
def test_values_and_drops_are_copied_over_https(tmp_path: Path, name: str) -> None:
    found = make_certificates(tmp_path, name)
    flags = ["--ca", str(found.ca), "--cert", str(found.cert), "--key", str(found.key)]
    here = Served(tmp_path / "here.log", *flags)
    with here, Served(tmp_path / "there.log", *flags, "--peer", here.url) as there:
        assert here.url.startswith("https://")
        first, second = Client(here.url, certificates=found), Client(there.url, certificates=found)
        stranger = Client(here.url, certificates=Certificates(found.ca))
        assert first.finish(ask("a"), Lease(), Value(b'{"json":1}', 2.0)) is not None
        eventually(lambda: isinstance(second.begin(ask("a"), 0.0), Value))
        assert second.begin(ask("a"), 0.0) == Value(b'{"json":1}', 2.0)
        assert stranger.begin(ask("a"), 0.0) == Lease()  # it shows no certificate
        first.drop(ask("a"), "a", "it differed")
        eventually(lambda: isinstance(second.begin(ask("a"), 0.0), Lease))
        for client in (first, second, stranger):
            client.close()


def test_a_site_that_is_down_delays_no_call_and_is_read_later(tmp_path: Path) -> None:
    with Served(tmp_path / "here.log") as here, Served(tmp_path / "there.log", "--peer", here.url) as there:
        client, other = Client(there.url), Client(here.url)
        other.finish(ask("a"), Lease(), Value(b'{"json":1}'))
        eventually(lambda: isinstance(client.begin(ask("a"), 0.0), Value))
        here.kill()
        began_s = time.monotonic()
        for number in range(20):
            assert client.finish(ask(f"alone {number}"), Lease(), Value(b'{"json":2}')) is not None
        assert time.monotonic() - began_s < 60.0  # each would wait 25 s for a site
        here.start()
        other.close()
        other = Client(here.url)
        other.finish(ask("b"), Lease(), Value(b'{"json":3}'))
        eventually(lambda: isinstance(client.begin(ask("b"), 0.0), Value))
        there.stop()
        there.start()  # goes on where it was
        client.close()
        client = Client(there.url)
        assert there.num_values == 22
        assert b'"after":' in there.log.read_bytes()
        client.close()
        other.close()


def test_two_sites_that_read_each_other_stop_writing(tmp_path: Path) -> None:
    with Served(tmp_path / "a.log") as here, Served(tmp_path / "b.log", "--peer", here.url) as there:
        here.stop()
        here.flags = ("--peer", there.url)
        here.start()
        first, second = Client(here.url), Client(there.url)
        first.finish(ask("a"), Lease(), Value(b'{"json":1}'))
        second.finish(ask("b"), Lease(), Value(b'{"json":2}'))
        eventually(lambda: isinstance(first.begin(ask("b"), 0.0), Value))
        eventually(lambda: isinstance(second.begin(ask("a"), 0.0), Value))
        sizes: list[tuple[int, int]] = []

        def rested() -> bool:
            sizes.append((here.log.stat().st_size, there.log.stat().st_size))
            return len(sizes) > 40 and len(set(sizes[-10:])) == 1

        eventually(rested)
        first.close()
        second.close()


def test_a_certificate_of_another_host_or_authority_is_refused(tmp_path: Path) -> None:
    for folder in ("other", "strange"):
        (tmp_path / folder).mkdir()
    other = make_certificates(tmp_path / "other", "127.0.0.9")
    strange = make_certificates(tmp_path / "strange")
    with Served(tmp_path / "a.log", "--cert", str(other.cert), "--key", str(other.key)) as served:
        for found in (Certificates(other.ca), Certificates(strange.ca), Certificates()):
            client = Client(served.url, certificates=found)
            assert client.begin(ask("a"), 0.0) == Lease()
            assert client.finish(ask("a"), Lease(), Value(b'{"json":1}')) is None
            client.close()
