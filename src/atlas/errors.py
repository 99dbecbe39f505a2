"""Every error a user can meet, in one tree.

    AtlasError                 anything that is the user's to mend; the command line prints it and exits with 2
    |-- SpecError              a file or a flag says something impossible (names file, key, value, rule, remedy)
    |   `-- InfeasibleError    the job is well written but cannot run on what it was given
    |-- ProgramError           a Program that cannot be executed (names the ops and why)
    |-- MissingExtraError      an optional dependency is needed and absent (names the extra to install)
    |-- WorkerError            a worker or a connection failed while a Program ran
    |-- EmulatorLateError      an emulated network was too late for its run to count (wan.emulator.lateness)
    `-- ProbeError             a probe could not measure a path, and says what is in its way (wan.probe)

A bug of ours is never an AtlasError: it keeps its traceback.
"""

from __future__ import annotations

EXTRAS = {
    "torch": "runtime",
    "safetensors": "runtime",
    "tokenizers": "hf",
    "ortools": "exact",
    "resvg_py": "png",
    "cryptography": "wan",
    "starlette": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
    "jinja2": "serve",
}
"""By module that may be absent: the extra of pyproject.toml that brings it."""
PACKAGES = {"resvg_py": "resvg-py", "prometheus_client": "prometheus-client"}
"""Where a package has another name than its module."""


class AtlasError(Exception):
    """Something the user can mend. The message says what was given, the rule, and what to change."""


class SpecError(AtlasError):
    """A job, cluster, profile or flag is wrong."""

    def __init__(self, *, where: str, key: str, value: object, rule: str, remedy: str) -> None:
        self.where, self.key, self.value, self.rule, self.remedy = where, key, value, rule, remedy
        given = f" = {value!r}" if value is not None else ""
        super().__init__(f"{where}: {key}{given}: {rule}. {remedy}")


class InfeasibleError(SpecError):
    """The job is well formed, but it does not fit the hardware or the links it names."""


class ProgramError(AtlasError):
    """A Program misses a dependency, deadlocks or holds too much in memory."""


class MissingExtraError(AtlasError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package {package!r}: pip install 'atlas-bubbletea[{extra}]'")

    @classmethod
    def of(cls, error: ModuleNotFoundError, purpose: str) -> MissingExtraError | None:
        """Of a module that an extra brings; None for any other: its absence is a bug of ours."""
        module = (error.name or "").partition(".")[0]
        return cls(PACKAGES.get(module, module), EXTRAS[module], purpose) if module in EXTRAS else None


class WorkerError(AtlasError):
    """A worker died, stalled or lost its peer while a Program ran."""
