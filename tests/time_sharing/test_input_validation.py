"""What one pipeline says can cost that pipeline, never the others: requests, numbers and messages that make no sense,
and logs that hold such.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from bench import Bench

from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.protocol.topology import BadShare, Pool, RegistrationError, register
from nemo_rl.time_sharing.protocol.types import (
    ACTOR_INFER,
    ACTOR_TRAIN,
    Answer,
    Command,
    CommandOutcome,
    Demand,
    GivenBack,
    Held,
    Limits,
    Priority,
    Reply,
    Status,
    Verb,
    Want,
)

NOT_A_COUNT: list[Any] = [math.nan, math.inf, -1, 1.5, "5", None, True, 10**400, 10**5000]


def talk(bench: Bench, name: str, **fields: Any) -> Reply:
    """Like `Bench.status`, with the reply."""
    bench.seqs[name] = bench.seqs.get(name, 0) + 1
    reply = bench.scheduler.status(
        Status(name, bench.state.pipelines[name].incarnation, bench.seqs[name], term=bench.state.term, **fields),
        bench.now,
    )
    bench.settle()
    return reply


# Requests.


@pytest.mark.parametrize(
    "want",
    [
        Want(ACTOR_INFER, Priority.INITIALIZATION, 1, 0),
        Want(ACTOR_TRAIN, Priority.GENERATION, 1, 0),
        Want(ACTOR_INFER, Priority.GENERATION, 1, 0),
        Want(ACTOR_TRAIN, 1, 1, 0),  # type: ignore[arg-type]
        Want("critic", Priority.CRITIC_TRAINING, 1, 0),
    ],
)
def test_a_request_that_can_never_be_granted_is_refused_for_its_pipeline_alone(want: Want) -> None:
    bench = Bench(2)
    bench.register("odd", [0], [0, 1])
    reply = talk(bench, "odd", wants=(want,))
    assert (
        reply.registered
        and [ended.request for ended in reply.ended] == [1]
        and "cannot be requested" in reply.ended[0].reason
    )
    assert not bench.state.pipelines["odd"].wants
    assert bench.serves("good")
    # It may go on with a request that can be granted.
    epoch = bench.state.pipelines["good"].held[ACTOR_TRAIN].epoch
    bench.status("good", given_back=(GivenBack(ACTOR_TRAIN, epoch, 1),))
    bench.status("odd", wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 2, 0),))
    assert ACTOR_TRAIN in bench.state.pipelines["odd"].held


def test_an_inference_cluster_that_an_agent_says_it_holds_is_not_adopted() -> None:
    bench = Bench(2)
    bench.register("a", [0], [0, 1])
    again = Bench(2)
    again.scheduler.recover(bench.record.entries, bench.now)
    again.status("a", holds=(Held(ACTOR_INFER, 1 << 40, Priority.INITIALIZATION),))
    assert not again.state.pipelines["a"].held and again.serves("good")


# Numbers.


@pytest.mark.parametrize(
    "value", NOT_A_COUNT, ids=lambda value: str(value)[:8] if not isinstance(value, int) or value < 10**400 else "huge"
)
@pytest.mark.parametrize("field", ["target", "done", "unit"])
def test_a_demand_that_is_no_count_is_left_out_and_nobody_else_notices(field: str, value: Any) -> None:
    bench = Bench(2)
    bench.register("odd", [0], [0, 1])
    reply = talk(bench, "odd", demand=Demand(100, 0, 1, 1)._replace(**{field: value}))
    assert reply.registered and len(reply.refused) == 1 and f"demand {field}=" in reply.refused[0]
    assert bench.serves("good")
    again = Bench(2)
    again.scheduler.recover(bench.record.entries, bench.now)
    assert not again.state.pipelines["odd"].fenced


@pytest.mark.parametrize("field", ["weight", "min_share", "max_share", "staleness", "rank_batch"])
@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -1, "3", None, True, [1], 10**400, 1e308, 1e-320], ids=lambda value: str(value)[:8]
)
def test_a_registration_with_a_number_that_no_plan_could_use_is_refused(field: str, value: Any) -> None:
    mappings = {ACTOR_TRAIN: [0], ACTOR_INFER: [0, 1]}
    if field == "min_share" and value == 1e-320:
        value = 1.5
    if field == "staleness" and value is None:  # which is no bound
        value = 1.5
    with pytest.raises(BadShare, match=f"{field}="):
        register(
            Pool(1, 2),
            "p",
            "ns",
            dict.fromkeys(mappings, 1),
            mappings,
            **{"max_share": 1.0, field: value} | ({} if field != "max_share" else {"min_share": 0.5}),
        )


@pytest.mark.parametrize("value", [1.5, math.nan])
@pytest.mark.parametrize("field", ["staleness", "rank_batch"])
def test_a_registration_with_a_count_that_is_none_is_refused(field: str, value: float) -> None:
    with pytest.raises(BadShare, match=f"{field}={value} must be at least ., and a whole number"):
        register(Pool(1, 2), "p", "ns", {ACTOR_INFER: 1}, {ACTOR_INFER: [0, 1]}, **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("weight", [1e-6, 1, 1000])
def test_weights_up_to_a_thousand_are_admitted(weight: float) -> None:
    bench = Bench(2)
    bench.scheduler.register("heavy", "ns", {ACTOR_INFER: 1}, {ACTOR_INFER: [0, 1]}, 0.0, weight=weight)
    bench.register("light", [0], [0, 1])
    bench.status("heavy", demand=Demand(10**12, 0, 10**12, 1))
    bench.status("light", demand=Demand(1, 0, 1, 1))
    bench.settle(60.0)
    assert bench.phases("heavy")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"pipeline": None}, "id must be text"),
        ({"pipeline": 7}, "id must be text"),
        ({"namespace": 7}, "namespace=7 must be text"),
        ({"tps": [1]}, "cluster_tp_configs must map cluster names to values"),
        ({"tps": {1: 1}}, "cluster_tp_configs must map cluster names to values"),
        ({"tps": {ACTOR_INFER: 1.0}}, "tp=1.0 must be an integer"),
        ({"mappings": 3}, "cluster_device_mappings must map"),
        ({"mappings": {ACTOR_INFER: 3}}, "its device mapping is 3; expected a list"),
        ({"mappings": {ACTOR_INFER: "01"}}, "GPU ids are integers"),
        ({"incarnation": "1"}, "incarnation='1' must be a whole number"),
        ({"incarnation": -1}, "incarnation=-1 must be a whole number"),
    ],
)
def test_a_registration_of_the_wrong_types_is_a_registration_error(changed: dict[str, Any], message: str) -> None:
    bench = Bench(2)
    given: dict[str, Any] = {
        "pipeline": "p",
        "namespace": "ns",
        "tps": {ACTOR_INFER: 1},
        "mappings": {ACTOR_INFER: [0, 1]},
        "reading": 0.0,
        **changed,
    }
    with pytest.raises(RegistrationError, match=message):
        bench.scheduler.register(**given)
    assert not bench.state.pipelines


# Shapes.


@pytest.mark.parametrize(
    "fields",
    [
        {"term": 10**400},
        {"term": "1"},
        {"leaving": "yes"},
        {"wants": None},
        {"holds": ((ACTOR_TRAIN, 1, Priority.ACTOR_TRAINING),)},
        {"given_back": (GivenBack(ACTOR_TRAIN, "1", 0),)},  # type: ignore[arg-type]
        {"given_back": (GivenBack(ACTOR_TRAIN, 1, math.nan),)},  # type: ignore[arg-type]
        {"awake": ((0,),)},
        {"awake": (("0", 1),)},
        {"broken": ({},)},
    ],
)
def test_a_status_of_the_wrong_shape_is_not_taken_and_is_no_heartbeat(fields: dict[str, Any]) -> None:
    bench = Bench(2)
    bench.register("odd", [0], [0, 1])
    before = len(bench.record.entries)
    status = replace(Status("odd", 0, 5, term=bench.state.term), **fields)
    reply = bench.scheduler.status(status, bench.now)
    assert reply.registered and len(reply.refused) == 1
    assert len(bench.record.entries) == before
    bench.state.limits = Limits(lease_s=10.0, isolation_s=0.0, plan_interval_s=0.0)
    for _ in range(15):
        bench.settle(1.0)
        bench.scheduler.status(replace(status, seq=status.seq + 1), bench.now)
    assert "odd" not in bench.state.pipelines, "it says nothing that can be understood, so it is silent"
    assert bench.serves("good")


@pytest.mark.parametrize("name", [None, [], 3])
def test_a_status_of_nobody_is_told_that_it_is_not_registered(name: Any) -> None:
    assert not Bench(2).scheduler.status(Status(name, 0, 1), 0.0).registered


def _wake_of(bench: Bench) -> Command:
    bench.register("a", [0], [0, 1])
    bench.silent.add("a")
    bench.status("a", demand=Demand(1, 0, 1, 1))
    return next(command for command in bench.sent if command.verb is Verb.SERVE)


@pytest.mark.parametrize(
    "changed",
    [
        {"version": math.nan},
        {"version": "1"},
        {"seq": None},
        {"outcome": "done"},
        {"command": []},
        {"incarnation": None},
    ],
)
def test_an_answer_of_the_wrong_shape_is_not_taken(changed: dict[str, Any]) -> None:
    bench = Bench(2)
    wake = _wake_of(bench)
    before = len(bench.record.entries)
    bench.scheduler.answer(replace(Answer(wake.command, "a", 0, CommandOutcome.DONE), **changed), bench.now)
    assert len(bench.record.entries) == before and bench.phases("a") == {wake.rank: "rising"}


@pytest.mark.parametrize(("pipeline", "incarnation"), [("a", 1), ("b", 0)])
def test_an_answer_of_another_pipeline_or_incarnation_is_not_taken_for_the_one_that_was_asked(
    pipeline: str, incarnation: int
) -> None:
    bench = Bench(2)
    wake = _wake_of(bench)
    bench.scheduler.answer(Answer(wake.command, pipeline, incarnation, CommandOutcome.DONE), bench.now)
    assert bench.phases("a") == {wake.rank: "rising"}
    bench.scheduler.answer(Answer(wake.command, "a", 0, CommandOutcome.DONE), bench.now)
    assert bench.phases("a") == {wake.rank: "serving"}


# Bounded holds and waits.


def test_a_hold_longer_than_max_hold_s_ends_in_fencing() -> None:
    bench = Bench(2)
    bench.state.limits = Limits(lease_s=1e6, max_hold_s=20.0, plan_interval_s=0.0)
    for name in ("long", "next"):
        bench.register(name, [0], [0, 1])
        bench.status(name, wants=(Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 1, 0),))
    bench.settle(19.0)
    assert ACTOR_TRAIN in bench.state.pipelines["long"].held
    bench.settle(5.0)
    assert "long" not in bench.state.pipelines and ACTOR_TRAIN in bench.state.pipelines["next"].held
    fenced = [entry.event for entry in bench.record.entries if isinstance(entry.event, ev.Fenced)]
    assert [event.pipeline for event in fenced] == ["long"] and "max_hold_s=20" in fenced[0].reason


def _expired(bench: Bench) -> Want:
    """`late` waits for GPU 0, which `holder` has, until its request expires."""
    bench.state.limits = Limits(lease_s=1e6, request_s=20.0, plan_interval_s=0.0)
    want = Want(ACTOR_TRAIN, Priority.ACTOR_TRAINING, 1, 0)
    for name in ("holder", "late"):
        bench.register(name, [0], [0, 1])
        bench.status(name, wants=(want,))
    bench.settle(19.0)
    assert bench.state.pipelines["late"].wants
    bench.settle(5.0)
    assert not bench.state.pipelines["late"].wants
    return want


def test_an_expired_request_is_told_to_its_agent_until_it_asks_under_a_new_number() -> None:
    bench = Bench(2)
    want = _expired(bench)
    for _ in range(2):
        reply = talk(bench, "late", wants=(want,))
        assert [ended.request for ended in reply.ended] == [1] and "request_s=20" in reply.ended[0].reason
    reply = talk(bench, "late", wants=(want._replace(request=2),))
    assert not reply.ended and bench.state.pipelines["late"].wants
    epoch = bench.state.pipelines["holder"].held[ACTOR_TRAIN].epoch
    bench.status("holder", given_back=(GivenBack(ACTOR_TRAIN, epoch, 1),))
    assert ACTOR_TRAIN in bench.state.pipelines["late"].held


def test_a_new_scheduler_still_knows_which_requests_have_expired() -> None:
    bench = Bench(2)
    want = _expired(bench)
    again = Bench(2)
    again.seqs = bench.seqs
    again.scheduler.recover(bench.record.entries, bench.now)
    assert [ended.request for ended in talk(again, "late", wants=(want,)).ended] == [1]
