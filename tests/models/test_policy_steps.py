"""The split step as a driver calls it: futures, what the result says, what may happen between steps, and a rank that
dies in the middle of one.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import WorkerError
from nemo_rl.loss import ClippedPGLossFn
from nemo_rl.models.policy.lm_policy import Policy
from tests.models.policy_ranks import MEGATRON, ROWS, RaisingLoss, run_config, training_batch

pytestmark = [pytest.mark.ray, pytest.mark.slow]

# Far below the deadline of a collective, which the other ranks hang in.
SOON_S = 60.0


@pytest.fixture(scope="module")
def policy(tiny_model: Path, ray_session: None) -> Iterator[Policy]:
    cluster = RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=1, num_gpus_per_node=2, name="steps")
    config = run_config(tiny_model, 2, *MEGATRON)
    policy = Policy(cluster, config.policy, None, init_reference_model=False)
    policy.wait_until_started()
    yield policy
    policy.shutdown()
    cluster.shutdown()


def test_chunks_under_way_make_the_step_that_train_makes(policy: Policy, tiny_model: Path) -> None:
    loss, data = ClippedPGLossFn(run_config(tiny_model, 2).loss_fn), training_batch()
    started = policy.started
    assert started is not None and (started.backend, started.ranks) == ("megatron", 2)
    assert re.fullmatch(r"megatron-core [\d.]+ \(local\), packed attention \(sdpa\)", started.kernels)
    with pytest.raises(WorkerError, match="no train step open"):
        policy.finish_train_step()
    expected = policy.train(data, loss, eval_mode=True)
    policy.begin_train_step(loss, mbs=2)
    chunks = [policy.submit_microbatches(data.slice(0, 3)), policy.submit_microbatches(data.slice(3, ROWS))]
    finished = policy.submit_finish_train_step()
    # Calls run in the order in which they were submitted; the driver waits for the last alone.
    result = finished.result(timeout_s=SOON_S)
    assert finished.done() and all(chunk.done() for chunk in chunks)
    assert result["loss"].tolist() == pytest.approx(expected["loss"].tolist(), rel=1e-5)
    assert result["num_ranks"] == 2 and result["lr"] > 0 and result["skipped_steps"] == 0
    assert len(result["all_mb_metrics"]["global_valid_toks"]) == 1
    # Forward and backward of every row, however they were cut.
    assert result["total_flops"] == pytest.approx(3 * expected["total_flops"])


def test_a_chunk_that_fails_closes_the_step_on_every_worker(policy: Policy, tiny_model: Path) -> None:
    config, data = run_config(tiny_model, 2), training_batch()
    before = policy.worker_group.run("weight_checksums")[0]
    policy.begin_train_step(RaisingLoss(config.loss_fn))
    with pytest.raises(WorkerError, match="planted"):
        policy.train_microbatch(data)
    with pytest.raises(WorkerError, match="no train step open"):
        policy.finish_train_step()
    assert policy.worker_group.run("weight_checksums")[0] == before


def test_training_goes_on_after_everything_was_taken_off_the_devices(policy: Policy, tiny_model: Path) -> None:
    loss, data = ClippedPGLossFn(run_config(tiny_model, 2).loss_fn), training_batch()
    before = policy.worker_group.run("weight_checksums")[0]
    policy.offload_training_gpu()
    policy.destroy_nccl_groups()
    policy.destroy_nccl_groups()
    policy.prepare_for_training()
    assert policy.worker_group.run("weight_checksums")[0] == before
    policy.begin_train_step(loss)
    with pytest.raises(WorkerError, match="a train step is open"):
        policy.destroy_nccl_groups()
    policy.abort_train_step()
    policy.destroy_nccl_groups()
    assert policy.train(data, loss)["grad_norm"] > 0


def test_a_rank_that_dies_in_a_step_ends_the_call_for_all(policy: Policy, tiny_model: Path) -> None:
    pids = [answer["pid"] for answer in policy.worker_group.run("describe")]
    loss, data = ClippedPGLossFn(run_config(tiny_model, 2).loss_fn), training_batch()
    policy.begin_train_step(loss)
    policy.train_microbatches(data.slice(0, 3))
    started = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerError, match="rank 1"):
        policy.train_microbatches(data.slice(3, ROWS))
    assert time.monotonic() - started < SOON_S
