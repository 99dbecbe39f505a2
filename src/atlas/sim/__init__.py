"""The simulator: Program + Costs -> Timeline.

    simulate(program, costs)            the Timeline of one run
    simulate.reference, compiled.run    the two engines, equal event for event

Importing this package does not import numba; the compiled engine does, if a Program is large enough to need it.
"""

from atlas.sim.lower import SeededNoise, Tables, lower
from atlas.sim.simulate import simulate

__all__ = ["SeededNoise", "Tables", "lower", "simulate"]
