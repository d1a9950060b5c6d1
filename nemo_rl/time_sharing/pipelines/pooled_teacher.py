"""A student's way to a teacher that is a job of its pool, and what both ask of the pool's actor.

Invariant: a teacher that dies is looked for again until a deadline, and samples are sent again to the new one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import ray

from nemo_rl.config import ConfigError
from nemo_rl.config.errors import first_line
from nemo_rl.config.teacher_sections import Teacher
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.interfaces import GenerationError
from nemo_rl.time_sharing.agents.actors import CONTROL_NAMESPACE, POOL_NAME

logger = logging.getLogger(__name__)

_ANSWER_S = 60.0
_POLL_S = 1.0
_FIND_S = 600.0


class TeacherLeft(GenerationError):
    """A job that served a teacher takes no more samples."""


class Served(NamedTuple):
    """What a job serves, or what a student needs."""

    model: str
    topk: int  # tokens of each position, at most; 0 where only those that were sampled are scored
    longest: int  # tokens of a sample, at most

    def differences(self, needed: Served, job: str, key: str = "teacher.model_name") -> Iterator[str]:
        """What a student needs and the job does not serve. `key`: which names the student's teacher."""
        if self.model != needed.model:
            yield f"{key} is {needed.model}, and the job {job} serves {self.model}"
        if self.topk < needed.topk:
            yield f"topk_logits_k is {needed.topk}, and the job {job} gives {self.topk} tokens of a position at most"
        if self.longest < needed.longest:
            yield (
                f"policy.max_total_sequence_length takes {needed.longest} tokens of a teacher, and the job {job} has "
                f"{self.longest}"
            )


class PooledTeacher:
    """A student's way to a teacher that is a job of its pool.

    Args:
        wait_s: How long samples may wait for the teacher's engines.
        find_s: How long the job may be missing, before its first answer or after it died.

    Raises ConfigError: there is no such job in time, or it teaches something else.
    """

    def __init__(
        self, student: str, teacher: Teacher, k: int, longest: int, *, wait_s: float, find_s: float = _FIND_S
    ) -> None:
        self._student, self._teacher, self._wait_s, self._find_s = student, teacher, wait_s, find_s
        self._job = teacher.job or ""
        self._actor = self._found()
        served: Served = ray.get(self._actor.teaches.remote(), timeout=_ANSWER_S)
        problems = list(served.differences(Served(teacher.policy.model_name, k, longest), self._job, teacher.key))
        if problems:
            raise ConfigError(problems, student)

    def _found(self) -> Any:
        deadline, reason = time.monotonic() + self._find_s, ""
        while time.monotonic() < deadline:
            actor, why = ask_pool("teacher", self._job)
            if actor is not None:
                return actor
            if why != reason:
                logger.warning("teacher=%s missing=%r awaited_s=%.0f", self._job, why, self._find_s)
            reason = why
            time.sleep(_POLL_S)
        raise ConfigError(
            [
                f"{self._teacher.job_key}: {reason}, and none came within {self._find_s:.0f} s; submit one whose "
                f"wrapper file has pipeline_cls: TeacherPipeline and exp_name: {self._job}"
            ],
            self._student,
        )

    def score(self, batch: BatchedDataDict, k: int) -> BatchedDataDict:
        """See `teachers.scores_of_prompts`; if the job dies meanwhile, the next one is asked. Raises GenerationError:
        it could not score them in time; ConfigError: it died, and no other came.
        """
        deadline = time.monotonic() + self._wait_s
        while True:
            left_s = max(1.0, deadline - time.monotonic())
            try:
                scores: BatchedDataDict = ray.get(self._actor.score.remote(batch, k), timeout=left_s)
                return scores
            except (ray.exceptions.RayActorError, TeacherLeft) as error:
                logger.warning("teacher=%s gone=%s another=awaited", self._job, first_line(error))
                # The pool may not have noticed yet.
                time.sleep(_POLL_S)
                self._actor = self._found()
            except ray.exceptions.GetTimeoutError as error:
                raise GenerationError(
                    f"the teacher {self._job} has not scored {batch.size} samples within {self._wait_s:.0f} s"
                ) from error
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, GenerationError):
                    raise GenerationError(f"the teacher {self._job}: {error.cause}") from error
                raise

    def kernels(self) -> str:
        """What computes it, in words."""
        return f"the job {self._job} of the pool"

    def shutdown(self) -> None:
        """The job is the pool's."""


def ask_pool(method: str, *arguments: object) -> Any:
    """The answer of the pool's actor."""
    pool: object = ray.get_actor(POOL_NAME, namespace=CONTROL_NAMESPACE)
    return ray.get(getattr(pool, method).remote(*arguments), timeout=_ANSWER_S)
