"""The store on the data plane, without actors: rows are owned by their step, handles are metas, and the same verbs
hold.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_rl.data_plane.client import StoredClient
from nemo_rl.data_plane.column_io import write_columns
from nemo_rl.data_plane.sharding import shard_meta_for_dp
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.data_plane_store import DataPlaneStore, StageRunner
from nemo_rl.experience.rollout_actor import ActorSources, RolloutActor
from nemo_rl.experience.rollout_source import Rollout
from nemo_rl.experience.sample_log import SampleFiles, sample_log_stage
from nemo_rl.experience.store import InProcessStore, RolloutColumns, SpentHandleError, StageOutput, TokenStage, mint_ids
from nemo_rl.models.policy.tq_policy import StoredColumns
from nemo_rl.utils.record import MemoryRecord
from nemo_rl.utils.record_events import StepBegun
from tests.experience.plane_in_process import plane_in_process


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> StoredClient:
    return plane_in_process(monkeypatch)


def batch(*lengths: int) -> BatchedDataDict[Any]:
    width = -(-max(lengths) // 4) * 4
    return BatchedDataDict(
        input_ids=torch.arange(len(lengths) * width).view(-1, width),
        input_lengths=torch.tensor(lengths),
        content=[f"text {n}" for n in lengths],
    )


def double(columns: BatchedDataDict[Any]) -> StageOutput:
    return StageOutput(
        {"advantages": columns["input_ids"] * 2.0},
        {"sum": columns["input_ids"].sum(-1), "width": torch.tensor(columns["input_ids"].shape[1:])},
    )


STAGE = TokenStage(double, ("input_ids", "content"), ("advantages",))


def test_the_verbs_mean_the_same_as_in_process(client: StoredClient) -> None:
    seen = []
    for store in (InProcessStore(0, 4), DataPlaneStore(client, 0, 4)):
        typed: Any = store
        with typed.step():
            one, two = typed.write(batch(3, 2, 5)), typed.write(batch(8, 1))
            kept = typed.concat([typed.select(one, [2, 0]), typed.select(two, [1])])
            kept = typed.update(kept, {"sample_mask": torch.tensor([1.0, 0.0, 1.0])})
            kept, rows = typed.apply(kept, STAGE)
            shown = typed.select_columns(kept, ["input_lengths", "advantages"])
            read = typed.read(shown, ["advantages", "input_lengths"])
            trained = [
                row[:n].tolist() for row, n in zip(read["advantages"], read["input_lengths"].tolist(), strict=True)
            ]
            seen.append((rows["width"].tolist(), read["advantages"].shape, read["input_lengths"].tolist(), trained))
            with pytest.raises(KeyError, match=r"columns \['prev_logprobs'\] were never written"):
                typed.select_columns(kept, ["prev_logprobs"])
            typed.clear(kept)
        typed.close()
    assert seen[0] == seen[1] and seen[0][0] == [8]
    assert client.list_samples("train") == {}


def test_masks_of_whole_numbers_travel_as_they_are(client: StoredClient) -> None:
    store = DataPlaneStore(client, 0, 4)
    with store.step():
        handle = store.update(store.write(batch(3, 2)), {"sample_mask": torch.tensor([1, 0])})
        mask = store.read(handle, ["sample_mask"])["sample_mask"]
        assert mask.dtype is torch.int64 and mask.tolist() == [1, 0]
        store.clear(handle)
    store.close()


def test_tags_go_where_rows_go_and_are_no_columns(client: StoredClient) -> None:
    seen = []
    for store in (InProcessStore(0, 4), DataPlaneStore(client, 0, 4)):
        typed: Any = store
        with typed.step():
            one, two = typed.write(batch(3, 2, 5)), typed.write(batch(8, 1))
            columns = typed.columns(one)
            one = typed.annotate(one, {"std": torch.tensor([0.1, 0.0, 1 / 3]), "turns": torch.tensor([1, 2, 3])})
            two = typed.annotate(two, {"std": torch.tensor([0.5, 0.7]), "turns": torch.tensor([4, 5])})
            kept = typed.concat([typed.select(one, [2, 0]), typed.select(two, [1])])
            assert typed.columns(one) == columns
            seen.append(
                (typed.tag(kept, "std").tolist(), typed.tag(kept, "turns").tolist(), typed.tag(kept, "std").dtype)
            )
            with pytest.raises(KeyError, match="tag 'baseline'"):
                typed.tag(kept, "baseline")
        typed.close()
    assert seen[0] == seen[1] and seen[0][0] == torch.tensor([1 / 3, 0.1, 0.7]).tolist()


VERBS = ["update", "replace", "annotate", "apply", "commit", "read", "tag", "select", "clear"]


def _outcome(store: Any, handle: Any, verb: str, number: int) -> tuple[Any, Any]:
    """What a verb gives on three rows: the handle from then on, and what a driver sees of it."""
    column = torch.full((3,), float(number))
    if verb in ("update", "replace"):
        return store.update(handle, {"rewards": column if verb == "update" else column * 2}), None
    if verb == "annotate":
        return store.annotate(handle, {"std": column}), None
    if verb == "apply":
        after, rows = store.apply(handle, STAGE)
        return after, rows["sum"].tolist()
    if verb == "commit":
        result: Any = BatchedDataDict(logprobs=column)
        if isinstance(store, DataPlaneStore):
            write_columns(store._client, handle, {"sample_mask": column})
            result = StoredColumns({"logprobs": "sample_mask"})
        return store.commit(handle, result, sample_mask="logprobs"), None
    if verb == "read":
        names = sorted(set(store.columns(handle)) - {"content"})
        read = store.read(handle, names)
        return handle, [(name, read[name].tolist()) for name in names]
    if verb == "tag":
        return handle, store.tag(handle, "std").tolist()
    if verb == "select":
        return store.select(handle, [0, 1, 2]), None
    store.clear(handle)
    return handle, None


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(program=st.lists(st.tuples(st.sampled_from(VERBS), st.booleans()), max_size=8))
def test_whoever_forgets_to_take_the_new_handle_hears_the_same_from_both_stores(
    client: StoredClient, program: list[tuple[str, bool]]
) -> None:
    seen = []
    for store in (InProcessStore(0, 4), DataPlaneStore(client, 0, 4)):
        said: list[Any] = []
        with store.step():
            handle: Any = store.write(batch(4, 4, 4))
            for number, (verb, rebinds) in enumerate(program):
                try:
                    after, shown = _outcome(store, handle, verb, number)
                except SpentHandleError as error:
                    said.append(str(error))
                except KeyError:
                    said.append("no such column or tag")
                else:
                    handle = after if rebinds else handle
                    said.append(shown)
        store.close()
        seen.append(said)
    assert seen[0] == seen[1]


def test_a_spent_handle_names_the_verb_that_gave_the_new_one() -> None:
    store = InProcessStore(0)
    handle = store.write(batch(3, 2))
    store.update(handle, {"rewards": torch.zeros(2)})
    with pytest.raises(SpentHandleError, match="spent by `update`: use the handle that `update` returned"):
        store.read(handle, ["input_ids"])
    assert "rewards" not in handle


def test_a_step_that_fails_leaves_no_row_and_touches_no_others(client: StoredClient) -> None:
    store = DataPlaneStore(client, 0)
    earlier = store.write(batch(2))
    with pytest.raises(ArithmeticError), store.step():
        handle = store.write(batch(3, 2))
        store.clear(store.select(handle, [0]))
        store.update(store.select(handle, [1]), {"sample_mask": torch.ones(1)})
        raise ArithmeticError("planted")
    assert list(client.list_samples("train")) == earlier.sample_ids
    store.clear(earlier)


def test_a_step_that_fails_with_the_data_plane_shows_its_own_error(
    client: StoredClient, caplog: pytest.LogCaptureFixture
) -> None:
    store = DataPlaneStore(client, 0)
    with pytest.raises(ArithmeticError), store.step():
        store.write(batch(3))
        client.close()
        raise ArithmeticError("planted")
    assert "rows_left" in caplog.text


def test_what_the_workers_stored_is_taken_over_under_the_name_it_has(client: StoredClient) -> None:
    store = DataPlaneStore(client, 0)
    handle = store.write(batch(2))
    committed = store.commit(handle, StoredColumns({"logprobs": "prev_logprobs"}), prev_logprobs="logprobs")
    assert "prev_logprobs" in (committed.fields or [])
    with pytest.raises(ValueError, match="stored 'logprobs' as 'prev_logprobs', the column 'other' was expected"):
        store.commit(committed, StoredColumns({"logprobs": "prev_logprobs"}), other="logprobs")


def test_row_ids_are_unique_and_tell_samples_of_a_prompt_together() -> None:
    ids = mint_ids([4, 4, 7, 4])
    assert len(set(ids)) == 4 and [identity.rpartition("_g")[2] for identity in ids] == ["0", "1", "0", "2"]
    assert len({identity.rpartition("_g")[0] for identity in ids}) == 2
    assert not set(ids) & set(mint_ids([4, 4, 7, 4]))


def test_the_stage_runner_writes_columns_and_gives_rows(client: StoredClient) -> None:
    store = DataPlaneStore(client, 0)
    handle = store.write(batch(2, 3))
    rows = StageRunner(client, {}).apply(handle, STAGE)
    assert rows["sum"].tolist() == [0 + 1, 4 + 5 + 6]
    assert client.get_padded(handle.sample_ids, "train", ["advantages"])["advantages"].tolist() == [
        [0.0, 2.0, 0.0],
        [8.0, 10.0, 12.0],
    ]


def test_what_passes_the_driver_does_not_grow_with_sequence_length(client: StoredClient) -> None:
    sizes = []
    for factor in (1, 4, 16):
        lengths = torch.full((64,), 1000 * factor)
        tokens = BatchedDataDict(
            input_ids=torch.zeros(64, 1000 * factor, dtype=torch.int64),
            input_lengths=lengths,
            content=["word " * 200 * factor] * 64,
        )
        source: Any = type(
            "Source", (), {"roll_out": lambda self, *_, t=tokens, n=lengths: Rollout(RolloutColumns(t, _rows(n)))}
        )()
        events = MemoryRecord()
        events.emit(StepBegun(1))
        rollout = RolloutActor(ActorSources({"train": source}, events), client, 8).rollout_to_tq(
            "train", BatchedDataDict(), None, 0
        )  # type: ignore[arg-type]
        assert [type(entry.event) for entry in rollout.events] == [StepBegun] and not events.entries
        store = DataPlaneStore(client, 0, 8)
        handle = store.write(rollout.columns.tokens)
        handle, rows = store.apply(handle, STAGE)
        shards, _ = shard_meta_for_dp(handle, dp_world=4)
        sizes.append(sum(len(pickle.dumps(value)) for value in (rollout, shards, rows)))
        store.clear(handle)
    assert max(sizes) < 1.01 * min(sizes)


def _rows(lengths: torch.Tensor) -> BatchedDataDict[Any]:
    return BatchedDataDict(prompt_number=torch.arange(len(lengths)) // 8, total_lengths=lengths)


def test_samples_that_cannot_be_written_are_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, files = InProcessStore(0), SampleFiles()
    handle = store.write(BatchedDataDict(content=["one", "two"], input_lengths=torch.tensor([1, 1])))
    for step in range(3):
        path = tmp_path / f"train_data_step{step}.jsonl"
        path.symlink_to("/dev/full")
        with files.best_effort():
            store.apply(handle, sample_log_stage(path, {"content": "content"}))
    store.close()
    (line,) = [entry.getMessage() for entry in caplog.records]
    assert "no space left on the disk" in line and "the run goes on" in line
