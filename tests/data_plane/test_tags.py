"""A row's tags are its own: writes add to them, the newest value of each stands, and joined metas share none."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.data_plane import KVBatchMeta
from nemo_rl.data_plane.client import StoredClient
from tests.data_plane.memory_storage import MemoryStorage

TAGS = st.dictionaries(st.sampled_from("abc"), st.integers(0, 9), max_size=3)
IDS = ["x", "y", "z"]


@given(st.lists(st.tuples(st.permutations(IDS), st.lists(TAGS, min_size=3, max_size=3)), min_size=1, max_size=5))
def test_tags_of_a_row_are_all_that_were_written_and_the_newest_of_each(
    writes: list[tuple[list[str], list[dict[str, int]]]],
) -> None:
    client = StoredClient(MemoryStorage, poll_s=0.01, full_wait_s=0.1)
    client.put_samples(IDS, "train", {"n": torch.arange(3)})
    expected: dict[str, dict[str, int]] = {identity: {} for identity in IDS}
    for ids, tags in writes:
        client.put_samples(ids, "train", {}, tags=tags)
        for identity, tag in zip(ids, tags, strict=True):
            expected[identity] |= tag
    assert client.list_samples("train") == expected
    client.close()


@given(st.lists(st.integers(1, 3), min_size=2, max_size=4))
def test_joined_rows_have_their_own_tags_in_order_and_share_them_with_no_part(sizes: list[int]) -> None:
    parts = []
    for number, size in enumerate(sizes):
        names = [f"{number}-{row}" for row in range(size)]
        parts.append(KVBatchMeta("train", None, names, ["n"], [1] * size, tags=[{"of": name} for name in names]))
    whole = parts[0].concat(*parts[1:])
    assert whole.tag("of") == whole.sample_ids == [identity for part in parts for identity in part.sample_ids]
    whole.set_tags({"later": [0] * whole.size, "of": ["changed"] * whole.size})
    for number, part in enumerate(parts):
        assert part.tags == [{"of": f"{number}-{row}"} for row in range(part.size)]
    for part in (whole.subset([0]), whole.slice(0, 1)):
        part.set_tags({"of": ["again"]})
    assert whole.tag("of") == ["changed"] * whole.size
