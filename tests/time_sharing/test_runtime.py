"""The agent's runtime between the pipeline's driver and the scheduler: what the driver's calls raise."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from local_scheduler import LocalScheduler, NoEngine

from nemo_rl.time_sharing.agents.agent import ProtocolError
from nemo_rl.time_sharing.agents.runtime import Dismissed, RequestEnded
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, ACTOR_TRAIN, Limits, Phase, Priority

LIMITS = Limits(heartbeat_s=0.02, lease_s=1e6, retry_s=0.02, plan_interval_s=0.0, request_s=60.0, max_hold_s=1e6)


@pytest.fixture
def scheduler() -> Iterator[LocalScheduler]:
    scheduler = LocalScheduler(LIMITS)
    yield scheduler
    scheduler.close()


def test_a_driver_whose_request_expires_is_told_so_and_gets_its_gpus_when_it_asks_again(
    scheduler: LocalScheduler,
) -> None:
    holder, late = scheduler.start("holder"), scheduler.start("late")
    holder.acquire(ACTOR_TRAIN, Priority.INITIALIZATION, -1, 60.0)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            late.acquire(ACTOR_TRAIN, Priority.INITIALIZATION, -1, 60.0)
        except TimeoutError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    scheduler.wait_until(lambda: bool(scheduler.core.state.pipelines["late"].wants))
    scheduler.pass_time(61.0)
    waiting.join(60.0)
    assert len(errors) == 1 and isinstance(errors[0], RequestEnded)
    assert str(errors[0]).startswith(
        "late: actor_train for INITIALIZATION of step -1 was not granted: it waited longer than request_s=60"
    )
    holder.release(ACTOR_TRAIN)
    late.acquire(ACTOR_TRAIN, Priority.INITIALIZATION, -1, 60.0)


def test_generation_is_not_acquired_but_reported(scheduler: LocalScheduler) -> None:
    agent = scheduler.start("a")
    with pytest.raises(ProtocolError, match=r"report demand \(set_demand\) instead"):
        agent.acquire(ACTOR_INFER, Priority.INITIALIZATION, -1, 60.0)
    agent.acquire(ACTOR_TRAIN, Priority.INITIALIZATION, -1, 60.0)


def test_a_driver_that_waits_while_its_pipeline_is_fenced_is_dismissed(scheduler: LocalScheduler) -> None:
    holder, late = scheduler.start("holder"), scheduler.start("late")
    holder.acquire(ACTOR_TRAIN, Priority.INITIALIZATION, -1, 60.0)
    threading.Timer(0.05, scheduler.unregister, ("late",)).start()
    with pytest.raises(Dismissed, match="incarnation 0 is no longer registered"):
        late.acquire(ACTOR_TRAIN, Priority.INITIALIZATION, -1, 60.0)
    assert late.fenced


class DefectiveAtFirst(NoEngine):
    """Its first wake raises what no engine should."""

    def __init__(self) -> None:
        self.wakes = 0

    def wake(self, rank: int) -> None:
        self.wakes += 1
        if self.wakes == 1:
            raise KeyError("a name that is still taken")


def test_an_engine_that_raises_whatever_has_failed_and_holds_nothing(scheduler: LocalScheduler) -> None:
    engine = DefectiveAtFirst()
    agent = scheduler.start("a", engine)
    agent.acquire(ACTOR_TRAIN, Priority.INITIALIZATION, -1, 60.0)
    agent.begin_at(0)
    agent.release(ACTOR_TRAIN, target=8)
    awake = scheduler.core.state.pipelines["a"].awake
    scheduler.wait_until(lambda: engine.wakes == 2)
    scheduler.wait_until(lambda: [rank.phase for rank in awake.values()] == [Phase.SERVING])
