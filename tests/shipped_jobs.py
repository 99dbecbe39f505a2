"""The job files under examples/."""

from __future__ import annotations

from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
SHIPPED = sorted(path for path in EXAMPLES.rglob("*.yaml") if path.name != "recipe.yaml")
