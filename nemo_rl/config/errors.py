"""Errors for the user: the base of all of them, and `ConfigError`, which holds every problem of a configuration.

Entry points print a `UserError` as one message and give anything else its traceback. Knows no key. Invariant: a message
about a key says which one, its value, what is allowed and, for a name, the nearest valid one.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Causes that lie in the user's files or disks and not in the code, for errors that carry no file name.
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE)


class UserError(Exception):
    """Something that a user can put right; the message says all that it takes.

    Errors of the package derive from this class and from the built-in one that fits, such as ValueError.
    """


def in_one_line(error: BaseException) -> str | None:
    """One-line message in place of a traceback; None where the traceback helps more.

    A `UserError` speaks for itself; of an OSError about a file, path and cause are enough.
    """
    if isinstance(error, UserError):
        return f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        paths = [str(path) for path in (error.filename, error.filename2) if path is not None]
        return f"{' -> '.join(paths)}: {error.strerror}"
    if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
        return f"while writing the run's files: {error.strerror}"
    return None


def disk_is_full(error: BaseException) -> bool:
    """Whether an error, or one that it follows from, was a full disk; also where a worker or a library passed it on as
    text.
    """
    known: BaseException | None = error
    while known is not None:
        full = isinstance(known, OSError) and known.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or "no space left on device" in str(known).lower() or "disk quota exceeded" in str(known).lower():
            return True
        known = known.__cause__ or known.__context__
    return False


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def why_not_written(error: OSError) -> str:
    """The cause of a failed write in a few words."""
    return "no space left on the disk" if disk_is_full(error) else error.strerror or str(error)


@dataclass(frozen=True)
class NotBuilt:
    """A key of NeMo-RL's whose value needs a part that this package does not have.

    Attributes:
        key: the dotted key.
        part: the missing part, in a few words; keys that wait for the same part name it alike.
        line: the whole message.
    """

    key: str
    part: str
    line: str

    def __str__(self) -> str:
        return self.line


Problem = str | NotBuilt


class ConfigError(UserError, ValueError):
    """The configuration cannot be used.

    Attributes:
        problems: one line per mistake.
        given: the same, with what a part that is not built says of itself.
        not_built: those of them that name a part which is not built; the others are mistakes of the configuration.
        source: the file, where there is one.
    """

    subject = "The configuration"

    def __init__(self, problems: Sequence[Problem], source: str | None = None) -> None:
        head = self.subject if source is None else f"{self.subject} {source}"
        count = "a mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
        super().__init__(f"{head} has {count}:\n" + "\n".join(f"  - {problem}" for problem in problems))
        self.problems = [str(problem) for problem in problems]
        self.not_built = [problem for problem in problems if isinstance(problem, NotBuilt)]
        self.source = source
        self.given = tuple(problems)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.given, self.source)


class OverridesError(ConfigError):
    """A command-line override cannot be parsed or applied."""

    subject = "The command line"


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name that looks most like `name`; None when none does."""
    lowered: dict[str, str] = {}
    for candidate in valid:
        lowered.setdefault(candidate.lower(), candidate)
    match = difflib.get_close_matches(name.lower(), list(lowered), n=1, cutoff=0.6)
    longer = [candidate for candidate in lowered if len(name) >= 3 and candidate.startswith(name.lower())]
    return lowered[(match or longer)[0]] if match or longer else None


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """` Did you mean x?` with the nearest valid name, else the empty string."""
    match = nearest(name, valid)
    return "" if match is None else f" Did you mean {match!r}?"
