"""Optical circuit switches: the interface that the controller uses, and an emulated switch.

`apply` returns when the new circuits carry data; `circuits` reads back what the switch has, so that a switch that
acknowledges a change without making it is detected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal, Protocol

from atlas.errors import AtlasError
from atlas.fabric.circuit_plan import Circuit


class SwitchError(AtlasError):
    """A switch was late, refused, could not be reached, or acknowledged circuits that it does not have."""


class Switch(Protocol):
    """One optical circuit switch, or all rails of a datacenter that do the same."""

    async def apply(self, circuits: Sequence[Circuit]) -> None:
        """Set up circuits and remove what else their ports had. Returns when they carry data; SwitchError."""

    async def circuits(self) -> set[Circuit]:
        """What is set up now."""


def require_one_to_one(circuits: Sequence[Circuit]) -> None:
    """Raise SwitchError where a port is used twice."""
    ports = [port for circuit in circuits for port in circuit]
    for port in ports:
        if ports.count(port) > 1:
            raise SwitchError(f"refused: port {port} is in two circuits; a port has one")


def merged(now: set[Circuit], wanted: Sequence[Circuit]) -> set[Circuit]:
    """The circuits after a change."""
    taken = {port for circuit in wanted for port in circuit}
    return {circuit for circuit in now if not taken & set(circuit)} | set(wanted)


class EmulatedSwitch:
    """Switches after `delay_s`; from the `fails_at`-th change on it fails in the way of `fault`."""

    def __init__(
        self, delay_s: float, *, fault: Literal["none", "late", "refuses", "no-change"] = "none", fails_at: int = 0
    ) -> None:
        self.delay_s, self.fault, self.fails_at = delay_s, fault, fails_at
        self.num_changes = 0
        self._circuits: set[Circuit] = set()

    async def apply(self, circuits: Sequence[Circuit]) -> None:
        require_one_to_one(circuits)
        fault = self.fault if self.num_changes >= self.fails_at else "none"
        self.num_changes += 1
        if fault == "refuses":
            raise SwitchError("refused: the switch is in maintenance")
        if fault == "late":
            await asyncio.Event().wait()
        await asyncio.sleep(self.delay_s)
        if fault != "no-change":
            self._circuits = merged(self._circuits, circuits)

    async def circuits(self) -> set[Circuit]:
        return set(self._circuits)
