"""Many adapters in real engines: log-probabilities of the merged model, versions, and rebuilt shards."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.models.generation.interfaces import GenerationError, ShardStateError
from nemo_rl.models.multi_lora.engine import AdapterTable, HeldAdapter
from tests.models.multi_lora_engines import engines_and_policy


def _held(table: AdapterTable, name: str, version: int) -> HeldAdapter:
    return HeldAdapter(name, version, table.number(), f"/folder/{name}/{version}")


def test_a_version_stays_while_a_request_uses_it_and_no_longer() -> None:
    table = AdapterTable()
    first = _held(table, "one", 0)
    assert table.put(first) is None and table.bind("r1", "one") == first
    second = _held(table, "one", 1)
    assert table.put(second) is None and table.bind("r2", "one") == second
    assert table.release("r1") == first and table.release("r2") is None
    assert table.remove("one") == second and table.remove("one") is None
    with pytest.raises(ShardStateError, match="has no adapter one; it has none"):
        table.bind("r3", "one")
    third = _held(table, "one", 2)
    table.put(third)
    table.bind("r4", "one")
    assert table.remove("one") is None and table.release("r4") == third
    assert len({first.number, second.number, third.number}) == 3


_MOVES = st.lists(
    st.tuples(st.sampled_from(["put", "bind", "release", "remove"]), st.sampled_from("abc"), st.integers(0, 9)),
    max_size=60,
)


@pytest.mark.slow
@given(moves=_MOVES)
@settings(max_examples=200)
def test_no_schedule_mixes_versions_or_drops_one_in_use(moves: list[tuple[str, str, int]]) -> None:
    table, newest, running, gone = AdapterTable(), {}, {}, set()
    for number, (move, name, choice) in enumerate(moves):
        dropped: list[HeldAdapter | None] = []
        if move == "put":
            newest[name] = _held(table, name, number)
            dropped.append(table.put(newest[name]))
        elif move == "bind" and name in newest:
            running[f"r{number}"] = table.bind(f"r{number}", name)
            assert running[f"r{number}"] == newest[name]
        elif move == "release" and running:
            request_id = sorted(running)[choice % len(running)]
            assert table.used[request_id] == running.pop(request_id)
            dropped.append(table.release(request_id))
        elif move == "remove":
            newest.pop(name, None)
            dropped.append(table.remove(name))
        for held in dropped:
            if held is not None:
                assert held not in running.values() and held not in newest.values() and held not in gone
                gone.add(held)
    for request_id in list(running):
        running.pop(request_id)
        held = table.release(request_id)
        gone |= {held} if held is not None else set()
    for name in list(newest):
        gone.add(table.remove(name))
    # Every version that ever came was dropped once.
    assert len(gone - {None}) == sum(move == "put" for move, _, _ in moves)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.vllm
def test_engines_draw_as_the_merged_models_of_their_adapters_and_keep_them(tiny_model: Path, ray_session: None) -> None:
    with engines_and_policy(tiny_model) as both:
        both.fill(0, "one", dim=8)
        both.fill(1, "two", dim=4)
        for name in ("one", "two"):
            both.bring(name, 0)
        requests = both.requests(["one", "two"])
        results = both.run(requests)
        both.check(requests, results, {"one": 0, "two": 0})
        # Only the adapter that stepped is sent, and the other's tokens stay as they were.
        both.train("one")
        both.bring("one", 1)
        again = both.run(requests)
        both.check(requests, again, {"one": 1, "two": 0})
        for request, before, after in zip(requests, results, again, strict=True):
            same = before.logprobs == after.logprobs
            assert same == (request.adapter != "one"), request.adapter
        assert both.versions() == [{"one": 1, "two": 0}]
        # A sleep and a wake, and a new engine, bring all adapters back.
        both.generation.sleep_partial([0], 1)
        both.generation.wake_up_partial([0])
        assert [result.logprobs for result in both.run(requests)] == [result.logprobs for result in again]
        both.lose_engine()
        after = both.run(requests)
        assert [result.logprobs for result in after] == [result.logprobs for result in again]
        assert both.versions() == [{"one": 1, "two": 0}]
        both.engines.remove("two")
        for name, said in (("two", "has no adapter two"), ("", "names no adapter")):
            with pytest.raises(GenerationError, match=said):
                both.run(both.requests([name], each=1))
