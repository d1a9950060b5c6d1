"""Calls in the shapes of NeMo-RL's documentation, each beside the call of ours that it equals."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.advantage_estimator import ADVANTAGE_ESTIMATORS
from nemo_rl.algorithms.grpo import scale_rewards
from nemo_rl.algorithms.grpo.advantages import shape_rewards
from nemo_rl.algorithms.loss import ClippedPGLossFn, NLLLossFn
from nemo_rl.algorithms.reward_functions import apply_reward_shaping
from nemo_rl.algorithms.utils import calculate_kl, get_gdpo_reward_component_keys, get_tokenizer
from nemo_rl.config import (
    AsyncRLConfig,
    CheckpointingConfig,
    MasterConfig,
    RewardScalingConfig,
    RewardShapingConfig,
    SFTMasterConfig,
)
from nemo_rl.config.errors import UserError
from nemo_rl.data.datasets import AllTaskProcessedDataset
from nemo_rl.data.interfaces import DataError, TaskDataSpec
from nemo_rl.data.llm_message_utils import (
    batched_message_log_to_flat_message,
    get_first_index_that_differs,
    message_log_to_flat_messages,
)
from nemo_rl.data.packing import get_packer
from nemo_rl.data.packing.algorithms import PackingAlgorithm
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.worker_groups import MultiWorkerFuture, RayWorkerGroup
from nemo_rl.environments.math_environment import MathEnvironment
from nemo_rl.environments.utils import create_env
from nemo_rl.evals.eval import eval_cons_k, eval_pass_k
from nemo_rl.models.generation.vllm import VllmGeneration
from nemo_rl.utils.checkpoint import CheckpointManager

SCALING = {"enabled": True, "source_min": 0.0, "source_max": 1.0, "target_min": -1.0, "target_max": 3.0}


def test_rewards_of_a_batch_are_scaled_in_it_and_alone() -> None:
    for cfg in (SCALING, RewardScalingConfig(**SCALING)):
        batch = BatchedDataDict({"total_reward": torch.tensor([0.0, 0.5]), "reward/a": torch.tensor([1.0, 2.0])})
        assert scale_rewards(batch, cfg) is batch
        assert batch["total_reward"].tolist() == [-1.0, 1.0] and batch["reward/a"].tolist() == [3.0, 3.0]
        assert scale_rewards(torch.tensor([0.5]), cfg).tolist() == [1.0]
    off = BatchedDataDict({"total_reward": torch.tensor([0.5])})
    assert scale_rewards(off, {**SCALING, "enabled": False})["total_reward"].tolist() == [0.5]


def test_rewards_of_a_batch_are_shaped_by_its_first_response() -> None:
    cfg = RewardShapingConfig(
        enabled=True, overlong_buffer_length=4, overlong_buffer_penalty=1.0, max_response_length=8
    )
    log = [
        {"role": "user", "token_ids": torch.zeros(9)},
        {"role": "assistant", "token_ids": torch.zeros(6)},
        {"role": "assistant", "token_ids": torch.zeros(90)},
    ]
    rewards, truncated = torch.tensor([1.0]), torch.tensor([False])
    for given in (cfg, cfg.to_dict()):
        batch = apply_reward_shaping(BatchedDataDict({"total_reward": rewards, "message_log": [log]}), given)
        assert (
            batch["total_reward"].tolist()
            == shape_rewards(rewards, torch.tensor([6]), truncated, cfg).tolist()
            == [0.5]
        )
        assert batch["unshaped_total_reward"].tolist() == [1.0]
    assert apply_reward_shaping(rewards, torch.tensor([6]), truncated, cfg).tolist() == [0.5]


@pytest.mark.parametrize("loss_fn", [ClippedPGLossFn({"reference_policy_kl_penalty": 0.0}), NLLLossFn()])
def test_a_loss_takes_log_probabilities_first_or_by_name(loss_fn: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    data = {name: -torch.rand(2, 4, generator=generator) for name in ("prev_logprobs", "generation_logprobs")}
    data |= {"advantages": torch.randn(2, 4, generator=generator), "input_ids": torch.zeros(2, 4, dtype=torch.int64)}
    data |= {"token_mask": torch.ones(2, 4), "sample_mask": torch.ones(2)}
    logprobs, counts = -torch.rand(2, 3, generator=generator), (torch.tensor(2.0), torch.tensor(6.0))
    by_name, metrics = loss_fn(data, *counts, next_token_logprobs=logprobs)
    named, _ = loss_fn(
        data=data, global_valid_seqs=counts[0], global_valid_toks=counts[1], next_token_logprobs=logprobs
    )
    first, same = loss_fn(logprobs, data, *counts)
    assert float(by_name) == float(first) == float(named) and metrics.keys() == same.keys()


@pytest.mark.parametrize("name", [name for name in ADVANTAGE_ESTIMATORS if name in ("grpo", "reinforce_plus_plus")])
def test_estimators_take_plain_mappings(name: str) -> None:
    estimator = ADVANTAGE_ESTIMATORS[name]({"name": name, "use_leave_one_out_baseline": False}, {})
    advantages = estimator.compute_advantage(torch.tensor([[1], [1]]), torch.tensor([0.0, 1.0]), torch.ones(2, 3))
    assert advantages.shape == (2, 3) and (advantages[1] > 0).all()


def test_weights_of_the_kl_multiply_it() -> None:
    p, q, weights = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]), torch.tensor([2.0, 0.5])
    assert torch.allclose(calculate_kl(p, q, importance_sampling_weights=weights), weights * calculate_kl(p, q))


@pytest.mark.parametrize("algorithm", [*PackingAlgorithm, *(algorithm.value.upper() for algorithm in PackingAlgorithm)])
def test_packers_measure_and_pack_nothing(algorithm: Any) -> None:
    packer = get_packer(algorithm, 10, collect_metrics=True, min_bin_count=None, bin_count_multiple=2)
    assert packer.pack([]) == [] and packer.metrics == {}
    bins = packer.pack([3, 4, 5])
    assert sorted(index for items in bins for index in items) == [0, 1, 2]
    assert packer.metrics == {"sequences": 3.0, "bins": 2.0, "used": 0.6}


@pytest.mark.parametrize(("asked", "answers"), [({}, ["5"]), ({"return_extracted_answer": False}, None)])
def test_the_math_environment_gives_answers_where_asked(asked: dict[str, bool], answers: list[str] | None) -> None:
    environment = MathEnvironment({"num_workers": 1})
    try:
        result = environment.step([[{"role": "assistant", "content": "5"}]], [{"ground_truth": "5"}], **asked)
    finally:
        environment.shutdown()
    assert result.rewards.tolist() == [1.0] and result.answers == answers


def test_flat_messages_hold_any_tensors() -> None:
    one, two = {"role": "user", "x": torch.tensor([1.0, 2.0])}, {"role": "assistant", "x": torch.tensor([3.0])}
    assert message_log_to_flat_messages([one, two])["x"].tolist() == [1.0, 2.0, 3.0]
    columns, lengths = batched_message_log_to_flat_message([[one, two], [two]], {"x": -1.0}, 4)
    assert columns["x"].tolist() == [[1.0, 2.0, 3.0, -1.0], [3.0, -1.0, -1.0, -1.0]] and lengths.tolist() == [3, 1]
    wide = {"role": "user", "token_ids": torch.tensor([7]), "route": torch.ones(1, 2)}
    columns, _ = batched_message_log_to_flat_message([[wide, {"role": "assistant", "token_ids": torch.tensor([8, 9])}]])
    assert columns["route"].tolist() == [[[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]]
    assert columns["token_ids"].tolist() == [[7, 8, 9]]


def test_a_checkpoint_manager_takes_a_path_and_any_name_of_a_metric(tmp_path: Path) -> None:
    for given in (tmp_path, str(tmp_path), {"checkpoint_dir": tmp_path}, CheckpointingConfig(checkpoint_dir=tmp_path)):
        assert CheckpointManager(given).root == tmp_path
    cfg = {"checkpoint_dir": tmp_path, "metric_name": "loss", "higher_is_better": False, "keep_top_k": 2}
    with CheckpointManager(cfg) as manager:
        for step, loss in ((1, 0.9), (2, 0.1), (3, 0.5)):
            manager.finalize_checkpoint(manager.init_tmp_checkpoint(step, {"loss": loss}, {"a": 1}))
        assert manager.get_best_checkpoint_path() == tmp_path / "step_2"
    assert not (tmp_path / "step_1").exists() and (tmp_path / "step_3").exists()


def test_a_processed_dataset_needs_no_limit() -> None:
    rows = [{"task_name": "math"}]
    dataset = AllTaskProcessedDataset(rows, None, TaskDataSpec("math"), lambda row, *_: {"seen": _[2]})
    assert len(dataset) == 1 and dataset[0]["seen"] > 1e9


def test_arguments_have_their_names() -> None:
    for function, names in (
        (create_env, ["env_name", "env_config"]),
        (RayWorkerGroup, ["cluster", "remote_worker_builder", "workers_per_node", "name_prefix"]),
        (VllmGeneration, ["cluster", "config", "name_prefix", "workers_per_node", "defer_model_load"]),
    ):
        assert [*inspect.signature(function).parameters][: len(names)] == names
    references: Any = ["a", "b"]
    assert [*MultiWorkerFuture(references, [0, 1])] == references


def test_engines_refuse_what_they_do_not_have() -> None:
    cluster = object.__new__(__import__("nemo_rl.distributed.virtual_cluster", fromlist=["_"]).RayVirtualCluster)
    for options in ({"defer_model_load": True}, {"workers_per_node": 1}, {"config": None}):
        with pytest.raises(UserError, match="every slot of the cluster is used"):
            VllmGeneration(cluster, **{"config": {"model_name": "x"}, **options})
    with pytest.raises(UserError, match="no model_name"):
        VllmGeneration(cluster, {"vllm_cfg": {}})


class Part:
    """Anything that a run is made of."""


class Tokenizer(Part):
    apply_chat_template = None


class OwnLoss(NLLLossFn):
    """A loss of the script's."""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What a script has before it calls `setup`, with a run of empty parts; `driven` gets the runs of loops."""
    from nemo_rl.algorithms.grpo import assembly, loop
    from nemo_rl.data import setup as data_setup
    from nemo_rl.environments import environment_registry

    names = ("policy", "generation", "train_loader", "val_loader", "logger", "checkpointer", "state", "teachers")

    def setup(config: MasterConfig) -> SimpleNamespace:
        parts: dict[str, Any] = {name: Part() for name in names}
        parts["close"] = lambda: driven.append("closed")
        return SimpleNamespace(config=config, tokenizer=Part(), clusters=[Part()], loss_fn=NLLLossFn(), **parts)

    driven: list[Any] = []
    monkeypatch.setattr(assembly, "setup", setup)
    monkeypatch.setattr(loop, "drive", driven.append)
    monkeypatch.setattr(loop, "async_grpo_train", lambda run, hooks: driven.append(run))
    made = SimpleNamespace(train=Part(), validation=Part(), env_of_task={"math": "math"})
    made.env_of_validation_task = made.env_of_task
    monkeypatch.setattr(data_setup, "load_datasets", lambda *_: made)
    monkeypatch.setattr(environment_registry, "start_environments", lambda *_: {"math": (Part(),)})
    config = {"data": {"train": {"dataset_name": "gsm8k"}, "validation": {"dataset_name": "gsm8k", "split": "test"}}}
    return SimpleNamespace(config=config, tokenizer=Tokenizer(), driven=driven)


def test_a_run_in_thirteen_parts_is_driven_by_them_in_any_order(script: SimpleNamespace) -> None:
    from nemo_rl.algorithms.grpo import grpo_train, setup
    from nemo_rl.data.utils import setup_response_data

    whole = MasterConfig.read(script.config)
    train, validation, envs, val_envs = setup_response_data(script.tokenizer, whole.data, whole.env)
    policy = {"generation": {"_pad_token_id": 0, "model_name": "x", "max_new_tokens": 8}}
    parts = setup({**script.config, "policy": policy}, script.tokenizer, train, validation)
    assert len(parts) == 13 and parts[3] == parts.clusters and parts.master_config.policy.generation.max_new_tokens == 8
    (policy, generation, _, _, loader, val_loader, loss_fn, logger, checkpointer, state, config, _, _) = parts
    given = (policy, generation, loader, val_loader, script.tokenizer, loss_fn, envs, val_envs, logger, checkpointer)
    grpo_train(*given, state, config)
    grpo_train(state, config, *reversed(given))
    grpo_train(policy=policy, loss_fn=(own := OwnLoss()), master_config=config)
    first, *_ = script.driven
    assert script.driven == [first, "closed"] * 3 and first.policy is policy and first.loss_fn is own


def test_what_is_no_part_of_the_run_is_refused_before_anything_starts(script: SimpleNamespace) -> None:
    from nemo_rl.algorithms.grpo import async_grpo_train, grpo_train, setup
    from nemo_rl.data.utils import setup_response_data

    whole = MasterConfig.read(script.config)
    train, validation, envs, _ = setup_response_data(script.tokenizer, whole.data, whole.env)
    parts = setup(script.config, script.tokenizer, train, validation)
    other = {"data": {**script.config["data"], "train": {"dataset_name": "DeepScaler"}}}
    for call, said in (
        (lambda: setup(script.config, script.tokenizer, Part(), None), "not from setup_response_data"),
        (lambda: setup(script.config, script.tokenizer, [1], None), "not from setup_response_data"),
        (lambda: setup(other, script.tokenizer, train, validation), "another data section"),
        (lambda: setup(script.config, script.tokenizer, train, validation, processor=Part()), "processor"),
        (lambda: setup(script.config, Part(), train, validation), "no tokenizer"),
        (lambda: setup(script.config, val_dataset=validation), "here it is setup"),
        (lambda: grpo_train(parts.policy, {"math": Part()}), "dict is no part"),
        (lambda: grpo_train(parts.policy, envs, Part()), "Part is no part"),
        (lambda: grpo_train(parts.policy, "text"), "str is no part"),
        (grpo_train, "with the run, or all parts"),
        (lambda: grpo_train(policy=Part()), "with the run, or all parts"),
        (lambda: async_grpo_train(*parts), "async_grpo.enabled: false"),
        (lambda: async_grpo_train(*parts, max_trajectory_age_steps=5), "max_trajectory_age_steps is 1"),
    ):
        with pytest.raises(UserError, match=said):
            call()
    # A run whose rollouts go ahead of training is not one in turns.
    parts.master_config.async_rl = AsyncRLConfig()
    with pytest.raises(UserError, match="set up with async_rl"):
        grpo_train(*parts)
    parts.master_config.grpo.async_grpo.enabled = True
    with pytest.raises(UserError, match="async_grpo.enabled: true"):
        grpo_train(*parts)
    assert script.driven == []


def test_a_run_of_supervised_fine_tuning_in_parts_is_driven_by_them_in_any_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from nemo_rl.algorithms.sft import assembly, driver, setup, sft_train
    from nemo_rl.data import setup as data_setup
    from nemo_rl.data.utils import setup_response_data

    names = ("policy", "clusters", "train_loader", "val_loader", "logger", "checkpointer", "state")
    driven: list[Any] = []

    def made(config: SFTMasterConfig) -> SimpleNamespace:
        run = SimpleNamespace(config=config, loss_fn=NLLLossFn(), **{name: Part() for name in names})
        run.clusters.training, run.close = Part(), lambda: driven.append("closed")
        return run

    monkeypatch.setattr(assembly, "setup", made)
    monkeypatch.setattr(driver, "sft_train", driven.append)
    monkeypatch.setattr(data_setup, "load_datasets", lambda *_: SimpleNamespace(train=Part(), validation=Part()))
    config = {"data": {"train": {"dataset_name": "gsm8k"}, "validation": {"dataset_name": "gsm8k", "split": "test"}}}
    tokenizer = Tokenizer()
    train, validation = setup_response_data(tokenizer, SFTMasterConfig.read(config).data)
    parts = setup(config, tokenizer, train, validation)
    assert len(parts) == 9 and parts.policy is parts[0] and parts.master_config is parts[8]
    policy, _, loader, val_loader, loss_fn, logger, checkpointer, state, master = parts
    given = (policy, loader, val_loader, tokenizer, loss_fn, master, logger, checkpointer, state)
    sft_train(*given)
    sft_train(*reversed(given))
    assert driven == [driven[0], "closed"] * 2 and driven[0].policy is policy
    for call, said in (
        (lambda: setup(config, tokenizer, Part()), "not from setup_response_data"),
        (lambda: setup(config, Part(), train), "no tokenizer"),
        (lambda: sft_train(*given, Part()), "Part is no part"),
        (lambda: sft_train(Part()), "with the run, or all parts"),
    ):
        with pytest.raises(UserError, match=said):
            call()
    assert len(driven) == 4


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_engines_are_made_of_a_cluster_and_a_configuration(tiny_model: Path, ray_session: None) -> None:
    from nemo_rl.algorithms.utils import get_tokenizer
    from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
    from nemo_rl.models.generation import configure_generation_config

    tokenizer = get_tokenizer({"name": str(tiny_model)})
    config = {
        "backend": "vllm",
        "model_name": str(tiny_model),
        "max_new_tokens": 4,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": None,
        "stop_token_ids": None,
        "stop_strings": None,
        "colocated": {"enabled": False, "resources": {"gpus_per_node": None, "num_nodes": None}},
        "vllm_cfg": {"precision": "float32", "max_model_len": 64, "async_engine": False},
    }
    cluster = RayVirtualCluster([1], use_gpus=False, max_colocated_worker_groups=1, num_gpus_per_node=1, name="calls")
    try:
        generation = VllmGeneration(cluster, configure_generation_config(config, tokenizer, is_eval=True))
        try:
            ids = tokenizer("1+1=", add_special_tokens=False, return_tensors="pt")["input_ids"]
            data = BatchedDataDict({"input_ids": ids, "input_lengths": torch.tensor([ids.shape[1]])})
            result = generation.generate(data, greedy=True)
            assert 1 <= int(result["generation_lengths"][0]) <= 4
            assert result["output_ids"][0, : ids.shape[1]].tolist() == ids[0].tolist()
        finally:
            generation.shutdown()
    finally:
        cluster.shutdown()


def test_an_evaluation_is_the_sum_over_prompts() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.5, 0.0, 0.0])
    assert eval_pass_k(rewards, 2, 1) == pytest.approx(0.5 + 0.5 + 0.0)
    assert eval_pass_k(rewards, 2, 2) == pytest.approx(1.0 + (1 - (1 - 2 / 2)) + 0.0)
    assert eval_cons_k(rewards, 2, 2, ["4", "5", "1", "1", None, None]) == pytest.approx(1.0)


def test_small_functions_of_nemo_rl_give_what_they_say() -> None:
    assert get_gdpo_reward_component_keys({"reward/b": 1, "total_reward": 2, "reward/a": 3}) == ["reward/a", "reward/b"]
    assert [get_first_index_that_differs(*pair) for pair in (("abc", "abd"), ("ab", "abc"), ("", "x"), ("a", "a"))] == [
        2,
        2,
        0,
        1,
    ]
    estimator = ADVANTAGE_ESTIMATORS["opd"]({"name": "opd"}, {})
    columns = {name: torch.full((1, 3), value) for name, value in (("teacher_logprobs", -1.0), ("prev_logprobs", -3.0))}
    estimator.compute_advantage(torch.zeros(1, 1), torch.zeros(1), torch.tensor([[0.0, 1.0, 1.0]]), **columns)  # type: ignore[attr-defined]
    assert estimator.last_metrics == {"on_policy_distillation/teacher_student_logprob_gap_mean": 2.0}
    with pytest.raises(DataError, match="get_processor=True"):
        get_tokenizer({"name": "x"}, True)
