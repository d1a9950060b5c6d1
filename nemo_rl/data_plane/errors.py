"""What can go wrong between a process and the data plane, as errors that a user can act on.

Knows no adapter. Invariant: a message names the operation, the partition and whatever died, is missing or is full.
"""

from __future__ import annotations

from nemo_rl.config.errors import UserError


class DataPlaneError(UserError, RuntimeError):
    """The data plane cannot serve; the message says what and where."""


class DataPlaneTimeout(DataPlaneError):
    """No answer within the deadline."""


class DataPlaneCapacityError(DataPlaneError):
    """The storage stayed full until the deadline; what it holds is untouched."""


class DataPlaneClosedError(DataPlaneError):
    """The client was closed."""


class MissingRowsError(KeyError):
    """Rows were never written or are cleared already."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class MissingColumnsError(KeyError):
    """Columns were not written for all of the rows."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class MooncakeUnavailableError(DataPlaneError):
    """Mooncake cannot be loaded on this machine; the message says what is missing and how to get it."""
