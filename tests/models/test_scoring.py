"""Log-probabilities of given tokens: the same for every chunk size, and filtered exactly as vLLM filters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nemo_rl.models.policy.scoring import LogitTransform, filter_logits, fused_logprobs, score_tokens

TOKENS, HIDDEN, VOCAB = 13, 6, 37


def _inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS, HIDDEN, generator=draw, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, generator=draw, requires_grad=True)
    return hidden, weight, torch.randn(VOCAB, generator=draw), torch.randint(0, VOCAB, (TOKENS,), generator=draw)


TRANSFORMS = [
    LogitTransform(),
    LogitTransform(0.7),
    LogitTransform(1.3, top_p=0.8, top_k=9),
    LogitTransform(softcap=5.0, scale=0.5),
]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("chunk", [1, 4, 13, 100])
def test_scores_and_gradients_do_not_depend_on_the_chunk(transform: LogitTransform, chunk: int) -> None:
    hidden, weight, bias, target = _inputs()
    whole = score_tokens(hidden, weight, bias, target, transform)
    kept = whole.logprobs_T.isfinite()
    grads = torch.autograd.grad(whole.logprobs_T[kept].sum() + whole.unfiltered_T.sum(), (hidden, weight))
    parts = score_tokens(hidden, weight, bias, target, transform, chunk=chunk)
    torch.testing.assert_close(parts.logprobs_T, whole.logprobs_T)
    torch.testing.assert_close(parts.unfiltered_T, whole.unfiltered_T)
    for got, want in zip(
        torch.autograd.grad(parts.logprobs_T[kept].sum() + parts.unfiltered_T.sum(), (hidden, weight)),
        grads,
        strict=True,
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("transform", [*TRANSFORMS[:2], TRANSFORMS[3], LogitTransform(1.3, softcap=4.0, scale=2.0)])
def test_fused_scores_and_gradients_are_those_of_autograd(transform: LogitTransform, chunk: int | None) -> None:
    hidden, weight, bias, target = _inputs()
    bias.requires_grad_()
    upstream = torch.randn(TOKENS, generator=torch.Generator().manual_seed(1))
    want = score_tokens(hidden, weight, bias, target, transform).logprobs_T
    got = fused_logprobs(hidden, weight, bias, target, transform, chunk=chunk)
    torch.testing.assert_close(got, want)
    inputs = (hidden, weight, bias)
    for gradient, wanted in zip(
        torch.autograd.grad(got @ upstream, inputs), torch.autograd.grad(want @ upstream, inputs), strict=True
    ):
        torch.testing.assert_close(gradient, wanted)


def test_fused_scores_leave_a_frozen_projection_alone() -> None:
    hidden, weight, _, target = _inputs()
    fused_logprobs(hidden, weight.detach(), None, target, LogitTransform()).sum().backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all()


def test_a_plain_score_is_a_log_softmax_at_the_temperature() -> None:
    hidden, weight, bias, target = _inputs()
    want = ((hidden @ weight.T + bias) / 0.5).log_softmax(-1).gather(-1, target[:, None]).squeeze(-1)
    torch.testing.assert_close(score_tokens(hidden, weight, bias, target, LogitTransform(0.5)).logprobs_T, want)


@pytest.mark.slow
@settings(max_examples=50)
@given(
    st.integers(0, 1000),
    st.one_of(st.just(1.0), st.floats(0.05, 0.99)),
    st.one_of(st.none(), st.integers(1, VOCAB + 3)),
    st.booleans(),
)
@example(231, 1 / 3, 1, True)  # three equal logits, whose sums end where top-p does
def test_filters_are_those_of_vllm(seed: int, top_p: float, top_k: int | None, ties: bool) -> None:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    logits = 3 * torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(seed))
    logits = logits.round() if ties else logits
    k = None if top_k is None else torch.full((5,), min(top_k, VOCAB))
    p = None if top_p == 1.0 else torch.full((5,), top_p)
    want = apply_top_k_top_p_pytorch(logits.clone(), k, p)
    torch.testing.assert_close(filter_logits(logits, top_p=top_p, top_k=top_k), want)


def test_top_k_comes_before_top_p() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Of the two largest, 0.4 and 0.3, the first alone has 4/7 of the mass.
    assert filter_logits(logits, top_p=0.5, top_k=2).isfinite().tolist() == [[True, False, False, False]]
    assert filter_logits(logits, top_p=0.5, top_k=None).isfinite().tolist() == [[True, True, False, False]]


def test_the_most_likely_token_is_always_kept() -> None:
    assert filter_logits(torch.tensor([[1.0, 2.0, 0.0]]), top_p=1e-6, top_k=None).isfinite().tolist() == [
        [False, True, False]
    ]
