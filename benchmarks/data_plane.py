"""What the data plane costs: the columns of one step through it, through TransferQueue used directly, and through Ray's
object store.

    python benchmarks/data_plane.py [--rows 512] [--tokens 1000] [--backend simple|mooncake_cpu] [--repeats 5] python
    benchmarks/data_plane.py --driver      bytes through the driver and its memory, at 1, 4 and 16 times the sequence
    length

The sequence is a step's: the rollout's write, the fetch for log-probabilities, two write-backs, advantages, the fetch
for training. Encoding and decoding count; every way must give the same padded tensors.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cloudpickle
import psutil
import ray
import torch
from tensordict import TensorDict

from nemo_rl.config import DataPlaneConfig
from nemo_rl.data_plane import KVBatchMeta, build_data_plane_client
from nemo_rl.data_plane.adapters.system import start_transfer_queue
from nemo_rl.data_plane.adapters.transfer_queue import TransferQueueAddress, fetch_config
from nemo_rl.data_plane.field_schema import DP_TRAIN_FIELDS, LP_SEED_FIELDS
from nemo_rl.data_plane.sharding import shard_meta_for_dp
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.ray_runtime import init_ray, shutdown_ray
from nemo_rl.experience.data_plane_store import DataPlaneStore
from nemo_rl.experience.rollout_source import Rollout
from nemo_rl.experience.store import InProcessStore, RolloutColumns, StageOutput, TokenStage
from nemo_rl.utils.record import MemoryRecord

Columns = dict[str, torch.Tensor]
ROLLOUT = ("input_ids", "input_lengths", "token_mask", "sample_mask", "generation_logprobs")
PAD = {"input_ids": 7}


def step_columns(rows: int, tokens: int) -> Columns:
    """Columns of a step; lengths lie within a tenth of `tokens`."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(int(tokens * 0.9), int(tokens * 1.1) + 1, (rows,), generator=draw)
    width = int(lengths.max())
    real = torch.arange(width) < lengths[:, None]
    logprobs = {
        name: torch.randn(rows, width, generator=draw) * real
        for name in ("generation_logprobs", "prev_logprobs", "reference_policy_logprobs", "advantages")
    }
    ids = torch.randint(0, 150_000, (rows, width), generator=draw).masked_fill(~real, PAD["input_ids"])
    return {
        "input_ids": ids,
        "input_lengths": lengths,
        "token_mask": real.long(),
        "sample_mask": torch.ones(rows),
        **logprobs,
    }


def through_the_plane(client: Any, columns: Columns) -> tuple[float, Columns]:
    """Seconds of a step, and what training fetched."""
    lengths = columns["input_lengths"].tolist()
    width = columns["input_ids"].shape[1]
    ids = [f"{uuid.uuid4().hex}_g0" for _ in lengths]
    started = time.perf_counter()
    client.put_padded(ids, "train", {name: columns[name] for name in ROLLOUT}, lengths)
    client.get_padded(ids, "train", LP_SEED_FIELDS, width=width, pad_value_dict=PAD)
    for name in ("prev_logprobs", "reference_policy_logprobs"):
        client.put_padded(ids, "train", {name: columns[name]}, lengths)
    client.put_padded(ids, "train", {name: columns[name] for name in ("advantages", "sample_mask")}, lengths)
    fetched = client.get_padded(ids, "train", DP_TRAIN_FIELDS, width=width, pad_value_dict=PAD)
    seconds = time.perf_counter() - started
    client.clear_samples(ids, "train")
    return seconds, dict(fetched)


def join_directly(address: TransferQueueAddress) -> Any:
    """Makes TransferQueue's own functions use the same processes."""
    from transfer_queue import interface
    from transfer_queue.client import TransferQueueClient

    config, _ = fetch_config(address.controller)
    storage = config.backend.storage_backend
    client = TransferQueueClient(client_id="directly", controller_info=config.controller.zmq_info)
    client.initialize_storage_manager(manager_type=storage, config=config.backend[storage])
    interface._TQ_CLIENT = client
    return client


def directly(columns: Columns) -> tuple[float, Columns]:
    """The same through TransferQueue's own key-value functions, one field per column, jagged."""
    import transfer_queue

    lengths, width = columns["input_lengths"], columns["input_ids"].shape[1]
    ids = [f"{uuid.uuid4().hex}_g0" for _ in lengths]

    def put(*names: str) -> None:
        fields = {name: _jagged(columns[name], lengths) for name in names}
        transfer_queue.kv_batch_put(ids, "train", TensorDict(fields, batch_size=[len(ids)]))

    def get(names: list[str]) -> Columns:
        found = transfer_queue.kv_batch_get(ids, "train", names)
        return {name: _dense(found[name], width, PAD.get(name, 0), rows_only=columns[name].ndim == 1) for name in names}

    started = time.perf_counter()
    put(*ROLLOUT)
    get(LP_SEED_FIELDS)
    put("prev_logprobs")
    put("reference_policy_logprobs")
    put("advantages", "sample_mask")
    fetched = get(DP_TRAIN_FIELDS)
    seconds = time.perf_counter() - started
    transfer_queue.kv_clear(ids, "train")
    return seconds, fetched


def _jagged(column: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    if column.ndim == 1:
        return column
    rows = [row[:length] for row, length in zip(column, lengths.tolist(), strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _dense(value: torch.Tensor, width: int, pad: int, *, rows_only: bool) -> torch.Tensor:
    if rows_only:
        return (torch.stack(list(value.unbind())) if value.is_nested else value).flatten()
    return torch.nested.to_padded_tensor(value, pad, (len(value.unbind()), width)) if value.is_nested else value


def through_rays_object_store(columns: Columns) -> tuple[float, Columns]:
    """The same as padded tensors in Ray's object store, which gives mappings of shared memory instead of copies."""
    started = time.perf_counter()
    held = [ray.put({name: columns[name] for name in ROLLOUT})]
    ray.get(held[0])
    for names in (("prev_logprobs",), ("reference_policy_logprobs",), ("advantages", "sample_mask")):
        held.append(ray.put({name: columns[name] for name in names}))
    fetched: Columns = {}
    for part in ray.get(held):
        fetched |= part
    return time.perf_counter() - started, fetched


def compare(args: argparse.Namespace) -> None:
    """Best of several, each way in turn, so that a busy machine is busy for all."""
    columns = step_columns(args.rows, args.tokens)
    sizes = (
        {"global_segment_size": args.segment_gib << 30, "local_buffer_size": 1 << 28}
        if args.backend == "mooncake_cpu"
        else {}
    )
    cfg = DataPlaneConfig(enabled=True, backend=args.backend, **sizes)
    address, undo = start_transfer_queue(cfg)
    client = build_data_plane_client(cfg, bootstrap=False, address=address)
    client.list_samples("train")
    direct_client = join_directly(address)
    ways: dict[str, Callable[[], tuple[float, Columns]]] = {
        f"data plane ({args.backend})": lambda: through_the_plane(client, columns),
        "TransferQueue, one field per column": lambda: directly(columns),
        "ray.put / ray.get": lambda: through_rays_object_store(columns),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.repeats):
        for name, way in ways.items():
            took, fetched = way()
            seconds[name].append(took)
            wrong = [column for column in DP_TRAIN_FIELDS if not torch.equal(fetched[column], columns[column])]
            if wrong:
                raise SystemExit(f"{name}: columns {wrong} came back changed")
    moved = (
        sum(
            columns[name].nbytes
            for names in (ROLLOUT, LP_SEED_FIELDS, DP_TRAIN_FIELDS, DP_TRAIN_FIELDS[-3:])
            for name in names
        )
        / 1e6
    )
    best = {name: min(values) for name, values in seconds.items()}
    direct = best["TransferQueue, one field per column"]
    print(
        f"{args.rows} rows of about {args.tokens} tokens, {moved:.0f} MB moved per step, best of "
        f"{args.repeats}; {os.cpu_count()} cores"
    )
    print("| way | s a step | MB/s | against TransferQueue directly |\n|---|---|---|---|")
    for name, value in best.items():
        print(f"| {name} | {value:.3f} | {moved / value:.0f} | {direct / value:.2f}x |")
    direct_client.close()
    client.close()
    undo.close()


class MadeUpRollouts:
    """Rollouts of one length, made where the actor lives."""

    def __init__(self, rows: int, tokens: int) -> None:
        self.columns = (rows, tokens)

    def roll_out(self, *_: Any) -> Rollout:
        """A rollout's columns."""
        columns = step_columns(*self.columns)
        rows = len(columns["input_lengths"])
        small = BatchedDataDict(
            prompt_number=torch.arange(rows) // 8,
            total_reward=torch.zeros(rows),
            total_lengths=columns["input_lengths"],
        )
        return Rollout(RolloutColumns(BatchedDataDict({name: columns[name] for name in ROLLOUT}), small))


def weigh(columns: BatchedDataDict[Any]) -> StageOutput:
    """A stage like those of a step: one column of tokens, one value per row."""
    return StageOutput({"advantages": columns["token_mask"] * 0.5}, {"tokens": columns["token_mask"].sum(-1)})


class Peak:
    """The most memory that this process had while a block ran, above what it had before."""

    def __enter__(self) -> Peak:
        self._before = self._most = psutil.Process().memory_info().rss
        self._done = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)
        self._watch.start()
        return self

    def _look(self) -> None:
        while not self._done.wait(0.005):
            self._most = max(self._most, psutil.Process().memory_info().rss)

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watch.join()

    @property
    def mb(self) -> float:
        """In MB."""
        return (self._most - self._before) / 1e6


def driver_cost(args: argparse.Namespace) -> None:
    """What steps cost the driver's process, as sequences grow: with rows on the data plane, and with rows in the
    driver.
    """
    client = build_data_plane_client(DataPlaneConfig(enabled=True))
    print(
        f"{args.rows} rows, {args.repeats} steps each\n| tokens per row | bytes of the columns | through the "
        "driver, bytes | driver's memory grows by, MB "
        "| with rows in the driver, MB |\n|---|---|---|---|---|"
    )
    for factor in (1, 4, 16):
        source = MadeUpRollouts(args.rows, args.tokens * factor)
        size = sum(column.nbytes for column in step_columns(*source.columns).values())
        store = DataPlaneStore(client, PAD["input_ids"])
        rollouts, _ = store.rollouts(source, None, MemoryRecord(), MemoryRecord())
        driver_step(store, rollouts)
        with Peak() as stored:
            passed = [driver_step(store, rollouts) for _ in range(args.repeats)]
        store.close()
        here: Any = InProcessStore(PAD["input_ids"])
        with Peak() as held:
            for _ in range(args.repeats):
                driver_step(here, source)
        print(f"| {args.tokens * factor:,} | {size:,} | {max(passed):,} | {stored.mb:.1f} | {held.mb:.1f} |")
    client.close()


def driver_step(store: Any, rollouts: Any) -> int:
    """Bytes of everything that a step hands to the driver or that the driver sends out."""
    plan: Any = SimpleNamespace(step=0)
    with store.step():
        rollout = rollouts.roll_out(BatchedDataDict(), plan, 0)
        handle = store.write(rollout.columns.tokens)
        rows = store.apply(handle, TokenStage(weigh, ("token_mask",), ("advantages",)))
        sent: list[Any] = [rows]
        if isinstance(handle, KVBatchMeta):
            lengths = handle.sequence_lengths or []
            packing: Any = {"max_tokens_per_microbatch": max(lengths) * 4, "algorithm": "modified_first_fit_decreasing"}
            packing |= {
                "sequence_length_pad_multiple": 1,
                "input_key": "input_ids",
                "input_lengths_key": "input_lengths",
            }
            sent += [
                rollout,
                *(shard_meta_for_dp(handle, dp_world=4, sequence_packing_args=packing)[0] for _ in range(3)),
            ]
        store.clear(handle)
    return sum(len(cloudpickle.dumps(value)) for value in sent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--backend", choices=["simple", "mooncake_cpu"], default="simple")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--segment-gib", type=int, default=1, help="mooncake_cpu: size of the segment")
    parser.add_argument("--driver", action="store_true", help="what the driver pays instead of seconds")
    args = parser.parse_args()
    init_ray(device="cpu")
    try:
        driver_cost(args) if args.driver else compare(args)
    finally:
        shutdown_ray()


if __name__ == "__main__":
    main()
