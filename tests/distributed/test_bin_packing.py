"""Bin packing: what every algorithm must keep, and the shape of each one's answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.distributed.batch_sharding import BinPackingError, PackingAlgorithm, get_packer

ALGORITHMS = list(PackingAlgorithm)
CAPACITY = 60
LENGTHS = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=80)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(lengths=LENGTHS)
def test_every_sequence_is_in_exactly_one_bin_and_no_bin_is_over_capacity(
    algorithm: PackingAlgorithm, lengths: list[int]
) -> None:
    bins = get_packer(algorithm, CAPACITY).pack(lengths)
    assert sorted(i for items in bins for i in items) == list(range(len(lengths)))
    assert all(items and sum(lengths[i] for i in items) <= CAPACITY for items in bins)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(lengths=LENGTHS, multiple=st.integers(1, 8), minimum=st.integers(1, 12))
def test_the_number_of_bins_is_a_multiple_of_the_ranks_or_packing_is_refused(
    algorithm: PackingAlgorithm, lengths: list[int], multiple: int, minimum: int
) -> None:
    packer = get_packer(algorithm, CAPACITY, min_bin_count=minimum, bin_count_multiple=multiple)
    free = len(get_packer(algorithm, CAPACITY).pack(lengths))
    needed = -(-max(free, minimum) // multiple) * multiple
    if needed > len(lengths):
        with pytest.raises(BinPackingError, match="cannot fill"):
            packer.pack(lengths)
        return
    bins = packer.pack(lengths)
    assert len(bins) == needed
    assert sorted(i for items in bins for i in items) == list(range(len(lengths)))
    assert all(items and sum(lengths[i] for i in items) <= CAPACITY for items in bins)


@given(lengths=LENGTHS)
def test_modified_first_fit_decreasing_stays_within_its_bound_of_the_token_total(lengths: list[int]) -> None:
    bins = get_packer("modified_first_fit_decreasing", CAPACITY).pack(lengths)
    # Two bins at most half full would have been one: so the bins hold more than half their capacity on average, but for
    # one.
    assert len(bins) <= 2 * sum(lengths) / CAPACITY + 1


def test_concatenative_keeps_the_order() -> None:
    assert get_packer("concatenative", 10).pack([4, 4, 4, 9, 1]) == [[0, 1], [2], [3, 4]]


def test_first_fit_decreasing_takes_the_longest_first() -> None:
    assert get_packer("first_fit_decreasing", 10).pack([2, 7, 5, 3, 3]) == [[1, 3], [2, 4, 0]]


def test_modified_first_fit_decreasing_pairs_large_with_medium_and_two_small() -> None:
    # 31 and 32 are large, 28 is medium and joins the larger bin that has room for it; 12 + 15 are small and share the
    # other.
    bins = get_packer("modified_first_fit_decreasing", 60).pack([32, 31, 28, 12, 15])
    assert [sorted(items) for items in bins] == [[0, 2], [1, 3, 4]]


def test_leftovers_go_into_the_emptiest_open_bin() -> None:
    assert get_packer("modified_first_fit_decreasing", 12).pack([5, 5, 5]) == [[0, 1], [2]]


def test_first_fit_shuffle_draws_the_same_order_in_every_process() -> None:
    lengths = [1 + (i * 37) % 50 for i in range(60)]
    packer, other = get_packer("first_fit_shuffle", 60), get_packer("first_fit_shuffle", 60)
    assert packer.pack(lengths) == packer.pack(lengths) == other.pack(lengths)


def test_a_sequence_longer_than_a_bin_is_named() -> None:
    with pytest.raises(BinPackingError, match="sequence 1 has 61 tokens"):
        get_packer("first_fit_decreasing", 60).pack([5, 61])


def test_an_unknown_algorithm_names_the_known_ones() -> None:
    with pytest.raises(BinPackingError, match="modified_first_fit_decreasing"):
        get_packer("best_fit", 60)


def test_the_public_path_offers_the_same_packers() -> None:
    from nemo_rl.data import packing

    assert packing.get_packer is get_packer
    with pytest.raises(AttributeError, match="best_packer"):
        _ = packing.best_packer
