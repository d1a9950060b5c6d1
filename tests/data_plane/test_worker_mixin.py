"""Workers on the data plane: one reader and one writer among the ranks that share rows, and errors that reach all of
them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_rl.data_plane.worker_mixin import TQWorkerMixin
from tests.data_plane.mixin_ranks import CountingStorage, Worker, attached, two_tensor_ranks
from tests.ranks import run_ranks


@pytest.mark.slow
def test_the_leader_reads_and_writes_for_the_ranks_that_share_its_rows() -> None:
    leader, sibling = run_ranks(two_tensor_ranks, 2)
    assert (leader["reads"], sibling["reads"]) == (1, 0)
    assert leader["ids"] == sibling["ids"] == [[0, 1, 2, 9, 9], [5, 6, 7, 8, 9]]
    assert sibling["half"] == "torch.bfloat16" and sibling["o"] == ["a", "b"]
    assert leader["wrote"] and not sibling["wrote"]
    assert leader["error"] == "ConnectionError: planted"
    assert (
        sibling["error"]
        == "DataPlaneError: rank 0 could not fetch the rows that this rank shares: ConnectionError: planted"
    )


@pytest.mark.parametrize(
    ("coordinates", "leads"),
    [
        ({"data_parallel": 3}, True),
        ({"tensor_parallel": 0, "context_parallel": 0, "pipeline_parallel": 0}, True),
        ({"tensor_parallel": 1}, False),
        ({"tensor_parallel": 0, "context_parallel": 1}, False),
        ({"pipeline_parallel": 1}, False),
    ],
)
def test_one_rank_leads_whatever_axes_there_are(coordinates: dict[str, int], leads: bool) -> None:
    assert Worker(coordinates)._is_replica_leader() is leads


def test_what_a_worker_cannot_write_back_is_refused_on_every_rank() -> None:
    worker = Worker({"tensor_parallel": 1})
    meta = attached(worker, CountingStorage())
    columns = {"x": "y"}
    with pytest.raises(TypeError, match="result 'x' is a list"):
        worker._write_back(meta, {"x": [1, 2]}, columns)  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="'x' has 3 rows for 2 ids"):
        worker._write_back(meta, {"x": torch.ones(3)}, columns)
    with pytest.raises(
        RuntimeError, match=r"lacks \['logprobs'\], from which the columns \['prev_logprobs'\] are written"
    ):
        worker._write_back(meta, {}, {"logprobs": "prev_logprobs"})
    with pytest.raises(ValueError, match="names no columns"):
        worker._fetch(meta.only_fields([]))


def test_a_worker_that_is_not_attached_says_so_and_attaches_once() -> None:
    worker = Worker({})
    with pytest.raises(RuntimeError, match="call setup_data_plane first"):
        worker._require_dp_client()
    meta = attached(worker, CountingStorage())
    client = worker._require_dp_client()
    worker.setup_data_plane("another", 0)  # type: ignore[arg-type]
    assert worker._require_dp_client() is client
    worker.get_logprobs_presharded(meta.only_fields(["input_ids"]), {"logprobs": "prev_logprobs"})
    assert client.get_padded(["b"], "p", ["prev_logprobs"])["prev_logprobs"].tolist() == [[1.0] * 5]
    worker.close_data_plane()
    worker.close_data_plane()


def test_a_backend_must_say_where_its_rank_sits() -> None:
    class Silent(TQWorkerMixin):
        pass

    silent: Any = Silent()
    with pytest.raises(NotImplementedError):
        silent._is_replica_leader()
