"""The number types of job files, and the frozen model they all derive from.

Bounds are generous (a million nodes) but finite, so that no value in a file overflows the engines' 64-bit nanoseconds
without a message.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Frozen(BaseModel):
    """Unknown keys are errors; a loaded file never changes."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]*$"
Name = Annotated[str, Field(strict=True, min_length=1, max_length=64, pattern=NAME)]
"""Letters, digits, `-` and `_`: safe in `--set` paths, file names and tables."""
Text = Annotated[str, Field(strict=True, max_length=4096)]
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
"""At least one of something that can be counted."""
Size = Annotated[int, Field(strict=True, ge=1, le=100_000_000)]
"""A dimension of a model, a window in bytes."""
Positive = Annotated[float, Field(strict=True, gt=0, le=1e9, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(strict=True, ge=0, le=1e9, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, gt=0, le=1, allow_inf_nan=False)]
"""More than nothing, at most all."""
Sigma = Annotated[float, Field(strict=True, ge=0, le=3, allow_inf_nan=False)]
"""Spread of a log-normal factor: at 3 one draw in three is off by more than twenty times."""
Latitude = Annotated[float, Field(strict=True, ge=-90, le=90, allow_inf_nan=False)]
Longitude = Annotated[float, Field(strict=True, ge=-180, le=180, allow_inf_nan=False)]
