"""Shares hold whatever the mix of jobs: many jobs of one user, training that holds more than is due, minimums of jobs,
limits that were lowered, and pipelines that stand in the way of nobody.
"""

from __future__ import annotations

from dataclasses import asdict

import pytest
from fleet import Fleet

from nemo_rl.time_sharing.history.fairness import FairnessChecks
from nemo_rl.time_sharing.log.events import Claimed, NodeAway, PoolOpened, QuotasSet, SchedulerStarted, UseWeighed
from nemo_rl.time_sharing.planning.division import Claimant, Leaf, divide_by_quotas
from nemo_rl.time_sharing.planning.plan import Plan, Snapshot
from nemo_rl.time_sharing.planning.validator import validate
from nemo_rl.time_sharing.protocol.quotas import QuotaNode, Quotas
from nemo_rl.time_sharing.scheduling.executor import Executor
from nemo_rl.utils.record import Entry

HALVES = (QuotaNode("group a", "", 0.5), QuotaNode("group b", "", 0.5))
"""Of two groups with a user each."""
USERS = (QuotaNode("user x", "group a"), QuotaNode("user y", "group b"))
LIMITED = (QuotaNode("group a", "", None, 8.0), QuotaNode("group b"))


def team(gpus: int, *nodes: QuotaNode) -> Fleet:
    fleet = Fleet(gpus)
    fleet.state.apply(QuotasSet((*nodes, *USERS), 3600.0), 0.0)
    return fleet


def add(fleet: Fleet, name: str, group: str = "a", train: tuple[int, ...] = (), **options: object) -> None:
    given: dict[str, object] = {"demand": 1000, "user": {"a": "x", "b": "y"}[group], "group": group, **options}
    infer = given.pop("infer", range(fleet.state.pool.slots))
    fleet.add(name, list(train), list(infer), **given)  # type: ignore[call-overload, arg-type]


def go(fleet: Fleet, now: float) -> Plan:
    """A plan that is sound, and carried out."""
    made = fleet.plan(now)
    assert validate(Snapshot.of(fleet.state), made) == []
    fleet.carry_out(made, now)
    return made


def up(fleet: Fleet) -> dict[str, int]:
    return {name: len(one.awake) for name, one in fleet.state.pipelines.items() if one.awake}


@pytest.mark.parametrize("jobs", [12, 17, 40])
def test_a_group_has_its_share_however_many_jobs_it_has(jobs: int) -> None:
    fleet = team(16, *HALVES)
    for number in range(jobs):
        add(fleet, f"x{number:02}", demand=10**6)
    add(fleet, "y", "b", demand=10**6)
    for pipeline in fleet.state.pipelines.values():
        pipeline.handover_s = 15.0
    had, now, hours = 0.0, 0.0, 2 * 3600.0
    while now < hours:
        go(fleet, now)
        if now >= hours / 2:
            had += 20.0 * up(fleet).get("y", 0)
        now += 20.0
        use = fleet.state.quota_use
        assert use is not None
        fleet.state.apply(UseWeighed(use.weighed(now)), now)
    assert had / (hours / 2) == pytest.approx(8.0, abs=0.8)


def test_first_ranks_of_high_priority_come_from_their_own_users_part() -> None:
    fleet = team(16, *HALVES)
    for number in range(4):
        add(fleet, f"high{number}", demand=1, priority="high", rank_batch=1)
    for number in range(3):
        add(fleet, f"x{number}", demand=10**6)
    go(fleet, 0.0)
    add(fleet, "y", "b", demand=10**6)
    for pipeline in fleet.state.pipelines.values():
        pipeline.handover_s = 15.0
    for now in range(100, 1000, 100):
        go(fleet, float(now))
    have = up(fleet)
    assert have["y"] == 8 and all(have[f"high{number}"] == 1 for number in range(4))


def test_few_due_to_many_users_of_a_group_are_whole_gpus_all_the_same() -> None:
    users = [QuotaNode(f"user u{number}", "group a", 0.2) for number in range(5)]
    fleet = team(4, *HALVES, *users)
    for number in range(5):
        add(fleet, f"u{number}", user=f"u{number}")
    add(fleet, "y", "b")
    for now in (0.0, 20.0, 40.0):
        go(fleet, now)
    assert up(fleet)["y"] == 2, "each of the five is due two fifths of a GPU, together they are due two"


def test_what_a_job_trains_on_is_had_by_its_group_also_while_it_generates() -> None:
    def leaf(name: str, group: str, fixed: int = 0) -> Leaf:
        return Leaf(Claimant(name, 1.0, 0.0, 16.0, 1), fixed, (f"user {name}", f"group {group}"))

    leaves = [leaf("a1", "a", 8), leaf("a2", "a"), leaf("b", "b")]
    pulls = divide_by_quotas(16, leaves, Quotas(HALVES, 60.0), {}).pulls
    assert pulls == pytest.approx({"a1": 8.0, "a2": 0.0, "b": 8.0}, abs=1e-3)


def test_use_of_those_without_a_share_counts_beside_one_who_has_one() -> None:
    quotas = Quotas((QuotaNode("user x", "", 0.5),), 3600.0)
    leaves = [Leaf(Claimant(name, 1.0, 0.0, 16.0, 1), 0, (f"user {name}",)) for name in "xy"]
    pulls = {late: divide_by_quotas(16, leaves, quotas, {late: 1e6}).pulls["x"] for late in ("user y", "", "user x")}
    assert pulls == pytest.approx({"user y": 32 / 3, "": 8.0, "user x": 16 / 3})


def test_the_minimum_of_a_job_is_one_within_what_its_user_has() -> None:
    fleet = team(16, QuotaNode("group a", "", 0.1), QuotaNode("group b", "", 0.9))
    add(fleet, "x", min_share=1.0)
    add(fleet, "y", "b")
    fleet.wake("y", *range(16))
    for now in (100.0, 200.0, 1000.0):
        go(fleet, now)
    assert up(fleet)["y"] >= 14


def lower(fleet: Fleet, limit: float, at: float) -> None:
    fleet.state.apply(QuotasSet((LIMITED[0]._replace(limit=limit), LIMITED[1], *USERS), 3600.0), at)


def test_a_limit_that_was_lowered_below_a_rank_stops_that_job_alone() -> None:
    fleet = team(8, *LIMITED)
    add(fleet, "wide", tp=4)
    lower(fleet, 2.0, 1.0)
    fleet.demand("wide", 1001, at=2.0)
    add(fleet, "narrow", at=3.0)
    for now in (10.0, 500.0):
        go(fleet, now)
    assert up(fleet) == {"narrow": 2}


def test_training_that_a_lowered_limit_will_never_allow_stands_in_nobodys_way() -> None:
    fleet = team(8, *LIMITED)
    add(fleet, "x", train=(0, 1, 2, 3), demand=0)
    add(fleet, "y", "b", train=(0, 1), demand=0)
    lower(fleet, 2.0, 95.0)
    fleet.want("x", at=100.0)
    for step in range(6):
        fleet.want("y", at=101.0 + 50 * step)
        made = go(fleet, 102.0 + 50 * step)
        assert [grant.pipeline for grant in made.grants] == ["y"], f"step {step}"
        assert [wait.because for wait in made.waits] == [("limit", "group a", 2)]
        fleet.release("y", at=130.0 + 50 * step)


def test_one_to_whom_nothing_is_due_takes_what_is_of_no_use_to_its_holder() -> None:
    fleet = team(8, QuotaNode("group a", "", 0.0), QuotaNode("group b", "", 1.0))
    add(fleet, "gap", "b", priority="scavenger")
    add(fleet, "idle", "b")
    add(fleet, "works", "b", demand=10, rank_batch=64)
    fleet.wake("gap", 0, 1, 2)
    fleet.wake("idle", 3, 4, 5, 6)
    fleet.wake("works", 7)
    fleet.demand("idle", 1000, 1000, at=40.0)
    add(fleet, "guest", at=50.0)
    for now in (100.0, 110.0):
        go(fleet, now)
    assert up(fleet) == {"works": 1, "guest": 7}


def test_a_job_of_high_priority_has_its_first_rank_before_the_others_of_its_user() -> None:
    fleet = team(8, *HALVES)
    for number in range(9):
        add(fleet, f"x{number}")
    add(fleet, "y", "b")
    fleet.wake("y", *range(8))
    add(fleet, "hot", train=(0,), priority="high", at=100.0)
    go(fleet, 100.0)
    assert up(fleet) == {"y": 4, "hot": 1, "x0": 1, "x1": 1, "x2": 1}


@pytest.mark.parametrize("priority", ["scavenger", "normal"])
def test_room_under_a_limit_goes_to_those_who_are_due_more_of_it(priority: str) -> None:
    fleet = team(16, *LIMITED, QuotaNode("user z", "group a"))
    add(fleet, "has", infer=range(8, 16), user="z", priority=priority)
    fleet.wake("has", *range(1, 8))
    add(fleet, "lacks", infer=range(8))
    fleet.wake("lacks", 0)
    for now in range(100, 200, 10):
        go(fleet, float(now))
    assert up(fleet) == ({"lacks": 8} if priority == "scavenger" else {"lacks": 4, "has": 4})


def test_no_rank_makes_way_under_one_limit_for_a_request_that_another_holds_up() -> None:
    fleet = team(16, *LIMITED, QuotaNode("user z", "group a", None, 4.0))
    add(fleet, "trains", train=tuple(range(8, 14)), demand=0)
    fleet.hold("trains")
    add(fleet, "serves", user="z")
    fleet.wake("serves", 4, 5)
    add(fleet, "asks", train=(0, 1, 2, 3), user="z", demand=0)
    fleet.want("asks", at=50.0)
    made = go(fleet, 100.0)
    assert not made.grants and not made.shrinks


def test_a_guaranteed_slice_is_not_cut_short_by_other_generation_either() -> None:
    fleet = Fleet(1, min_hold_s=10.0)
    for name in "abc":
        fleet.add(name, [], [0], demand=1000)
    fleet.wake("a", 0, at=0.0)
    for pipeline in fleet.state.pipelines.values():
        pipeline.handover_s = 0.2
    (woken,) = go(fleet, 400.0).expands
    assert woken.guaranteed
    for now in (401.0, 405.0, 409.0):
        assert go(fleet, now).expands == []
    assert [one.pipeline for one in go(fleet, 411.0).expands] == ["c"]


def test_a_job_whose_nodes_are_all_away_pulls_at_nothing_for_the_checker_either() -> None:
    fleet = Fleet(16, 2)
    checks, record = FairnessChecks(), list[tuple[float, object]]()
    apply = fleet.state.apply

    def recorded(event: object, at: float) -> None:
        record.append((at, event))
        apply(event, at)

    fleet.state.apply = recorded  # type: ignore[method-assign]
    recorded(PoolOpened(2, 8, asdict(fleet.state.limits)), 0.0)
    recorded(SchedulerStarted(1, True), 0.0)
    recorded(QuotasSet((*HALVES, *(QuotaNode(f"user {one}", "group a", 0.5) for one in "xz"), USERS[1]), 3600.0), 0.0)
    recorded(NodeAway(1), 1.0)
    add(fleet, "gone", infer=range(8, 16))
    add(fleet, "here", infer=range(8), user="z")
    add(fleet, "other", "b", infer=range(8))
    fleet.wake("here", 0, at=3.0)
    fleet.wake("other", *range(1, 8), at=3.0)
    answers: list[object] = []
    executor = Executor(fleet.state, lambda event: recorded(event, 200.0), answers.append, lambda: 200.0)
    executor.start(fleet.plan(200.0))
    for number, (at, event) in enumerate(record):
        if (handler := checks.handlers().get(type(event))) is not None:
            handler(Entry(number, at, "scheduler", event), event)
    checks._end_plan()
    assert sum(isinstance(event, Claimed) and event.pipeline == "here" for _, event in record) == 3
    assert checks.found == []


def test_a_wide_rank_partly_on_gpus_to_train_on_makes_way_under_the_limit() -> None:
    fleet = team(8, LIMITED[0]._replace(limit=5.0), LIMITED[1])
    add(fleet, "a", train=(2, 3, 4, 6, 7), tp=2)
    fleet.wake("a", 2, 3)
    fleet.want("a", at=50.0)
    assert not go(fleet, 100.0).grants
    assert [grant.gpus for grant in go(fleet, 101.0).grants] == [(2, 3, 4, 6, 7)]
