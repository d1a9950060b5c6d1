"""Counters mean after a restart what they meant before it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.algorithms.grpo.run import GRPOState
from nemo_rl.algorithms.resume import LOADER_FILE, Resume, RunState
from nemo_rl.algorithms.sft import driver
from nemo_rl.algorithms.sft.driver import SFTState
from nemo_rl.data.loader import make_loader
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

ROWS = 24


@pytest.mark.parametrize("kind", [GRPOState, SFTState])
@given(st.lists(st.integers(0, 10**6), min_size=5, max_size=5, unique=True))
def test_a_state_comes_back_from_a_checkpoint_as_it_went_in(kind: type[RunState], numbers: list[int]) -> None:
    step, epoch, in_epoch, samples, tokens = numbers
    state = kind(step, epoch, in_epoch, samples, tokens, {"val_loss": 0.5} if kind is SFTState else {})
    info = json.loads(json.dumps(state.training_info()))
    again: Any = kind.from_training_info(info)  # type: ignore[attr-defined]
    before, after = vars(state), vars(again)
    assert {name: after[name] for name in before if name != "val_metrics"} == {
        name: value for name, value in before.items() if name != "val_metrics"
    }


def run_to_end(loader: Any, state: SFTState, epochs: int, batch: int, trained: list[int], stop: int = 10**6) -> None:
    """Drives SFT's own walk over the data, without a policy."""
    cfg = SimpleNamespace(max_num_epochs=epochs, max_num_steps=10**6)
    run: Any = SimpleNamespace(config=SimpleNamespace(sft=cfg), state=state, train_loader=loader)
    for rows in driver._batches(run):
        trained += rows["row"]
        state.step, state.step_in_epoch = state.step + 1, state.step_in_epoch + 1
        assert len(rows["row"]) == batch
        # The last step must know that it is the last: it saves and validates.
        is_last = state.epoch == epochs - 1 and (state.step_in_epoch + 1) * batch > ROWS
        assert driver._finished(run) == is_last
        if state.step == stop or is_last:
            return


def loader_of(batch: int) -> Any:
    rows = [{"row": row} for row in range(ROWS)]
    collate = lambda some: BatchedDataDict({"row": [one["row"] for one in some]})  # noqa: E731
    return make_loader(rows, batch, collate, shuffle=True, seed=3, drop_last=True)  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(
    before=st.sampled_from([2, 3, 4, 6, 8]),
    now=st.sampled_from([2, 3, 4, 6, 8]),
    stop=st.integers(1, 20),
    epochs=st.integers(1, 3),
)
def test_every_row_of_every_epoch_is_trained_once_whatever_the_batch_was_before(
    before: int, now: int, stop: int, epochs: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    first, state, trained = loader_of(before), SFTState(), list[int]()
    run_to_end(first, state, epochs, before, trained, stop)
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.save(first.state_dict(), folder / LOADER_FILE)
    again, resumed = loader_of(now), SFTState.from_training_info(json.loads(json.dumps(state.training_info())))
    resume = Resume(folder, {}, [], {"batch": []} if before != now else {}, rows_before=before)
    assert resume.restore_position(again, resumed, now)
    assert resumed.step_in_epoch == state.step_in_epoch * before // now
    over = state.epoch * (ROWS // before) + state.step_in_epoch >= epochs * (ROWS // before)
    if not over:
        run_to_end(again, resumed, epochs, now, trained)
    # At most the rest that fills no batch is left out of the epoch that the restart was in.
    counts = [trained.count(row) for row in range(ROWS)]
    assert max(counts) <= epochs
    assert sum(counts) > epochs * ROWS - max(now, before)
    if before == now:
        assert counts == [epochs] * ROWS


@given(st.integers(1, 5), st.integers(5, 8))
def test_filled_up_validation_batches_have_the_loss_of_their_own_rows(rows: int, wanted: int) -> None:
    batch = BatchedDataDict({"sample_mask": torch.ones(rows), "value": torch.arange(1, rows + 1)})
    whole = driver._filled(batch, wanted)
    assert whole.size == wanted and whole["value"][:rows].tolist() == batch["value"].tolist()
    assert whole["sample_mask"].tolist() == [1.0] * rows + [0.0] * (wanted - rows)
    assert batch["sample_mask"].tolist() == [1.0] * rows
