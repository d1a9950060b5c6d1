"""A run whose accelerators belong to a control plane that knows it by `RLixHooksProtocol`, and its engines by the
names of such planes' services (`nemo_rl.compat.control_plane`), and at its start by the methods of generation and the
receiver: training lies inside the slots of generation, and sync is the plane's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import remove_placement_group

from nemo_rl.algorithms import grpo
from nemo_rl.algorithms.grpo import assembly
from nemo_rl.algorithms.grpo.assembly import setup
from nemo_rl.algorithms.grpo.loop import async_grpo_train
from nemo_rl.algorithms.grpo.run import GRPORun
from nemo_rl.algorithms.placement import Clusters, OwnPlacement
from nemo_rl.compat.control_plane import Coordinator
from nemo_rl.config import MasterConfig, load_master_config
from nemo_rl.distributed.accelerator_slots import Accelerator
from nemo_rl.models.generation.vllm.extension import bucket_stats
from nemo_rl.models.generation.vllm.fleet import ShardState
from nemo_rl.time_sharing.pipelines.shared_cluster import SharedCluster, reserve_pool
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.utils.metrics_file import read_metrics
from nemo_rl.utils.record import read_record
from nemo_rl.utils.record_events import GroupTrained, StepFinished, TokensGenerated
from tests.conftest import ROOT
from tests.models.test_receiver_methods import payloads

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, PROMPTS, BUCKET_BYTES = 3, 4, 1 << 20
OVERLAPPING, OTHER = 0, 1


class Overlapping(OwnPlacement):
    """Training on the first of two slots, and generation on both."""

    def reserve(self, config: MasterConfig, accelerator: Accelerator) -> Clusters:
        pool = Pool(1, 2)
        self.groups = reserve_pool(pool, accelerator)

        ports = config.cluster.master_port_range_low, config.cluster.master_port_range_high

        def cluster(slots: list[int], *, leads_ranks: bool) -> SharedCluster:
            return SharedCluster(
                pool,
                slots,
                accelerator,
                pipeline="foreign",
                incarnation=1,
                leads_ranks=leads_ranks,
                ports=ports,
            )

        return Clusters(cluster([OVERLAPPING], leads_ranks=False), cluster([OVERLAPPING, OTHER], leads_ranks=True))


class Plane:
    """Implements `RLixHooksProtocol`, and notes what it was asked for."""

    def __init__(self, run: GRPORun) -> None:
        assert run.generation is not None
        self._policy, self._generation = run.policy, run.generation
        self._coordinator = Coordinator(run)
        self._weights: dict[str, Any] = {}
        self._served: str | None = None
        self.said: list[str] = []
        self.progress: list[tuple[int, int]] = []

    def on_trajectory_collector_created(self, collector: Any) -> None:
        self.said.append("collector")
        self._collector = collector
        self._build(0)
        self._policy.offload_to_cpu()
        self._generation.mark_dp_ranks_inactive([OVERLAPPING, OTHER])
        self._load([OVERLAPPING, OTHER], 0)
        self._generation.activate_dp_ranks([OVERLAPPING, OTHER])

    def begin_progress_batch(self, step: int, target: int, completed: int) -> None:
        self.said.append(f"begin {step}")
        assert 0 <= completed <= target == PROMPTS

    def report_progress(self, step_target_trajectories: int, completed: int, new_batch: bool) -> None:
        self.progress.append((completed, step_target_trajectories))

    def end_progress_batch(self) -> None:
        self.said.append("end")

    def clear_progress(self) -> None:
        self.said.append("clear")

    def before_training(self, step: int) -> None:
        self.said.append(f"train {step}")
        self._coordinator.resize_infer([OVERLAPPING], [])
        states = [self._generation.fleet.state(shard) for shard in (OVERLAPPING, OTHER)]
        assert states == [ShardState.ASLEEP, ShardState.ACTIVE]

    def before_weight_sync(self, step: int) -> None:
        self.said.append(f"sync {step}")
        self._coordinator.build_latest(step + 1)

    def after_training(self, step: int) -> int:
        self.said.append(f"trained {step}")
        self._policy.offload_to_cpu()
        self._policy.destroy_nccl_groups()
        # Below its running requests, which stand still meanwhile.
        assert self._coordinator.sync_base_weights_to_active() == [OTHER]
        self._collector.set_weight_version(step + 1)
        if step == 0:
            self._coordinator.resize_infer([], [OVERLAPPING])
        else:
            self._generation.wake_up_partial([OVERLAPPING], skip_activate=True)
            self._coordinator.sync_selected_workers([OVERLAPPING], verify=True)
            self._generation.finalize_weight_update([OVERLAPPING], step + 1)
            self._generation.activate_dp_ranks([OVERLAPPING])
        assert grpo.DO_TIME_SHARING and self._coordinator.cache_ready_step == step + 1
        return step + 1

    def _build(self, version: int) -> None:
        group = self._policy.worker_group
        built = group.run("build_cpu_bucket_cache", step=version, bucket_bytes=BUCKET_BYTES, served=self._served)[0]
        self._served = built.path
        self._weights = {name: tensor.clone() for name, tensor in built.weights()}

    def _load(self, shards: list[int], version: int) -> None:
        workers = [self._generation.group.workers[shard] for shard in shards]

        def call(name: str, *arguments: object) -> None:
            ray.get([worker.rlix_model_update_rpc.remote(name, *arguments) for worker in workers], timeout=120)

        for bucket in payloads(self._weights):
            call("update_parameter_in_bucket", [bucket], False, [0], "cpu_serialize")
        call("verify_model", bucket_stats(self._weights))
        self._generation.finalize_weight_update(shards, version)


def test_a_control_plane_behind_hooks_runs_training_on_the_slots_of_an_engine_that_sleeps(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_session: None
) -> None:
    monkeypatch.setenv("RLIX_CONTROL_PLANE", "rlix")
    asked: list[object] = []
    start = assembly.start_engine_actors
    monkeypatch.setattr(
        assembly, "start_engine_actors", lambda *some, **named: asked.append(named["sleeps"]) or start(*some, **named)
    )
    config = load_master_config(
        ROOT / "examples" / "configs" / "grpo_arithmetic_async_cpu.yaml",
        [
            f"policy.model_name={tiny_model}",
            f"logger.log_dir={tmp_path / 'logs'}",
            f"grpo.max_num_steps={STEPS}",
            f"grpo.num_prompts_per_step={PROMPTS}",
            "grpo.num_generations_per_prompt=4",
            "policy.train_global_batch_size=16",
            "policy.train_micro_batch_size=8",
            # Versions that differ, so that tokens of a wrong one are seen.
            "policy.optimizer.kwargs.lr=0.01",
            f"weight_sync.bucket_bytes={BUCKET_BYTES}",
            "grpo.val_at_start=false",
            "grpo.val_period=0",
            "grpo.val_at_end=false",
            "checkpointing.enabled=false",
            "logger.tensorboard_enabled=false",
        ],
    )
    placement = Overlapping()
    run = setup(config, placement=placement)
    try:
        plane = Plane(run)
        async_grpo_train(run, plane)
    finally:
        run.close()
        for group in placement.groups:
            remove_placement_group(group)
    step = ["begin {0}", "end", "train {0}", "sync {0}", "trained {0}"]
    assert plane.said == ["collector", *[line.format(n) for n in range(STEPS) for line in step], "clear"]
    assert plane.progress[-1] == (PROMPTS, PROMPTS)
    assert asked == [True], "engines on slots of their own can sleep too"

    metrics = read_metrics(Path(config.logger.log_dir))
    steps, errors = metrics.scalars("train/token_mult_prob_error")
    assert steps == [*range(1, STEPS + 1)]
    # The policy scores what the engines drew under the version before it trains: a sample of that version is its own.
    assert errors[0] == pytest.approx(1.0, abs=1e-3)
    entries = [entry.event for entry in read_record(Path(config.logger.log_dir) / "record.jsonl")]
    trained = [event.group_id for event in entries if isinstance(event, GroupTrained)]
    assert len(trained) == len(set(trained)) == STEPS * PROMPTS
    assert [event.version for event in entries if isinstance(event, StepFinished)] == [*range(1, STEPS + 1)]
    drawn = {span.version for event in entries if isinstance(event, TokensGenerated) for span in event.spans}
    assert drawn >= {0, 1}
