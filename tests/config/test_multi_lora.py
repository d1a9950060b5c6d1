"""A base's file and adapters' files: what each may say, and what is refused by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl.config import ConfigError
from nemo_rl.config.multi_lora import check_adapter, load_adapter, load_base

_BASE = """
defaults: {examples}/grpo_arithmetic_cpu.yaml
multi_lora: {{slots: 2}}
policy: {{dtensor_cfg: {{lora_cfg: {{enabled: true, dim: 8}}}}}}
checkpointing: {{checkpoint_dir: {folder}/results}}
logger: {{log_dir: {folder}/logs}}
"""
_EXAMPLES = Path(__file__).parents[2] / "examples" / "configs"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(_BASE.format(examples=_EXAMPLES, folder=tmp_path))
    return path


def _written(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return path


def test_an_adapters_file_is_laid_over_the_base(base: Path, tmp_path: Path) -> None:
    cfg, raw = load_base(base)
    text = "grpo: {seed: 7}\npolicy: {max_grad_norm: 0.5, dtensor_cfg: {lora_cfg: {dim: 4}}}\nmulti_lora: {weight: 2}"
    adapter = load_adapter(raw, _written(tmp_path, "one", text))
    check_adapter(cfg, adapter, [])
    assert (adapter.name, adapter.config.grpo.seed, cfg.grpo.seed) == ("one", 7, 42)
    lora = adapter.config.policy.dtensor_cfg.lora_cfg
    assert (lora.dim, lora.enabled, adapter.config.multi_lora.weight) == (4, True, 2)
    assert adapter.config.checkpointing.checkpoint_dir == str(tmp_path / "results" / "one")
    assert adapter.config.logger.log_dir == str(tmp_path / "logs" / "one")
    assert adapter.config.policy.model_name == cfg.policy.model_name


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("policy: {model_name: other}", "policy.model_name"),
        ("cluster: {gpus_per_node: 2}", "cluster"),
        ("policy: {dtensor_cfg: {lora_cfg: {enabled: false}}}", "policy.dtensor_cfg.lora_cfg.enabled"),
        ("policy: {generation: {vllm_cfg: {max_model_len: 9}}}", "policy.generation.vllm_cfg"),
        ("multi_lora: {slots: 9}", "multi_lora.slots"),
        ("policy: 3", "policy"),
    ],
)
def test_a_key_of_the_base_is_refused_in_an_adapters_file(base: Path, tmp_path: Path, text: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_adapter(load_base(base)[1], _written(tmp_path, "one", text))
    assert f"{key}: belongs to the base" in str(caught.value)


def test_an_adapter_that_does_not_fit_beside_the_others_is_refused(base: Path, tmp_path: Path) -> None:
    cfg, raw = load_base(base)
    first = load_adapter(raw, _written(tmp_path, "one", "{}"))
    same = f"checkpointing: {{checkpoint_dir: {tmp_path}/results/../results/one}}"
    wide = "policy: {dtensor_cfg: {lora_cfg: {dim: 16}}}"
    for name, text, said in (
        ("two", same, "is that of adapter one too"),
        ("one", "{}", "names an adapter so already"),
        ("three", wide, "policy.dtensor_cfg.lora_cfg.dim is 16, and the base's engines hold adapters up to rank 8"),
        ("four", "policy: {generation: {max_new_tokens: 99}}", "policy.generation.max_new_tokens is 99"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_adapter(cfg, load_adapter(raw, _written(tmp_path, name, text)), [first])
        assert said in str(caught.value)
    with pytest.raises(ConfigError, match="an adapter is named after its file"):
        load_adapter(raw, _written(tmp_path, "a b", "{}"))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("policy.dtensor_cfg.lora_cfg.enabled=false", "adapters are all that this run trains"),
        ("policy.dtensor_cfg.lora_cfg.dropout=0.1", "an adapter's dropout would depend on"),
        ("policy.dtensor_cfg.context_parallel_size=2", "policy.dtensor_cfg.context_parallel_size is 2"),
        ("policy.dtensor_cfg.torch_compile=true", "policy.dtensor_cfg.torch_compile is true"),
        ("data_plane.enabled=true", "data_plane.enabled: not built for many adapters"),
        ("grpo.rollout_replay=somewhere", "grpo.rollout_replay: not built for many adapters"),
        ("policy.train_global_batch_size=256", "which make one step of its optimizer"),
        ("policy.generation.vllm_cfg.tensor_parallel_size=16", "engines over several nodes are not built for many"),
    ],
)
def test_what_adapters_cannot_share_is_refused_by_its_name(base: Path, override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_base(base, [override])
    assert said in str(caught.value)


def test_megatron_is_refused_with_the_reason(base: Path) -> None:
    with pytest.raises(ConfigError, match="A layer of Megatron-Core has one adapter"):
        load_base(base, ["policy.megatron_cfg.enabled=true", "policy.dtensor_cfg.enabled=false"])
