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
from functools import partial
from pathlib import Path

from pydantic import Field

from atlas.spec.document import read_yaml
from atlas.spec.fields import Frozen, Positive
from atlas.spec.refusal import validated

EVERYBODY = "everybody"
"""The tenant of a service without keys."""


class _Tenant(Frozen):
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    weight: Positive = 1.0


class _KeysFile(Frozen):
    tenants: dict[str, _Tenant] = Field(min_length=1)


@dataclass(frozen=True)
class ApiKeys:
    """By tenant: the digest of its key. Empty: no key is needed."""

    digests: Mapping[str, bytes]
    weights: Mapping[str, float]

    @classmethod
    def open_to_all(cls) -> ApiKeys:
        return cls({}, {})

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        document = read_yaml(path, key="keys")
        where = partial(document.origin, default=str(path))
        found = validated(_KeysFile, document.data, where, "See docs/bubbletea-serve.md")
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
