"""The distillation loss and its parts equal plain PyTorch on whole logits, however vocabulary and row are cut."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from nemo_rl.config.algorithms import TeacherKLConfig
from nemo_rl.data_plane.field_schema import TOPK_LOGPROBS
from nemo_rl.loss.distillation_loss import DistillationLossFn, reads_rest
from nemo_rl.loss.interfaces import GivenScores
from nemo_rl.models.policy.scoring import GivenTokens, LogitTransform, likely_tokens, score_tokens
from tests.ranks import run_ranks

TOKENS, HIDDEN, VOCABULARY = 11, 8, 24
KINDS = ("forward", "reverse", "mixed")
CASES = list(product(KINDS, (False, True), (1, 5, VOCABULARY - 1, VOCABULARY)))


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(TOKENS, HIDDEN, generator=draw)
    weight_VD = torch.randn(VOCABULARY, HIDDEN, generator=draw)
    teacher_TV = 2 * torch.randn(TOKENS, VOCABULARY, generator=draw)
    return hidden_TD, weight_VD, teacher_TV


def _plain(logits_TV: torch.Tensor, teacher_TV: torch.Tensor, k: int, cfg: TeacherKLConfig) -> torch.Tensor:
    """The divergence of each position, written down from its definition."""
    values, ids = teacher_TV.topk(k)
    teacher = values.log_softmax(-1)
    whole = logits_TV.log_softmax(-1)
    policy = whole.gather(-1, ids) if cfg.zero_outside_topk else logits_TV.gather(-1, ids).log_softmax(-1)
    forward = (teacher.exp() * (teacher - policy)).sum(-1)
    reverse = (policy.exp() * (policy - teacher)).sum(-1)
    if cfg.zero_outside_topk:
        outside = torch.ones_like(whole).scatter(-1, ids, 0.0)
        reverse = reverse + (outside * whole.exp() * (whole + 100.0)).sum(-1)
    weight = {"forward": 1.0, "reverse": 0.0, "mixed": cfg.mixed_kl_weight}[cfg.kl_type]
    return weight * forward + (1 - weight) * reverse


def _loss(cfg: TeacherKLConfig, given: GivenScores, logprobs_Tk: torch.Tensor) -> torch.Tensor:
    """The product's loss of one row whose every token is trained."""
    width = TOKENS + 1
    data = {
        "token_mask": torch.ones(1, width),
        "sample_mask": torch.ones(1),
        TOPK_LOGPROBS: F.pad(logprobs_Tk, (0, 0, 0, 1))[None],
    }
    return DistillationLossFn(cfg)(data, 1.0, TOKENS, given=given.map(lambda column: column[None]))[0]


@pytest.mark.parametrize(("kind", "zero", "k"), CASES)
@pytest.mark.parametrize("chunk", [None, 4])
def test_loss_and_gradients_are_those_of_whole_logits(kind: Any, zero: bool, k: int, chunk: int | None) -> None:
    cfg = TeacherKLConfig(kl_type=kind, zero_outside_topk=zero, mixed_kl_weight=0.3)
    results = []
    for plain in (True, False):
        hidden_TD, weight_VD, teacher_TV = _inputs()
        hidden_TD.requires_grad_(), weight_VD.requires_grad_()
        if plain:
            loss = _plain(hidden_TD @ weight_VD.T, teacher_TV, k, cfg).mean()
        else:
            values_Tk, ids_Tk = teacher_TV.log_softmax(-1).topk(k)
            scores = score_tokens(
                hidden_TD,
                weight_VD,
                None,
                torch.zeros(TOKENS, dtype=torch.long),
                LogitTransform(),
                given=GivenTokens(ids_Tk, reads_rest(cfg)),
                chunk=chunk,
            )
            assert scores.given is not None
            loss = _loss(cfg, scores.given, values_Tk)
        loss.backward()
        results.append((loss.detach(), hidden_TD.grad, weight_VD.grad))
    for want, got in zip(*results, strict=True):
        # Rounding counts in units of the largest term, which is 100 times the policy's probability outside the top k.
        scale = max(100.0 if reads_rest(cfg) else 1.0, float(want.abs().max()))
        torch.testing.assert_close(got / scale, want / scale, atol=1e-6, rtol=0)


def test_mixed_lies_between_its_two_divergences() -> None:
    hidden_TD, weight_VD, teacher_TV = _inputs()
    losses = [
        _plain(hidden_TD @ weight_VD.T, teacher_TV, 5, TeacherKLConfig(kl_type=kind, mixed_kl_weight=weight)).mean()
        for kind, weight in (("forward", 0.5), ("mixed", 1.0), ("reverse", 0.5), ("mixed", 0.0))
    ]
    assert losses[0] == losses[1]
    assert losses[2] == losses[3]


def test_a_sample_without_loss_is_counted_as_a_sample() -> None:
    logprobs = torch.log_softmax(torch.randn(3, 4, 2), -1)
    data = {
        "token_mask": torch.ones(3, 5),
        "sample_mask": torch.tensor([1.0, 0.0, 1.0]),
        TOPK_LOGPROBS: torch.log_softmax(torch.randn(3, 5, 2), -1),
    }
    _, metrics = DistillationLossFn(TeacherKLConfig())(data, 2, 8, given=GivenScores(logprobs))
    assert metrics["num_valid_samples"] == 3


def test_a_batch_without_a_teachers_columns_is_refused() -> None:
    data = {"token_mask": torch.ones(1, 3), "sample_mask": torch.ones(1)}
    with pytest.raises(KeyError, match=TOPK_LOGPROBS):
        DistillationLossFn(TeacherKLConfig())(data, 1.0, 1.0, given=None)


def split_vocabulary() -> dict[str, Any]:
    """What a rank with half of the vocabulary computes: most likely tokens, and loss and gradients of every case."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    half = slice(rank * VOCABULARY // 2, (rank + 1) * VOCABULARY // 2)
    seen: dict[str, Any] = {}
    for kind, zero, k in CASES:
        cfg = TeacherKLConfig(kl_type=kind, zero_outside_topk=zero)
        hidden_TD, weight_VD, teacher_TV = _inputs()
        values_Tk, ids_Tk = teacher_TV.log_softmax(-1).topk(k)
        mine = weight_VD[half].clone().requires_grad_()
        hidden_TD.requires_grad_()
        scores = score_tokens(
            hidden_TD,
            mine,
            None,
            torch.arange(TOKENS),
            LogitTransform(),
            given=GivenTokens(ids_Tk, reads_rest(cfg)),
            chunk=4,
            group=group,
        )
        assert scores.given is not None
        loss = _loss(cfg, scores.given, values_Tk)
        loss.backward()
        want_hidden, want_weight = _inputs()[0].requires_grad_(), _inputs()[1].requires_grad_()
        want = _plain(want_hidden @ want_weight.T, teacher_TV, k, cfg).mean()
        want.backward()
        scale = max(100.0 if reads_rest(cfg) else 1.0, float(want.detach().abs()))
        gaps = [loss - want, hidden_TD.grad - want_hidden.grad, mine.grad - want_weight.grad[half]]
        tokens = likely_tokens(hidden_TD.detach(), weight_VD[half], None, k, LogitTransform(), chunk=4, group=group)
        whole = likely_tokens(hidden_TD.detach(), weight_VD, None, k, LogitTransform(), chunk=100)
        seen[f"{kind} {zero} {k}"] = {
            "gap": max(float(gap.detach().abs().max()) for gap in gaps) / scale,
            "same ids": torch.equal(tokens.ids_Tk, whole.ids_Tk),
            "logprob gap": float((tokens.logprobs_Tk - whole.logprobs_Tk).abs().max()),
        }
    return seen


@pytest.mark.slow
def test_ranks_that_share_the_vocabulary_compute_the_same(tmp_path: Any) -> None:
    for seen in run_ranks(split_vocabulary, 2):
        for case, numbers in seen.items():
            assert numbers["same ids"], case
            assert numbers["gap"] < 1e-6, (case, numbers)
            # Log-probabilities are up to about 20 here.
            assert numbers["logprob gap"] < 1e-5, (case, numbers)
