"""The policy-gradient loss: every switch against a reference of loops, every split against the whole, gradients where
they are a choice.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.config import ClippedPGLossConfig
from nemo_rl.loss import ClippedPGLossFn, LossFunction, LossType, MetricNormalizer
from nemo_rl.loss.clipped_pg import Truncation, importance_weights, positive_nll_scale
from nemo_rl.loss.interfaces import count_valid, normalize_metrics

IS = {"use_importance_sampling_correction": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dapo": {"ratio_clip_max": 0.28, "ratio_clip_c": 10.0, "reference_policy_kl_penalty": 0.0},
    "dual_clip": {"ratio_clip_c": 1.5},
    "gspo": {"sequence_level_importance_ratios": True, "token_level_loss": False},
    "gspo_with_correction": {"sequence_level_importance_ratios": True, "token_level_loss": False, **IS},
    "gspo_icepop": {
        "sequence_level_importance_ratios": True,
        "token_level_loss": False,
        **IS,
        "truncated_importance_sampling_type": "icepop",
        "truncated_importance_sampling_ratio": 2.0,
        "truncated_importance_sampling_ratio_min": 0.5,
    },
    "cispo": {"use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 5.0},
    "reinforce": {"disable_ppo_ratio": True},
    "strict_on_policy": {"force_on_policy_ratio": True},
    "strict_on_policy_corrected": {"force_on_policy_ratio": True, **IS},
    "sequence_mean": {"token_level_loss": False},
    "correction": IS,
    "tis": {**IS, "truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 1.2},
    "tis_two_sided": {
        **IS,
        "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": 1.2,
        "truncated_importance_sampling_ratio_min": 0.9,
    },
    "icepop": {
        **IS,
        "truncated_importance_sampling_type": "icepop",
        "truncated_importance_sampling_ratio": 1.3,
        "truncated_importance_sampling_ratio_min": 0.7,
    },
    "seq_mask_tis": {
        **IS,
        "truncated_importance_sampling_type": "seq-mask-tis",
        "truncated_importance_sampling_ratio": 1.05,
        "truncated_importance_sampling_ratio_min": 0.95,
    },
    "kl_k1": {"reference_policy_kl_penalty": 0.5, "reference_policy_kl_type": "k1"},
    "kl_k2": {"reference_policy_kl_penalty": 0.5, "reference_policy_kl_type": "k2"},
    "kl_k3_tight_clamps": {
        "reference_policy_kl_penalty": 0.5,
        "kl_input_clamp_value": 0.4,
        "kl_output_clamp_value": 0.05,
    },
    "kl_unclamped": {"reference_policy_kl_penalty": 0.5, "kl_input_clamp_value": None, "kl_output_clamp_value": None},
    "kl_on_policy_approximation": {"reference_policy_kl_penalty": 0.5, "use_on_policy_kl_approximation": True},
    "kl_in_reward": {"reference_policy_kl_penalty": 0.5, "use_kl_in_reward": True},
    "vapo": {"positive_example_nll_weight": 0.3},
    "vapo_sequences": {"positive_example_nll_weight": 0.3, "token_level_loss": False},
}


def batch(
    seed: int, rows: int = 6, width: int = 9, dtype: torch.dtype = torch.float64
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Columns [rows, width] with prompts, padding and one masked row, and current log-probabilities [rows, width -
    1].
    """
    rng = np.random.default_rng(seed)
    current = -rng.exponential(1.5, (rows, width - 1))

    def near(scale: float) -> np.ndarray:
        return np.concatenate(
            [np.zeros((rows, 1)), np.minimum(current + rng.normal(0, scale, current.shape), -1e-3)], axis=1
        )

    token_mask = np.zeros((rows, width))
    for row in range(rows):
        start = rng.integers(1, width - 2)
        token_mask[row, start : rng.integers(start + 1, width + 1)] = 1
    sample_mask = np.ones(rows)
    sample_mask[rng.integers(rows)] = 0
    columns = {
        "input_ids": rng.integers(0, 50, (rows, width)),
        "advantages": rng.normal(0, 1, (rows, width)),
        "prev_logprobs": near(0.3),
        "generation_logprobs": near(0.3),
        "reference_policy_logprobs": near(0.6),
        "token_mask": token_mask,
        "sample_mask": sample_mask,
        "rewards": rng.integers(0, 2, rows).astype(float),
    }
    tensors = {
        name: torch.tensor(column, dtype=dtype if column.dtype == np.float64 else None)
        for name, column in columns.items()
    }
    return tensors, torch.tensor(current, dtype=dtype)


def reference_kl(
    policy: float,
    reference: float,
    kind: str,
    input_clamp: float | None,
    output_clamp: float | None,
    weight: float = 1.0,
) -> float:
    log_ratio = reference - policy
    if input_clamp is not None:
        log_ratio = min(max(log_ratio, -input_clamp), input_clamp)
    value = {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": np.exp(log_ratio) - 1 - log_ratio}[kind] * weight
    return value if output_clamp is None else min(max(value, -output_clamp), output_clamp)


def reference_weight(o: np.ndarray, g: np.ndarray, own: list[int], t: int, cfg: Any) -> float:
    w = np.exp(sum(o[k] - g[k] for k in own)) if cfg.sequence_level_importance_ratios else np.exp(o[t] - g[t])
    w = w if np.isfinite(w) else 0.0
    kind, upper = cfg.truncated_importance_sampling_type, cfg.truncated_importance_sampling_ratio
    lower = cfg.truncated_importance_sampling_ratio_min or 0.0
    if kind == "tis":
        return min(max(w, lower), upper)
    if kind == "icepop":
        return w if lower <= w <= upper else 0.0
    if kind == "seq-mask-tis":
        return w if lower <= np.exp(np.mean([o[k] - g[k] for k in own])) <= upper else 0.0
    return w


def reference_policy_term(c: np.ndarray, o: np.ndarray, a: float, own: list[int], t: int, cfg: Any) -> float:
    log_ratio = np.mean([c[k] - o[k] for k in own]) if cfg.sequence_level_importance_ratios else c[t] - o[t]
    ratio = np.exp(log_ratio)
    clipped = min(max(ratio, 1 - cfg.ratio_clip_min), 1 + cfg.ratio_clip_max)
    if cfg.disable_ppo_ratio:
        return -a * c[t]
    if cfg.use_cispo:
        return -a * clipped * c[t]
    value = max(-a * ratio, -a * clipped)
    return min(value, -a * cfg.ratio_clip_c) if cfg.ratio_clip_c is not None and a < 0 else value


def reference_loss(
    data: Mapping[str, np.ndarray], current: np.ndarray, cfg: Any, sequences: float, tokens: float
) -> float:
    """The loss of `data` [B, S] at `current` [B, S-1], token by token from the formulas."""
    total, positive = 0.0, []
    for row in range(len(current)):
        c, sample_mask = current[row], data["sample_mask"][row]
        o = c if cfg.force_on_policy_ratio else data["prev_logprobs"][row, 1:]
        g, f, a = (data[name][row, 1:] for name in ("generation_logprobs", "reference_policy_logprobs", "advantages"))
        own = [t for t in range(len(c)) if data["token_mask"][row, 1 + t]]
        if not own or not sample_mask:
            continue
        row_total = 0.0
        for t in own:
            value = reference_policy_term(c, o, a[t], own, t, cfg)
            if cfg.use_importance_sampling_correction:
                value *= reference_weight(o, g, own, t, cfg)
            if cfg.reference_policy_kl_penalty and not cfg.use_kl_in_reward:
                weight = np.exp(c[t] - g[t]) if cfg.use_on_policy_kl_approximation else 1.0
                estimate = reference_kl(
                    c[t],
                    f[t],
                    cfg.reference_policy_kl_type,
                    cfg.kl_input_clamp_value,
                    cfg.kl_output_clamp_value,
                    weight,
                )
                value += cfg.reference_policy_kl_penalty * estimate
            row_total += value
        total += (
            row_total / (tokens + 1e-8) if cfg.token_level_loss else row_total / (len(own) + 1e-8) / (sequences + 1e-8)
        )
        if data["rewards"][row] > 0:
            positive += [-c[t] for t in own]
    return total + cfg.positive_example_nll_weight * (float(np.mean(positive)) if positive else 0.0)


def loss_of(variant: str) -> ClippedPGLossFn:
    return ClippedPGLossFn(ClippedPGLossConfig(**VARIANTS[variant]))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", range(4))
def test_the_loss_equals_its_formula(variant: str, seed: int) -> None:
    data, current = batch(seed)
    sequences, tokens = count_valid(data)
    loss_fn = loss_of(variant)
    loss, metrics = loss_fn(data, sequences, tokens, next_token_logprobs=current)
    expected = reference_loss(
        {k: v.numpy() for k, v in data.items()}, current.numpy(), loss_fn.cfg, float(sequences), float(tokens)
    )
    assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert metrics["loss"].item() == loss.item()


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_agrees_with_the_formula_to_1e_5(variant: str) -> None:
    data, current = batch(11, dtype=torch.float32)
    loss_fn = loss_of(variant)
    sequences, tokens = count_valid(data)
    loss, _ = loss_fn(data, sequences, tokens, next_token_logprobs=current)
    wide = {k: v.double().numpy() for k, v in data.items()}
    assert loss.item() == pytest.approx(
        reference_loss(wide, current.double().numpy(), loss_fn.cfg, float(sequences), float(tokens)), rel=1e-5, abs=1e-6
    )


# positive_example_nll_weight without the driver's scale is a mean of its own microbatch: that case has its own test
# below.
SPLITTABLE = [name for name in VARIANTS if not name.startswith("vapo")]


def run(
    loss_fn: LossFunction, data: dict[str, torch.Tensor], current: torch.Tensor, parts: list[list[int]], counts: Any
) -> Any:
    """Loss, gradient and summed metrics over the microbatches `parts`."""
    leaf = current.clone().requires_grad_()
    total, sums = torch.zeros((), dtype=current.dtype), dict[str, torch.Tensor]()
    for rows in parts:
        loss, metrics = loss_fn({k: v[rows] for k, v in data.items()}, *counts, next_token_logprobs=leaf[rows])
        loss.backward()
        total = total + loss.detach()
        for name, value in metrics.items():
            extremum = torch.minimum if "_min" in name else torch.maximum if "_max" in name else torch.add
            sums[name] = extremum(sums[name], value) if name in sums else value
    return total, leaf.grad, sums


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    variant=st.sampled_from(SPLITTABLE),
    seed=st.integers(0, 10_000),
    labels=st.lists(st.integers(0, 3), min_size=6, max_size=6),
)
def test_microbatches_add_up_to_the_whole_whatever_the_split(variant: str, seed: int, labels: list[int]) -> None:
    data, current = batch(seed)
    loss_fn = loss_of(variant)
    parts = [rows for part in range(4) if (rows := [row for row in range(6) if labels[row] == part])]
    counts = count_valid(data)
    whole = run(loss_fn, data, current, [list(range(6))], counts)
    split = run(loss_fn, data, current, parts, counts)
    torch.testing.assert_close(split[0], whole[0], rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(split[1], whole[1], rtol=1e-6, atol=1e-12)
    for name in whole[2]:
        torch.testing.assert_close(split[2][name], whole[2][name], rtol=1e-6, atol=1e-12, msg=name)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(variant=st.sampled_from(sorted(VARIANTS)), seed=st.integers(0, 10_000))
def test_plain_sums_divided_at_the_end_equal_the_normalised_loss(variant: str, seed: int) -> None:
    data, current = batch(seed)
    loss_fn = loss_of(variant)
    sequences, tokens = count_valid(data)
    whole = run(loss_fn, data, current, [list(range(6))], (sequences, tokens))
    sums = run(loss_fn, data, current, [list(range(6))], (1.0, 1.0))
    count = tokens if loss_fn.loss_type is LossType.TOKEN_LEVEL else sequences
    torch.testing.assert_close(sums[0] / count, whole[0], rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(sums[1] / count, whole[1], rtol=1e-6, atol=1e-12)
    for name, value in normalize_metrics(sums[2], loss_fn, sequences, tokens).items():
        torch.testing.assert_close(value, whole[2][name], rtol=1e-6, atol=1e-12, msg=name)


@pytest.mark.parametrize("variant", ["vapo", "vapo_sequences"])
def test_the_positive_example_term_is_split_safe_with_the_scale_of_the_whole_batch(variant: str) -> None:
    data, current = batch(5)
    data["rewards"] = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0])
    loss_fn = loss_of(variant)
    sequences, tokens = count_valid(data)
    whole = run(loss_fn, data, current, [list(range(6))], (sequences, tokens))
    own_tokens = data["token_mask"][:, 1:].sum(1)
    scale = positive_nll_scale(
        data["rewards"], own_tokens, data["sample_mask"], token_level_loss=loss_fn.cfg.token_level_loss
    )
    data["positive_nll_scale"] = scale
    split = run(loss_fn, data, current, [[0], [1, 2], [3, 4, 5]], (sequences, tokens))
    torch.testing.assert_close(split[0], whole[0], rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(split[1], whole[1], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_masked_positions_never_matter_even_when_they_hold_nan_or_infinity(variant: str) -> None:
    data, current = batch(3)
    counts = count_valid(data)
    expected = run(loss_of(variant), data, current, [list(range(6))], counts)
    masked = (data["token_mask"] * data["sample_mask"][:, None]) == 0
    garbage = torch.where(torch.arange(9) % 2 == 0, torch.nan, torch.inf).expand(6, 9)
    dirty = {
        k: torch.where(masked, garbage, v) if k.endswith("logprobs") or k == "advantages" else v
        for k, v in data.items()
    }
    loss, gradient, metrics = run(
        loss_of(variant), dirty, torch.where(masked[:, 1:], garbage[:, 1:], current), [list(range(6))], counts
    )
    torch.testing.assert_close(loss, expected[0])
    torch.testing.assert_close(gradient, expected[1])
    for name, value in metrics.items():
        torch.testing.assert_close(value, expected[2][name], msg=name)


@pytest.mark.parametrize("log_ratio", [0.0, 5.0, 89.0, 1000.0, 1e30])
@pytest.mark.parametrize("sequence_level", [True, False])
def test_truncated_weights_end_at_their_bound_however_large_the_ratio(sequence_level: bool, log_ratio: float) -> None:
    def weights(truncation: Truncation) -> Any:
        rows = torch.tensor([[log_ratio, 0.0], [-log_ratio, 0.0]])
        return importance_weights(
            rows,
            torch.zeros(2, 2),
            torch.tensor([[1.0, 0.0]] * 2),
            sequence_level=sequence_level,
            truncation=truncation,
        )

    low, high = (1.0, 1.0) if log_ratio == 0 else (0.5, 2.0)
    tis = weights(Truncation("tis", upper=2.0, lower=0.5))
    assert tis.weights_BT[:, 0].tolist() == [high, low]
    assert weights(Truncation("tis", upper=2.0)).weights_BT[0, 0] == high
    assert tis.out_of_bounds[:, 0].tolist() == [float(log_ratio != 0)] * 2
    assert weights(Truncation("icepop", 2.0, 0.5)).weights_BT[:, 0].tolist() == [float(log_ratio == 0)] * 2


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_log_ratio_that_is_no_number_has_no_weight_under_any_bound(broken: float) -> None:
    for sequence_level in (True, False):
        for truncation in (None, Truncation("tis", 2.0, 0.5), Truncation("icepop", 2.0, 0.5)):
            found = importance_weights(
                torch.tensor([[broken]]),
                torch.zeros(1, 1),
                torch.ones(1, 1),
                sequence_level=sequence_level,
                truncation=truncation,
            )
            assert found.weights_BT.item() == 0


@pytest.mark.parametrize("variant", [name for name in VARIANTS if not name.startswith("vapo")])
def test_ratios_too_large_for_a_float_leave_loss_gradient_and_metrics_finite(variant: str) -> None:
    for advantage in (1.0, 0.0):
        data, current = batch(1, dtype=torch.float32)
        data["advantages"] = torch.full_like(data["advantages"], advantage)
        data |= dict.fromkeys(("prev_logprobs", "generation_logprobs"), torch.full_like(data["prev_logprobs"], -300.0))
        loss, gradient, metrics = run(loss_of(variant), data, current, [list(range(6))], count_valid(data))
        assert torch.isfinite(loss) and torch.isfinite(gradient).all()
        assert all(torch.isfinite(torch.as_tensor(value)) for value in metrics.values()), metrics


def test_a_nan_in_a_trained_token_reaches_the_loss() -> None:
    data, current = batch(3)
    row, column = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).nonzero()[0].tolist()
    current[row, column] = torch.nan
    loss, _ = loss_of("grpo")(data, *count_valid(data), next_token_logprobs=current)
    assert torch.isnan(loss)


@pytest.mark.parametrize("variant", VARIANTS)
def test_masks_may_be_whole_numbers(variant: str) -> None:
    data, current = batch(3)
    whole = data | {name: data[name].long() for name in ("sample_mask", "token_mask")}
    losses = [loss_of(variant)(d, *count_valid(d), next_token_logprobs=current)[0] for d in (data, whole)]
    assert losses[0].item() == losses[1].item()


def test_a_batch_without_trained_tokens_has_zero_loss_and_infinite_extrema() -> None:
    data, current = batch(3)
    data["sample_mask"].zero_()
    loss, metrics = loss_of("grpo")(data, *count_valid(data), next_token_logprobs=current)
    assert loss.item() == 0
    assert metrics["probs_ratio_min"].item() == float("inf")
    assert metrics["probs_ratio_max"].item() == float("-inf")


def test_on_policy_the_gradient_is_the_advantage_times_the_score() -> None:
    data, current = batch(2)
    data["prev_logprobs"][:, 1:] = current
    counts = count_valid(data)
    _, forced, _ = run(loss_of("strict_on_policy"), data, current, [list(range(6))], counts)
    data["reference_policy_logprobs"][:, 1:] = current
    _, gradient, _ = run(loss_of("grpo"), data, current, [list(range(6))], counts)
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    torch.testing.assert_close(gradient, -data["advantages"][:, 1:] * mask / counts[1])
    assert not torch.equal(forced, gradient)  # its KL term still pulls towards the other reference


def test_cispo_keeps_the_gradient_of_clipped_tokens_that_ppo_drops() -> None:
    data, current = batch(2)
    data["prev_logprobs"][:, 1:] = current - 3  # every ratio is e^3, far above both bounds
    data["advantages"].fill_(1.0)
    counts = count_valid(data)
    no_kl = {"reference_policy_kl_penalty": 0.0}
    _, ppo, _ = run(ClippedPGLossFn(ClippedPGLossConfig(**no_kl)), data, current, [list(range(6))], counts)
    _, cispo, _ = run(
        ClippedPGLossFn(ClippedPGLossConfig(use_cispo=True, **no_kl)), data, current, [list(range(6))], counts
    )
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    assert ppo.abs().sum() == 0
    torch.testing.assert_close(cispo, -1.2 * mask / counts[1])


def test_cispos_clipped_ratio_is_a_weight_without_a_gradient_of_its_own() -> None:
    data, current = batch(2)
    counts = count_valid(data)
    cfg = ClippedPGLossConfig(use_cispo=True, reference_policy_kl_penalty=0.0, ratio_clip_min=0.5, ratio_clip_max=0.3)
    _, gradient, _ = run(ClippedPGLossFn(cfg), data, current, [list(range(6))], counts)
    ratio = (current - data["prev_logprobs"][:, 1:]).exp()
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    assert ((ratio < 1.3) & (mask != 0)).any() and ((ratio > 1.3) & (mask != 0)).any()
    torch.testing.assert_close(gradient, -data["advantages"][:, 1:] * ratio.clamp(0.5, 1.3) * mask / counts[1])


def test_importance_weights_of_a_sequence_leave_out_what_is_not_trained() -> None:
    rows, mask = torch.tensor([[0.5, 9.0, 0.25]]), torch.tensor([[1.0, 0.0, 1.0]])
    for kind in (None, Truncation("tis", 5.0)):
        found = importance_weights(rows, torch.zeros(1, 3), mask, sequence_level=True, truncation=kind)
        assert found.weights_BT.tolist() == [pytest.approx([2.117] * 3, abs=1e-3)]
    masked = importance_weights(
        rows, torch.zeros(1, 3), mask, sequence_level=False, truncation=Truncation("seq-mask-tis", 1.5, 1.4)
    )
    assert masked.out_of_bounds.tolist() == [0.0]


def test_tokens_outside_the_sampling_filter_are_masked_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    data, current = batch(4)
    counts = count_valid(data)
    trained = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).nonzero().tolist()
    filtered = current.clone()
    filtered[tuple(trained[0])] = -torch.inf
    data["prev_logprobs"][trained[1][0], trained[1][1] + 1] = -torch.inf
    loss, _ = loss_of("grpo")(data, *counts, next_token_logprobs=filtered, next_token_logprobs_unfiltered=current)
    assert "tokens_outside_sampling_filter=2" in caplog.text
    for row, column in trained[:2]:
        data["token_mask"][row, column + 1] = 0
    expected, _ = loss_of("grpo")(data, *counts, next_token_logprobs=current)
    torch.testing.assert_close(loss, expected)


def test_the_kl_is_taken_of_unfiltered_logprobs() -> None:
    data, current = batch(4)
    data["reference_policy_logprobs"][:, 1:] = current - 0.5
    _, metrics = loss_of("kl_k1")(
        data, *count_valid(data), next_token_logprobs=current + 0.1, next_token_logprobs_unfiltered=current
    )
    assert metrics["kl_penalty"].item() == pytest.approx(0.5, rel=1e-6)


def test_metrics_have_their_formula() -> None:
    data, current = batch(6)
    sequences, tokens = count_valid(data)
    _, metrics = loss_of("grpo")(data, sequences, tokens, next_token_logprobs=current)
    mask = ((data["token_mask"] * data["sample_mask"][:, None])[:, 1:] > 0).numpy()
    c, o, g, f = (
        x.numpy()[mask]
        for x in (
            current,
            *(data[k][:, 1:] for k in ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs")),
        )
    )
    mixture = np.log((np.exp(o) + np.exp(g)) / 2)

    def k3(p: np.ndarray, q: np.ndarray) -> np.ndarray:
        return np.exp(q - p) - 1 - (q - p)

    expected = {
        "token_mult_prob_error": np.mean(np.exp(np.abs(g - o))),
        "gen_kl_error": np.mean(k3(g, o)),
        "policy_kl_error": np.mean(k3(o, g)),
        "js_divergence_error": np.mean(k3(mixture, o) + k3(mixture, g)) / 2,
        "approx_entropy": -np.mean(np.exp(c - g) * c),
        "kl_penalty": np.mean(k3(c, f)),
        "probs_ratio": np.mean(np.exp(c - o)),
        "probs_ratio_min": np.min(np.exp(c - o)),
        "probs_ratio_max": np.max(np.exp(c - o)),
        "probs_ratio_clamped": np.mean(np.clip(np.exp(c - o), 0.8, 1.2)),
        "sampling_importance_ratio": np.mean(np.exp(o - g)),
        "is_oob_ratio": 0.0,
        "positive_nll_loss": 0.0,
        "num_valid_samples": 5.0,
    }
    for name, value in expected.items():
        assert metrics[name].item() == pytest.approx(value, rel=1e-6, abs=1e-9), name
    for variant, kl in (("kl_k1", g - o), ("kl_k2", (g - o) ** 2 / 2)):
        _, metrics = loss_of(variant)(data, sequences, tokens, next_token_logprobs=current)
        assert metrics["gen_kl_error"].item() == pytest.approx(np.mean(kl), rel=1e-6)
        assert metrics["policy_kl_error"].item() == pytest.approx(np.mean(-kl if variant == "kl_k1" else kl), rel=1e-6)


@pytest.mark.parametrize(
    ("variant", "denominator"), [("icepop", MetricNormalizer.TOKENS), ("seq_mask_tis", MetricNormalizer.SEQUENCES)]
)
def test_out_of_bounds_ratio_counts_tokens_or_sequences(variant: str, denominator: MetricNormalizer) -> None:
    data, current = batch(8)
    loss_fn = loss_of(variant)
    _, metrics = loss_fn(data, *count_valid(data), next_token_logprobs=current)
    mask = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:]
    log_ratio = (data["prev_logprobs"] - data["generation_logprobs"])[:, 1:] * mask
    ratio = log_ratio.exp() if variant == "icepop" else (log_ratio.sum(1) / mask.sum(1).clamp(min=1)).exp()
    low, high = loss_fn.cfg.truncated_importance_sampling_ratio_min, loss_fn.cfg.truncated_importance_sampling_ratio
    outside = ((ratio < low) | (ratio > high)).double()
    weight = mask if variant == "icepop" else data["sample_mask"]
    assert loss_fn.metric_normalizations["is_oob_ratio"] is denominator
    assert metrics["is_oob_ratio"].item() == pytest.approx(((outside * weight).sum() / weight.sum()).item(), rel=1e-6)


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"sequence_level_importance_ratios": True}, "token_level_loss: false"),
        ({"use_cispo": True, "disable_ppo_ratio": True}, "loss_fn.disable_ppo_ratio exclude each other"),
        ({"use_cispo": True, "ratio_clip_c": 3.0}, "loss_fn.ratio_clip_c exclude each other"),
        ({"use_cispo": True, "token_level_loss": False}, "token_level_loss: true"),
        (
            {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 2.0},
            "use_importance_sampling_correction: true",
        ),
        (
            {**IS, "truncated_importance_sampling_type": "icepop", "truncated_importance_sampling_ratio": 2.0},
            "ratio_min",
        ),
        ({**IS, "truncated_importance_sampling_type": "tis"}, "truncated_importance_sampling_ratio"),
        (
            {**VARIANTS["seq_mask_tis"], "sequence_level_importance_ratios": True, "token_level_loss": False},
            "seq-mask-tis",
        ),
    ],
)
def test_switches_that_exclude_each_other_are_refused_by_key(switches: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClippedPGLossFn(ClippedPGLossConfig(**switches))


def test_a_missing_column_is_named() -> None:
    data, current = batch(0)
    del data["generation_logprobs"]
    with pytest.raises(KeyError, match="generation_logprobs"):
        loss_of("grpo")(data, 1, 1, next_token_logprobs=current)
