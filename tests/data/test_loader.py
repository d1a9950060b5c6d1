"""Loaders continue exactly where they stopped."""

from __future__ import annotations

import io
import multiprocessing
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.data.interfaces import DataError
from nemo_rl.data.loader import EpochBatches, MultipleLoaders, make_loader
from nemo_rl.distributed.batched_data_dict import BatchedDataDict


def collate(rows: Sequence[int]) -> BatchedDataDict[Any]:
    return BatchedDataDict(idx=torch.tensor(list(rows)))


def loader(
    rows: int = 23, batch_size: int = 4, num_workers: int = 0, shuffle: bool = True, drop_last: bool = True
) -> Any:
    return make_loader(
        list(range(rows)), batch_size, collate, shuffle=shuffle, seed=5, drop_last=drop_last, num_workers=num_workers
    )


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def batches(source: Any, epochs: int) -> list[list[int]]:
    return [batch["idx"].tolist() for _ in range(epochs) for batch in source]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 14))
def test_a_restored_loader_yields_what_the_first_would_have_yielded(stop_after: int) -> None:
    expected = batches(loader(), 4)
    first, seen = loader(), []
    while len(seen) < stop_after:
        for batch in first:
            seen.append(batch["idx"].tolist())
            if len(seen) == stop_after:
                break
    second = loader()
    second.load_state_dict(through_a_file(first.state_dict()))
    rest = batches(second, 4)
    assert seen == expected[:stop_after]
    assert rest[: len(expected) - stop_after] == expected[stop_after:]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(0, 5), st.integers(1, 9), st.integers(0, 3))
def test_an_epoch_that_goes_on_with_other_batches_or_another_seed_visits_every_row_once(
    size: int, stop_after: int, new_size: int, new_seed: int
) -> None:
    rows = list(range(23))
    first = make_loader(rows, size, collate, shuffle=True, seed=5, drop_last=False)
    seen: list[int] = []
    for number, batch in enumerate(first, start=1):
        seen += batch["idx"].tolist()
        if number >= stop_after:
            break
    if len(seen) == len(rows):
        return
    second = make_loader(rows, new_size, collate, shuffle=True, seed=new_seed, drop_last=False)
    second.load_state_dict(through_a_file(first.state_dict()))
    assert sorted(seen + [row for batch in second for row in batch["idx"].tolist()]) == rows


@pytest.mark.slow
@pytest.mark.parametrize("stop_after", [2, 5, 7])
def test_workers_that_read_ahead_do_not_lose_batches(stop_after: int) -> None:
    expected = batches(loader(), 3)
    first, seen = loader(num_workers=2), []
    while len(seen) < stop_after:
        for batch in first:
            seen.append(batch["idx"].tolist())
            if len(seen) == stop_after:
                state = through_a_file(first.state_dict())
                break
    second = loader(num_workers=2)
    second.load_state_dict(state)
    rest = batches(second, 3)
    assert seen + rest[: len(expected) - stop_after] == expected


@pytest.mark.slow
def test_a_worker_that_is_ended_at_the_exit_of_a_run_raises_nothing() -> None:
    iterator = iter(loader(num_workers=1))
    next(iterator)
    (worker,) = multiprocessing.active_children()
    worker.terminate()
    worker.join(timeout=60.0)
    assert worker.exitcode == 0


def test_every_epoch_visits_every_row_once_in_an_order_of_its_own() -> None:
    source = loader(rows=20)
    epochs = [[index for batch in batches(source, 1) for index in batch] for _ in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_validation_loaders_keep_the_order_and_the_last_batch() -> None:
    assert batches(loader(rows=5, batch_size=2, shuffle=False, drop_last=False), 1) == [[0, 1], [2, 3], [4]]


def test_too_little_data_is_refused() -> None:
    with pytest.raises(DataError, match="the dataset is empty"):
        loader(rows=0)
    with pytest.raises(DataError, match="the dataset has 3 rows, fewer than one batch of 4"):
        loader(rows=3)


@given(st.integers(1, 40), st.integers(1, 9), st.booleans())
def test_the_number_of_batches_is_what_comes_out(rows: int, size: int, drop_last: bool) -> None:
    order = EpochBatches(rows, size, True, 0, drop_last)
    assert len(list(order)) == len(order)


def multiple(custom: Any = None) -> MultipleLoaders:
    return MultipleLoaders(
        {
            "a": loader(rows=8),
            "b": make_loader(list(range(100, 120)), 4, collate, shuffle=True, seed=1, drop_last=True),
        },
        2,
        custom,
    )


def test_several_loaders_take_turns_for_ever_and_can_be_restored() -> None:
    source = multiple()
    seen = [next(source)["idx"].tolist() for _ in range(9)]
    assert all(max(batch[:4]) < 8 and min(batch[4:]) >= 100 for batch in seen)
    first = multiple()
    for _ in range(4):
        next(first)
    second = multiple()
    second.load_state_dict(through_a_file(first.state_dict()))
    assert [next(second)["idx"].tolist() for _ in range(5)] == seen[4:]


def test_a_custom_function_mixes_the_loaders() -> None:
    def only_b(iterators: dict[str, Any], loaders: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        batch = next(iterators["b"])
        return BatchedDataDict(idx=batch["idx"] + 1000), iterators

    source = multiple(only_b)
    assert next(source)["idx"].min() >= 1100


@pytest.mark.parametrize("drawn", [1, 2, 3, 4, 5])
def test_restored_loaders_go_on_with_the_one_whose_turn_it_is(drawn: int) -> None:
    def loaders() -> MultipleLoaders:
        return MultipleLoaders({"a": loader(8, shuffle=False), "b": loader(12, shuffle=False), "c": loader(4)})

    first = loaders()
    for _ in range(drawn):
        next(first)
    second = loaders()
    second.load_state_dict(first.state_dict())
    assert [next(second)["idx"].tolist() for _ in range(4)] == [next(first)["idx"].tolist() for _ in range(4)]
