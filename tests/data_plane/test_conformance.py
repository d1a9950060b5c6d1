"""One contract for every backend: what is read is what was written, whole, in order, and until it is cleared."""

from __future__ import annotations

import asyncio
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from nemo_rl.data_plane import DataPlaneClient, KVBatchMeta
from nemo_rl.data_plane.interfaces import MissingColumnsError, MissingRowsError

IDS = ["a_g0", "a_g1", "b_g0", "b_g1"]
LENGTHS = [3, 5, 1, 4]


def ragged(dtype: torch.dtype = torch.int64) -> torch.Tensor:
    rows = [torch.arange(n, dtype=torch.float32).to(dtype) for n in LENGTHS]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def padded(width: int = 6) -> dict[str, Any]:
    ids = torch.arange(4 * width).view(4, width)
    return {"input_ids": ids, "input_lengths": torch.tensor(LENGTHS), "generation_logprobs": torch.randn(4, width)}


def test_columns_of_every_kind_come_back_as_they_were(client: DataPlaneClient, partition: str) -> None:
    objects = np.empty(4, dtype=object)
    objects[:] = ["text", ["a", 1, None], {"k": torch.ones(2, dtype=torch.bfloat16)}, ("t", 2.5)]
    fields = {
        "ids": ragged(),
        "half": ragged(torch.bfloat16),
        "length": torch.tensor(LENGTHS),
        "flag": torch.tensor([True, False, True, False]),
        "image": torch.randn(4, 2, 3, dtype=torch.float64),
        "one": torch.arange(4, dtype=torch.int32).view(4, 1),
        "objects": objects,
    }
    meta = client.put_samples(IDS, partition, TensorDict(fields, batch_size=[4]))
    assert meta == KVBatchMeta(partition, None, IDS, list(fields))
    got = client.get_samples(IDS, partition, list(fields))
    assert list(got.batch_size) == [4]
    for name in ("ids", "half"):
        assert got[name].is_nested
        for one, other in zip(got[name].unbind(), fields[name].unbind(), strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)
    for name in ("length", "flag", "image", "one"):
        assert got[name].dtype == fields[name].dtype and torch.equal(got[name], fields[name])
    assert list(got["objects"][:2]) == ["text", ["a", 1, None]] and got["objects"][3] == ("t", 2.5)
    assert torch.equal(got["objects"][2]["k"], torch.ones(2, dtype=torch.bfloat16))


def test_rows_come_in_the_order_they_are_asked_for_and_padded_to_the_width_asked_for(
    client: DataPlaneClient, partition: str
) -> None:
    columns = padded()
    client.put_padded(IDS, partition, columns, LENGTHS)
    order = [2, 0, 3]
    got = client.get_padded(
        [IDS[i] for i in order], partition, ["input_ids", "input_lengths"], width=8, pad_value_dict={"input_ids": 9}
    )
    assert list(got) == ["input_ids", "input_lengths"] and got["input_ids"].shape == (3, 8)
    for row, index in enumerate(order):
        length = LENGTHS[index]
        assert torch.equal(got["input_ids"][row, :length], columns["input_ids"][index, :length])
        assert bool((got["input_ids"][row, length:] == 9).all())
    assert got["input_lengths"].tolist() == [LENGTHS[i] for i in order]


def test_an_undeclared_column_of_single_numbers_arrives_with_its_shape(client: DataPlaneClient, partition: str) -> None:
    client.put_samples(IDS, partition, {"bonus": torch.tensor([0.5, 1.5, 2.5, 3.5]), "column": torch.ones(4, 1)})
    got = client.get_samples(IDS, partition, ["bonus", "column"])
    assert got["bonus"].shape == (4,) and got["bonus"].tolist() == [0.5, 1.5, 2.5, 3.5]
    assert got["column"].shape == (4, 1)


def test_a_column_written_again_is_read_as_it_was_written_last(client: DataPlaneClient, partition: str) -> None:
    client.put_samples(IDS, partition, {"mask": torch.ones(4), "x": torch.arange(4)})
    client.put_samples(IDS[1:3], partition, {"mask": torch.zeros(2)})
    client.put_samples(IDS[1:3], partition, {"mask": torch.full((2,), 7.0)})
    assert client.get_samples(IDS[1:3], partition, ["mask"])["mask"].tolist() == [7, 7]
    assert client.get_samples(IDS[:1], partition, ["mask"])["mask"].tolist() == [1]
    client.put_samples(IDS, partition, {"mask": torch.full((4,), 2.0), "x": torch.arange(4) + 1})
    got = client.get_samples(IDS, partition, ["mask", "x"])
    assert got["mask"].tolist() == [2, 2, 2, 2] and got["x"].tolist() == [1, 2, 3, 4]


def test_columns_are_added_to_rows_that_exist_by_different_writers(client: DataPlaneClient, partition: str) -> None:
    client.put_padded(IDS, partition, padded(), LENGTHS)
    other = (
        pickle.loads(pickle.dumps(client))
        if "Memory" not in type(getattr(client, "storage", None)).__name__
        else client
    )
    other.put_padded(IDS[:2], partition, {"prev_logprobs": torch.ones(2, 6)}, LENGTHS[:2])
    other.put_padded(IDS[2:], partition, {"prev_logprobs": torch.full((2, 6), 2.0)}, LENGTHS[2:])
    got = client.get_padded(IDS, partition, ["prev_logprobs", "input_lengths"])
    assert got["prev_logprobs"].sum(dim=1).tolist() == [3, 5, 2, 8]
    if other is not client:
        other.close()


def test_rows_of_every_size_travel(client: DataPlaneClient, partition: str) -> None:
    columns = {"input_ids": torch.randint(0, 9, (4, 5000)), "generation_logprobs": torch.randn(4, 5000)}
    lengths = [5000, 1, 0, 3000]
    client.put_padded(IDS, partition, columns, lengths)
    got = client.get_padded([IDS[3], IDS[0], IDS[2]], partition, list(columns))
    for name, column in columns.items():
        assert (
            torch.equal(got[name][0, :3000], column[3, :3000])
            and torch.equal(got[name][1], column[0])
            and not got[name][2].any()
        )


def test_several_writers_add_columns_at_once_while_others_read(client: DataPlaneClient, partition: str) -> None:
    client.put_samples(IDS, partition, {"x": torch.arange(4)})

    def add(number: int) -> list[int]:
        client.put_samples(IDS, partition, {f"column_{number}": torch.arange(4) + number})
        return client.get_samples(IDS, partition, ["x"])["x"].tolist()

    with ThreadPoolExecutor(8) as pool:
        assert all(seen == [0, 1, 2, 3] for seen in pool.map(add, range(16)))
    got = client.get_samples(IDS, partition, [f"column_{number}" for number in range(16)])
    assert all(got[f"column_{number}"].tolist() == [number, number + 1, number + 2, number + 3] for number in range(16))


def test_a_client_may_be_used_where_an_event_loop_runs(client: DataPlaneClient, partition: str) -> None:
    async def inside() -> list[int]:
        client.put_samples(IDS, partition, {"x": torch.arange(4)})
        return client.get_samples(IDS, partition, ["x"])["x"].tolist()

    assert asyncio.run(inside()) == [0, 1, 2, 3]


def test_what_is_missing_is_named_and_nothing_is_read(client: DataPlaneClient, partition: str) -> None:
    client.put_samples(IDS[:2], partition, {"x": torch.arange(2)})
    with pytest.raises(MissingColumnsError, match=r"columns \['advantages'\] are not written"):
        client.get_samples(IDS[:2], partition, ["x", "advantages"])
    with pytest.raises(MissingRowsError, match=r"1 of 3 rows do not exist.*'b_g0'"):
        client.get_samples(IDS[:3], partition, ["x"])
    with pytest.raises(MissingRowsError):
        client.get_samples(IDS, "no-such-partition", ["x"])
    client.put_samples(IDS[2:], partition, {"y": torch.arange(2)})
    with pytest.raises(MissingColumnsError, match="x"):
        client.get_samples(IDS, partition, ["x"])


def test_what_does_not_match_the_ids_is_refused_before_anything_is_written(
    client: DataPlaneClient, partition: str
) -> None:
    with pytest.raises(ValueError, match="must match batch size"):
        client.put_samples(IDS, partition, {"x": torch.arange(3)})
    with pytest.raises(ValueError, match="align 1:1"):
        client.put_samples(IDS, partition, {"x": torch.arange(4)}, tags=[{}])
    with pytest.raises(ValueError, match="must match batch size"):
        client.put_padded(IDS, partition, padded(), LENGTHS[:3])
    with pytest.raises(ValueError, match="repeat in one put"):
        client.put_samples(["a", "a"], partition, {"x": torch.arange(2)})
    with pytest.raises(TypeError, match=r"column 'x', row 1: non-tensor value of type .*object"):
        client.put_samples(IDS[:2], partition, {"x": [1, object()]})
    with pytest.raises(TypeError, match="column 'input_lengths' holds int64, float32 was given; convert it"):
        client.put_samples(IDS, partition, {"input_lengths": torch.ones(4)})
    with pytest.raises(TypeError, match="column 'advantages' holds float32, int64 was given"):
        client.put_padded(IDS, partition, {"advantages": torch.ones(4, max(LENGTHS), dtype=torch.int64)}, LENGTHS)
    with pytest.raises(TypeError, match="column 'input_ids' holds int64, a tensor; list was given"):
        client.put_samples(IDS, partition, {"input_ids": ["one", "two", "three", "four"]})
    assert client.list_samples(partition) == {}


def test_tags_travel_without_columns_and_add_up(client: DataPlaneClient, partition: str) -> None:
    client.put_samples(IDS, partition, {"x": torch.arange(4)}, tags=[{"weight_version": i} for i in range(4)])
    client.put_samples(IDS[:1], partition, tags=[{"std": 0.5}])
    assert client.list_samples(partition) == {
        "a_g0": {"weight_version": 0, "std": 0.5},
        "a_g1": {"weight_version": 1},
        "b_g0": {"weight_version": 2},
        "b_g1": {"weight_version": 3},
    }


def test_clearing_drops_exactly_the_rows_named_and_is_repeatable(client: DataPlaneClient, partition: str) -> None:
    client.put_samples(IDS, partition, {"x": torch.arange(4)})
    client.put_samples(IDS[:1], partition, {"y": torch.arange(1)})
    client.clear_samples(IDS[:2], partition)
    client.clear_samples(IDS[:2], partition)
    assert list(client.list_samples(partition)) == IDS[2:]
    with pytest.raises(MissingRowsError):
        client.get_samples(IDS[:1], partition, ["x"])
    assert client.get_samples(IDS[2:], partition, ["x"])["x"].tolist() == [2, 3]
    client.clear_samples(None, partition)
    with pytest.warns(RuntimeWarning, match="no rows to clear"):
        client.clear_samples(None, partition)
    client.put_samples(IDS, partition, {"x": torch.arange(4) + 10})
    assert client.get_samples(IDS, partition, ["x"])["x"].tolist() == [10, 11, 12, 13]


def test_nothing_is_a_legal_batch(client: DataPlaneClient, partition: str) -> None:
    assert client.put_samples([], partition).size == 0
    assert list(client.get_samples([], partition, ["x"]).batch_size) == [0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        client.clear_samples([], partition)
    client.put_samples(
        IDS,
        partition,
        {"x": torch.nested.as_nested_tensor([torch.zeros(0)] * 3 + [torch.ones(2)], layout=torch.jagged)},
    )
    assert [len(row) for row in client.get_samples(IDS, partition, ["x"])["x"].unbind()] == [0, 0, 0, 2]
