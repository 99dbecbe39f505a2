"""Atlas: plan, simulate and run language-model training across datacenters.

    import atlas

    found = atlas.simulate("examples/tiny.yaml")   # in Jupyter: a figure
    found.table()                                  # a list of dicts, for pandas
    found.best.timeline.table()                    # every op

docs/api.md describes the names below. Each is imported when it is first used, so that `import atlas` is cheap: no
torch, no numba, no pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atlas.api import plan, simulate, train, whatif
    from atlas.errors import AtlasError
    from atlas.ir.store import load_timeline
    from atlas.ir.timeline import Timeline
    from atlas.spec import load_job
    from atlas.view.svg import Figure

__version__ = "0.1.0"
__all__ = [
    "AtlasError",
    "Figure",
    "Timeline",
    "load_job",
    "load_timeline",
    "plan",
    "simulate",
    "train",
    "whatif",
]
_MODULES = {
    "AtlasError": "atlas.errors",
    "Figure": "atlas.view.svg",
    "Timeline": "atlas.ir.timeline",
    "load_job": "atlas.spec",
    "load_timeline": "atlas.ir.store",
}
"""Where the names are that `atlas.api` does not have."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_MODULES.get(name, "atlas.api")), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
