"""API keys by tenant, from a file that has only their SHA-256.

    tenants:
      search: {sha256: 5e88..., weight: 2}

The check takes the same time for every key: all keys of the file are compared, each in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atlas.errors import AtlasError

EVERYBODY = "everybody"
"""The tenant of a service without keys."""


class _Tenant(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    weight: float = Field(default=1.0, gt=0)


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid")
    tenants: dict[str, _Tenant] = Field(min_length=1)


@dataclass(frozen=True)
class Keys:
    """By tenant: the digest of its key. Empty: no key is needed."""

    digests: Mapping[str, bytes]
    weights: Mapping[str, float]

    @classmethod
    def open_to_all(cls) -> Keys:
        return cls({}, {})

    @classmethod
    def read(cls, path: Path) -> Keys:
        try:
            found = _Document.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise AtlasError(f"{path}: {error.strerror or error}. Check the path") from None
        except (yaml.YAMLError, ValidationError, UnicodeDecodeError) as error:
            first = str(error).splitlines()
            raise AtlasError(
                f"{path}: not a file of keys ({' '.join(first[:3])}). See docs/bubbletea-serve.md"
            ) from None
        return cls(
            {name: bytes.fromhex(tenant.sha256) for name, tenant in found.tenants.items()},
            {name: tenant.weight for name, tenant in found.tenants.items()},
        )

    def tenant(self, header: str | None) -> str | None:
        """The tenant of an `Authorization` header; None: unknown."""
        if not self.digests:
            return EVERYBODY
        kind, _, key = (header or "").partition(" ")
        given = hashlib.sha256(key.strip().encode(errors="surrogateescape")).digest()
        found = None
        for name, digest in self.digests.items():
            if hmac.compare_digest(given, digest):
                found = name
        return found if kind.lower() == "bearer" else None
