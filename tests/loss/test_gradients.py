"""The gradient of the clipped policy-gradient loss is that of its formula, with its fixed parts held fixed.

The formula is differentiated by central differences, in plain numbers: neither torch's graph nor the loss's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl.config import ClippedPGLossConfig
from nemo_rl.loss import ClippedPGLossFn, NLLLossFn
from nemo_rl.loss.interfaces import count_valid
from tests.loss.test_clipped_pg import IS, VARIANTS, batch, reference_weight

TIGHT = {"reference_policy_kl_penalty": 0.5, "kl_input_clamp_value": 0.4, "kl_output_clamp_value": 0.05}
MORE: dict[str, dict[str, Any]] = {
    "kl_k1_tight": {**TIGHT, "reference_policy_kl_type": "k1", "kl_output_clamp_value": 0.2},
    "kl_k2_tight": {**TIGHT, "reference_policy_kl_type": "k2"},
    "kl_tight_on_policy_approximation": {**TIGHT, "use_on_policy_kl_approximation": True},
    "kl_input_clamp_on_policy_approximation": {
        **TIGHT,
        "use_on_policy_kl_approximation": True,
        "kl_output_clamp_value": None,
    },
    "kl_output_clamp": {**TIGHT, "kl_input_clamp_value": None},
    "kl_corrected": {"reference_policy_kl_penalty": 0.5, **IS},
    "kl_by_sequences": {"reference_policy_kl_penalty": 0.5, "token_level_loss": False},
    "dual_clip_tight": {"ratio_clip_c": 1.05, "ratio_clip_min": 0.5},
}
ALL = {name: keys for name, keys in {**VARIANTS, **MORE}.items() if not name.startswith("vapo")}


def policy_term(own: list[int], o: np.ndarray, at: np.ndarray, a: np.ndarray, cfg: Any) -> Callable[..., float]:
    """The term of token `t` at log-probabilities `c`; what carries no gradient is taken at `at`."""

    def term(c: np.ndarray, t: int) -> float:
        if cfg.disable_ppo_ratio:
            return float(-a[t] * c[t])
        if cfg.use_cispo:
            ratio = np.exp(at[t] - o[t])
            return float(-a[t] * min(max(ratio, 1 - cfg.ratio_clip_min), 1 + cfg.ratio_clip_max) * c[t])
        by_sequence = cfg.sequence_level_importance_ratios
        ratio = np.exp(np.mean([c[k] - o[k] for k in own]) if by_sequence else c[t] - o[t])
        clipped = min(max(ratio, 1 - cfg.ratio_clip_min), 1 + cfg.ratio_clip_max)
        value = max(-a[t] * ratio, -a[t] * clipped)
        return float(min(value, -a[t] * cfg.ratio_clip_c) if cfg.ratio_clip_c is not None and a[t] < 0 else value)

    return term


def kl_term(c: float, at: float, f: float, g: float, cfg: Any) -> float:
    raw, clamp = f - c, cfg.kl_input_clamp_value
    log_ratio = raw if clamp is None else min(max(raw, -clamp), clamp)
    kind = cfg.reference_policy_kl_type
    value = {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": np.exp(log_ratio) - 1 - log_ratio}[kind]
    # A token that the input clamp cut does not push the policy through its weight either.
    weighed = at if clamp is not None and abs(f - at) > clamp else c
    value *= np.exp(weighed - (g if cfg.use_on_policy_kl_approximation else at))
    bound = cfg.kl_output_clamp_value
    return float(value if bound is None else min(max(value, -bound), bound))


def weighted_sum(weights: dict[int, float], term: Callable[..., float], c: np.ndarray) -> float:
    return sum(weight * term(c, t) for t, weight in weights.items())


def kl_of_token(at: float, f: float, g: float, cfg: Any, c: np.ndarray) -> float:
    return kl_term(c[0], at, f, g, cfg)


def slope(function: Callable[[np.ndarray], float], at: np.ndarray, place: int, step: float = 1e-6) -> float:
    up, down = at.copy(), at.copy()
    up[place] += step
    down[place] -= step
    return (function(up) - function(down)) / (2 * step)


def expected_gradient(data: dict[str, np.ndarray], current: np.ndarray, kl_of: np.ndarray, cfg: Any) -> Any:
    """Gradients by `current` and by the unfiltered log-probabilities `kl_of`."""
    tokens = float((data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum())
    sequences = float(data["sample_mask"].sum())
    by_current, by_kl = np.zeros_like(current), np.zeros_like(current)
    for row, c in enumerate(current):
        own = [t for t in range(len(c)) if data["token_mask"][row, 1 + t]]
        if not own or not data["sample_mask"][row]:
            continue
        o = c.copy() if cfg.force_on_policy_ratio else data["prev_logprobs"][row, 1:]
        g, f, a = (data[name][row, 1:] for name in ("generation_logprobs", "reference_policy_logprobs", "advantages"))
        share = 1 / tokens if cfg.token_level_loss else 1 / len(own) / sequences
        term = policy_term(own, o, c, a, cfg)
        corrected = cfg.use_importance_sampling_correction
        weights = {t: reference_weight(o, g, own, t, cfg) if corrected else 1.0 for t in own}
        total = partial(weighted_sum, weights, term)
        for place in own:
            by_current[row, place] += share * slope(total, c, place)
            if cfg.reference_policy_kl_penalty and not cfg.use_kl_in_reward:
                at = kl_of[row, place : place + 1]
                of_kl = partial(kl_of_token, at[0], f[place], g[place], cfg)
                by_kl[row, place] += share * cfg.reference_policy_kl_penalty * slope(of_kl, at, 0)
    return by_current, by_kl


@pytest.mark.parametrize("variant", ALL)
@pytest.mark.parametrize("filtered", [False, True])
def test_the_gradient_of_every_variant_is_that_of_its_formula(variant: str, filtered: bool) -> None:
    cut, pushed = 0, 0
    for seed in range(6):
        data, current = batch(seed)
        # Filters leave a token more likely among those that are left.
        unfiltered = current - 0.2 if filtered else current
        cfg = ClippedPGLossConfig(**ALL[variant])
        leaf, whole = current.clone().requires_grad_(), unfiltered.clone().requires_grad_()
        loss, _ = ClippedPGLossFn(cfg)(
            data,
            *count_valid(data),
            next_token_logprobs=leaf,
            next_token_logprobs_unfiltered=whole if filtered else None,
        )
        loss.backward()
        plain = {name: column.numpy() for name, column in data.items()}
        by_current, by_kl = expected_gradient(plain, current.numpy(), unfiltered.numpy(), cfg)
        got_current = leaf.grad
        got_kl = torch.zeros_like(current) if whole.grad is None else whole.grad
        if not filtered:
            by_current, by_kl = by_current + by_kl, np.zeros_like(by_kl)
        torch.testing.assert_close(got_current, torch.tensor(by_current), rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(got_kl, torch.tensor(by_kl), rtol=1e-5, atol=1e-8)
        mask = plain["token_mask"][:, 1:] * plain["sample_mask"][:, None] != 0
        gap = np.abs(plain["reference_policy_logprobs"][:, 1:] - unfiltered.numpy())
        cut += int((mask & (gap > (cfg.kl_input_clamp_value or np.inf))).sum())
        pushed += int((mask & (by_current + by_kl != 0)).sum())
    assert pushed > 20
    assert cut > 5 or "tight" not in variant or "kl" not in variant


def test_a_masked_conversation_has_no_part_in_the_loss_of_fine_tuning() -> None:
    """Whatever stands in it, and whatever its tokens' own mask says."""
    data, current = batch(3)
    data["sample_mask"] = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    data["token_mask"][1] = 1.0
    kept = [0, 2, 4, 5]
    counts = count_valid(data)
    leaf = current.clone().requires_grad_()
    loss, metrics = NLLLossFn()(data, *counts, next_token_logprobs=leaf)
    loss.backward()
    of_kept = {name: column[kept] for name, column in data.items()}
    alone = current[kept].clone().requires_grad_()
    expected, expected_metrics = NLLLossFn()(of_kept, *count_valid(of_kept), next_token_logprobs=alone)
    expected.backward()
    assert [float(count) for count in counts] == [float(count) for count in count_valid(of_kept)]
    assert loss.item() == pytest.approx(expected.item()) and leaf.grad is not None
    torch.testing.assert_close(leaf.grad[kept], alone.grad)
    assert not leaf.grad[[1, 3]].any()
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        {name: float(value) for name, value in expected_metrics.items()}
    )
