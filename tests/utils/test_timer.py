"""Timer and TimeoutChecker, on a clock that is set by hand."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.utils.timer import TimeoutChecker, Timer, TimerError, parse_duration


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(durations=st.lists(st.integers(0, 100), min_size=1, max_size=10))
def test_durations_are_reduced(durations: list[int]) -> None:
    clock = Clock()
    timer = Timer(clock)
    for duration in durations:
        with timer.time("step"):
            clock.now += duration
    assert timer.elapsed("step") == durations
    assert timer.reduce("step", "sum") == sum(durations)
    assert timer.reduce("step", "count") == len(durations)
    assert timer.reduce("step", "median") == statistics.median(durations)
    assert timer.reduce("step", "std") == pytest.approx(statistics.stdev(durations) if len(durations) > 1 else 0.0)
    assert timer.get_timing_metrics("max") == {"step": max(durations)}


def test_a_block_that_raises_is_measured_and_labels_may_nest() -> None:
    clock = Clock()
    timer = Timer(clock)
    with pytest.raises(KeyError), timer.time("total"), timer.time("total/part"):
        clock.now += 2
        raise KeyError("x")
    assert timer.get_timing_metrics() == {"total": 2.0, "total/part": 2.0}
    timer.reset("total")
    assert timer.get_timing_metrics() == {"total/part": 2.0}


def test_marks_measure_from_one_to_the_next() -> None:
    clock = Clock()
    timer = Timer(clock)
    assert timer.mark("step") is None
    clock.now += 3
    assert timer.mark("step") == 3
    timer.record("step", 5)
    assert timer.elapsed("step") == [3, 5]


def test_wrong_use_is_named() -> None:
    timer = Timer()
    timer.start("a")
    with pytest.raises(TimerError, match="'a' is already running"):
        timer.start("a")
    with pytest.raises(TimerError, match="'b' was not started"):
        timer.stop("b")
    with pytest.raises(TimerError, match="'b' has no measurements"):
        timer.reduce("b")
    with pytest.raises(ValueError, match="p99"):
        timer.reduce("a", "p99")


def test_a_run_saves_before_its_time_is_up_when_another_step_would_not_fit() -> None:
    clock = Clock()
    checker = TimeoutChecker("00:00:01:00", clock=clock)
    checker.start_iterations()
    for _ in range(2):
        clock.now += 20
        checker.mark_iteration()
    assert checker.check_save()  # at 40 s, with steps of 20 s, 60 s is reached
    assert not checker.check_save()
    patient = TimeoutChecker("00:00:01:00", fit_last_save_time=False, clock=clock)
    clock.now += 59
    assert not patient.check_save()
    clock.now += 1
    assert patient.check_save()
    assert not TimeoutChecker(None, clock=clock).check_save()


def test_run_time_has_one_form() -> None:
    assert parse_duration("01:02:03:04") == 93784
    for text in ("10:00", "a:b:c:d", "00:00:00:-1"):
        with pytest.raises(ValueError, match="DD:HH:MM:SS"):
            parse_duration(text)


def test_a_timer_carries_what_nemo_rls_callers_give_it() -> None:
    timer = Timer(context={"rank": 3})
    timer.record("step", 2.0)
    timer.mark("token", {"step": 1})
    assert timer.context == {"rank": 3} and timer.get_elapsed("step") == [2.0]
    assert [(mark.label, mark.metadata) for mark in timer.marks] == [("token", {"step": 1})]
