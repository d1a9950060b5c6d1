"""What takes long to start, like a command, gets GPUs for long enough, and is not started for less."""

from __future__ import annotations

import pytest
from fleet import Fleet

from nemo_rl.time_sharing.planning.plan import Plan
from nemo_rl.time_sharing.protocol.topology import BadShare


def beside_training(*, generation_s: float, slice_s: float, gpus: int = 2) -> Fleet:
    """`a` trains on GPU 0 and generates on GPU 1; the last time that took `generation_s`, and it began anew at 100 s.
    `command` could run on GPU 0, for which it has waited since then.
    """
    fleet = Fleet(gpus, min_hold_s=5.0, aging_s=60.0)
    fleet.add("a", [0], [0, 1], rank_batch=64)
    fleet.add("command", [], [0], slice_s=slice_s)
    fleet.demand("a", 40, at=90.0 - generation_s)
    fleet.want("a", at=90.0)
    fleet.hold("a", at=90.0)
    fleet.demand("a", 0, at=100.0)
    fleet.demand("a", 40, at=100.0)
    fleet.release("a", at=100.0)
    fleet.wake("a", 1, at=100.0)
    fleet.demand("command", 1, at=100.0)
    return fleet


def started(plan: Plan) -> list[bool]:
    """Whether the command's rank is guaranteed; empty where it is not woken."""
    return [expand.guaranteed for expand in plan.expands if expand.pipeline == "command"]


@pytest.mark.parametrize(
    ("generation_s", "slice_s", "now", "expected"),
    [
        (3.0, 0.0, 100.5, [False]),  # any gap is of use
        (3.0, 60.0, 100.5, []),  # the gap is too short
        (80.0, 60.0, 100.5, [False]),  # it is long enough
        (80.0, 60.0, 125.0, []),  # what is left of it is not
        (3.0, 60.0, 159.0, []),
        (3.0, 60.0, 160.0, [True]),  # it has waited for a slice
    ],
)
def test_a_gap_is_used_where_a_slice_fits(
    generation_s: float, slice_s: float, now: float, expected: list[bool]
) -> None:
    plan = beside_training(generation_s=generation_s, slice_s=slice_s).plan(now)
    assert started(plan) == expected
    if not expected:
        assert plan.wake_at is not None and plan.wake_at <= 160.0


@pytest.mark.parametrize(
    ("slice_s", "now", "expected"), [(0.0, 110.0, [False]), (60.0, 110.0, []), (60.0, 165.0, [True])]
)
def test_a_rank_of_another_is_not_taken_for_less(slice_s: float, now: float, expected: list[bool]) -> None:
    fleet = beside_training(generation_s=3.0, slice_s=slice_s, gpus=3)
    fleet.add("b", [], [0, 2], weight=0.2)
    fleet.wake("b", 0, at=100.0)
    fleet.wake("b", 1, at=100.0)
    fleet.demand("b", 2, at=100.0)
    plan = fleet.plan(now)
    assert started(plan) == expected
    assert [shrink.pipeline for shrink in plan.shrinks] == ["b"] * len(expected)


def test_training_waits_for_the_end_of_a_guaranteed_slice_and_no_longer() -> None:
    fleet = beside_training(generation_s=3.0, slice_s=60.0)
    fleet.wake("command", 0, at=160.0, guaranteed=True)
    fleet.want("a", at=170.0)
    waits = fleet.plan(219.0)
    assert not waits.grants and [wait.because[0] for wait in waits.waits] == ["guaranteed"]
    granted = fleet.plan(220.0)
    assert [grant.pipeline for grant in granted.grants] == ["a"]
    assert [(shrink.pipeline, shrink.rank) for shrink in granted.shrinks] == [("command", 0)]


@pytest.mark.parametrize("slice_s", [-1.0, 3601.0, float("nan"), "long", True])
def test_impossible_slices_are_refused(slice_s: float) -> None:
    with pytest.raises(BadShare, match="slice_s"):
        Fleet(1).add("command", [], [0], slice_s=slice_s)
