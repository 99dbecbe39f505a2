"""Every error a user can meet, in one tree.

    AtlasError                 a mistake that the user can fix; the command line prints it and exits with 2
    |-- SpecError              a file or a flag is wrong (names file, key, value, rule, remedy)
    |   `-- InfeasibleError    the job is valid but does not fit its hardware
    |-- ProgramError           a Program that cannot be executed (names the ops and why)
    |-- MissingExtraError      an optional dependency is needed and absent (names the extra to install)
    |-- WorkerError            a worker or a connection failed while a Program ran
    |-- DivergedRunError       the loss or the gradients are not finite: the recipe must change
    |-- StartAgainError        another part of the run was out of reach: start the same command again; exit code 75
    |-- SwitchError            an optical switch was late, refused, or reported circuits that it does not have
    |-- EmulatorLateError      the emulated network fell too far behind for a run to count (wan.emulator.lateness)
    `-- ProbeError             a probe could not measure a path (wan.probe; names the reason)

A bug in Atlas is never an AtlasError: it keeps its traceback. `StopSignal` is not an error: a scheduler stops the run.
"""

from __future__ import annotations

EXTRAS = {
    "torch": "runtime",
    "safetensors": "runtime",
    "tokenizers": "hf",
    "resvg_py": "png",
    "cryptography": "wan",
    "obstore": "s3",
    "starlette": "serve",
    "uvicorn": "serve",
    "h11": "serve",
    "prometheus_client": "serve",
    "jinja2": "serve",
}
"""By optional module: the extra of pyproject.toml that installs it."""
PACKAGES = {"resvg_py": "resvg-py", "prometheus_client": "prometheus-client"}
"""By module: the name of its package, where it differs."""


START_AGAIN = 75
"""Exit code (EX_TEMPFAIL of <sysexits.h>): the same command, started again, continues the run."""


class AtlasError(Exception):
    """A mistake that the user can fix. The message has what was given, the rule, and what to change."""

    exit_code = 2


class SpecError(AtlasError):
    """A job, cluster, profile or flag is wrong."""

    def __init__(self, *, where: str, key: str, value: object = None, rule: str, remedy: str) -> None:
        self.where, self.key, self.value, self.rule, self.remedy = where, key, value, rule, remedy
        if where.startswith("--") and key in (where.removeprefix("--"), "file", "folder"):  # a flag and its value
            given = where if value is None else f"{where} {value!r}"
        else:
            given = f"{where}: {key}" if value is None else f"{where}: {key} = {value!r}"
        super().__init__(f"{given}: {rule}. {remedy}")


class InfeasibleError(SpecError):
    """The job is valid, but it does not fit the hardware or the links it names."""


class ProgramError(AtlasError):
    """A Program lacks a dependency, deadlocks or needs too much memory."""


class MissingExtraError(AtlasError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package {package!r}: pip install 'atlas-bubbletea[{extra}]'")

    @classmethod
    def of(cls, error: ModuleNotFoundError, purpose: str) -> MissingExtraError | None:
        """For a missing module that an extra installs; None for any other, which is a bug in Atlas."""
        module = (error.name or "").partition(".")[0]
        return cls(PACKAGES.get(module, module), EXTRAS[module], purpose) if module in EXTRAS else None


class WorkerError(AtlasError):
    """A worker died, stalled or lost its peer while a Program ran."""


class DivergedRunError(AtlasError):
    """The loss or the norm of the gradients is not finite. A restart would diverge again."""

    def __init__(self, text: str, step: int) -> None:
        self.step = step
        """The first step that is not finite, from 1."""
        super().__init__(text)


class StartAgainError(AtlasError):
    """Another part of the run was out of reach. The user need not change anything."""

    exit_code = START_AGAIN


class StopSignal(KeyboardInterrupt):
    """SIGTERM or SIGUSR1: a scheduler takes the hosts away, and starts the same command again later."""
