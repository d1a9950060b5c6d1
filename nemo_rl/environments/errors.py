"""Failures of environments, each naming the environment.

Knows no environment. Invariant: a message says which environment, what it did, and what was expected.
"""

from nemo_rl.config.errors import UserError


class EnvironmentFailure(UserError, RuntimeError):
    """An environment raised, took too long, or returned something of the wrong shape."""


class UnknownEnvironment(UserError, ValueError):
    """A name that no environment has."""
