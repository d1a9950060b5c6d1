"""Products of adapters on a CPU: every token with the factor of its own adapter, and none without one."""

from __future__ import annotations

import torch

from nemo_rl.models.multi_lora.cpu_kernels import expand, expand_slice, products, shrink


def test_bits_of_a_product_depend_on_no_other_token() -> None:
    generator = torch.Generator().manual_seed(0)
    for wide, rank in ((128, 16), (16, 384), (64, 8)):
        factors = torch.randn(2, rank, wide, generator=generator)
        row = torch.randn(wide, generator=generator)
        found = []
        for tokens in (1, 2, 7, 16, 33, 256, 300):
            inputs = torch.randn(tokens, wide, generator=generator)
            for place in {0, tokens // 2, tokens - 1}:
                inputs[place] = row
                found.append(products(inputs, factors, torch.ones(tokens, dtype=torch.int64))[place])
        assert all(torch.equal(product, found[0]) for product in found)


def test_bits_of_a_product_are_those_of_its_adapter_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    factors, inputs = torch.randn(4, 1, 24, 32, generator=generator), torch.randn(210, 32, generator=generator)
    index = torch.randint(-1, 4, (210,), generator=generator)
    mixed = products(inputs, factors, index)
    for adapter in range(4):
        own = index == adapter
        assert torch.equal(mixed[own], products(inputs[own], factors, index[own]))
        assert torch.equal(mixed[own], products(inputs, factors, index.to(torch.int32))[own])
    assert not mixed[index < 0].any()


def test_every_token_is_multiplied_by_the_factor_of_its_adapter() -> None:
    generator = torch.Generator().manual_seed(0)
    factors = torch.randn(3, 1, 4, 6, generator=generator)
    inputs = torch.randn(5, 6, generator=generator)
    for adapters in ([0, 2, -1, 0, 1], [2, 2, 2, 2, 2], [-1, -1, -1, -1, -1]):
        wanted = torch.stack(
            [factors[a, 0] @ row if a >= 0 else torch.zeros(4) for a, row in zip(adapters, inputs, strict=True)]
        )
        index = torch.tensor(adapters)
        torch.testing.assert_close(products(inputs, factors, index), wanted)
        out = torch.ones(5, 7)
        shrink(inputs, factors, out, index, 0.5)
        torch.testing.assert_close(out, torch.cat([0.5 * wanted, torch.ones(5, 3)], dim=1))
        out = torch.ones(5, 3)
        expand(inputs, factors, out, index)
        torch.testing.assert_close(out, 1 + wanted[:, :3])
        out = torch.ones(5, 6)
        expand_slice(inputs, factors, out, index, 1, 4, add_inputs=False)
        torch.testing.assert_close(out, torch.cat([torch.ones(5, 1), wanted, torch.ones(5, 1)], dim=1))
