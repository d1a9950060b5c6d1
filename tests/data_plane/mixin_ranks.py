"""What the ranks of the worker-mixin test run: a worker without a model that fetches, scores and writes back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from nemo_rl.data_plane import KVBatchMeta
from nemo_rl.data_plane.client import StoredClient
from nemo_rl.data_plane.sharding import shard_meta_for_dp
from nemo_rl.data_plane.worker_mixin import TQWorkerMixin
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from tests.data_plane.memory_storage import MemoryStorage

LENGTHS = [3, 5]


class Worker(TQWorkerMixin):
    """Scores every token with this rank's number plus one."""

    def __init__(self, coordinates: dict[str, int], group: Any = None) -> None:
        self._coordinates = coordinates
        self._group = group
        self.rank = coordinates.get("tensor_parallel", 0)

    def _local_coords(self) -> dict[str, int]:
        return self._coordinates

    def _make_replica_group(self) -> Any:
        return self._group

    def get_logprobs(self, data: Any, micro_batch_size: int | None = None) -> BatchedDataDict[Any]:
        return BatchedDataDict(logprobs=torch.full(data["input_ids"].shape, self.rank + 1.0))


class CountingStorage(MemoryStorage):
    """Counts reads; one that is told to fail does."""

    reads = 0
    fails = False

    def get(self, rows: Any, blocks: Any) -> Any:
        if self.fails:
            raise ConnectionError("planted")
        self.reads += 1
        return super().get(rows, blocks)


def attached(worker: Worker, storage: MemoryStorage) -> KVBatchMeta:
    """Attaches a worker to a storage that holds two rows."""
    client = StoredClient(lambda: storage, poll_s=0.01)
    worker.setup_data_plane(client, pad_token_id=9)
    columns = {
        "input_ids": torch.arange(10).view(2, 5),
        "input_lengths": torch.tensor(LENGTHS),
        "half": torch.ones(2, 2, dtype=torch.bfloat16),
        "o": ["a", "b"],
    }
    meta = client.put_padded(["a", "b"], "p", columns, LENGTHS)
    meta.sequence_lengths = LENGTHS
    (shard,), _ = shard_meta_for_dp(meta, dp_world=1)
    return shard


def two_tensor_ranks() -> dict[str, Any]:
    """A leader and a sibling: one read, equal batches, one writer, and an error that reaches both."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    worker = Worker({"data_parallel": 0, "tensor_parallel": rank}, dist.new_group([0, 1]))
    storage = CountingStorage()
    meta = attached(worker, storage)
    batch = worker._fetch(meta)
    seen: dict[str, Any] = {
        "reads": storage.reads,
        "ids": batch["input_ids"].tolist(),
        "half": str(batch["half"].dtype),
        "o": list(batch["o"]),
    }
    worker.get_logprobs_presharded(meta.only_fields(["input_ids"]), {"logprobs": "prev_logprobs"})
    blocks = storage.locate("p", ["a", "b"], create=False).blocks
    seen["wrote"] = any("prev_logprobs" in name for name in blocks)
    storage.fails = True
    try:
        worker._fetch(meta)
    except Exception as error:  # noqa: BLE001 - the test reads what it was
        seen["error"] = f"{type(error).__name__}: {error}"
    dist.destroy_process_group()
    return seen
