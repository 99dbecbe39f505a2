"""The certificates of a launcher: checked before it connects to others, and warnings of those that end soon, also while
it runs: a run may take longer than its certificates are valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from atlas.errors import AtlasError
from atlas.launch.rendezvous import AgentName
from atlas.lifetime import Repeating
from atlas.wan.security.certs import expiry_warnings, require_current, require_own_name
from atlas.wan.security.credentials import Credentials, Security

EVERY_S = 12 * 3600.0
"""Between two checks of the certificates."""


def security_of(name: AgentName, certificates: Path | None, trusted_networks: tuple[str, ...]) -> Security:
    """Raises AtlasError if files are missing, do not match, are not valid now, or are of another datacenter."""
    if certificates is None:
        if trusted_networks:
            raise AtlasError(
                f"--trusted {', '.join(trusted_networks)}: hosts there prove their names by certificates, and there "
                "are none. Give --certs too, or leave out --trusted"
            )
        return Security()
    require_current(certificates, name.datacenter)
    require_own_name(certificates, name.datacenter)
    security = Security(Credentials.of_folder(certificates, name.node), trusted_networks)
    _ = security.server_context, security.client_context
    return security


@contextmanager
def expiry_watch(
    folder: Path | None, datacenter: str, say: Callable[[str], None], every_s: float = EVERY_S
) -> Iterator[None]:
    """Inside the block: warn now and every `every_s` seconds. Without a folder, never."""

    def warn() -> None:
        for warning in expiry_warnings(folder, datacenter):
            say(warning)

    def warn_again() -> None:
        try:
            warn()
        except (OSError, ValueError, AtlasError) as error:  # it is being replaced, perhaps
            say(f"warning: the certificates in {folder} cannot be read: {error}. Check these files")

    warn()
    with Repeating("expiry of certificates", every_s, warn_again):
        yield
