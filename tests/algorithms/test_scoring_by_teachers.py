"""Teachers on CPU slots: an engine gives the columns of a policy, and either of them may die."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from nemo_rl.algorithms.distillation.teachers import EngineTeacher, Teachers, start_teacher_actors
from nemo_rl.config import DistillationMasterConfig, load_master_config
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.data_plane.field_schema import TOPK_IDS, TOPK_LOGPROBS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import WorkerDiedError
from nemo_rl.experience.store import InProcessStore
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.timer import Timer
from tests.conftest import ROOT
from tests.models.engines import engine_pids, kill

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]

K, WIDTH = 40, 32
LENGTHS = torch.tensor([32, 1, 2, 17, 9, 31])


@contextmanager
def _teacher(model: Path, backend: str) -> Iterator[Teachers]:
    overrides = [
        f"policy.model_name={model}",
        f"teacher.model_name={model}",
        f"teacher.backend={backend}",
        f"distillation.topk_logits_k={K}",
    ]
    path = ROOT / "examples" / "configs" / "distillation_arithmetic_cpu.yaml"
    config = load_master_config(path, overrides, DistillationMasterConfig)
    cluster = RayVirtualCluster([1], use_gpus=False, max_colocated_worker_groups=1, num_gpus_per_node=1, name=backend)
    actors = start_teacher_actors(config, cluster, {}, pytest.fail)
    tokenizer = get_tokenizer(config.policy.tokenizer)
    # The policy only makes room, on GPUs.
    teachers = Teachers(actors, config, cast(Policy, None), tokenizer, lends=False)
    try:
        yield teachers
    finally:
        teachers.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def engine(ray_session: None, tiny_model: Path) -> Iterator[Teachers]:
    with _teacher(tiny_model, "vllm") as teachers:
        yield teachers


@pytest.fixture(scope="module")
def policy(ray_session: None, tiny_model: Path) -> Iterator[Teachers]:
    with _teacher(tiny_model, "policy") as teachers:
        yield teachers


def _columns(teachers: Teachers, rows: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 256, (len(LENGTHS), WIDTH), generator=torch.Generator().manual_seed(5))
    store = InProcessStore(0)
    handle = store.write(BatchedDataDict(input_ids=ids.repeat(rows, 1), input_lengths=LENGTHS.repeat(rows)))
    scored = store.read(teachers.score(handle, ["t"] * len(LENGTHS) * rows, store, Timer()), (TOPK_IDS, TOPK_LOGPROBS))
    return scored[TOPK_IDS], scored[TOPK_LOGPROBS]


def _model(teachers: Teachers) -> Any:
    return teachers._models[0]


def test_engines_give_the_columns_of_a_policy_and_give_them_again_after_sleep(
    engine: Teachers, policy: Teachers
) -> None:
    (ids, logprobs), (want_ids, want) = _columns(engine), _columns(policy)
    for row, length in enumerate(LENGTHS.tolist()):
        trained = slice(0, length - 1)
        assert torch.allclose(logprobs[row, trained], want[row, trained], atol=1e-5)
        # Where two tokens are as likely their order is free.
        apart = (want[row, trained, :-1] - want[row, trained, 1:]) > 1e-5
        clear = torch.nn.functional.pad(apart, (1, 0), value=True) & torch.nn.functional.pad(apart, (0, 1), value=False)
        assert torch.equal(ids[row, trained][clear], want_ids[row, trained][clear])
        assert clear.sum() > 0.9 * clear.numel() - K
    again = _columns(engine)
    assert torch.equal(again[0], ids) and torch.equal(again[1], logprobs)


def test_engines_give_the_log_probability_of_every_token_that_a_policy_gives(
    engine: Teachers, policy: Teachers
) -> None:
    ids = torch.randint(0, 256, (len(LENGTHS), WIDTH), generator=torch.Generator().manual_seed(5))
    # These engines have no room for one token more.
    lengths = LENGTHS.clamp(max=WIDTH - 1)
    batch = BatchedDataDict(input_ids=ids, input_lengths=lengths)
    of_policy = _model(policy)
    of_policy.prepare_for_lp_inference()
    want = of_policy.get_logprobs(batch)["logprobs"]
    _model(engine).prepare_for_lp_inference()
    found = _model(engine).score(batch, 0)["logprobs"]
    _model(engine).offload_to_cpu()
    for row, length in enumerate(lengths.tolist()):
        assert torch.allclose(found[row, 1:length], want[row, 1:length], atol=1e-5)
        assert not found[row, length:].any() and found[row, 0] == 0
    assert (found[0, 1 : WIDTH - 1] < 0).all()


def test_samples_wait_for_the_rebuild_of_a_dead_engine(engine: Teachers) -> None:
    teacher = _model(engine)
    assert isinstance(teacher, EngineTeacher)
    before = _columns(engine)
    # Between two batches, so that it is found dead when it is woken.
    kill(engine_pids(teacher._generation)[0])
    after = _columns(engine)
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    killed: list[int] = []

    def kill_when_busy() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not killed:
            if teacher._generation._dispatcher._pending:
                killed.append(engine_pids(teacher._generation)[0])
                kill(killed[0])
            time.sleep(0.001)

    thread = threading.Thread(target=kill_when_busy)
    thread.start()
    ids, _ = _columns(engine, rows=200)
    thread.join()
    assert killed and torch.equal(ids, before[0].repeat(200, 1, 1))


def test_a_dead_policy_ends_the_scoring_with_its_name(policy: Teachers) -> None:
    _columns(policy)
    kill(_model(policy).worker_group.run("describe")[0]["pid"])
    with pytest.raises(WorkerDiedError, match="teacher"):
        _columns(policy)
