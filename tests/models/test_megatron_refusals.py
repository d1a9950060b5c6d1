"""What the Megatron backend does not take is refused by its key, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl.config import ConfigError, PolicyConfig
from nemo_rl.models.megatron.megatron_checks import check_device, check_policy
from nemo_rl.models.policy.model_config import KernelUnavailableError, UnsupportedModelError, model_config
from tests.models.policy_ranks import MEGATRON, run_config

KEY = "policy.megatron_cfg"


def _policy(model: Path, *overrides: str, world: int = 4) -> PolicyConfig:
    return run_config(model, world, *MEGATRON, *overrides).policy


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{KEY}.tensor_model_parallel_size=4"], "num_key_value_heads=2; possible: 1, 2"),
        ([f"{KEY}.pipeline_model_parallel_size=4"], "num_hidden_layers=2; possible: 1, 2"),
        ([f"{KEY}.expert_model_parallel_size=2"], "the model has no experts; set it to 1"),
    ],
)
def test_grids_that_the_model_does_not_allow_are_refused_with_those_that_would_do(
    tiny_model: Path, overrides: list[str], message: str
) -> None:
    cfg = _policy(tiny_model, *overrides)
    with pytest.raises(UnsupportedModelError, match=message):
        check_policy(cfg, model_config(cfg))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{KEY}.expert_model_parallel_size=3", f"{KEY}.context_parallel_size=3"], "4 experts; possible: 1, 2, 4"),
        ([f"{KEY}.tensor_model_parallel_size=2"], "needs policy.megatron_cfg.sequence_parallel=true"),
        (
            [f"{KEY}.tensor_model_parallel_size=2", f"{KEY}.sequence_parallel=true"],
            "expert_tensor_parallel_size=1 differs from tensor_model_parallel_size=2",
        ),
    ],
)
def test_grids_that_experts_do_not_allow_are_refused(tiny_moe_model: Path, overrides: list[str], message: str) -> None:
    cfg = _policy(tiny_moe_model, *overrides, world=3 if "=3" in overrides[0] else 2)
    with pytest.raises(UnsupportedModelError, match=message):
        check_policy(cfg, model_config(cfg))


def test_an_unknown_architecture_is_refused_with_those_that_are_known(tiny_model: Path) -> None:
    cfg = _policy(tiny_model)
    model = model_config(cfg)
    model.model_type = "gpt2"
    with pytest.raises(UnsupportedModelError, match="'gpt2' is not known; possible: llama, qwen2, qwen3, qwen3_moe"):
        check_policy(cfg, model)


@pytest.mark.parametrize(
    "override",
    [
        "cuda_graph_impl=local",
        "moe_router_load_balancing_type=sinkhorn",
        "distributed_data_parallel_config.use_custom_fsdp=true",
    ],
)
def test_what_is_not_built_is_refused_by_name_when_the_configuration_is_read(tiny_model: Path, override: str) -> None:
    key = f"{KEY}.{override.partition('=')[0]}"
    with pytest.raises(ConfigError, match=f"{key}: .* is not built yet: ") as caught:
        _policy(tiny_model, f"{KEY}.{override}")
    assert [refusal.key for refusal in caught.value.not_built] == [key]
    # A section that is not enabled asks for nothing.
    run_config(tiny_model, 1, f"{KEY}.{override}")


PREDICTS = [f"{KEY}.mtp_num_layers=2", f"{KEY}.mtp_loss_scaling_factor=0.1"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{KEY}.mtp_loss_scaling_factor=0.0"], "mtp_loss_scaling_factor is 0, so that these layers would not be"),
        ([f"{KEY}.mtp_use_repeated_layer=true"], "mtp_use_repeated_layer: .* which Megatron-Core 0.16 lacks"),
        ([f"{KEY}.mtp_detach_heads=true"], "mtp_detach_heads: .* which Megatron-Core 0.16 lacks"),
        ([f"{KEY}.peft.enabled=true"], "mtp_num_layers: .* with adapters"),
        (
            [f"{KEY}.activation_checkpointing=true", f"{KEY}.model_overrides={{recompute_num_layers: 2}}"],
            "recompute_num_layers is 2, but policy.megatron_cfg.mtp_num_layers is 2",
        ),
        (
            [f"{KEY}.model_overrides={{mtp_num_layers: 3}}"],
            "model_overrides.mtp_num_layers: 3: this is policy.megatron",
        ),
        ([f"{KEY}.model_overrides={{mtp_standalone: true}}"], "model_overrides.mtp_standalone: .* not built yet"),
    ],
)
def test_multi_token_prediction_that_is_not_possible_is_refused_by_its_keys(
    tiny_model: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _policy(tiny_model, *PREDICTS, *overrides)
    assert _policy(tiny_model, *PREDICTS).megatron_cfg.mtp_num_layers == 2
    # Keys that belong to it, and none of its layers; and a section that is not enabled.
    if "mtp_" in overrides[0].partition("=")[0]:
        _policy(tiny_model, *overrides)
    run_config(tiny_model, 1, *PREDICTS, *overrides)


@pytest.mark.parametrize(
    "override", ["peft.dropout=0.1", "peft.lora_dtype=float32", "peft.a2a_experimental=true", "fp8_cfg.enabled=true"]
)
def test_what_adapters_cannot_do_is_refused_by_name_when_the_configuration_is_read(
    tiny_model: Path, override: str
) -> None:
    key = f"{KEY}.{override.partition('=')[0]}"
    with pytest.raises(ConfigError) as caught:
        _policy(tiny_model, f"{KEY}.peft.enabled=true", f"{KEY}.{override}")
    assert [refusal.key for refusal in caught.value.not_built] == [key]
    if "peft" in key:
        _policy(tiny_model, f"{KEY}.{override}")


@pytest.mark.parametrize("frozen", ["freeze_moe_router=true", "peft.enabled=true"])
def test_a_load_balancing_loss_of_routers_that_stay_as_they_are_is_refused(tiny_moe_model: Path, frozen: str) -> None:
    loss = [f"{KEY}.moe_router_load_balancing_type=aux_loss", f"{KEY}.moe_aux_loss_coeff=0.01"]
    with pytest.raises(ConfigError, match=f"{frozen.partition('=')[0]} is true, so that the router .*cannot follow it"):
        _policy(tiny_moe_model, *loss, f"{KEY}.{frozen}")


def test_adapters_that_the_model_does_not_allow_are_refused(tiny_model: Path, tiny_moe_model: Path) -> None:
    def refusal(model: Path, *overrides: str) -> str:
        cfg = _policy(model, f"{KEY}.peft.enabled=true", *overrides, world=2)
        with pytest.raises(UnsupportedModelError) as caught:
            check_policy(cfg, model_config(cfg))
        return str(caught.value)

    assert "layers of experts" in refusal(tiny_moe_model)
    cfg = _policy(tiny_moe_model, f"{KEY}.peft.enabled=true", f"{KEY}.peft.exclude_modules=['*.experts.*']", world=2)
    check_policy(cfg, model_config(cfg))
    assert "q_proj matches no linear layer" in refusal(tiny_model, f"{KEY}.peft.target_modules=[q_proj]")
    first = [f"{KEY}.peft.target_modules=['*.layers.0.*']", f"{KEY}.pipeline_model_parallel_size=2"]
    assert "chooses nothing in layers 1 of the model" in refusal(tiny_model, *first)


def test_experts_that_do_not_divide_the_ranks_of_a_stage_are_refused_with_numbers_that_would_do(
    tiny_moe_model: Path,
) -> None:
    grid = [f"{KEY}.pipeline_model_parallel_size=2", f"{KEY}.expert_model_parallel_size=4"]
    with pytest.raises(
        ConfigError, match="is 4, which does not divide the 2 ranks of a pipeline stage; possible: 1, 2"
    ):
        _policy(tiny_moe_model, *grid)


@pytest.mark.parametrize("override", [f"{KEY}.optimizer.optimizer=sgd", "policy.precision=float16"])
def test_what_cannot_be_optimised_is_refused_when_the_configuration_is_read(tiny_model: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=f"{override.partition('=')[0]} is {override.partition('=')[2]}"):
        _policy(tiny_model, override)


@pytest.mark.parametrize("key", ["fp8_cfg.enabled", "gradient_accumulation_fusion"])
def test_keys_that_need_transformer_engine_are_refused_without_it(tiny_model: Path, key: str) -> None:
    with pytest.raises(KernelUnavailableError, match=f"{KEY}.{key}=true needs Transformer Engine"):
        check_device(_policy(tiny_model, f"{KEY}.{key}=true"), cuda=False)


def test_both_backends_at_once_are_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="are both true; enable exactly one"):
        run_config(tiny_model, 1, f"{KEY}.enabled=true")
