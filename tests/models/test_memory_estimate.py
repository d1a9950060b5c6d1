"""What training takes of a GPU: the estimate against measured peaks, what cannot fit, and words for what ran out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.config import PolicyConfig
from nemo_rl.config.world_sizes import ParallelSizes
from nemo_rl.models.policy.memory_estimate import (
    GpuMemoryError,
    MemoryEstimate,
    estimate,
    explained,
    policy_bytes_on_cpu,
)
from nemo_rl.utils.flops import TransformerShape

GIB = 1 << 30
H200, H100 = int(139.8 * GIB), int(79.1 * GIB)
# Qwen2.5: layers, hidden, query and key widths, multiply-adds of a feed-forward, vocabulary; and weights.
SHAPES = {
    "0.5b": (TransformerShape(24, 896, 896, 128, 3 * 896 * 4864, 151936), 494_032_768),
    "1.5b": (TransformerShape(28, 1536, 1536, 256, 3 * 1536 * 8960, 151936), 1_543_714_304),
    "7b": (TransformerShape(28, 3584, 3584, 512, 3 * 3584 * 18944, 152064), 7_615_616_512),
}


def policy(tokens: int = 16384, **keys: Any) -> PolicyConfig:
    packing = {"enabled": True, "train_mb_tokens": tokens, "logprob_mb_tokens": tokens}
    return PolicyConfig(model_name="some/model", precision="bfloat16", sequence_packing=packing, **keys)


def of(
    shape: str,
    tokens: int = 16384,
    sizes: ParallelSizes | None = None,
    gpu: int = H200,
    engines: int = 0,
    **keys: Any,
) -> MemoryEstimate:
    known, parameters = SHAPES[shape]
    given = sizes or ParallelSizes()
    return estimate(policy(tokens, **keys), known, given, parameters=parameters, device_bytes=gpu, engines=engines)


@pytest.mark.parametrize(
    ("shape", "tokens", "measured_gib"),
    # `benchmarks/train_step.py --shape SHAPE --tokens TOKENS --microbatches 2` on one H200, most that torch allocated.
    [("0.5b", 8192, 18.9), ("0.5b", 32768, 43.1), ("1.5b", 8192, 45.7)],
)
def test_estimates_are_what_was_measured(shape: str, tokens: int, measured_gib: float) -> None:
    assert of(shape, tokens).peak / GIB == pytest.approx(measured_gib, rel=0.15)


def test_what_cannot_fit_is_refused_with_the_key_to_lower() -> None:
    with pytest.raises(GpuMemoryError, match=r"cannot be trained here.*cluster\.gpus_per_node.*lora_cfg"):
        of("7b", gpu=H100, engines=1).check(policy())
    with pytest.raises(GpuMemoryError, match=r"longest row.*lower policy\.sequence_packing\.train_mb_tokens to"):
        of("1.5b", 65536, gpu=H100, engines=2).check(policy(65536))
    assert of("1.5b", 8192, gpu=H100, engines=2).check(policy(8192)) is None


@given(st.integers(1024, 200_000))
def test_the_row_that_is_named_fits_and_less_is_never_refused(tokens: int) -> None:
    from contextlib import suppress

    worst = of("1.5b", tokens, gpu=H100, engines=1)
    message: str | None = None
    with suppress(GpuMemoryError):
        message = worst.check(policy(tokens))
        if message is None:
            assert worst.peak <= H100
            return
    try:
        worst.check(policy(tokens))
    except GpuMemoryError as error:
        message = str(error)
    assert message is not None
    named = int(message.rpartition("train_mb_tokens to ")[2].split(",  or")[0].split(", or")[0].replace(",", ""))
    assert named < tokens
    assert of("1.5b", named, gpu=H100, engines=1).check(policy(named)) is None


def test_a_policy_starts_beside_engines_where_its_first_passes_fit() -> None:
    assert of("1.5b", gpu=H100).starts_beside_engines(0.6) and of("1.5b").starts_beside_engines(0.6)
    assert not of("7b", gpu=H100).starts_beside_engines(0.6)
    assert not of("1.5b", gpu=H100).starts_beside_engines(0.9)
    # Each rank gathers all weights for a pass, however many ranks share them.
    eight = of("7b", sizes=ParallelSizes(dp=8), gpu=H100)
    assert eight.starts_beside_engines(0.6) and not eight.starts_beside_engines(0.8)


def test_ranks_adapters_and_checkpoints_take_their_part() -> None:
    one, four = of("7b"), of("7b", sizes=ParallelSizes(dp=4))
    assert four.weights * 4 == one.weights and four.optimizer * 4 == one.optimizer
    assert four.activations == one.activations
    recomputed = of("7b", dtensor_cfg={"enabled": True, "activation_checkpointing": True})
    assert recomputed.activations is not None and one.activations is not None
    assert recomputed.activations < one.activations / 8
    adapters = of("7b", dtensor_cfg={"enabled": True, "lora_cfg": {"enabled": True, "dim": 16, "alpha": 32}})
    assert adapters.weights == one.weights and adapters.optimizer < one.optimizer / 50
    assert (
        of("7b", dtensor_cfg={"enabled": True, "tensor_parallel_size": 2}, sizes=ParallelSizes(tp=2)).activations
        is None
    )


def test_out_of_memory_says_who_holds_it_and_what_to_change() -> None:
    cpu = torch.device("cpu")
    said = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"
    with (
        pytest.raises(GpuMemoryError, match=r"while training: 2\.00 GiB asked.*train_mb_tokens \(now 4096\)"),
        explained(policy(4096), cpu, "training", training=True),
    ):
        raise torch.OutOfMemoryError(said)
    with (
        pytest.raises(GpuMemoryError, match=r"while scoring: .*policy\.logprob_batch_size \(now 6\)"),
        explained(
            PolicyConfig(logprob_batch_size=6, sequence_packing={"enabled": False}), cpu, "scoring", training=False
        ),
    ):
        raise torch.OutOfMemoryError(said)


def test_processes_on_cpus_take_what_was_measured() -> None:
    # GRPO of SmolLM2 135M with a reference on one CPU slot, most that was resident in two steps of short rows.
    config = PolicyConfig(model_name="some/model", precision="float32")
    assert policy_bytes_on_cpu(config, 134_515_008, 1, reference=True) == pytest.approx(5.10e9, rel=0.15)
    alone = policy_bytes_on_cpu(config, 134_515_008, 1, reference=False)
    assert policy_bytes_on_cpu(config, 134_515_008, 2, reference=False) < alone < 4.7e9
