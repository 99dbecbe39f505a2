"""The table of docs/claims.md: each claim of README and docs, with the bench and the line that measure it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Claim(NamedTuple):
    text: str
    bench: str
    """Name of a script in bench/, without `.py`."""
    line: str
    """Part of the name of a line that it prints."""


def read_claims(path: Path) -> list[Claim]:
    """Rows of the form `| claim | `bench/NAME.py` | `line` |`."""
    claims = []
    for row in path.read_text().splitlines():
        cells = [cell.strip() for cell in row.strip().strip("|").split("|")]
        if len(cells) == 3 and cells[1].startswith("`bench/"):
            bench = cells[1].strip("`").removeprefix("bench/").removesuffix(".py")
            claims.append(Claim(cells[0], bench, cells[2].strip("`")))
    return claims
