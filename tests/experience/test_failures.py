"""Failures end a run by how many there are in a row, or of one prompt, and not by how many it has seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.experience.rollout_tasks import CollectorError, FailurePolicy, Failures
from nemo_rl.models.generation.interfaces import GenerationError

EVENTS = st.lists(st.booleans(), max_size=40)


@given(EVENTS, st.integers(0, 4))
def test_a_run_ends_at_the_first_failure_beyond_those_allowed_in_a_row(events: list[bool], allowed: int) -> None:
    failures, in_a_row = Failures(FailurePolicy(in_a_row=allowed)), 0
    for number, fails in enumerate(events):
        if not fails:
            failures.succeeded()
            in_a_row = 0
            continue
        in_a_row += 1
        if in_a_row > allowed:
            with pytest.raises(CollectorError, match=f"{in_a_row} rollouts in a row failed"):
                failures.tries_again(f"g{number}", 99, ValueError("x"))
            return
        assert failures.tries_again(f"g{number}", 99, ValueError("x"))


@given(EVENTS, st.integers(0, 4), st.integers(0, 4), st.integers(1, 3))
def test_prompts_are_dropped_as_long_as_their_number_and_their_row_are_allowed(
    events: list[bool], most: int, most_in_a_row: int, attempts: int
) -> None:
    policy = FailurePolicy(data_attempts=attempts, max_skipped=most, max_skipped_in_a_row=most_in_a_row)
    failures, dropped, row = Failures(policy), 0, 0
    for number, fails in enumerate(events):
        if not fails:
            failures.succeeded()
            row = 0
            continue
        for attempt in range(1, attempts):
            assert failures.tries_again(f"g{number}", attempt, ValueError("x"))
        dropped, row = dropped + 1, row + 1
        if dropped > most or row > most_in_a_row:
            with pytest.raises(CollectorError, match="allow no further dropped prompt"):
                failures.tries_again(f"g{number}", attempts, ValueError("x"))
            return
        assert not failures.tries_again(f"g{number}", attempts, ValueError("x"))
        assert failures.skipped == dropped


@pytest.mark.parametrize("attempts", [1, 3])
def test_failures_of_the_machinery_drop_no_prompt(attempts: int) -> None:
    failures = Failures(FailurePolicy(infra_attempts=attempts, data_attempts=1, max_skipped=9, max_skipped_in_a_row=9))
    for attempt in range(1, attempts):
        assert failures.tries_again("g", attempt, GenerationError("an engine died"))
    with pytest.raises(CollectorError, match="max_infra_attempts_per_prompt"):
        failures.tries_again("g", attempts, GenerationError("an engine died"))
    assert failures.skipped == 0
