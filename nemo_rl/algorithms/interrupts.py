"""What Ctrl-C and SIGTERM do, by where a run is: end it, save and end it, or wait until it has ended.

Also says, once a run was interrupted, what of it is saved. Knows a run by its counters and its checkpoints. Invariant:
while a run is being ended no signal breaks that off, so no process is left.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Protocol, Self

from nemo_rl.algorithms.run_state import RunState
from nemo_rl.config.infrastructure import CheckpointingConfig
from nemo_rl.utils.checkpoint import CheckpointManager

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruptible(Protocol):
    """What is asked of a run that was interrupted."""

    checkpointer: CheckpointManager

    @property
    def state(self) -> RunState:
        """Its counters."""
        ...


class Interrupts:
    """The handlers of a run's signals; a context manager that puts the former ones back.

    A scheduler that ends the job sends SIGTERM: it deserves the same clean end as Ctrl-C.
    """

    def __init__(self) -> None:
        self.save_asked = False
        self._end_after_step: Callable[[], None] | None = None
        self._ending = self._told = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        self.listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyrefly: ignore[bad-argument-type]

    def listen(self) -> None:
        """Takes the signals, also from libraries that took them meanwhile."""
        # Handlers can be set by the main thread only; a run inside another thread is ended by whoever owns the process.
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                before = signal.signal(number, self._on_signal)
                self._before.setdefault(number, before)

    def save_first(self, end_after_step: Callable[[], None]) -> None:
        """From here on the first signal lets the step finish, saves and ends; `end_after_step` asks the run to."""
        self._end_after_step = end_after_step

    def ending(self) -> None:
        """The run is being ended: signals wait for it."""
        self._ending = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._ending:
            if not self._told:
                self._told = True
                sys.stderr.write("already ending: workers and files are being closed\n")
            return
        if self._end_after_step is not None and not self.save_asked:
            self.save_asked = True
            self._end_after_step()
            sys.stderr.write("interrupted: the step is finished and saved first; once more ends at once\n")
            return
        raise KeyboardInterrupt


def what_is_saved(run: Interruptible, cfg: CheckpointingConfig) -> str:
    """Where an interrupted run would go on, and how many steps that loses; to be asked once the run is closed."""
    step = run.state.step
    done = f"interrupted after step {step}"
    if not cfg.enabled:
        return f"{done}: checkpointing.enabled is false, so nothing is saved"
    newest = run.checkpointer.get_latest_checkpoint_path()
    saved = 0 if newest is None else int(newest.name.removeprefix("step_"))
    lost = step - saved
    hint = "" if cfg.save_on_signal or lost == 0 else "; checkpointing.save_on_signal=true would save first"
    if newest is None:
        return f"{done}: no checkpoint was written yet, {_steps(lost)} lost{hint}"
    if lost == 0:
        return f"{done}: all of it is in {newest}; the same command goes on from there"
    return f"{done}: the newest checkpoint is {newest}, {_steps(lost)} lost{hint}; the same command goes on from there"


def _steps(count: int) -> str:
    return f"{count} step is" if count == 1 else f"{count} steps are"
