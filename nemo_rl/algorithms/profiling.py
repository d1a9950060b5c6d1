"""Profiles chosen steps with Nsight Systems.

Invariants: recording is on in the requested steps only; a worker that cannot be switched does not end the run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from nemo_rl.config.nsight_variables import ENGINES, POLICY_WORKERS, STEPS, Profile, asked_profile
from nemo_rl.distributed.accelerator_slots import Accelerator
from nemo_rl.distributed.nsight import check_profiler
from nemo_rl.distributed.worker_groups import WorkerError

logger = logging.getLogger(__name__)


def profile_of_run() -> Profile | None:
    """The profile requested by environment variables."""
    return asked_profile(os.environ, (POLICY_WORKERS, ENGINES))


def check_profile(accelerator: Accelerator | None) -> None:
    """Checks that the requested profile can be taken. `accelerator`: of the cluster that will start on this machine;
    None if the run joins a cluster, whose nodes check it themselves. Raises ProfilerUnavailable: there is no GPU, or
    `nsys` is not on PATH.
    """
    if profile_of_run() is not None and accelerator is not None:
        check_profiler(cuda=accelerator.is_cuda)


class StepProfiler:
    """Switches recording between steps. `profile`: the request; None records nothing."""

    def __init__(self, profile: Profile | None, switches: Sequence[Callable[[bool], None]]) -> None:
        self._profile = profile
        self._switches = switches
        self._on = self._began = False

    def before(self, step: int) -> None:
        """Called before each step. `step`: from 1, counted over the whole run including resumed steps."""
        if self._profile is not None:
            self._switch(self._profile.covers(step), step)

    def end(self) -> None:
        """Called after the last step."""
        if self._profile is None:
            return
        self._switch(False, None)
        if not self._began:
            first, end = self._profile.first, self._profile.end
            logger.warning("profile=nothing reason=no_step_in_range %s=%s:%s", STEPS, first, end)

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
def profiled_steps(*workers: Any) -> Generator[StepProfiler]:
    """Context manager that records the requested steps. `*workers`: policy and engines; None is left out."""
    profile = profile_of_run()
    switches = [each.profile for each in workers if each is not None] if profile is not None else []
    profiler = StepProfiler(profile, switches)
    try:
        yield profiler
    finally:
        profiler.end()
