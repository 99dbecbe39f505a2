"""A small certificate authority for a group of nodes: one CA, one certificate and key per node.

A node's certificate has the names that the node may use, `atlas://datacenter/worker`, and is valid for both ends of a
connection. One for a whole datacenter has `atlas://datacenter/*`. Keys are P-256, written with mode 0600; the CA's key
is needed only here and can be kept elsewhere. Needs the `cryptography` package (extra `wan`). Knows no connections.
"""

from __future__ import annotations

import datetime as dt
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atlas.errors import AtlasError, MissingExtraError
from atlas.wan.security.credentials import URI, Credentials

DEFAULT_DAYS, CA_DAYS = 90, 3650
"""Validity of a node's certificate and of the CA's, unless the user says otherwise."""
WARN_DAYS = 14
"""Before a certificate ends, a launcher warns."""
_NAME = re.compile(r"[A-Za-z0-9_.-]+/([A-Za-z0-9_.-]+|\*)")


def _x509() -> tuple[Any, Any, Any, Any]:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise MissingExtraError("cryptography", "wan", "making certificates") from None
    return x509, hashes, serialization, ec


def make_ca(folder: Path, *, days: int = CA_DAYS) -> None:
    """Writes ca.pem and ca.key, unless the folder has a CA."""
    if (folder / "ca.key").exists() and (folder / "ca.pem").exists():
        return
    x509, _, _, ec = _x509()
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"atlas CA {os.urandom(4).hex()}")])
    usage = _usage(x509, sign_certificates=True)
    extensions = [(x509.BasicConstraints(ca=True, path_length=0), True), (usage, True)]
    _write(folder / "ca", key, _certificate(subject, subject, key, key, days, extensions))


def require_names(nodes: Sequence[str], also: Sequence[str] = ()) -> None:
    """Raise AtlasError for a node that `make_node` refuses."""
    for each in (*(name if "/" in name else f"{name}/*" for name in nodes), *also):
        if not _NAME.fullmatch(each):
            raise AtlasError(
                f"node {each.removesuffix('/*')!r}: write datacenter/worker, with letters, digits, dots, - and _; "
                "a datacenter alone stands for all its nodes"
            )


def make_node(
    folder: Path, name: str, *, days: int = DEFAULT_DAYS, also: Sequence[str] = (), starts_in_days: float = 0.0
) -> Credentials:
    """Writes the certificate and key of node `datacenter/worker`, or of all nodes of `datacenter`, signed by the
    folder's CA."""
    x509, _, serialization, ec = _x509()
    require_names([name], also)
    stem = name.removesuffix("/*").replace("/", ".")
    name = name if "/" in name else f"{name}/*"
    try:
        issuer_key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
        issuer = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    except OSError as error:
        raise AtlasError(f"{error.filename}: {error.strerror}. Make the CA first with `atlas wan certs`") from None
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:64])])
    uris = [x509.UniformResourceIdentifier(URI + each) for each in (name, *also)]
    purposes = [x509.ExtendedKeyUsageOID.SERVER_AUTH, x509.ExtendedKeyUsageOID.CLIENT_AUTH]
    extensions = [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(x509, sign_certificates=False), True),
        (x509.ExtendedKeyUsage(purposes), False),
        (x509.SubjectAlternativeName(uris), False),
    ]
    certificate = _certificate(subject, issuer.subject, key, issuer_key, days, extensions, starts_in_days)
    _write(folder / stem, key, certificate)
    return Credentials(folder / "ca.pem", folder / f"{stem}.pem", folder / f"{stem}.key")


def expires(cert_file: Path) -> dt.datetime:
    end: dt.datetime = _read(cert_file).not_valid_after_utc
    return end


def require_current(folder: Path, datacenter: str) -> None:
    """Raises AtlasError if a certificate of the datacenter, or the CA's, is not valid now."""
    now = dt.datetime.now(dt.UTC)
    for file in _files_of(folder, datacenter):
        start, end = _read(file).not_valid_before_utc, expires(file)
        if not start <= now <= end:
            since = (
                f"expired on {end:%Y-%m-%d %H:%M} UTC" if now > end else f"is valid from {start:%Y-%m-%d %H:%M} UTC on"
            )
            raise AtlasError(
                f"{file} {since}, and it is {now:%Y-%m-%d %H:%M} UTC here. Make a new one with `atlas wan certs`, or "
                "correct this host's clock"
            )


def expiry_warnings(folder: Path | None, datacenter: str) -> list[str]:
    """One line for each certificate that ends soon."""
    if folder is None:
        return []
    now = dt.datetime.now(dt.UTC)
    left = {file: expires(file) - now for file in _files_of(folder, datacenter)}
    return [
        f"warning: {file} {f'expires in {time.days} days' if time > dt.timedelta(0) else 'has expired'}: make a new "
        "one with `atlas wan certs` and copy it there"
        for file, time in left.items()
        if time < dt.timedelta(days=WARN_DAYS)
    ]


def described(folder: Path | None, datacenter: str) -> dict[str, dict[str, Any]]:
    """By file: the names and the end of each certificate that a launcher of this datacenter uses."""
    files = [] if folder is None else _files_of(folder, datacenter)
    return {file.name: {"names": names_of(file), "until": expires(file).isoformat()} for file in files}


def names_of(cert_file: Path) -> list[str]:
    """The nodes that a certificate is for."""
    x509, _, _, _ = _x509()
    found = _read(cert_file)
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    return [uri.removeprefix(URI) for uri in uris if uri.startswith(URI)]


def require_own_name(folder: Path, datacenter: str) -> None:
    """Raises AtlasError if the datacenter's certificate is for another one."""
    file = folder / f"{datacenter}.pem"
    if file.exists() and f"{datacenter}/*" not in names_of(file):
        raise AtlasError(
            f"{file} is for {', '.join(names_of(file)) or 'no node'}, not for {datacenter}. Make one with `atlas wan "
            f"certs {datacenter}`"
        )


def _files_of(folder: Path, datacenter: str) -> list[Path]:
    """The certificates that a launcher of this datacenter and its workers use."""
    found = [folder / "ca.pem", folder / f"{datacenter}.pem", *sorted(folder.glob(f"{datacenter}.*.pem"))]
    return [file for file in found if file.exists()]


def _read(cert_file: Path) -> Any:
    x509, _, _, _ = _x509()
    try:
        return x509.load_pem_x509_certificate(cert_file.read_bytes())
    except (OSError, ValueError) as error:
        raise AtlasError(f"{cert_file}: not a certificate ({error}). Make one with `atlas wan certs`") from None


def _usage(x509: Any, *, sign_certificates: bool) -> Any:
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _certificate(
    subject: Any, issuer: Any, key: Any, issuer_key: Any, days: int, extensions: list[Any], starts_in_days: float = 0.0
) -> Any:
    x509, hashes, _, _ = _x509()
    # An hour earlier than now, because clocks differ.
    start = dt.datetime.now(dt.UTC) + dt.timedelta(days=starts_in_days) - dt.timedelta(hours=1)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + dt.timedelta(days=days, hours=1))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(issuer_key, hashes.SHA256())


def _write(base: Path, key: Any, certificate: Any) -> None:
    _, _, serialization, _ = _x509()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    key_file = base.parent / f"{base.name}.key"
    key_file.unlink(missing_ok=True)
    descriptor = os.open(key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(private)
    (base.parent / f"{base.name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
