"""A GPU's calibration from measured runs: least squares on the logarithm of predicted over measured, robust to the few
runs that a cluster slowed down for reasons of its own. Shares stay between 0 and 1 whatever the data say.

Levenberg-Marquardt with a numerical derivative, in numpy: deterministic, a second for 1,500 runs. Knows runs and
times; files are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atlas.cost.calibration.runs import Machine, Run, iteration_s, rates_by_tp
from atlas.spec.gpus import Calibration

Floats = NDArray[np.float64]
SOFT = 0.05
"""Errors well below 5 % count by their square, errors well above by their size, as the score counts them."""
START = Calibration(
    matrix_efficiency=0.75, memory_efficiency=0.6, peer_efficiency=0.7, layer_floor_us=500.0, fused_attention=False
)


@dataclass(frozen=True)
class Sample:
    """Runs of one source. Every source weighs the same, however many runs it has."""

    runs: Sequence[Run]
    measured_s: Floats


def predict(runs: Sequence[Run], machine: Machine, calibration: Calibration) -> Floats:
    """Iteration seconds, closed form."""
    rates_of = rates_by_tp(machine, calibration)
    return np.array([iteration_s(run, machine, rates_of) for run in runs])


def fit(samples: Sequence[Sample], machine: Machine) -> Calibration:
    """The calibration that explains the samples best."""

    def residuals(point: Floats) -> Floats:
        calibration = from_point(point)
        parts = []
        for sample in samples:
            log_error = np.log(predict(sample.runs, machine, calibration) / sample.measured_s)
            parts.append(soften(log_error) / np.sqrt(len(sample.runs)))
        return np.concatenate(parts)

    return from_point(least_squares(residuals, to_point(START)))


def to_point(calibration: Calibration) -> Floats:
    """Log odds of the shares, log of the floor: any point of the space is a possible calibration."""
    c = calibration
    shares = np.array([c.matrix_efficiency, c.memory_efficiency, c.peer_efficiency])
    return np.append(np.log(shares / (1 - shares)), np.log(c.layer_floor_us))


def from_point(point: Floats) -> Calibration:
    matrix, memory, peer = (1 / (1 + np.exp(-point[:3]))).tolist()
    return Calibration(
        matrix_efficiency=matrix,
        memory_efficiency=memory,
        peer_efficiency=peer,
        layer_floor_us=float(np.exp(point[3])),
        fused_attention=False,
    )


def soften(log_error: Floats) -> Floats:
    """Residuals whose squares grow like |error| beyond SOFT."""
    return np.asarray(np.sign(log_error) * SOFT * np.sqrt(2 * (np.sqrt(1 + (log_error / SOFT) ** 2) - 1)))


def least_squares(residuals: Callable[[Floats], Floats], start: Floats, *, max_steps: int = 100) -> Floats:
    """The point with the least sum of squares, by Levenberg-Marquardt."""
    point, damping = start, 1e-2
    value: Floats = residuals(point)
    for _ in range(max_steps):
        jacobian = np.stack([(residuals(point + 1e-4 * axis) - value) / 1e-4 for axis in np.eye(len(point))], axis=1)
        normal, slope = jacobian.T @ jacobian, jacobian.T @ value
        before = value @ value
        while damping < 1e8:
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -slope)
            trial: Floats = np.asarray(point + np.clip(step, -1, 1))
            if np.sum((trial_value := residuals(trial)) ** 2) < before:
                break
            damping *= 4
        else:
            return point  # no step helps any more
        point, value, damping = trial, trial_value, damping / 3
        if before - value @ value < 1e-10 * before:
            return point
    return point
