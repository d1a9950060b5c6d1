"""Samples that share a prompt in a packed row on a GPU: scores and gradients in half precision are those of samples by
themselves, as far as half precision tells.
"""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from nemo_rl.models.policy.attention import Segments, register
from nemo_rl.models.policy.packed import pack

PROMPT, WIDTH, SAMPLES, PROMPTS = 200, 300, 4, 3


def _scores(model: Qwen2ForCausalLM, *, share: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Log-probabilities [B, S] of the next tokens, all gradients in one vector, and the tokens that were computed."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 1000, (PROMPTS * SAMPLES, WIDTH), generator=draw)
    ids[:, :PROMPT] = ids[::SAMPLES, :PROMPT].repeat_interleave(SAMPLES, dim=0)
    lengths = torch.randint(PROMPT + 5, WIDTH + 1, (len(ids),), generator=draw)
    packed = pack({"input_ids": ids, "input_lengths": lengths}, torch.device("cuda"), multiple=8, share=share)
    model.zero_grad()
    hidden = model.base_model(
        input_ids=packed.input_ids_T[None],
        position_ids=packed.position_ids_T[None],
        attention_mask=None,
        use_cache=False,
        segments=Segments(packed.cu_seqlens, packed.max_seqlen, shared=packed.keys),
    ).last_hidden_state[0]
    logprobs = model.lm_head(hidden).float().log_softmax(-1).gather(-1, packed.target_ids_T[:, None]).squeeze(-1)
    scores = packed.unpack(logprobs)
    (scores[:, PROMPT:] * torch.arange(len(ids), device="cuda")[:, None].cos()).sum().backward()
    gradient = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
    return scores.detach(), gradient, packed.work.tokens


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("attn", [None, "flex"])
def test_shared_prompts_give_the_scores_and_gradients_of_samples_by_themselves(attn: str | None) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config._attn_implementation = register(attn)
    whole = Qwen2ForCausalLM(config).cuda()
    half = Qwen2ForCausalLM(config).cuda().bfloat16()
    half.load_state_dict({name: tensor.bfloat16() for name, tensor in whole.state_dict().items()})
    whole.load_state_dict({name: tensor.float() for name, tensor in half.state_dict().items()})
    exact, exact_gradient, _ = _scores(whole, share=False)
    apart, apart_gradient, all_tokens = _scores(half, share=False)
    shared, shared_gradient, tokens = _scores(half, share=True)
    assert tokens < all_tokens - (PROMPTS * (SAMPLES - 1)) * (PROMPT - 20)
    assert float((shared - exact).abs().max()) < 2 * float((apart - exact).abs().max()) + 1e-3
    rounding = float((apart_gradient - exact_gradient).norm() / exact_gradient.norm())
    assert float((shared_gradient - exact_gradient).norm() / exact_gradient.norm()) < 2 * rounding + 1e-3
