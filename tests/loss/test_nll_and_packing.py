"""NLL, the KL estimators, and losses over packed sequences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.config import ClippedPGLossConfig
from nemo_rl.loss import ClippedPGLossFn, LossFunction, LossInputType, NLLLossFn, SequencePackingLossWrapper
from nemo_rl.loss.clipped_pg import calculate_kl, jensen_shannon
from nemo_rl.loss.interfaces import count_valid, masked_mean


def test_nll_is_the_mean_over_trained_tokens_of_the_global_batch() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]])
    data = {
        "token_mask": torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]]),
        "sample_mask": torch.tensor([1.0, 1.0]),
        "input_ids": torch.zeros(2, 4),
    }
    loss, metrics = NLLLossFn()(data, *count_valid(data), next_token_logprobs=logprobs)
    assert loss.item() == pytest.approx((2 + 3 + 4 + 5) / 4)
    assert metrics["num_unmasked_tokens"].item() == 4
    assert isinstance(NLLLossFn(), LossFunction)


def test_masked_mean_over_a_dimension_and_over_a_given_count() -> None:
    values, mask = torch.tensor([[1.0, 2.0], [3.0, torch.nan]]), torch.tensor([[1, 1], [1, 0]])
    assert masked_mean(values, mask).item() == pytest.approx(2.0)
    assert masked_mean(values, mask, dim=-1).tolist() == pytest.approx([1.5, 3.0])
    assert masked_mean(values, mask, global_normalization_factor=12).item() == pytest.approx(0.5)


def test_counts_see_next_token_positions_of_valid_rows_only() -> None:
    data = {"token_mask": torch.ones(3, 5), "sample_mask": torch.tensor([1, 0, 1])}
    assert [count.item() for count in count_valid(data)] == [2, 8]
    with pytest.raises(KeyError, match="sample_mask"):
        count_valid({"token_mask": torch.ones(1, 2)})


@given(
    policy=st.lists(st.floats(-8, -0.01), min_size=3, max_size=3),
    reference=st.lists(st.floats(-8, -0.01), min_size=3, max_size=3),
)
def test_kl_estimates_are_zero_for_equal_policies_and_k2_and_k3_never_negative(
    policy: list[float], reference: list[float]
) -> None:
    p, q = torch.tensor(policy, dtype=torch.float64), torch.tensor(reference, dtype=torch.float64)
    for kind in ("k1", "k2", "k3"):
        assert calculate_kl(p, p, kind).abs().max() == 0
    assert calculate_kl(p, q, "k2").min() >= 0
    assert calculate_kl(p, q, "k3").min() >= -1e-12
    assert calculate_kl(p, q, "k3").max() <= 10
    assert jensen_shannon(p, p).abs().max() < 1e-12
    mixture = ((p.exp() + q.exp()) / 2).log()
    parts = [(own - mixture).exp() - (own - mixture) - 1 for own in (p, q)]
    assert torch.allclose(jensen_shannon(p, q), (parts[0] + parts[1]) / 2, atol=1e-9)


@pytest.mark.parametrize("clamped", [-5.0, 3.0])
def test_kl_weight_is_detached_where_the_input_clamp_bit(clamped: float) -> None:
    policy = torch.tensor([-1.0, clamped], requires_grad=True)
    weight = (policy - policy.detach()).exp()
    calculate_kl(
        policy,
        torch.tensor([-1.5, -1.0]),
        "k3",
        input_clamp_value=2.0,
        output_clamp_value=None,
        importance_sampling_weights=weight,
    ).sum().backward()
    # d/dc [w (e^L - 1 - L)] at L = f - c = -0.5: (1 - e^L) + (e^L - 1 - L) = -L.
    assert policy.grad.tolist() == pytest.approx([0.5, 0.0])


def test_an_unknown_kl_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="k4"):
        calculate_kl(torch.zeros(1), torch.zeros(1), "k4")


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 7), min_size=1, max_size=5),
    multiple=st.sampled_from([1, 4]),
    seed=st.integers(0, 1000),
)
def test_a_packed_microbatch_has_the_loss_and_gradient_of_the_padded_one(
    lengths: list[int], multiple: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, width = len(lengths), 8
    columns = ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
    data = {name: torch.randn(rows, width, generator=generator, dtype=torch.float64) for name in columns}
    inside = torch.arange(width) < torch.tensor(lengths)[:, None]
    data |= {
        "input_ids": torch.zeros(rows, width, dtype=torch.long),
        "token_mask": inside.double(),
        "sample_mask": torch.ones(rows),
    }
    padded_lengths = [-(-length // multiple) * multiple for length in lengths]
    starts = torch.tensor([0, *padded_lengths]).cumsum(0)
    packed = torch.randn(1, int(starts[-1]), generator=generator, dtype=torch.float64).requires_grad_()
    padded = torch.zeros(rows, width - 1, dtype=torch.float64)
    for row, length in enumerate(lengths):
        padded[row, : length - 1] = packed.detach()[0, starts[row] : starts[row] + length - 1]
    padded.requires_grad_()

    loss_fn = ClippedPGLossFn(ClippedPGLossConfig())
    wrapper = SequencePackingLossWrapper(loss_fn, torch.tensor([0, *lengths]).cumsum(0), starts)
    counts = count_valid(data)
    loss, metrics = wrapper(data, *counts, next_token_logprobs=packed)
    expected, expected_metrics = loss_fn(data, *counts, next_token_logprobs=padded)
    torch.testing.assert_close(loss, expected)
    assert {name: value.item() for name, value in metrics.items()} == {
        name: value.item() for name, value in expected_metrics.items()
    }
    loss.backward()
    expected.backward()
    for row, length in enumerate(lengths):
        torch.testing.assert_close(
            packed.grad[0, starts[row] : starts[row] + length - 1], padded.grad[row, : length - 1]
        )


def test_packed_logits_are_cut_into_rows() -> None:
    class LogitSum(NLLLossFn):
        input_type = LossInputType.LOGIT

        def __call__(
            self, data: object, seqs: object, toks: object, *, logits: torch.Tensor
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return logits.sum(), {"shape": torch.tensor(logits.shape), "last": logits[1, 1].detach()}

    logits = torch.arange(15.0).view(1, 5, 3)
    wrapper = SequencePackingLossWrapper(LogitSum(), torch.tensor([0, 3, 5]))
    total, metrics = wrapper({"input_ids": torch.zeros(2, 4)}, 1, 1, logits=logits)
    assert metrics["shape"].tolist() == [2, 4, 3]
    assert metrics["last"].tolist() == [12.0, 13.0, 14.0]
    assert total.item() == logits.sum().item()


def test_packing_refuses_losses_it_cannot_feed() -> None:
    class Distillation(NLLLossFn):
        input_type = LossInputType.DISTILLATION

    with pytest.raises(ValueError, match="policy.sequence_packing.enabled"):
        SequencePackingLossWrapper(Distillation(), torch.tensor([0, 3]))
