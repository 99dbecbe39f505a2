"""Atlas: plan, simulate and run language-model training across datacenters.

Importing this package is cheap on purpose: no torch, no numba, no pydantic. Ask a room for what you need
(`atlas.ir`, `atlas.sim`, `atlas.schedules`, ...).
"""

__version__ = "0.1.0"
