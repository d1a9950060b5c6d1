"""NamedSharding: the rank grid and its coordinates."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.distributed.named_sharding import NamedSharding

AXES = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]


def grid(shape: tuple[int, int, int, int]) -> NamedSharding:
    return NamedSharding(np.arange(int(np.prod(shape))).reshape(shape), AXES)


@given(shape=st.tuples(*[st.integers(1, 4)] * 4))
def test_coordinates_lead_back_to_the_rank(shape: tuple[int, int, int, int]) -> None:
    sharding = grid(shape)
    for rank in range(sharding.size):
        assert sharding.get_ranks(**sharding.get_worker_coords(rank)) == rank
    assert sharding.shape == dict(zip(AXES, shape, strict=True))


@given(shape=st.tuples(*[st.integers(1, 4)] * 4), axis=st.sampled_from(AXES))
def test_an_axis_partitions_the_ranks(shape: tuple[int, int, int, int], axis: str) -> None:
    sharding = grid(shape)
    parts = [sharding.get_ranks_by_coord(**{axis: i}) for i in range(sharding.get_axis_size(axis))]
    assert sorted(rank for part in parts for rank in part) == list(range(sharding.size))


def test_a_subset_of_coordinates_gives_a_sharding_over_the_other_axes() -> None:
    rest = grid((1, 2, 1, 2)).get_ranks(pipeline_parallel=0, context_parallel=0)
    assert rest == NamedSharding([[0, 1], [2, 3]], ["data_parallel", "tensor_parallel"])


def test_ranks_out_of_range_are_an_empty_list() -> None:
    assert grid((1, 2, 1, 2)).get_ranks_by_coord(data_parallel=2) == []


@pytest.mark.parametrize(
    ("layout", "message"), [([[0, 1], [2]], "ragged"), ([[0.0, 1.0]], "integers"), ([[0, 0]], "once"), ([], "no ranks")]
)
def test_a_broken_layout_is_refused(layout: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NamedSharding(layout, ["a", "b"])


def test_names_must_match_the_axes() -> None:
    with pytest.raises(ValueError, match="2 axes"):
        NamedSharding([[0, 1]], ["a"])
    with pytest.raises(ValueError, match="no axis 'tp'"):
        NamedSharding([[0, 1]], ["a", "b"]).get_axis_size("tp")
    with pytest.raises(ValueError, match="rank 7"):
        NamedSharding([[0, 1]], ["a", "b"]).get_worker_coords(7)


def test_the_first_position_of_named_axes() -> None:
    coords = grid((1, 2, 1, 2)).get_worker_coords(2)
    assert NamedSharding.is_axis_zero(coords, ["tensor_parallel", "pipeline_parallel"])
    assert not NamedSharding.is_axis_zero(coords, "data_parallel")
