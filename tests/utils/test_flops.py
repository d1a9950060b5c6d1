"""FLOPs from a configuration, against counting by hand and against PyTorch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Gemma4TextConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from nemo_rl.utils.flops import TransformerShape, UnknownArchitecture, Work, peak_tflops, utilization

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 100,
    "tie_word_embeddings": True,
}


def test_a_dense_model_by_hand() -> None:
    shape = TransformerShape.from_hf_config(LlamaConfig(**SMALL))
    per_token = 3 * (32 * 64 + 2 * 32 * 32 + 64 * 32 + 3 * 32 * 48) + 32 * 100
    attention = 3 * 2 * 64 * sum(range(1, 11))
    ten = Work.of([10], [10])
    assert shape.forward_flops(ten) == 2 * (10 * per_token + attention)
    assert shape.forward_flops(ten + ten) == 2 * shape.forward_flops(ten)
    assert shape.train_flops(ten) == 3 * shape.forward_flops(ten)
    layer = 10 * (32 * 64 + 2 * 32 * 32 + 64 * 32 + 3 * 32 * 48) + 2 * 64 * sum(range(1, 11))
    predicted = 2 * (10 * 2 * 32 * 32 + layer + 10 * 32 * 100)
    assert shape.train_flops(ten, predicted_tokens=2) == 3 * (shape.forward_flops(ten) + 2 * predicted)


def test_tokens_behind_a_shared_prefix_look_at_it_too() -> None:
    # Four tokens once, then two and three that go on from them.
    assert Work.of([4, 2, 3], [4, 6, 7]) == Work(9, 10 + (5 + 6) + (5 + 6 + 7))


def test_matrix_products_agree_with_the_counter_of_pytorch() -> None:
    length = 24
    config = Qwen3Config(**SMALL)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.long))
    shape = TransformerShape.from_hf_config(config)
    # Eager attention multiplies the masked half too.
    masked_half = 3 * 2 * 2 * 64 * length * (length - 1) / 2
    assert counter.get_total_flops() == shape.forward_flops(Work.of([length], [length])) + masked_half


def test_a_mixture_of_experts_counts_the_experts_a_token_visits() -> None:
    moe = Qwen3MoeConfig(
        **SMALL,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    shape = TransformerShape.from_hf_config(moe)
    assert shape.mlp_operations == 3 * 32 * 2 * 20 + 32 * 8


def test_a_configuration_without_sizes_is_named() -> None:
    class Odd:
        model_type = "odd"

    with pytest.raises(UnknownArchitecture, match="'odd'"):
        TransformerShape.from_hf_config(Odd())


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("NVIDIA H200", "bfloat16", 989.5),
        ("NVIDIA H100 80GB HBM3", "torch.bfloat16", 989.5),
        ("NVIDIA H100 PCIe", "bfloat16", 756.5),
        ("NVIDIA A100-SXM4-80GB", "float32", 156.0),
        ("NVIDIA L40S", "float8", 724.1),
        ("Abacus", "bfloat16", None),
    ],
)
def test_peaks_are_found_by_the_name_the_driver_gives(name: str, dtype: str, expected: float | None) -> None:
    assert peak_tflops(name, dtype) == expected


def test_utilization_is_a_fraction_of_the_peak() -> None:
    assert utilization(1e15, 2.0, 5, 100.0) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="int4"):
        peak_tflops("NVIDIA H100", "int4")


def test_layers_of_several_sizes_count_by_their_mean() -> None:
    config = Gemma4TextConfig(
        **{**SMALL, "num_hidden_layers": 2},
        layer_types=["sliding_attention", "full_attention"],
        global_head_dim=48,
        hidden_size_per_layer_input=0,
    )
    shape = TransformerShape.from_hf_config(config)
    assert (shape.query_width, shape.key_value_width) == (4 * (16 + 48) // 2, 2 * (16 + 48) // 2)
