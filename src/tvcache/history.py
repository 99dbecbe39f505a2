"""The mutating calls of one rollout, in order, with the state after each. It only grows, so a length
identifies a state. It does not know environments."""

from __future__ import annotations

from tvcache.keys import Task, ToolCall, root


class History:
    """`states[n]` is the state after the first `n` calls."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.states: list[bytes] = [root(task)]
        self.calls: list[ToolCall] = []
        self.bodies: list[bytes] = []
        """The encoded output of each call."""
        self.until_s: list[float] = [0.0]
        """Measured seconds of the first `n` calls together."""

    def __len__(self) -> int:
        return len(self.calls)

    @property
    def state(self) -> bytes:
        return self.states[-1]

    def append(self, call: ToolCall, state: bytes, body: bytes, seconds: float) -> None:
        self.calls.append(call)
        self.bodies.append(body)
        self.until_s.append(self.until_s[-1] + seconds)
        self.states.append(state)

    def replay_s(self, start: int, end: int) -> float:
        """Measured seconds of the calls from `start` to `end`."""
        return self.until_s[end] - self.until_s[start]
