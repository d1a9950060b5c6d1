"""Work behind its caller comes in order, and what it raised is heard of once."""

from __future__ import annotations

import threading
import time

import pytest

from nemo_rl.algorithms.grpo.step_reports import Backlog, BacklogStuck


def test_work_runs_behind_its_caller_in_order_and_what_it_raised_is_raised_once() -> None:
    backlog, seen, go = Backlog("step-report", 30.0), [], threading.Event()
    backlog.put(lambda: (go.wait(60.0), seen.append(1)))
    assert not seen
    go.set()
    backlog.put(lambda: seen.append(2))
    backlog.wait()
    assert seen == [1, 2]

    def fail() -> None:
        raise OSError(28, "No space left on device")

    backlog.put(fail)
    with pytest.raises(OSError, match="No space left"):
        backlog.put(lambda: seen.append(3))
    backlog.wait()
    assert seen == [1, 2], "nothing is begun behind a failure that nobody has heard of"
    backlog.put(lambda: seen.append(4))
    backlog.close()
    backlog.close()
    assert seen == [1, 2, 4]


def test_a_wait_has_a_deadline_and_an_end_shows_what_failed(caplog: pytest.LogCaptureFixture) -> None:
    backlog, go = Backlog("step-report", 0.05), threading.Event()
    backlog.put(lambda: go.wait(60.0))
    begun = time.monotonic()
    with pytest.raises(BacklogStuck, match="step-report: not done within 0 s"):
        backlog.wait()
    assert time.monotonic() - begun < 29
    go.set()
    backlog.put(lambda: {}["samples"])
    backlog.close()
    assert "step-report=failed" in caplog.text and "KeyError: 'samples'" in caplog.text
