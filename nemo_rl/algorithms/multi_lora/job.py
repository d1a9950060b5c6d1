"""A job of many adapters on one base model: adapters join, train beside each other, and leave.

Each adapter is a thread that runs GRPO's own loop on the shared policy and engines. Invariants: an adapter that ends,
fails or is removed changes nothing of the others; a slot is free again once nothing of its adapter is left; a step
whose training pass has begun is finished, anything before it is discarded.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

from ray.exceptions import RayError

from nemo_rl.algorithms.grpo.loop import GRPOSteps
from nemo_rl.algorithms.grpo.run import GRPORun
from nemo_rl.algorithms.launch import directories_of_its_own
from nemo_rl.algorithms.multi_lora.assembly import AdapterRecords, Shared, build_run, check_layers
from nemo_rl.algorithms.multi_lora.passes import AdapterRemoved
from nemo_rl.algorithms.resume import NothingToDo
from nemo_rl.algorithms.training_loop import CompletedStep, train_to_end
from nemo_rl.config.errors import UserError, first_line
from nemo_rl.config.master import MultiLoraMasterConfig
from nemo_rl.config.multi_lora import AdapterConfig, check_adapter

logger = logging.getLogger(__name__)

_TRACEBACK = re.compile(r"\n(?:\x1b\[\d+m)*(?:ray::|Traceback )")


class SlotsFull(UserError, RuntimeError):
    """No slot is free for another adapter."""


class UnknownAdapter(UserError, KeyError):
    """The job has no such adapter."""

    def __str__(self) -> str:
        return str(self.args[0])


class AdapterPhase(str, Enum):
    """Where an adapter is."""

    JOINING = "joining"
    RUNNING = "running"
    LEAVING = "leaving"
    DONE = "done"
    FAILED = "failed"
    REMOVED = "removed"

    @property
    def over(self) -> bool:
        """Whether it trains no more and holds no slot."""
        return self in (AdapterPhase.DONE, AdapterPhase.FAILED, AdapterPhase.REMOVED)


@dataclass(frozen=True)
class AdapterState:
    """An adapter as people and other programs see it."""

    name: str
    phase: AdapterPhase
    slot: int
    step: int
    total_steps: int
    waits_for: int  # prompt groups that it waits for
    open_samples: int  # samples of these
    waited_s: float  # for training passes, behind other adapters
    joined_in_s: float | None  # from add to its first step; None before
    log_dir: str
    reason: str = ""  # why it failed, or ended early

    def plain(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self) | {"phase": self.phase.value}


@dataclass
class _Member:
    adapter: AdapterConfig
    slot: int
    removed: threading.Event = field(default_factory=threading.Event)
    phase: AdapterPhase = AdapterPhase.JOINING
    run: GRPORun | None = None
    added: float = field(default_factory=time.monotonic)
    joined_in_s: float | None = None
    waits_for: int = 0
    reason: str = ""
    thread: threading.Thread | None = None

    def state(self, waited_s: float) -> AdapterState:
        run, grpo = self.run, self.adapter.config.grpo
        return AdapterState(
            self.adapter.name,
            self.phase,
            self.slot,
            run.state.step if run is not None else grpo.max_num_steps if self.phase is AdapterPhase.DONE else 0,
            grpo.max_num_steps if run is None else run.total_steps,
            0 if self.phase.over else self.waits_for,
            0 if self.phase.over else self.waits_for * grpo.num_generations_per_prompt,
            waited_s,
            self.joined_in_s,
            self.adapter.config.logger.log_dir,
            self.reason,
        )


class MultiLoraJob:
    """Adapters on one base.

    Args:
        base: The base's configuration.
        shared: What the adapters share.
        records: Where adapters write what happens to them.
    """

    def __init__(self, base: MultiLoraMasterConfig, shared: Shared, records: AdapterRecords | None = None) -> None:
        self.base, self._shared, self._records = base, shared, records or AdapterRecords()
        self._members: dict[str, _Member] = {}
        self._changed = threading.Condition()
        self._closing = False

    def add(self, adapter: AdapterConfig) -> AdapterState:
        """Lets an adapter join; it is built on a thread of its own.

        Raises ConfigError: its rank is above the base's, or another that runs has its name or one of its directories;
        UnsupportedModelError: it names layers that the model does not have; SlotsFull: there is no free slot, with who
        could leave; AdapterRemoved: the job ends.
        """
        check_layers(adapter)
        with self._changed:
            running = [member for member in self._members.values() if not member.phase.over]
            check_adapter(self.base, adapter, [member.adapter for member in running])
            free = sorted(set(range(self.base.multi_lora.slots)) - {member.slot for member in running})
            if not free:
                raise SlotsFull(self._full(adapter.name, running))
            if self._closing:
                raise AdapterRemoved(f"adapter {adapter.name}: the job ends")
            member = self._members[adapter.name] = _Member(adapter, free[0])
            member.thread = threading.Thread(target=self._train, args=(member,), name=f"adapter-{adapter.name}")
            member.thread.start()
            return self._state(member)

    def _state(self, member: _Member) -> AdapterState:
        return member.state(self._shared.passes.waited_s(member.adapter.name))

    def _full(self, name: str, running: list[_Member]) -> str:
        states = [self._state(member) for member in running]
        left = {state.name: state.total_steps - state.step for state in states}
        soonest = min(left, key=lambda other: left[other])
        said = ", ".join(f"{of.name} ({of.phase.value}, step {of.step} of {of.total_steps})" for of in states)
        return (
            f"adapter {name}: all multi_lora.slots={self.base.multi_lora.slots} are taken, by {said}; {soonest} ends "
            f"soonest, after {left[soonest]} more steps: wait for it, remove one, or start the job with more slots"
        )

    def remove(self, name: str) -> AdapterState:
        """Lets an adapter leave: its requests are ended and what its open step has is discarded, unless its training
        pass has begun. Returns at once. Raises UnknownAdapter: there is none that runs.
        """
        with self._changed:
            member = self._members.get(name)
            if member is None or member.phase.over:
                running = [other for other, of in self._members.items() if not of.phase.over]
                raise UnknownAdapter(f"no adapter {name} runs here; there are {', '.join(running) or 'none'}")
            member.phase = AdapterPhase.LEAVING
            member.removed.set()
            return self._state(member)

    def states(self) -> list[AdapterState]:
        """All adapters of this job, those that are over too."""
        with self._changed:
            return [self._state(member) for member in self._members.values()]

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until no adapter runs. Returns whether none does."""
        with self._changed:
            return self._changed.wait_for(
                lambda: all(member.phase.over for member in self._members.values()), timeout_s
            )

    def end_after_steps(self) -> None:
        """Has every adapter save and end when its running step is over, those that join after their first one; none is
        added any more. A job that loses its GPUs soon after each start still gets on.
        """
        with self._changed:
            self._closing = True
            for member in self._members.values():
                if member.run is not None:
                    member.run.timeout.end_after_step()

    def close(self) -> None:
        """Removes every adapter and waits until they have left."""
        with self._changed:
            self._closing = True
            for member in self._members.values():
                member.removed.set()
        for member in list(self._members.values()):
            if member.thread is not None:
                member.thread.join()

    def _train(self, member: _Member) -> None:
        name, shared = member.adapter.name, self._shared
        phase, reason = AdapterPhase.DONE, ""
        try:
            with ExitStack() as stack:
                stack.enter_context(directories_of_its_own(member.adapter.config))
                reason = self._run(member, stack)
        except NothingToDo as nothing:
            reason = str(nothing)
        except AdapterRemoved as removed:
            phase, reason = AdapterPhase.REMOVED, str(removed)
        except (UserError, OSError, RayError) as error:
            phase, reason = AdapterPhase.FAILED, _without_traceback(error)
            logger.error("adapter=%s failed reason=%s", name, reason)
            logger.debug("adapter=%s failed", name, exc_info=True)
        except Exception as error:
            # Whatever it was, the others go on.
            phase, reason = AdapterPhase.FAILED, f"{type(error).__name__}: {error}"
            logger.exception("adapter=%s failed", name)
        finally:
            shared.passes.leave(name)
            shared.engines.remove(name)
            try:
                shared.policy.clear_slot(member.slot)
            except (UserError, RayError, RuntimeError) as error:
                logger.warning("adapter=%s slot=%d clearing=failed reason=%s", name, member.slot, first_line(error))
            with self._changed:
                # A step that ended while the adapter was being removed was its last.
                member.phase = AdapterPhase.REMOVED if member.removed.is_set() and phase is AdapterPhase.DONE else phase
                member.reason = reason
                self._changed.notify_all()

    def _run(self, member: _Member, stack: ExitStack) -> str:
        """Trains an adapter to its end; why it ended before its last step, if it did."""
        shared, name = self._shared, member.adapter.name

        def progress(ready: int, of: int) -> None:
            member.waits_for = max(0, of - ready)

        run = build_run(member.adapter, member.slot, shared, self._records, member.removed, progress)
        stack.callback(run.close)
        # First of all: engines that are rebuilt are recorded for the adapters that they get.
        stack.callback(shared.engines.remove, name)
        if member.removed.is_set():
            raise AdapterRemoved(f"adapter {name} was removed")
        shared.passes.join(name, member.adapter.config.multi_lora.weight)
        with self._changed:
            member.run = run
            if self._closing:
                run.timeout.end_after_step()
            member.phase = AdapterPhase.RUNNING
            member.joined_in_s = time.monotonic() - member.added
        run.progress.say(f"joined after {member.joined_in_s:.1f} s")
        train_to_end(_AdapterSteps(run, member.removed))
        return run.timeout.reason if run.state.step < run.total_steps else ""


def _without_traceback(error: BaseException) -> str:
    """An error's message on one line, without the traceback of a worker that Ray appends."""
    said = _TRACEBACK.split(str(error), maxsplit=1)[0]
    return " ".join(said.split()) or type(error).__name__


class _AdapterSteps(GRPOSteps):
    """GRPO's steps, which end when the adapter was removed."""

    def __init__(self, run: GRPORun, removed: threading.Event) -> None:
        super().__init__(run)
        self._removed = removed

    def finished(self) -> bool:
        return self._removed.is_set() or super().finished()

    def why_ended(self, newest: CompletedStep | None) -> str | None:
        return None if self._removed.is_set() else super().why_ended(newest)


def write_reports(states: list[AdapterState]) -> list[Path]:
    """Writes the report of every adapter that has one; their paths."""
    from nemo_rl.utils.metrics_file import NoMetrics
    from nemo_rl.utils.plots import NothingToShow
    from nemo_rl.utils.report import write_report

    paths: list[Path] = []
    for state in states:
        try:
            paths += write_report(Path(state.log_dir))
        except (NoMetrics, NothingToShow, OSError) as error:
            logger.info("adapter=%s report=none reason=%s", state.name, error)
    return paths
