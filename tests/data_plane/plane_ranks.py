"""What the ranks of the worker test run: one batch through a real policy worker, given directly and fetched from the
data plane.
"""

from __future__ import annotations

from typing import Any

from nemo_rl.data_plane import KVBatchMeta
from nemo_rl.data_plane.client import StoredClient
from nemo_rl.data_plane.column_io import kv_first_write
from nemo_rl.data_plane.field_schema import TAG
from nemo_rl.data_plane.sharding import shard_meta_for_dp
from nemo_rl.loss import ClippedPGLossFn
from nemo_rl.models.policy.batches import microbatch_arguments, prefixes_of, shares_prompts, tags_of
from tests.data_plane.memory_storage import MemoryStorage
from tests.models.policy_ranks import ROWS, WIDTH, grouped_batch, make_worker, run_config, shard_of, training_batch


class LossOfMore(ClippedPGLossFn):
    """A loss of a user's own, which reads columns that nobody else knows."""

    def __call__(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        if list(data["hint"]) != [{"bonus": int(bonus)} for bonus in data["bonus"]]:
            raise ValueError(f"hints {list(data['hint'])} do not belong to {data['bonus']}")
        loss, metrics = super().__call__(data, *args, **kwargs)
        return loss, metrics | {"bonus": data["bonus"].sum().float()}


def both_ways(model: str, world: int, overrides: list[str]) -> dict[str, Any]:
    """What a worker computed from its shard, and from the rows that it fetched."""
    return {
        "direct": _step(model, world, overrides, fetched=False),
        "fetched": _step(model, world, overrides, fetched=True),
    }


def _step(model: str, world: int, overrides: list[str], *, fetched: bool) -> dict[str, Any]:
    config = run_config(model, world, *overrides)
    worker = make_worker(config, init_reference_model=True)
    share = shares_prompts(config.policy, cuda=False)
    loss, data = ClippedPGLossFn(config.loss_fn), grouped_batch() if share else training_batch()
    rank = worker.backend.groups.coordinates()["data_parallel"]
    sizes = {"gbs": ROWS, "mbs": config.policy.train_micro_batch_size}
    seen: dict[str, Any] = {}
    if not fetched:
        scored = shard_of(worker, data, training=False)
        seen["scores"] = [
            worker.get_logprobs(scored)["logprobs"].tolist(),
            worker.get_reference_policy_logprobs(scored)["reference_logprobs"].tolist(),
        ]
        seen["train"] = [worker.train(shard_of(worker, data), loss, eval_mode=False, **sizes) for _ in range(2)]
    else:
        # Each rank has a storage of its own with the same rows: what is under test is the worker, not the way.
        storage = MemoryStorage()
        client = StoredClient(lambda: storage)
        tags = {name.removeprefix(TAG): data.pop(name).tolist() for name in tags_of(data)}
        meta = kv_first_write(
            data, sample_ids=[str(n) for n in range(ROWS)], dp_client=client, partition_id="train", pad_to_multiple=4
        )
        meta.set_tags(tags)
        worker.setup_data_plane(client, pad_token_id=257)

        def shard(*, training: bool) -> KVBatchMeta:
            prefixes = prefixes_of(meta.common_tags()) if share else None
            arguments = microbatch_arguments(config.policy, training=training, prefixes=prefixes)
            return shard_meta_for_dp(
                meta, dp_world=worker.backend.sizes.dp, batch_size=ROWS if training else None, **arguments
            )[0][rank]

        scored = shard(training=False).only_fields(["input_ids", "input_lengths"])
        columns = {"logprobs": "teacher_logprobs", "reference_logprobs": "reference_policy_logprobs"}
        worker.get_policy_and_reference_logprobs_presharded(scored, columns)
        if worker._is_replica_leader():
            written = client.get_padded(scored.sample_ids, "train", list(columns.values()), width=WIDTH)
            seen["scores"] = [written[column].tolist() for column in columns.values()]
        seen["train"] = [
            worker.train_presharded(shard(training=True), loss, eval_mode=False, **sizes) for _ in range(2)
        ]
        worker.close_data_plane()
    return seen | {"weights": worker.weight_checksums()}
