"""Pipelines that hold one fixed cluster while they wait for another never end up waiting for each other."""

from __future__ import annotations

import random

import pytest
from fleet import Fleet
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.time_sharing.agents.agent import Agent
from nemo_rl.time_sharing.agents.agent_parts import ProtocolError
from nemo_rl.time_sharing.planning.hold_graph import HoldGraph
from nemo_rl.time_sharing.planning.plan import explain
from nemo_rl.time_sharing.protocol.types import ACTOR_TRAIN, CRITIC, FIXED_CLUSTERS, REFERENCE, Command, Priority, Verb
from nemo_rl.utils.record import NullRecord

PRIORITIES = {ACTOR_TRAIN: Priority.ACTOR_TRAINING, CRITIC: Priority.CRITIC_TRAINING, REFERENCE: Priority.REF_LOG_PROBS}
GPUS, ROUNDS = 6, 4


def crossed() -> Fleet:
    """`a` holds its trainer's GPU and will want its critic's, which is where `b` trains; and the other way round."""
    fleet = Fleet(4)
    fleet.add_clusters("a", {ACTOR_TRAIN: [0], CRITIC: [1]})
    fleet.add_clusters("b", {ACTOR_TRAIN: [1], CRITIC: [0]})
    fleet.want("a", at=1.0)
    fleet.want("b", at=2.0)
    return fleet


def test_the_second_of_two_that_could_block_each_other_waits() -> None:
    fleet = crossed()
    plan = fleet.plan()
    assert [grant.pipeline for grant in plan.grants] == ["a"]
    assert any(
        "b waits for actor_train: a holds GPUs that this pipeline may want next" in line for line in explain(plan)
    )
    fleet.carry_out(plan, 3.0)
    fleet.want("a", Priority.CRITIC_TRAINING, cluster=CRITIC, at=4.0)
    plan = fleet.plan()
    assert [(grant.pipeline, grant.cluster) for grant in plan.grants] == [("a", CRITIC)], (
        "b is ahead in the queue, but waits for a"
    )
    fleet.carry_out(plan, 5.0)
    fleet.release("a", at=6.0)
    fleet.release("a", CRITIC, at=6.0)
    assert [grant.pipeline for grant in fleet.plan().grants] == ["b"]


def test_without_the_rule_both_hold_what_the_other_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HoldGraph, "closes_cycle", lambda self, name, gpus: None)
    fleet = crossed()
    fleet.carry_out(fleet.plan(), 3.0)
    for name in ("a", "b"):
        fleet.want(name, Priority.CRITIC_TRAINING, cluster=CRITIC, at=4.0)
    assert fleet.plan(10_000.0).empty


def test_who_waits_for_a_holder_does_not_reserve_against_it() -> None:
    fleet = Fleet(4)
    fleet.add_clusters("wide", {ACTOR_TRAIN: [0, 1]})
    fleet.add_clusters("holder", {ACTOR_TRAIN: [0], REFERENCE: [1]})
    fleet.hold("holder")
    fleet.want("wide", Priority.INITIALIZATION, at=1.0)
    fleet.want("holder", Priority.REF_LOG_PROBS, cluster=REFERENCE, at=50.0)
    assert [(grant.pipeline, grant.cluster) for grant in fleet.plan().grants] == [("holder", REFERENCE)]


def test_a_pipeline_cannot_ask_for_gpus_that_another_of_its_clusters_holds() -> None:
    fleet = Fleet(2)
    fleet.add_clusters("a", {ACTOR_TRAIN: [0], REFERENCE: [0]})
    agent = Agent(fleet.state.pipelines["a"].topology, 0, _Deaf(), NullRecord())
    request = agent.want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 0, 0.0)
    agent.command(
        Command(
            "1.1",
            1,
            "a",
            0,
            Verb.GRANT,
            epoch=1,
            cluster=ACTOR_TRAIN,
            gpus=(0,),
            priority=Priority.ACTOR_TRAINING,
            step=0,
            request=request,
        )
    )
    with pytest.raises(ProtocolError, match="release actor_train before asking"):
        agent.want(REFERENCE, Priority.REF_LOG_PROBS, 0, 0.0)
    agent.release(ACTOR_TRAIN)
    agent.want(REFERENCE, Priority.REF_LOG_PROBS, 0, 0.0)


class _Deaf:
    def __getattr__(self, name: str) -> object:
        return lambda *arguments: None


@st.composite
def fleets(draw: st.DrawFn) -> tuple[Fleet, dict[str, list[list[str]]]]:
    """Pipelines with up to three fixed clusters on random GPUs, and the clusters that each takes one after the other,
    holding all, per round.
    """
    fleet, scripts = Fleet(GPUS), {}
    for number in range(draw(st.integers(2, 5))):
        gpus = draw(st.permutations(range(GPUS)))
        names = draw(st.permutations(FIXED_CLUSTERS))[: draw(st.integers(1, 3))]
        cuts = sorted(draw(st.lists(st.integers(1, GPUS), min_size=len(names), max_size=len(names), unique=True)))
        places = {name: sorted(gpus[low:high]) for name, low, high in zip(names, [0, *cuts], cuts, strict=False)}
        name = f"p{number}"
        fleet.add_clusters(name, places)
        scripts[name] = [draw(st.permutations(names)) for _ in range(ROUNDS)]
    return fleet, scripts


@given(case=fleets(), seed=st.integers(0, 1 << 20))
@settings(max_examples=150)
def test_whatever_is_held_while_more_is_wanted_everybody_gets_through(
    case: tuple[Fleet, dict[str, list[list[str]]]], seed: int
) -> None:
    fleet, scripts = case
    rng = random.Random(seed)
    now, idle = 0.0, 0
    while any(scripts.values()):
        now += 1.0
        moved = False
        for name, rounds in scripts.items():
            pipeline = fleet.state.pipelines[name]
            if not rounds or pipeline.wants or rng.random() < 0.3:
                continue
            moved = True
            missing = [cluster for cluster in rounds[0] if cluster not in pipeline.held]
            if missing:
                fleet.want(name, PRIORITIES[missing[0]], cluster=missing[0], at=now)
            else:
                for cluster in list(pipeline.held):
                    fleet.release(name, cluster, at=now)
                rounds.pop(0)
        plan = fleet.plan(now)
        fleet.carry_out(plan, now)
        idle = 0 if moved or plan.grants else idle + 1
        assert idle < 20, (
            f"everybody waits: { {n: (sorted(p.held), sorted(p.wants)) for n, p in fleet.state.pipelines.items()} }"
        )
