"""Optimizers and schedules come from dotted names; what does not fit is an error that names the key."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from nemo_rl.config import OptimizerConfig, PolicyConfig, SchedulerConfig
from nemo_rl.models.policy.model_config import UnsupportedModelError, model_config
from nemo_rl.models.policy.optimizer import (
    OptimizerConfigError,
    advance_scheduler,
    build_optimizer,
    build_scheduler,
    check_names,
)


def _parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2))]


def _sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(_parameters(), lr=1.0)


def test_an_optimizer_is_built_by_its_dotted_name() -> None:
    optimizer = build_optimizer(OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 0.5}), _parameters())
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("name", "kwargs", "says"),
    [
        ("torch.optim.AdamV", {}, "module torch.optim has no 'AdamV'"),
        ("nowhere.Adam", {}, "No module named 'nowhere'"),
        ("Adam", {}, "not a dotted name"),
        ("torch.optim.SGD", {"learning_rate": 1.0}, "unexpected keyword argument 'learning_rate'"),
        ("torch.optim.SGD", {"lr": -1.0}, "Invalid learning rate"),
        ("torch.nn.ParameterList", {}, "is not a torch optimizer"),
    ],
)
def test_an_optimizer_that_cannot_be_built_is_named_with_its_key(name: str, kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(OptimizerConfigError, match="policy.optimizer") as error:
        build_optimizer(OptimizerConfig(name=name, kwargs=kwargs), _parameters())
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([SchedulerConfig(name="torch.optim.lr_scheduler.Linear")], "policy.scheduler.0"),
        (
            [SchedulerConfig(name="torch.optim.lr_scheduler.StepLR", kwargs={"step": 1})],
            "policy.scheduler.0: torch.optim.lr_scheduler.StepLR(step=1)",
        ),
        ([SchedulerConfig(name="torch.optim.lr_scheduler.ConstantLR")] * 2, "2 schedulers need 1 milestones, got None"),
    ],
)
def test_a_schedule_that_cannot_be_built_is_named_with_its_key(entries: list[SchedulerConfig], says: str) -> None:
    with pytest.raises(OptimizerConfigError) as error:
        build_scheduler(entries, _sgd())
    assert says in str(error.value)


def test_schedules_follow_each_other_at_their_milestones() -> None:
    optimizer = _sgd()
    first = SchedulerConfig(name="torch.optim.lr_scheduler.ConstantLR", kwargs={"factor": 0.5, "total_iters": 100})
    second = SchedulerConfig(name="torch.optim.lr_scheduler.ConstantLR", kwargs={"factor": 1.0, "total_iters": 100})
    scheduler = build_scheduler([first, second, SchedulerConfig(milestones=[2])], optimizer)
    assert scheduler is not None
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == [0.5, 0.5, 1.0, 1.0]


@pytest.mark.parametrize(
    "entries",
    [
        [
            SchedulerConfig(
                name="transformers.get_cosine_schedule_with_warmup",
                kwargs={"num_warmup_steps": 2, "num_training_steps": 10},
            )
        ],
        PolicyConfig().scheduler,
    ],
)
def test_a_schedule_goes_on_where_it_was(entries: list[SchedulerConfig]) -> None:
    whole, resumed = _sgd(), _sgd()
    schedules = [build_scheduler(entries, optimizer) for optimizer in (whole, resumed)]
    assert schedules[0] is not None and schedules[1] is not None
    for _ in range(3):
        whole.step()
        schedules[0].step()
    resumed.step()
    advance_scheduler(schedules[1], 3)
    assert resumed.param_groups[0]["lr"] == whole.param_groups[0]["lr"]
    for optimizer, schedule in zip((whole, resumed), schedules, strict=True):
        optimizer.step()
        schedule.step()
    assert schedules[1].get_last_lr() == schedules[0].get_last_lr()


def test_a_schedule_whose_rate_or_arguments_changed_is_obeyed_from_the_step_where_the_run_is() -> None:
    entry = SchedulerConfig(
        name="torch.optim.lr_scheduler.LinearLR", kwargs={"start_factor": 0.5, "end_factor": 1.0, "total_iters": 4}
    )
    optimizer = torch.optim.SGD(_parameters(), lr=8.0)
    schedule = build_scheduler([entry], optimizer)
    assert schedule is not None
    optimizer.step()
    advance_scheduler(schedule, 2)
    assert schedule.get_last_lr() == pytest.approx([6.0])


def test_an_override_of_a_key_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    Qwen2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2).save_pretrained(tmp_path)
    for key, near in (("rope_thetta", ""), ("max_position_embedings", "Did you mean 'max_position_embeddings'")):
        cfg = PolicyConfig(model_name=str(tmp_path), hf_config_overrides={key: 8})
        with pytest.raises(UnsupportedModelError, match=rf"hf_config_overrides\.{key}: 8: .* no such key\..*{near}"):
            model_config(cfg)
    cfg = PolicyConfig(model_name=str(tmp_path), hf_config_overrides={"max_position_embeddings": 8})
    assert model_config(cfg).max_position_embeddings == 8


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("LinearLR", {"total_iters": "50"}),
        ("ReduceLROnPlateau", {"patience": 3}),
        ("CosineAnnealingLR", {"T_max": 10, "eta_min": "0.1"}),
        ("StepLR", {"step_size": 1, "gamma": [0.1]}),
    ],
)
def test_a_schedule_that_cannot_take_a_step_is_named_before_the_run(name: str, kwargs: dict[str, Any]) -> None:
    entry = SchedulerConfig(name=f"torch.optim.lr_scheduler.{name}", kwargs=kwargs)
    with pytest.raises(OptimizerConfigError, match=rf"policy\.scheduler\.0: .*{name}.* cannot"):
        check_names(OptimizerConfig(), [entry])


TE = "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"


def _trained(optimizer_name: str, kwargs: dict[str, Any], steps: int = 5) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(7, 5, generator=generator))
    optimizer = build_optimizer(OptimizerConfig(name=optimizer_name, kwargs=kwargs), [weights])
    for _ in range(steps):
        weights.grad = torch.randn(7, 5, generator=generator)
        optimizer.step()
    return weights.detach(), optimizer


@pytest.mark.parametrize(
    ("kwargs", "torchs", "theirs"),
    [
        ({}, "torch.optim.AdamW", {"weight_decay": 0.0}),
        ({"weight_decay": 0.1, "betas": [0.8, 0.99], "eps": 1e-6}, "torch.optim.AdamW", {}),
        ({"weight_decay": 0.1, "adam_w_mode": False}, "torch.optim.Adam", {}),
        ({"master_weights": True, "store_param_remainders": True}, "torch.optim.AdamW", {"weight_decay": 0.0}),
    ],
)
def test_fused_adam_is_torchs_adam(kwargs: dict[str, Any], torchs: str, theirs: dict[str, Any]) -> None:
    own = ("adam_w_mode", "master_weights", "store_param_remainders")
    same = {key: value for key, value in kwargs.items() if key not in own} | theirs
    got, _ = _trained(TE, {"lr": 0.1, **kwargs})
    want, _ = _trained(torchs, {"lr": 0.1, **same})
    torch.testing.assert_close(got, want)


def test_fused_adams_moments_are_kept_in_bfloat16_and_restored_bit_for_bit() -> None:
    kwargs = {"lr": 0.1, "exp_avg_dtype": "torch.bfloat16", "exp_avg_sq_dtype": "torch.bfloat16"}
    weights, optimizer = _trained(TE, kwargs)
    exact, _ = _trained(TE, {"lr": 0.1})
    (state,) = optimizer.state.values()
    assert {state[name].dtype for name in ("exp_avg", "exp_avg_sq")} == {torch.bfloat16}
    assert 0 < (weights - exact).abs().max() < 0.05
    again = torch.nn.Parameter(weights.clone())
    restored = build_optimizer(OptimizerConfig(name=TE, kwargs=kwargs), [again])
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for parameter, one in ((optimizer.param_groups[0]["params"][0], optimizer), (again, restored)):
        parameter.grad = torch.ones(7, 5)
        one.step()
    assert torch.equal(again, optimizer.param_groups[0]["params"][0])


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"exp_avg_dtype": "torch.float16"}, "exp_avg_dtype=torch.float16: moments are kept in"),
        ({"master_weight_dtype": "torch.bfloat16"}, "weights are kept in float32"),
        ({"capturable": True}, "capturable=true is not supported"),
        ({"betas": [0.9, 1.0]}, "out of range"),
        ({"momentum": 0.9}, "unexpected keyword argument 'momentum'"),
    ],
)
def test_what_fused_adam_cannot_do_is_refused(kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(OptimizerConfigError) as error:
        build_optimizer(OptimizerConfig(name=TE, kwargs={"lr": 0.1, **kwargs}), _parameters())
    assert says in str(error.value)
