"""Least squares for the benches that fit constants: Levenberg-Marquardt with a numerical derivative, in numpy.

Deterministic. It has only residuals and points; their meaning is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SOFT = 0.05
"""Errors well below 5 % count by their square, errors well above by their size, as in the score."""


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
            return point  # no step improves the fit
        point, value, damping = trial, trial_value, damping / 3
        if before - value @ value < 1e-10 * before:
            return point
    return point
