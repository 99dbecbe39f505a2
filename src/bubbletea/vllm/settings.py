"""The connector's settings, from vLLM's `kv_connector_extra_config`. vLLM writes them to its log, so the token is in a
file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bubbletea.handoff.fetch import EngineIdentity
from bubbletea.nixl_plane import is_installed


@dataclass(frozen=True)
class ConnectorSettings:
    """The keys of `kv_connector_extra_config`."""

    token_file: str
    """File with the token of BubbleTea's hand-off."""
    model: str = ""
    """The model's id, if vLLM was not given a folder."""
    peers: tuple[str, ...] = ()
    """Other hosts whose keys and values are accepted, by the name that BubbleTea sends."""
    timeout_s: float = 30.0
    """A load that takes longer is cancelled and recomputed."""

    certs: str = ""
    """Folder with certificates (`atlas wan certs`), for workers beyond loopback."""
    name: str = ""
    """This node in its certificate: `datacenter/node`."""
    data_plane: str = "tcp"
    """`nixl`: read keys and values by NIXL from workers that have it; from others by TCP."""

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> ConnectorSettings:
        known = cls.__dataclass_fields__
        if unknown := sorted(set(extra) - set(known)):
            raise ValueError(f"kv_connector_extra_config: {unknown[0]!r} is not one of {', '.join(known)}")
        if "token_file" not in extra:
            raise ValueError("kv_connector_extra_config: name the token_file that BubbleTea was started with")
        if extra.get("certs") and "/" not in str(extra.get("name", "")):
            raise ValueError("kv_connector_extra_config: certs needs a name, datacenter/node, as in the certificate")
        plane = extra.get("data_plane", "tcp")
        if plane not in ("tcp", "nixl"):
            raise ValueError(f"kv_connector_extra_config: data_plane {plane!r} is not one of tcp, nixl")
        if plane == "nixl" and not is_installed():
            raise ValueError(
                "kv_connector_extra_config: data_plane nixl needs the package nixl: install it, or use tcp"
            )
        return cls(**{**extra, "peers": tuple(extra.get("peers", ()))})

    @property
    def caller(self) -> EngineIdentity:
        return EngineIdentity(
            Path(self.token_file).read_text(encoding="utf-8").strip(), self.certs, self.name, self.data_plane == "nixl"
        )
