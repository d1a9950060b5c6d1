"""What a driver has around it, without Ray and without a model: prompts, generation, policy, store and record.

Everything writes down what happens, so that a test can say in which order a driver calls what, and what it trains.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.accelerators import OwnAccelerators
from nemo_rl.algorithms.grpo.assembly import make_source
from nemo_rl.algorithms.grpo.run import GRPOState
from nemo_rl.algorithms.grpo.step_reports import DeviceCount, StepReports
from nemo_rl.config import load_master_config
from nemo_rl.data_plane.client import StoredClient
from nemo_rl.data_plane.column_io import read_columns, write_columns
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.data_plane_store import DataPlaneStore
from nemo_rl.experience.rollout_source import Rollout
from nemo_rl.experience.rollouts import RolloutPlan
from nemo_rl.experience.store import InProcessStore, RolloutColumns
from nemo_rl.models.policy.tq_policy import StoredColumns
from nemo_rl.utils.record import MemoryRecord
from nemo_rl.utils.timer import TimeoutChecker, Timer

CONFIG = Path(__file__).parents[2] / "examples" / "configs" / "grpo_arithmetic_async_cpu.yaml"
PROMPTS, SAMPLES = 3, 2
SMALL = (
    f"grpo.num_prompts_per_step={PROMPTS}",
    f"grpo.num_generations_per_prompt={SAMPLES}",
    f"policy.train_global_batch_size={PROMPTS * SAMPLES}",
    "policy.train_micro_batch_size=2",
    "policy.logprob_batch_size=2",
    "grpo.val_at_start=false",
    "grpo.val_period=0",
    "grpo.val_at_end=false",
    "grpo.max_num_epochs=1",
    "grpo.max_num_steps=5",
    "loss_fn.reference_policy_kl_penalty=0.0",
    "checkpointing.metric_name=null",
    "checkpointing.keep_top_k=null",
)


class Loader:
    """Prompts 0, 1, 2, ..."""

    def __init__(self, batches: int = 40, at: int = 0) -> None:
        self.at, self._batches = at, batches

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[BatchedDataDict[Any]]:
        while self.at < self._batches:
            self.at += 1
            first = PROMPTS * (self.at - 1)
            yield BatchedDataDict(
                idx=list(range(first, first + PROMPTS)), length=torch.ones(PROMPTS), loss_multiplier=torch.ones(PROMPTS)
            )

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}


class World:
    """Everything around the driver, writing down what happens."""

    def __init__(
        self,
        tmp_path: Path,
        *overrides: str,
        loader: Loader | None = None,
        state: GRPOState | None = None,
        resumed_from: Path | None = None,
        plane: StoredClient | None = None,
        config: Path = CONFIG,
    ) -> None:
        self.plane = plane
        self.happened: list[str] = []
        self.step_open = False
        self.trained: list[int] = []
        self.sample_numbers: list[int] = []
        self.rewards = lambda prompt, sample: float(sample)
        self.served = -1
        self.released = 0
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.saved: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        config = load_master_config(config, [*SMALL, f"checkpointing.checkpoint_dir={tmp_path}/ck", *overrides])
        loader = loader or Loader()
        self.run: Any = SimpleNamespace(
            adapter="",
            config=config,
            policy=self,
            generation=self,
            rollouts=self,
            resumed_from=resumed_from,
            accelerators=None,
            source=None,
            validation=None,
            store=InProcessStore(0) if plane is None else DataPlaneStore(plane, 0),
            loss_fn=None,
            train_loader=loader,
            val_loader=None,
            logger=SimpleNamespace(log_metrics=self.log_metrics, log_dir=tmp_path, samples_dir=tmp_path),
            checkpointer=SimpleNamespace(
                finish=lambda: None, poll=lambda: None, tolerate_failure=nullcontext, retry_due=False
            ),
            state=state or GRPOState(),
            record=MemoryRecord(),
            timer=Timer(),
            timeout=TimeoutChecker(None),
            memory=SimpleNamespace(after_step=lambda step: None, last=lambda: None),
            progress=SimpleNamespace(
                phase=lambda name: None,
                validated=lambda value, name, step: None,
                step_done=lambda *a, **k: None,
            ),
            total_steps=len(loader),
            teachers=None,
        )
        run = self.run
        self.run.reports = StepReports(
            run.config, run.store, run.logger, run.record, run.progress, run.generation, DeviceCount(2, 1, 1)
        )
        self.run.accelerators = OwnAccelerators(self, self.run.timer, self.run.progress.phase)  # type: ignore[arg-type]
        self.run.source = make_source(self.run)
        self.logged: list[dict[str, Any]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int, prefix: str, **_: Any) -> None:
        if prefix == "train":
            self.logged.append(metrics)

    # refitter; no shard is lost here
    def close(self) -> None:
        pass

    def await_rebuild(self, rebuilds: bool) -> None:
        pass

    def revive(self, version: int) -> None:
        # The real one waits for the loop where requests are dispatched: nobody may hold what that waits for.
        self.start_on_dispatch_loop(asyncio.sleep(0)).result(timeout=30.0)

    # generation
    def start_on_dispatch_loop(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def roll_out_group(self, batch: BatchedDataDict[Any], plan: RolloutPlan) -> Rollout:
        version = max(0, self.served)
        await asyncio.sleep(0.002)
        rows, prompt = batch.size, int(batch["idx"][0])
        rewards = torch.tensor([self.rewards(prompt, sample) for sample in range(rows)])
        tokens = BatchedDataDict(
            input_ids=torch.full((rows, 4), prompt),
            input_lengths=torch.full((rows,), 4),
            token_mask=torch.tensor([[0, 1, 1, 1]] * rows),
            generation_logprobs=torch.zeros(rows, 4),
            token_versions=torch.full((rows, 4), version, dtype=torch.int32),
            content=[str(prompt)] * rows,
        )
        columns = BatchedDataDict(
            total_reward=rewards,
            truncated=torch.zeros(rows, dtype=torch.bool),
            sample_mask=torch.ones(rows),
            prompt_lengths=torch.ones(rows),
            response_lengths=torch.full((rows,), 3),
            generated_lengths=torch.full((rows,), 3),
            total_lengths=torch.full((rows,), 4),
            prompt_number=batch["prompt_number"],
            sample_number=batch["sample_number"],
            weight_version=torch.full((rows,), version),
            newest_version=torch.full((rows,), version),
            mixed_kv=torch.zeros(rows, dtype=torch.bool),
        )
        return Rollout(RolloutColumns(tokens, columns), {"total_turns": float(rows)})

    def roll_out(self, batch: BatchedDataDict[Any], plan: RolloutPlan, attempt: int) -> Rollout:
        groups = [
            asyncio.run(self.roll_out_group(batch.slice(row, row + SAMPLES), plan))
            for row in range(0, batch.size, SAMPLES)
        ]
        tokens = BatchedDataDict.from_batches([group.columns.tokens for group in groups])
        return Rollout(
            RolloutColumns(tokens, BatchedDataDict.from_batches([group.columns.rows for group in groups])),
            groups[0].metrics,
        )

    # refitter
    def release_device(self) -> None:
        self.released += 1

    def make_room(self) -> None:
        pass

    def bring_to(self, version: int, timer: Any = None, *, recompute_kv: bool = True) -> None:
        self.happened.append(f"refit {version}")
        self.served = version

    def metrics(self) -> dict[str, float]:
        return {}

    # policy
    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        self.happened.append("logprobs")

    def get_logprobs(self, data: Any, timer: Any = None) -> Any:
        if self.plane is None:
            return BatchedDataDict(logprobs=torch.zeros(data["input_ids"].shape))
        write_columns(
            self.plane,
            data,
            {"prev_logprobs": torch.zeros(read_columns(self.plane, data, ["input_ids"])["input_ids"].shape)},
        )
        return StoredColumns({"logprobs": "prev_logprobs"})

    def prepare_for_training(self) -> None:
        pass

    def submit_train(self, data: Any, loss_fn: Any, timer: Any = None) -> Any:
        self.happened.append("train")
        self._train_on(data)
        return SimpleNamespace(result=self._result)

    def _train_on(self, data: Any) -> None:
        if self.plane is not None:
            data = read_columns(self.plane, data, data.fields)
        self.trained += data["input_ids"][::SAMPLES, 0].tolist()
        self.sample_numbers += data["sample_index"].tolist()

    def _result(self) -> dict[str, Any]:
        metrics = {"global_valid_toks": [1.0]}
        return {"loss": torch.zeros(1), "grad_norm": 0.0, "all_mb_metrics": metrics, "num_ranks": 1}

    def begin_train_step(self, loss_fn: Any, *, gbs: int | None = None) -> None:
        assert not self.step_open
        self.step_open = True
        self.happened.append("begin")

    def train_microbatches(self, data: Any, timer: Any = None) -> None:
        assert self.step_open
        self._train_on(data)
        self.happened.append(f"train {len(self.trained)}")

    def submit_finish_train_step(self) -> Any:
        assert self.step_open
        self.step_open = False
        self.happened.append("finish")
        return SimpleNamespace(result=self._result)

    def abort_train_step(self) -> None:
        self.step_open = False
        self.happened.append("abort")


class Hooks:
    """Writes down every call; as a control plane it refits by itself."""

    def __init__(self, world: World, *, refits: bool) -> None:
        self._world, self._refits = world, refits
        self.progress: list[tuple[int, int, bool]] = []

    def on_trajectory_collector_created(self, collector: Any) -> None:
        self._world.happened.append("collector")
        self._world.served = 0 if self._refits else self._world.served

    def begin_progress_batch(self, step: int, target: int, completed: int) -> None:
        self._world.happened.append(f"begin {step}")

    def report_progress(self, step_target_trajectories: int, completed: int, new_batch: bool) -> None:
        self.progress.append((step_target_trajectories, completed, new_batch))

    def end_progress_batch(self) -> None:
        self._world.happened.append("end")

    def clear_progress(self) -> None:
        self._world.happened.append("clear")

    def before_training(self, step: int) -> None:
        self._world.happened.append(f"before training {step}")

    def before_weight_sync(self, step: int) -> None:
        self._world.happened.append(f"before sync {step}")

    def after_training(self, step: int) -> int | None:
        self._world.happened.append(f"after training {step}")
        self._world.served = step + 1 if self._refits else self._world.served
        return step + 1 if self._refits else None


def save_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints in memory: what would be written, by step."""

    def save(checkpointer: Any, world: World, loader: Any, step: int, info: Any, config: Any, also: Any) -> None:
        world.happened.append(f"save {step}")
        world.saved[step] = (loader.state_dict(), dict(also))

    monkeypatch.setattr("nemo_rl.algorithms.training_loop.begin_checkpoint", save)
