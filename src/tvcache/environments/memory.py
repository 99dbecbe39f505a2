"""An environment that is a Python object: forked by a deep copy."""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from tvcache.environments import require_tool


class MemoryEnvironment:
    """Tools are functions of the state and the arguments: `tools[name](state, **arguments)`."""

    def __init__(self, state: Any, tools: Mapping[str, Callable[..., Any]]) -> None:
        self.state, self.tools = state, tools

    def fork(self) -> MemoryEnvironment:
        return MemoryEnvironment(copy.deepcopy(self.state), self.tools)

    def execute(self, name: str, arguments: Any) -> Any:
        require_tool(name, self.tools)
        return self.tools[name](self.state, **arguments)

    def close(self) -> None:
        self.state = None

    def size_bytes(self) -> int:
        return len(pickle.dumps(self.state))

    def fingerprint(self) -> str:
        return hashlib.sha256(pickle.dumps(self.state)).hexdigest()
