"""What becomes of rollouts that fail, and of a wait without end.

A failed rollout is tried again, or its prompt is dropped, or the run ends.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ray.exceptions import RayError, RayTaskError

from nemo_rl.config.errors import UserError
from nemo_rl.models.generation.interfaces import GenerationError

logger = logging.getLogger(__name__)

_CAUSES = 8


class CollectorError(UserError, RuntimeError):
    """The collector cannot deliver: too many rollouts failed, it was stopped, or nothing arrived in time."""


class CollectorStalled(CollectorError):
    """No group was finished in time."""


@dataclass(frozen=True)
class StallPolicy:
    """What a wait for groups does when none finishes."""

    timeout_s: float = 600.0  # seconds without a finished group that count as a stall
    aborts: bool = True  # whether a stall ends the run; it is logged otherwise
    advice: str = ""  # what to do about it


@dataclass(frozen=True)
class FailurePolicy:
    """What bounds failures. Either failures in a row count, of any prompt, or each prompt has attempts of its own."""

    in_a_row: int | None = None  # failed rollouts in a row that are tried again; None counts attempts of prompts
    infra_attempts: int = 5  # rollouts of a prompt before failures of the machinery end the run
    data_attempts: int = 2  # rollouts of a prompt before failures of its own make it be dropped
    backoff_s: tuple[float, float] = (1.0, 30.0)  # first pause and longest pause between attempts
    max_skipped: int = 0  # prompts that a run may drop
    max_skipped_in_a_row: int = 0  # prompts that may be dropped without one that finishes between them


class Failures:
    """Counts the failures of a run."""

    def __init__(self, policy: FailurePolicy) -> None:
        self._policy = policy
        self._in_a_row = 0
        self._skipped_in_a_row = 0
        self.skipped = 0  # prompts that were dropped

    def succeeded(self) -> None:
        """A group was finished."""
        self._in_a_row = self._skipped_in_a_row = 0

    def tries_again(self, name: str, attempts: int, error: BaseException) -> bool:
        """Whether a rollout of group `name`, which failed `attempts` times, is tried again; otherwise its prompt is
        dropped. Raises CollectorError: the failures are too many for the run.
        """
        self._in_a_row += 1
        if self._policy.in_a_row is None:
            return self._has_attempts(name, attempts, error)
        if self._in_a_row > self._policy.in_a_row:
            raise CollectorError(
                f"{self._in_a_row} rollouts in a row failed, grpo.async_grpo.max_generation_failures allows "
                f"{self._policy.in_a_row}; the last, of group {name}: {error}"
            ) from error
        logger.warning("group=%s rollout=failed again_in_a_row=%d reason=%s", name, self._in_a_row, error)
        return True

    def _has_attempts(self, name: str, attempts: int, error: BaseException) -> bool:
        policy, machinery = self._policy, is_infrastructure(error)
        allowed = policy.infra_attempts if machinery else policy.data_attempts
        if attempts < allowed:
            logger.warning("group=%s rollout=failed attempt=%d of=%d reason=%s", name, attempts, allowed, error)
            return True
        key = "max_infra_attempts_per_prompt" if machinery else "max_data_attempts_per_prompt"
        said = f"group {name} failed {attempts} times, async_rl.rollout_failure.{key}={allowed}; the last: {error}"
        if machinery:
            raise CollectorError(said) from error
        self.skipped += 1
        self._skipped_in_a_row += 1
        if self.skipped > policy.max_skipped or self._skipped_in_a_row > policy.max_skipped_in_a_row:
            raise CollectorError(
                f"{said}; async_rl.rollout_failure.max_skipped_prompts={policy.max_skipped} and "
                f"max_consecutive_dropped_prompts={policy.max_skipped_in_a_row} allow no further dropped prompt"
            ) from error
        logger.warning("group=%s prompt=dropped skipped=%d reason=%s", name, self.skipped, error)
        return False


def is_infrastructure(error: BaseException) -> bool:
    """Whether a rollout failed for what the machinery did, rather than for its prompt: an engine, a timeout, a
    connection or a Ray process, somewhere among its causes.
    """
    cause: BaseException | None = error
    for _ in range(_CAUSES):
        if cause is None:
            return False
        if isinstance(cause, (GenerationError, TimeoutError, ConnectionError)):
            return True
        # What the code of an environment raised in its actor comes back as a task error.
        if isinstance(cause, RayError) and not isinstance(cause, RayTaskError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
