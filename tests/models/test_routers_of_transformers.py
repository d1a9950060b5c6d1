"""Routers of transformers' families take recorded routes, with gate weights of their own scores, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_rl.models.dtensor.experts import expert_modules
from nemo_rl.models.dtensor.replayed_routers import attach_router_replay
from nemo_rl.models.policy.model_config import UnsupportedModelError
from nemo_rl.models.policy.router_replay import RouterPass, Routes

TOKENS, EXPERTS, LAYERS = 5, 8, 2
FAMILIES = ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3", "glm4_moe", "granitemoe"]
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 0,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "pad_token_id": None,
}


def _model(family: str) -> Any:
    torch.manual_seed(0)
    usual = AutoConfig.for_model(family)
    sizes = SIZES | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS)
    known = {name: value for name, value in sizes.items() if hasattr(usual, name)}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **known))


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_get_the_recorded_routes(family: str) -> None:
    model = _model(family)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for module in expert_modules(model):
        module.register_forward_pre_hook(lambda _, given: seen.append((given[1], given[2])))
    replay = attach_router_replay(model, torch.device("cpu"))
    assert len(replay.targets) == LAYERS
    draw = torch.Generator().manual_seed(1)
    routes = torch.rand(TOKENS, LAYERS, EXPERTS, generator=draw).topk(2).indices
    valid = torch.tensor([True, True, False, True, True])
    for target in replay.targets:
        routed = RouterPass(Routes(routes.to(torch.uint8), valid, torch.ones(TOKENS, dtype=torch.bool)))
        target.aim(routed, recomputes=False, counts=True)
    model(torch.randint(0, 32, (1, TOKENS), generator=draw)).logits.sum().backward()
    for layer, (experts, weights) in enumerate(seen):
        assert torch.equal(experts[valid], routes[valid, layer])
        assert not torch.equal(experts, routes[:, layer])
        assert weights.requires_grad
    assert replay.targets[0].counts[1:].tolist() == [4.0, 5.0]


@pytest.mark.slow
def test_compiled_layers_take_the_routes_of_each_pass() -> None:
    model, tokens = _model("qwen3_moe"), torch.randint(0, 32, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    replay = attach_router_replay(model, torch.device("cpu"))
    every = torch.ones(TOKENS, dtype=torch.bool)

    def passes() -> list[torch.Tensor]:
        found = []
        for seed in range(2):
            draw = torch.Generator().manual_seed(seed)
            routes = Routes(torch.rand(TOKENS, LAYERS, EXPERTS, generator=draw).topk(2).indices, every, every)
            for target in replay.targets:
                target.aim(RouterPass(routes), recomputes=False, counts=True)
            logits = model(tokens).logits
            logits.square().sum().backward()
            gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
            model.zero_grad()
            found += [logits.detach(), gradient]
        return found

    plain = passes()
    model.base_model.layers[0].compile(dynamic=True, backend="eager")
    for got, want in zip(passes(), plain, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(plain[0], plain[2], atol=1e-4)
    assert replay.targets[0].counts[1].item() == 4 * TOKENS


def test_routers_that_choose_in_another_way_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"routers of PhimoeForCausalLM do not choose experts by one top-k"):
        attach_router_replay(_model("phimoe"), torch.device("cpu"))
