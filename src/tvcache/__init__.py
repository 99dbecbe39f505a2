"""A cache of tool calls for agents in post-training: a hit needs the same task, the same mutating calls before, and the
same call. Useful alone: imports neither atlas nor bubbletea, and only the standard library until it serves."""

from __future__ import annotations

from tvcache.cache import Cache
from tvcache.errors import TvcacheError
from tvcache.keys import Task
from tvcache.rollout import Rollout
from tvcache.snapshots import Snapshots
from tvcache.tools import Tool

__all__ = ["Cache", "Rollout", "Snapshots", "Task", "Tool", "TvcacheError"]
