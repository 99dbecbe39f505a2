"""What one launcher has forwarded in an attempt, as far as a coordinator that was started again must receive it again:
steps that not all workers had finished, saves that may not be complete, results and ends of workers.

Knows messages of workers; sends nothing.
"""

from __future__ import annotations

from typing import Any

from atlas.launch.control_channel import Message


class Ledger:
    """Not thread-safe: the agent holds a lock, because a message is recorded and sent in one piece."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def add(self, message: Message) -> None:
        body = message.get("message")
        if body is None or not body.keys().isdisjoint({"step", "saved", "copied", "result", "error"}):
            self.messages.append(message)

    def done(self, num_done: int) -> None:
        """All workers have finished this many steps."""
        self._keep(lambda body: body.get("step", num_done) >= num_done)

    def complete(self, saves: list[list[int]]) -> None:
        """These are complete everywhere. The last one stays, so that it is known to be complete."""
        last = max(tuple(pair) for pair in saves)
        self._keep(lambda body: tuple(body.get("saved") or body.get("copied") or last) >= last)

    def _keep(self, wanted: Any) -> None:
        self.messages = [m for m in self.messages if m.get("message") is None or wanted(m["message"])]
