"""Models whose layers or heads differ from Llama's: computed as transformers computes them, or refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from nemo_rl.config import LoraConfig, PolicyConfig
from nemo_rl.models.dtensor.dtensor_checks import check_attention, check_policy
from nemo_rl.models.dtensor.dtensor_lora import AdaptedLinear, apply_adapters
from nemo_rl.models.dtensor.scorer import CausalLMScorer
from nemo_rl.models.policy import attention
from nemo_rl.models.policy.backend import BACKENDS
from nemo_rl.models.policy.model_config import UnsupportedModelError, empty_model
from nemo_rl.models.policy.packed import pack
from nemo_rl.models.policy.scoring import LogitTransform, logit_transform

ALONE: Any = SimpleNamespace(cp_group=None, cp_rank=0, tp_group=None, sizes=SimpleNamespace(cp=1, tp=1))
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "vocab_size": 97,
    "pad_token_id": 0,
}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_d_ssm": 64, "mamba_n_groups": 1}
CARRYING: dict[str, dict[str, Any]] = {
    "qwen3_5_text": LINEAR,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 8},
    "falcon_h1": MAMBA,
}
FACTORS: dict[str, dict[str, Any]] = {
    "granite": {"logits_scaling": 0.25},
    "hyperclovax": {"logits_scaling": 0.25},
    "cohere": {"logit_scale": 0.25},
    "falcon_h1": {"lm_head_multiplier": 0.25, **MAMBA},
}


def config_of(kind: str, **more: Any) -> Any:
    known = CONFIG_MAPPING[kind]()
    return CONFIG_MAPPING[kind](**{name: value for name, value in SIZES.items() if hasattr(known, name)} | more)


def model_of(config: Any, name: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=name).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("kind", FACTORS)
def test_a_familys_factor_on_its_logits_is_that_of_transformers(kind: str) -> None:
    model, ids = model_of(config_of(kind, **FACTORS[kind]), "eager"), torch.tensor([[5, 9, 12]])
    with torch.no_grad():
        head, hidden = model.get_output_embeddings(), model.base_model(ids).last_hidden_state
        ours = logit_transform(1.0, 1.0, None, model.config).model_logits(head(hidden))
        torch.testing.assert_close(ours, model(ids).logits)


def test_the_cap_on_logits_is_read_where_a_multimodal_model_keeps_it() -> None:
    config = CONFIG_MAPPING["gemma3n"]()
    assert logit_transform(1.0, 1.0, None, config).softcap == config.text_config.final_logit_softcapping == 30.0


@pytest.mark.parametrize("kind", CARRYING)
def test_a_row_of_layers_that_carry_a_state_holds_one_sequence(kind: str) -> None:
    plain = model_of(config_of(kind, **CARRYING[kind]), "eager")
    model = AutoModelForCausalLM.from_config(
        config_of(kind, **CARRYING[kind]), attn_implementation=attention.register()
    ).eval()
    model.load_state_dict(plain.state_dict())
    scorer = CausalLMScorer(model, ALONE, None)
    ids = torch.tensor([[5, 9, 12, 44, 60, 7], [33, 21, 4, 11, 0, 0]])
    both = {"input_ids": ids, "input_lengths": torch.tensor([6, 4])}
    second = {"input_ids": ids[1:], "input_lengths": torch.tensor([4])}
    device = torch.device("cpu")
    with torch.no_grad():
        batch = pack(second, device, multiple=8)
        found: Any = scorer(batch, LogitTransform())
        expected = plain(ids[1:, :4]).logits[0, :3].log_softmax(-1).gather(-1, ids[1, 1:4, None])[:, 0]
        torch.testing.assert_close(found.logprobs_T[:3], expected, atol=1e-4, rtol=1e-4)
        with pytest.raises(UnsupportedModelError, match=r"2 sequences.* set policy.train_micro_batch_size"):
            scorer(pack(both, device), LogitTransform())


ONE_EACH = {"train_micro_batch_size": 1, "logprob_batch_size": 1, "sequence_packing": {"enabled": False}}


@pytest.mark.parametrize("kind", CARRYING)
@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"train_micro_batch_size": 2}, "sequences of one microbatch would read each other; set policy.train_micro_ba"),
        ({"logprob_batch_size": 2}, "carry a state along a row"),
        ({"sequence_packing": {"enabled": True}}, "carry a state along a row"),
        ({"dynamic_batching": {"enabled": True}}, "carry a state along a row"),
        ({"dtensor_cfg": {"context_parallel_size": 2}}, "need whole sequences on every rank"),
    ],
)
def test_settings_that_put_sequences_side_by_side_are_refused_before_the_run(
    kind: str, more: dict[str, Any], says: str
) -> None:
    config = config_of(kind, **CARRYING[kind])
    check_policy(PolicyConfig.model_validate(ONE_EACH), config)
    with pytest.raises(UnsupportedModelError, match=says):
        check_policy(PolicyConfig.model_validate(ONE_EACH | more), config)


@pytest.mark.parametrize("kind", ["llama4_text", "deepseek_v32"])
def test_kinds_of_attention_that_are_not_computed_are_refused(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"a {kind} model\) has layers of the kind \w+_attention, which"):
        check_policy(PolicyConfig.model_validate(ONE_EACH), CONFIG_MAPPING[kind]())


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
@pytest.mark.parametrize("method", ["fp8", "awq", "gptq", "bitsandbytes", "compressed-tensors"])
def test_quantised_weights_are_refused_before_they_are_read_without_their_scales(
    kind: str, backend: str, method: str
) -> None:
    config, cfg = config_of(kind), PolicyConfig.model_validate(ONE_EACH)
    BACKENDS[backend].check(cfg, config)
    config.quantization_config = {"quant_method": method}
    with pytest.raises(UnsupportedModelError, match=rf"its weights are quantised \({method}\), and training needs"):
        BACKENDS[backend].check(cfg, config)


# Models whose files have dropout, or noise in their routers, and one without either.
NOISY: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.5},
    "starcoder2": {"residual_dropout": 0.5},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.5},
    "phimoe": {"num_local_experts": 4, "router_jitter_noise": 0.5, "input_jitter_noise": 0.5},
    "qwen3": {},
}


@pytest.mark.parametrize("kind", NOISY)
def test_training_passes_score_tokens_as_other_passes_do(kind: str) -> None:
    model = model_of(config_of(kind, **NOISY[kind]), attention.register())
    scorer = CausalLMScorer(model, ALONE, None)
    data = {"input_ids": torch.tensor([[5, 9, 12, 44, 60, 7]]), "input_lengths": torch.tensor([6])}
    scored: list[torch.Tensor] = []
    for training in (False, True, True):
        output: Any = scorer.train(training)(pack(data, torch.device("cpu")), LogitTransform())
        scored.append(output.logprobs_T)
    assert torch.equal(scored[0], scored[1]) and torch.equal(scored[1], scored[2])


def test_adapters_keep_their_dropout() -> None:
    model = model_of(config_of("qwen3"), attention.register())
    apply_adapters(model, LoraConfig(enabled=True, dim=4, dropout=0.5))
    scorer = CausalLMScorer(model, ALONE, None)
    for training in (True, False):
        assert {part.training for part in scorer.train(training).modules() if isinstance(part, AdaptedLinear)} == {
            training
        }
    assert scorer.train().training and not model.training


@pytest.mark.parametrize("kind", ["bloom", "xglm", "gpt_neox_japanese"])
def test_models_with_an_attention_of_their_own_are_refused(kind: str) -> None:
    model = empty_model(CONFIG_MAPPING[kind](vocab_size=97), attn_implementation=attention.register())
    with pytest.raises(UnsupportedModelError, match="computes attention by itself"):
        check_attention(model)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "biogpt", "mamba", "qwen3_5_text"])
def test_models_that_attend_through_transformers_are_taken(kind: str) -> None:
    check_attention(empty_model(config_of(kind), attn_implementation=attention.register()))


@pytest.mark.parametrize("kind", ["nemotron", "stablelm"])
def test_a_model_that_passes_no_borders_on_is_refused_by_name(kind: str) -> None:
    model = model_of(config_of(kind), attention.register())
    with pytest.raises(NotImplementedError, match="Attention gets no borders of sequences"):
        model.base_model(torch.tensor([[1, 2]]), attention_mask=None, use_cache=False, segments=None)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_experts_that_get_no_adapters_are_named_at_the_start(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    cfg = PolicyConfig.read(
        {"model_name": kind, "dtensor_cfg": {"lora_cfg": {"enabled": True, "match_all_linear": True}}}
    )
    check_policy(cfg, config_of(kind))
    assert ("the experts of qwen3_moe lie in stacked weights" in caplog.text) == (kind == "qwen3_moe")


def test_a_model_that_writes_no_text_is_refused_by_name() -> None:
    cfg = PolicyConfig(model_name="pictures")
    with pytest.raises(
        UnsupportedModelError, match="pictures is a vit model, of which transformers has none that writes"
    ):
        check_policy(cfg, CONFIG_MAPPING["vit"]())
