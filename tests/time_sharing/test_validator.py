"""The plan validator: every rule refuses a plan that breaks it and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from fleet import Fleet

from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.log.state import Claim, Lease
from nemo_rl.time_sharing.planning.plan import Expand, Grant, Plan, PriorityChange, Shrink, Snapshot
from nemo_rl.time_sharing.planning.validator import validate
from nemo_rl.time_sharing.protocol.types import ACTOR_INFER, ACTOR_TRAIN, Phase, Priority
from nemo_rl.time_sharing.simulation.random_scenarios import random_scenario
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.utils.record import MemoryRecord

WHY = ("free",)


def fleet() -> Fleet:
    """`a` trains on 0, 1 and generates on 0-3 in ranks of one; `w` generates on 4-7 in ranks of two; `b` holds its
    training GPU 8; `c` generates on 1, 2.
    """
    made = Fleet(10)
    made.add("a", [0, 1], [0, 1, 2, 3], demand=100)
    made.add("w", [4], [4, 5, 6, 7], tp=2, demand=100)
    made.add("b", [8], [8, 9], demand=100)
    made.add("c", [], [1, 2], demand=100)
    made.want("a")
    made.wake("a", 0, 2)
    made.wake("w", 0)
    made.hold("b", priority=Priority.OLD_LOG_PROBS)
    made.want("b")
    return made


def grant(
    gpus: tuple[int, ...] = (0, 1),
    *,
    name: str = "a",
    cluster: str = ACTOR_TRAIN,
    request: int = 1,
    priority: Priority = Priority.ACTOR_TRAINING,
) -> Plan:
    return Plan(grants=[Grant(name, cluster, request, priority, gpus, (), WHY)], shrinks=[shrink()])


def shrink(name: str = "a", rank: int = 0) -> Shrink:
    return Shrink(name, rank, WHY)


def expand(name: str, rank: int, *gpus: int) -> Expand:
    return Expand(name, rank, gpus, False, WHY)


def ledger(change: Callable[[Fleet], object], plan: Plan) -> tuple[Fleet, Plan]:
    made = fleet()
    change(made)
    return made, plan


def test_a_sound_plan_passes() -> None:
    plan = grant()
    plan.expands += [expand("w", 1, 6, 7), expand("b", 1, 9)]
    plan.priority_changes.append(PriorityChange("b", ACTOR_TRAIN, 2, Priority.REF_LOG_PROBS, WHY))
    assert validate(Snapshot.of(fleet().state), plan) == []


BROKEN: dict[str, list[Plan]] = {
    "rule 1": [Plan(expands=[expand("w", 1, 6, 7)] * 2), Plan(grants=grant().grants * 2, shrinks=[shrink()])],
    "rule 2": [
        grant((0, 1, 2, 3), cluster=ACTOR_INFER, priority=Priority.INITIALIZATION),
        grant(priority=Priority.GENERATION),
    ],
    "rule 3": [
        grant(request=7),
        grant(priority=Priority.CRITIC_TRAINING),
        grant((8,), name="b", request=2),
        Plan(priority_changes=[PriorityChange("a", ACTOR_TRAIN, 1, Priority.CRITIC_TRAINING, WHY)]),
    ],
    "rule 4": [Plan(grants=grant().grants), Plan(expands=[expand("b", 0, 8)])],
    "rule 5": [
        Plan(shrinks=[shrink(rank=1)]),
        Plan(expands=[expand("w", 0, 4, 5)]),
        Plan(shrinks=[shrink()], expands=[expand("a", 0, 0)]),
    ],
    "rule 6": [
        grant((0,)),
        Plan(expands=[expand("w", 1, 6)]),
        Plan(grants=grant().grants, shrinks=[shrink()], expands=[expand("c", 0, 1)]),
    ],
    "rule 7": [Plan(expands=[expand("w", 2, 8, 9)]), Plan(shrinks=[shrink(rank=-1)])],
    "rule 11": [Plan(expands=[expand("nobody", 0, 9)]), grant(name="nobody"), grant(cluster="critic")],
    "rule 12": [Plan(expands=[expand("w", 1, 7, 6)]), Plan(expands=[expand("b", 1, 3)])],
    "rule 13": [Plan(shrinks=[shrink()])],
    "rule 14": [Plan(grants=grant().grants, shrinks=[shrink()], expands=[expand("a", 3, 3)])],
}


@pytest.mark.parametrize(
    ("rule", "number"), [(rule, number) for rule, plans in BROKEN.items() for number in range(len(plans))]
)
def test_a_plan_that_breaks_a_rule_is_refused_by_it(rule: str, number: int) -> None:
    problems = validate(Snapshot.of(fleet().state), BROKEN[rule][number])
    assert any(problem.startswith(f"{rule}:") for problem in problems), problems


def test_rules_about_the_state_of_a_pipeline() -> None:
    def leaves(made: Fleet) -> None:
        made.state.pipelines["a"].leaving = True

    def fenced(made: Fleet) -> None:
        made.state.pipelines["a"].fenced = True

    def rises(made: Fleet) -> None:
        made.wake("a", 3, phase=Phase.RISING)

    def claimed(made: Fleet) -> None:
        made.state.claimed[1] = Claim(1, "w", ACTOR_INFER, 0, 0, (1,))

    def quarantined(made: Fleet) -> None:
        made.state.quarantined.add(1)

    cases = [(leaves, "rule 11"), (fenced, "rule 11"), (rises, "rule 14"), (claimed, "rule 4"), (quarantined, "rule 4")]
    for change, rule in cases:
        made, plan = ledger(change, grant())
        assert any(
            problem.startswith(f"{rule}:") and re.search(r"\ba\b", problem)
            for problem in validate(Snapshot.of(made.state), plan)
        ), rule


def test_a_ledger_that_contradicts_itself_is_named() -> None:
    def owned_by_another(made: Fleet) -> None:
        made.state.owner[2] = Lease("w", ACTOR_INFER, 1, 99)

    def held_twice(made: Fleet) -> None:
        made.state.pipelines["w"].awake[1] = made.state.pipelines["w"].awake[0]
        made.state.pipelines["b"].held[ACTOR_TRAIN].gpus = (6,)

    def awake_twice(made: Fleet) -> None:
        made.state.pipelines["c"].awake[1] = made.state.pipelines["a"].awake[2]

    both = Plan(shrinks=[shrink(rank=2), shrink("c", 1)])
    for change, rule, ordered in (
        (owned_by_another, "rule 8", grant()),
        (held_twice, "rule 10", grant()),
        (awake_twice, "rule 10", both),
    ):
        made, plan = ledger(change, ordered)
        snapshot = Snapshot.of(made.state)
        assert any(problem.startswith(f"{rule}:") for problem in validate(snapshot, plan))
    assert any(problem.startswith("rule 9: GPU 2") for problem in validate(snapshot, both))


def test_a_simulated_plan_that_breaks_a_rule_is_reported_by_the_checker() -> None:
    world = World(
        random_scenario(3), 3, lambda clock: MemoryRecord(clock=clock), validator=lambda snapshot, plan: ["rule 1: b"]
    )
    world.run(max_events=60)
    found = check(world.entries, ended=False)
    assert found and {violation.message for violation in found} == {"a plan broke the ledger: rule 1: b"}
