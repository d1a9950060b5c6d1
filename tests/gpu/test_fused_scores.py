"""Fused scores on a GPU in half precision against a log-softmax in float32."""

from __future__ import annotations

import pytest
import torch

from nemo_rl.models.policy.scoring import LogitTransform, fused_logprobs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.7, softcap=20.0)])
@pytest.mark.parametrize("chunk", [None, 300])
def test_fused_scores_in_half_precision_are_within_its_rounding(transform: LogitTransform, chunk: int | None) -> None:
    tokens, hidden_size, vocabulary = 1000, 256, 32000
    draw = torch.Generator(device="cuda").manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, device="cuda", generator=draw)
    weight = torch.randn(vocabulary, hidden_size, device="cuda", generator=draw) * hidden_size**-0.5
    target = torch.randint(0, vocabulary, (tokens,), device="cuda", generator=draw)
    upstream = torch.randn(tokens, device="cuda", generator=draw)
    half = [tensor.bfloat16().requires_grad_() for tensor in (hidden, weight)]
    whole = [tensor.detach().float().requires_grad_() for tensor in half]
    got = fused_logprobs(*half, None, target, transform, chunk=chunk)
    logits = transform.model_logits(whole[0] @ whole[1].T)
    want = logits.log_softmax(-1).gather(-1, target[:, None]).squeeze(-1)
    torch.testing.assert_close(got, want, atol=0.05, rtol=0.01)
    gradients = torch.autograd.grad(got @ upstream, half)
    for gradient, wanted in zip(gradients, torch.autograd.grad(want @ upstream, whole), strict=True):
        error = (gradient.float() - wanted).norm() / wanted.norm()
        assert gradient.dtype == torch.bfloat16 and float(error) < 0.02
