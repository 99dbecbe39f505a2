"""Units, and the operator's default limit, which commands, service and simulator share."""

MIB, GIB = 1 << 20, 1 << 30
"""Bytes."""
SECOND = 1_000_000_000
"""Nanoseconds."""
SLOWDOWN_BUDGET = 0.005
"""The share by which prefill may make an iteration of training longer, unless --slowdown gives another one."""
