"""Shares, limits and priorities: how GPUs are divided down the tree, what the planner does about them, and what the
checker finds of a planner that does otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from fleet import Fleet
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.time_sharing.history import quota_checks
from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.log.events import QuotasSet, UseWeighed
from nemo_rl.time_sharing.planning import apportionment, planner
from nemo_rl.time_sharing.planning.division import Claimant, Division, Leaf, divide_by_quotas
from nemo_rl.time_sharing.planning.plan import Plan, PlanState, Snapshot, explain
from nemo_rl.time_sharing.planning.validator import validate
from nemo_rl.time_sharing.protocol.quotas import QuotaNode, Quotas, share_problems
from nemo_rl.time_sharing.protocol.topology import RegistrationError
from nemo_rl.time_sharing.protocol.types import Priority
from nemo_rl.time_sharing.simulation.scenario_reading import parse_scenario
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.utils.record import Entry, MemoryRecord

LAB = (
    QuotaNode("group lab"),
    QuotaNode("group vision", "group lab", 0.75),
    QuotaNode("group nlp", "group lab", 0.25),
    QuotaNode("user ann", "group vision"),
    QuotaNode("user bob", "group nlp"),
    QuotaNode("user cyd", "group nlp"),
)
USERS = {"ann": ("user ann", "group vision", "group lab"), "bob": ("user bob", "group nlp", "group lab")}
USERS["cyd"] = ("user cyd", "group nlp", "group lab")


def leaf(name: str, claim: float, most: float, user: str, fixed: int = 0, least: float = 0.0) -> Leaf:
    return Leaf(Claimant(name, claim, least, most, 1), fixed, USERS[user])


def division(budget: float, *leaves: Leaf, nodes: tuple[QuotaNode, ...] = LAB, **use: float) -> Division:
    named = {name.replace("_", " "): had for name, had in use.items()}
    return divide_by_quotas(budget, leaves, Quotas(nodes, 3600.0), named)


def test_groups_get_their_shares_and_jobs_of_one_user_divide_by_their_work() -> None:
    found = division(16, leaf("a", 10, 16, "ann"), leaf("b", 300, 16, "bob"), leaf("b2", 100, 16, "bob"))
    assert found.entitled == pytest.approx({"a": 12, "b": 3, "b2": 1})
    assert found.pulls == pytest.approx(found.entitled)


def test_an_unused_share_is_borrowed_and_pulls_no_less_when_it_comes_back() -> None:
    few = division(16, leaf("a", 10, 2, "ann"), leaf("b", 1, 16, "bob"))
    assert few.entitled == pytest.approx({"a": 2, "b": 14})
    assert few.pulls == pytest.approx({"a": 12, "b": 4})
    assert division(16, leaf("b", 1, 16, "bob")).entitled == pytest.approx({"b": 16})


def test_training_of_a_job_without_demand_counts_for_its_group() -> None:
    found = division(16, leaf("a", 0, 8, "ann", fixed=8), leaf("a2", 1, 16, "ann"), leaf("b", 1, 16, "bob"))
    assert found.entitled == pytest.approx({"a2": 4, "b": 4})
    assert found.pulls == pytest.approx({"a2": 4, "b": 4})


def test_who_had_less_than_the_share_of_late_has_more_until_that_is_made_up() -> None:
    jobs = leaf("a", 1, 16, "ann"), leaf("b", 1, 16, "bob")
    equal = (LAB[0], LAB[1]._replace(share=0.5), LAB[2]._replace(share=0.5), *LAB[3:])
    had = division(16, *jobs, nodes=equal, group_vision=1000, group_nlp=0).entitled
    assert had == pytest.approx({"a": 3.2, "b": 12.8}), "at most twice, and half, the share"
    had = division(16, *jobs, nodes=equal, group_vision=600, group_nlp=400).entitled
    assert had == pytest.approx({"a": 6.4, "b": 9.6}, rel=0.02)
    had = division(16, *jobs, nodes=equal, group_vision=500, group_nlp=500).entitled
    assert had == pytest.approx({"a": 8, "b": 8})


def test_limits_and_users_without_a_share_beside_one_who_has_one() -> None:
    nodes = (*LAB[:2], LAB[2]._replace(limit=2), LAB[3], LAB[4]._replace(share=0.25), LAB[5])
    jobs = leaf("a", 1, 16, "ann"), leaf("b", 1, 16, "bob"), leaf("c", 9, 16, "cyd")
    assert division(16, *jobs, nodes=nodes).entitled == pytest.approx({"a": 14, "b": 0.5, "c": 1.5})
    none = (*LAB[:4], LAB[4]._replace(share=1.0), LAB[5])
    assert division(16, *jobs, nodes=none).entitled == pytest.approx({"a": 12, "b": 4, "c": 0}, abs=1e-4)
    assert division(16, jobs[2], nodes=none).entitled == pytest.approx({"c": 16}), "what others leave"


@given(
    st.lists(
        st.tuples(st.sampled_from(["ann", "bob", "cyd"]), st.floats(0.1, 100), st.integers(1, 40), st.integers(0, 4)),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 64),
    st.dictionaries(st.sampled_from(["group vision", "group nlp", "user ann", "user bob"]), st.floats(0, 1e6)),
    st.sampled_from([None, 1.0, 6.0]),
)
def test_no_more_is_divided_than_there_is_and_all_of_it_where_it_can_be_used(
    jobs: list[tuple[str, float, int, int]], budget: int, use: dict[str, float], limit: float | None
) -> None:
    nodes = (*LAB[:2], LAB[2]._replace(limit=limit), *LAB[3:])
    leaves = [leaf(f"j{i}", claim, most, user, fixed=fixed) for i, (user, claim, most, fixed) in enumerate(jobs)]
    found = divide_by_quotas(budget, leaves, Quotas(nodes, 60.0), use)
    trained = sum(one.fixed for one in leaves)
    total = sum(found.entitled.values())
    assert total <= max(budget, trained) + 1e-6
    cap = {user: sum(max(m, f) for who, _, m, f in jobs if who == user) for user in USERS}
    nlp = cap["bob"] + cap["cyd"]
    held = sum(one.fixed for one in leaves if one.above[1] == "group nlp")
    most = cap["ann"] + (nlp if limit is None else max(min(nlp, limit), held))
    assert total == pytest.approx(min(budget, most), abs=1e-6) or trained > budget
    assert all(pull > 0 for pull in found.pulls.values()) and sum(found.pulls.values()) <= budget * (1 + 1e-4)
    # The checker works the same out in its own way.
    pullers = [quota_checks.Puller(one.claimant.name, one.above, one.claimant.claim, one.fixed) for one in leaves]
    assert quota_checks.pulls(Quotas(nodes, 60.0), use, budget, pullers) == pytest.approx(found.pulls, rel=1e-6)
    bounded = [one._replace(most=leaf.claimant.maximum) for one, leaf in zip(pullers, leaves, strict=True)]
    within = quota_checks.entitlements(Quotas(nodes, 60.0), use, budget, bounded)
    assert within == pytest.approx(found.entitled, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ((*LAB[:2], LAB[2]._replace(share=0.5), *LAB[3:]), ["of group lab add up to 1.25 (group vision 0.75, "]),
        ((*LAB[:2], LAB[2]._replace(share=None), *LAB[3:]), ["has no share, and group vision beside it has one"]),
        ((QuotaNode("group a", "", 0.6), QuotaNode("user x", "", 0.6)), ["the shares at the top add up to 1.2"]),
        (LAB, []),
    ],
)
def test_shares_that_cannot_be_kept_are_named(nodes: tuple[QuotaNode, ...], said: list[str]) -> None:
    found = list(share_problems(nodes))
    assert len(found) == len(said) and all(part in line for part, line in zip(said, found, strict=True))


# -- the planner -----------------------------------------------------------------------------------------------------


def team(gpus: int, *nodes: QuotaNode) -> Fleet:
    fleet = Fleet(gpus)
    fleet.state.apply(QuotasSet(nodes or LAB, 3600.0), 0.0)
    return fleet


def sound(fleet: Fleet, now: float = 100.0) -> Plan:
    made = fleet.plan(now)
    assert validate(Snapshot.of(fleet.state), made) == []
    return made


def test_free_gpus_go_by_shares_and_borrowed_ones_come_back() -> None:
    fleet = team(8)
    for name, user, group in (("a", "ann", "vision"), ("b", "bob", "nlp")):
        fleet.add(name, [], list(range(8)), demand=1000, user=user, group=group)  # type: ignore[arg-type]
    fleet.carry_out(sound(fleet), 100.0)
    assert {name: len(fleet.state.pipelines[name].awake) for name in "ab"} == {"a": 6, "b": 2}
    fleet.demand("a", 0, at=110.0)
    fleet.carry_out(sound(fleet, 200.0), 200.0)
    assert len(fleet.state.pipelines["b"].awake) == 8, "borrowed"
    fleet.demand("a", 1000, at=210.0)
    for now in range(300, 600, 100):
        fleet.carry_out(sound(fleet, now), now)
    assert len(fleet.state.pipelines["a"].awake) == 6, "reclaimed"


def test_many_jobs_of_one_group_take_no_turns_from_a_group_with_a_larger_share() -> None:
    fleet = team(2, LAB[0], LAB[1]._replace(share=0.8), LAB[2]._replace(share=0.2), *LAB[3:])
    fleet.add("a", [], [0, 1], demand=1000, user="ann", group="vision")  # type: ignore[arg-type]
    names = [f"b{number}" for number in range(4)]
    for name in names:
        fleet.add(name, [], [0, 1], demand=100, user="bob", group="nlp")  # type: ignore[arg-type]
    starved = 6 * fleet.state.limits.aging_s + 1.0
    for part in (0.3, 0.5, 0.7, 0.9):
        fleet.carry_out(sound(fleet, part * starved), part * starved)
    assert len(fleet.state.pipelines["a"].awake) == 2, "all of nlp is due less than half a GPU"
    fleet.carry_out(sound(fleet, starved), starved)
    served = [rank for name in names for rank in fleet.state.pipelines[name].awake.values()]
    assert served and all(rank.guaranteed for rank in served), "the shares let no job starve"


def limited(most: float, **options: Any) -> Fleet:
    fleet = team(4, QuotaNode("group nlp", limit=most), QuotaNode("user bob", "group nlp"))
    fleet.add("b", [0, 1], [0, 1, 2, 3], demand=100, user="bob", group="nlp", **options)  # type: ignore[arg-type]
    return fleet


def test_a_limit_is_kept_and_training_has_ranks_of_its_group_make_way() -> None:
    fleet = limited(2)
    result = sound(fleet)
    assert len(result.expands) == 2
    fleet.wake("b", 2, 3)
    fleet.want("b")
    result = sound(fleet)
    assert not result.grants and {(s.pipeline, s.rank) for s in result.shrinks} == {("b", 2), ("b", 3)}
    assert any(
        "waits for actor_train: the 2 slots of the limit of group nlp are taken" in line for line in explain(result)
    )
    fleet.carry_out(result, 100.0)
    assert [grant.gpus for grant in sound(fleet, 101.0).grants] == [(0, 1)]
    fleet.hold("b", at=101.0)
    assert sound(fleet, 102.0).expands == [], "what it trains on counts"


def test_nothing_makes_way_for_a_limit_that_training_of_the_group_fills() -> None:
    fleet = limited(3)
    fleet.add("c", [2, 3], [0, 1, 2, 3], demand=100, user="bob", group="nlp")  # type: ignore[arg-type]
    fleet.hold("c")
    fleet.wake("b", 0)
    fleet.want("b")
    result = sound(fleet)
    assert not result.grants and not result.shrinks, "one more than the limit, and only training could make room"
    fleet.release("c", at=100.0)
    assert sound(fleet, 101.0).grants


def test_a_limit_that_is_lowered_sends_ranks_to_sleep_and_guaranteed_ones_too() -> None:
    fleet = limited(4)
    fleet.wake("b", 0, 1, 2, 3, guaranteed=True)
    fleet.state.apply(QuotasSet((QuotaNode("group nlp", limit=1.0), QuotaNode("user bob", "group nlp")), 60.0), 1.0)
    result = sound(fleet)
    assert len(result.shrinks) == 3 and not result.expands
    assert any("group nlp has more than the 1 slots of its limit" in line for line in explain(result))


def test_a_pipeline_without_a_rank_gets_one_of_its_limit_when_a_slice_has_ended() -> None:
    fleet = limited(2)
    fleet.add("c", [], [0, 1, 2, 3], demand=100, user="bob", group="nlp")  # type: ignore[arg-type]
    fleet.wake("b", 2, 3, at=99.0)
    assert sound(fleet, 100.0).empty, "in their slices"
    result = sound(fleet, 200.0)
    # One of b's GPUs is taken over, since that needs no room.
    assert len(result.shrinks) == 1 and [e.pipeline for e in result.expands] == ["c"]
    assert result.expands[0].gpus[0] in (2, 3)


def test_a_high_request_comes_first_is_passed_by_none_and_an_old_one_comes_before_it() -> None:
    fleet = Fleet(2, high_lead_s=600.0)
    for name, options in (("low", {}), ("high", {"priority": "high"}), ("holds", {})):
        fleet.add(name, [0], [0, 1], **options)  # type: ignore[arg-type]
    fleet.want("low", at=100.0)
    fleet.want("high", at=650.0)
    assert [grant.pipeline for grant in sound(fleet, 660.0).grants] == ["high"]
    fleet.state.pipelines["low"].wants["actor_train"].since = 40.0
    assert [grant.pipeline for grant in sound(fleet, 660.0).grants] == ["low"], "it has waited for longer than the lead"
    fleet = Fleet(4)
    fleet.add("wide", [0, 1], [0, 1, 2, 3], priority="high")  # type: ignore[arg-type]
    fleet.add("short", [0], [0, 1, 2, 3])
    fleet.add("holder", [1], [0, 1, 2, 3])
    fleet.hold("holder", at=95.0)
    fleet.state.pipelines["holder"].hold_estimates[Priority.ACTOR_TRAINING] = 60.0
    fleet.state.pipelines["short"].hold_estimates[Priority.ACTOR_TRAINING] = 5.0
    fleet.want("wide", at=10.0)
    fleet.want("short", at=11.0)
    assert sound(fleet).grants == []


def test_a_scavenger_has_what_is_left_and_gives_it_at_once() -> None:
    fleet = Fleet(4)
    fleet.add("gaps", [], [0, 1, 2, 3], demand=100, priority="scavenger")  # type: ignore[arg-type]
    fleet.add("a", [0], [0, 1], demand=1)
    result = sound(fleet)
    assert {e.pipeline for e in result.expands} == {"a", "gaps"} and len(result.expands) == 4 - 1
    assert any("as a scavenger it gives them to any job that wants them" in line for line in explain(result))
    assert 0 not in {gpu for e in result.expands if e.pipeline == "gaps" for gpu in e.gpus}, "a may train there soon"
    fleet.carry_out(result, 100.0)
    fleet.demand("a", 100, at=100.0)
    fleet.wake("gaps", 0, at=100.0)
    result = sound(fleet, 100.1)
    assert {(s.pipeline, s.rank) for s in result.shrinks} <= {("gaps", 0), ("gaps", 1)} and result.shrinks
    assert any("gaps runs in gaps, and a can use the GPUs" in line for line in explain(result))
    starving = Fleet(2)
    starving.add("a", [], [0, 1], demand=100)
    starving.add("gaps", [], [0, 1], demand=100, priority="scavenger")  # type: ignore[arg-type]
    starving.wake("a", 0, 1)
    assert sound(starving, 1e6).empty, "it is never waited for"
    with pytest.raises(RegistrationError, match="priority=scavenger is for jobs that do not train"):
        starving.add("trains", [0], [0, 1], priority="scavenger")  # type: ignore[arg-type]


def test_a_scavenger_has_the_gpus_of_ranks_that_have_been_idle_for_as_long_as_it_needs_to_rise() -> None:
    fleet = Fleet(3)
    fleet.add("a", [0], [0, 1, 2], demand=8)
    fleet.add("b", [], [2], demand=8)
    fleet.wake("a", 1)
    fleet.state.pipelines["a"].start_s = 20.0
    fleet.wake("b", 0)
    fleet.hold("a", at=31.0)
    fleet.add("gaps", [], [1, 2], demand=100, priority="scavenger")  # type: ignore[arg-type]
    assert sound(fleet, 90.0).empty, "a has work"
    fleet.demand("a", 8, done=8, at=90.0)
    waits = sound(fleet, 109.0)
    assert waits.empty and waits.wake_at == 110.0, "its engine may take 20 s to rise, as that of a did"
    result = sound(fleet, 110.0)
    assert [(s.pipeline, s.rank) for s in result.shrinks] == [("a", 1)], "b has work"
    assert [(e.pipeline, e.rank) for e in result.expands] == [("gaps", 0)]
    assert "rank 1 of a goes to sleep: a has had nothing to generate for 20.0 s, and gaps runs in gaps." in set(
        explain(result, 110.0)
    )
    fleet.carry_out(result, 110.0)
    fleet.release("a", at=115.0)
    fleet.demand("a", 16, done=8, at=120.0)
    back = sound(fleet, 120.0)
    assert ("gaps", 0) in {(s.pipeline, s.rank) for s in back.shrinks}
    assert ("a", 1) in {(e.pipeline, e.rank) for e in back.expands}


def test_a_scavenger_takes_no_more_idle_ranks_than_its_users_limit_allows() -> None:
    fleet = team(4, QuotaNode("user bob", "", limit=2))
    fleet.add("idle", [], [0, 1, 2, 3], demand=8, user="ann")  # type: ignore[arg-type]
    fleet.wake("idle", 0, 1, 2, 3)
    fleet.demand("idle", 8, done=8, at=10.0)
    fleet.add("gaps", [], [0, 1, 2, 3], demand=100, user="bob", priority="scavenger")  # type: ignore[arg-type]
    result = sound(fleet, 100.0)
    assert len(result.expands) == len(result.shrinks) == 2


# -- the checker -----------------------------------------------------------------------------------------------------


def crowd(horizon_s: float) -> dict[str, Any]:
    infer = list(range(8))
    job = {"infer": infer, "steps": 8, "groups": 32, "staleness": 1, "tokens": {"median": 100}}
    jobs = [
        {"name": "a", "user": "ann", "train": [0], **job},
        {"name": "b", "user": "bob", "train": [1], **job, "groups": 64},
        {"name": "c", "user": "cyd", "train": [0, 2], **job, "groups": 64, "priority": "high"},
        {"name": "d", "user": "cyd", "train": [0, 1], **job},
        {"name": "s", "user": "ann", "train": [], **job, "staleness": 0, "priority": "scavenger"},
    ]
    groups = {"vision": {"share": 0.75}, "nlp": {"share": 0.25, "limit": 5.0}}
    users = {"ann": {"parent": "vision"}, "bob": {"parent": "nlp"}, "cyd": {"parent": "nlp", "limit": 3.0}}
    team = {"groups": groups, "users": users, "half_life_hours": 0.05}
    return {"pool": {"gpus_per_node": 8}, "jobs": jobs, **team, "costs": {"start_s": 1.0}, "horizon_s": horizon_s}


def simulated(seed: int, horizon_s: float = 2000.0) -> list[Entry]:
    records: list[MemoryRecord] = []
    world = World(
        parse_scenario(crowd(horizon_s)), seed, lambda clock: records.append(MemoryRecord(clock=clock)) or records[0]
    )
    world.run()
    return records[0].entries


def test_a_crowd_with_quotas_and_priorities_keeps_every_invariant() -> None:
    entries = simulated(0)
    assert check(entries) == [], "and so all jobs have ended"
    weighed = [entry.event for entry in entries if isinstance(entry.event, UseWeighed)]
    assert len(weighed) > 3 and weighed[-1].use["group nlp"] > 0


def _no_room(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PlanState, "has_room", lambda self, name, gpus: True)


def _by_work_alone(patch: pytest.MonkeyPatch) -> None:
    def flat(budget: float, leaves: Any, quotas: Quotas, use: dict[str, float]) -> Division:
        wants = [one for one in leaves if one.claimant.claim]
        level = budget / sum(one.claimant.claim for one in wants)
        shares = {one.claimant.name: one.claimant.claim * level for one in wants}
        return Division(shares, shares)

    patch.setattr(apportionment, "divide_by_quotas", flat)


def _waits_like_others(patch: pytest.MonkeyPatch) -> None:
    sound_gaps = apportionment._in_gaps

    def in_gaps(plan_state: PlanState, *of: Any) -> Any:
        plan_state.reserved.clear()
        return sound_gaps(plan_state, *of)

    patch.setattr(apportionment, "_in_gaps", in_gaps)


def _works_or_not(patch: pytest.MonkeyPatch) -> None:
    sound_gaps = apportionment._in_gaps

    def in_gaps(plan_state: PlanState, result: Plan, name: str, idle: Any) -> Any:
        return sound_gaps(plan_state, result, name, {*plan_state.pipelines})

    patch.setattr(apportionment, "_in_gaps", in_gaps)
    patch.setattr(apportionment, "_idle_from", lambda *of: -math.inf)


def _use_is_made_up(patch: pytest.MonkeyPatch) -> None:
    from nemo_rl.time_sharing.log.quota_use import QuotaUse

    patch.setattr(QuotaUse, "weighed", lambda self, now: {"group nlp": 7.0})


def _no_lead(patch: pytest.MonkeyPatch) -> None:
    sound_queue = planner.queue

    def queue(snapshot: Snapshot) -> list[planner.QueueItem]:
        lead = snapshot.limits.high_lead_s
        high = {name for name, one in snapshot.pipelines.items() if one.spec.is_high}
        items = [item._replace(key=item.key + lead) if item.name in high else item for item in sound_queue(snapshot)]
        return sorted(items, key=lambda item: item[:3])

    patch.setattr(planner, "queue", queue)


@pytest.mark.parametrize(
    ("spoil", "said", "horizon_s"),
    [
        (_no_room, "would have", 90.0),
        (_by_work_alone, "its share of what both have", 400.0),
        (_waits_like_others, "a scavenger, is to wake on GPUs that", 90.0),
        (_works_or_not, "has or just had work, makes way for", 90.0),
        (_use_is_made_up, "is said to have had", 90.0),
        (_no_lead, "is overtaken by", 90.0),
    ],
)
def test_what_breaks_a_quota_or_a_priority_is_found_in_the_record(
    spoil: Callable[[pytest.MonkeyPatch], None], said: str, horizon_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch)
    for seed in range(6):
        if any(said in violation.message for violation in check(simulated(seed, horizon_s))):
            return
    pytest.fail("not found")
