"""Products of adapters on a CPU: every token with the factors of its own adapter, and none without one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nemo_rl.models.multi_lora.cpu_kernels import add_products


def products(
    inputs: torch.Tensor, downs: Sequence[torch.Tensor], ups: Sequence[torch.Tensor], index: torch.Tensor
) -> torch.Tensor:
    widths = [up.shape[-2] for up in ups]
    out = torch.zeros(len(inputs), sum(widths))
    add_products(out, inputs, downs, ups, widths, index)
    return out


def test_bits_of_a_product_depend_on_no_other_token() -> None:
    generator = torch.Generator().manual_seed(0)
    for wide, rank, width in ((128, 16, 384), (64, 8, 20)):
        down, up = (torch.randn(2, *shape, generator=generator) for shape in ((rank, wide), (width, rank)))
        row = torch.randn(wide, generator=generator)
        found = []
        for tokens in (1, 2, 7, 16, 33, 256, 300):
            inputs = torch.randn(tokens, wide, generator=generator)
            for place in {0, tokens // 2, tokens - 1}:
                inputs[place] = row
                found.append(products(inputs, [down], [up], torch.ones(tokens, dtype=torch.int64))[place])
        assert all(torch.equal(product, found[0]) for product in found)


def test_bits_of_a_product_are_those_of_its_adapter_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    downs = [torch.randn(4, 1, 8, 32, generator=generator) for _ in range(2)]
    ups = [torch.randn(4, 1, width, 8, generator=generator) for width in (24, 12)]
    inputs = torch.randn(210, 32, generator=generator)
    index = torch.randint(-1, 4, (210,), generator=generator)
    mixed = products(inputs, downs, ups, index)
    for adapter in range(4):
        own = index == adapter
        assert torch.equal(mixed[own], products(inputs[own], downs, ups, index[own]))
        assert torch.equal(mixed[own], products(inputs, downs, ups, index.to(torch.int32))[own])
    assert not mixed[index < 0].any()


def test_every_token_is_multiplied_by_the_factors_of_its_adapter() -> None:
    generator = torch.Generator().manual_seed(0)
    downs = [torch.randn(3, 1, 2, 6, generator=generator) for _ in range(2)]
    ups = [torch.randn(3, 1, width, 2, generator=generator) for width in (4, 3)]
    inputs = torch.randn(5, 6, generator=generator)
    for adapters in ([0, 2, -1, 0, 1], [2, 2, 2, 2, 2], [-1, -1, -1, -1, -1]):
        wanted = [
            torch.stack([up[a, 0] @ down[a, 0] @ row if a >= 0 else torch.zeros(up.shape[-2]) for a, row in rows])
            for down, up in zip(downs, ups, strict=True)
            for rows in [list(zip(adapters, inputs, strict=True))]
        ]
        out = torch.ones(5, 9)
        add_products(out, inputs, downs, ups, (4, 3), torch.tensor(adapters), 0.5)
        torch.testing.assert_close(out, 1 + 0.5 * torch.cat([*wanted, torch.zeros(5, 2)], dim=1))
        # An output without room for what the last factor is padded by.
        out = torch.ones(5, 6)
        add_products(out, inputs, downs, ups, (4, 3), torch.tensor(adapters), 0.5)
        torch.testing.assert_close(out, 1 + 0.5 * torch.cat([wanted[0], wanted[1][:, :2]], dim=1))
