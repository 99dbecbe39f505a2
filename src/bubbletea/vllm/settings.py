"""What an operator tells the connector, in vLLM's `kv_connector_extra_config`. vLLM prints that into its log, so the
token itself stays in a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ConnectorSettings:
    """`kv_connector_extra_config`, each key by the name of a field."""

    token_file: str
    """Holds the token that BubbleTea's hand-off was started with."""
    model: str = ""
    """The model's id where vLLM was not given a folder to find it from."""
    peers: tuple[str, ...] = ()
    """Hosts besides this one whose keys and values are accepted, as BubbleTea names itself."""
    timeout_s: float = 30.0
    """A load that takes longer is given up and recomputed."""

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> ConnectorSettings:
        known = cls.__dataclass_fields__
        if unknown := sorted(set(extra) - set(known)):
            raise ValueError(f"kv_connector_extra_config: {unknown[0]!r} is not one of {', '.join(known)}")
        if "token_file" not in extra:
            raise ValueError("kv_connector_extra_config: name the token_file that BubbleTea was started with")
        return cls(**{**extra, "peers": tuple(extra.get("peers", ()))})

    @property
    def token(self) -> str:
        return Path(self.token_file).read_text(encoding="utf-8").strip()
