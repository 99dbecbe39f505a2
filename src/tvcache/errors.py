"""Every error a user can meet, in one tree.

TvcacheError               something the user can fix; the command line prints it and exits with 2
|-- ArgumentsError         a call that has no canonical form (not JSON, NaN, too deep, too large)
|-- CannotForkError        this environment cannot be copied; the cache continues without snapshots
`-- ReplayError            an environment could not be brought to the state that a call needs
"""

from __future__ import annotations


class TvcacheError(Exception):
    """The message gives the value, the rule and the change to make."""


class ArgumentsError(TvcacheError):
    """A call's name or arguments have no canonical form."""


class CannotForkError(TvcacheError):
    """The environment cannot be copied."""


class ReplayError(TvcacheError):
    """A history could not be executed again."""


def words_of(error: Exception) -> str:
    """What an error says, without its number."""
    return str(getattr(error, "strerror", None) or error)
