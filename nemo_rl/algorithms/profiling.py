"""The steps of a run that Nsight Systems records.

Switches the recording of workers on and off between steps; which workers record is theirs to know. Invariants: it is on
in the steps that were asked for and in no other; a worker that cannot be switched does not end the run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nemo_rl.config.profiling import ENGINES, POLICY_WORKERS, STEPS, Profile, asked_profile
from nemo_rl.distributed.accelerators import Accelerator
from nemo_rl.distributed.nsight import check_profiler
from nemo_rl.distributed.worker_calls import WorkerError

logger = logging.getLogger(__name__)


def profile_of_run() -> Profile | None:
    """The profile that this process's variables ask for."""
    return asked_profile(os.environ, (POLICY_WORKERS, ENGINES))


def check_profile(accelerator: Accelerator | None) -> None:
    """Whether what this process's variables ask for can be profiled.

    Args:
        accelerator: Of the cluster that will be started on this machine; None where the run joins one, whose nodes find
            it out themselves.

    Raises:
        ProfilerUnavailable: There is no GPU, or `nsys` is not on PATH.
    """
    if profile_of_run() is not None and accelerator is not None:
        check_profiler(cuda=accelerator.is_cuda)


class StepProfiler:
    """Switches recording between steps.

    Args:
        profile: What is asked for; None records nothing.
        switches: Each switches some workers.
    """

    def __init__(self, profile: Profile | None, switches: Sequence[Callable[[bool], None]]) -> None:
        self._profile = profile
        self._switches = switches
        self._on = self._began = False

    def before(self, step: int) -> None:
        """Called before each step.

        Args:
            step: Counted from 1 over the whole run, also where it goes on from a checkpoint.
        """
        if self._profile is not None:
            self._switch(self._profile.covers(step), step)

    def end(self) -> None:
        """Called after the last step."""
        if self._profile is None:
            return
        self._switch(False, None)
        if not self._began:
            logger.warning("profile=nothing reason=no_step_in_range %s=%s:%s", STEPS, *self._range())

    def _range(self) -> tuple[int, int]:
        return (0, 0) if self._profile is None else (self._profile.first, self._profile.end)

    def _switch(self, on: bool, step: int | None) -> None:
        if on == self._on:
            return
        self._on, self._began = on, self._began or on
        logger.warning("profile=%s step=%s", "recording" if on else "written", step)
        for switch in self._switches:
            try:
                switch(on)
            except WorkerError as error:
                logger.warning("profile=incomplete reason=%s", error)


@contextmanager
def profiled_steps(*workers: Any) -> Iterator[StepProfiler]:
    """Records the steps inside that this process's variables ask for.

    Args:
        *workers: What has workers: a policy, engines; None is left out.
    """
    profile = profile_of_run()
    switches = [each.profile for each in workers if each is not None] if profile is not None else []
    profiler = StepProfiler(profile, switches)
    try:
        yield profiler
    finally:
        profiler.end()
