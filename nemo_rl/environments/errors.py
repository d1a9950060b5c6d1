"""Failures of environments, each naming the environment.

Knows no environment. Invariant: a message says which environment, what it did, and what was expected.
"""


class EnvironmentFailure(RuntimeError):
    """An environment raised, took too long, or returned something of the wrong shape."""


class UnknownEnvironment(ValueError):
    """A name that no environment has."""
