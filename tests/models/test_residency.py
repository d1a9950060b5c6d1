"""Storages that leave the device and come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.models.policy.residency import MovableStorages, ReferenceWeights, pieces
from tests.models.policy_ranks import stayed_and_moved
from tests.ranks import run_ranks


@given(st.lists(st.integers(1, 50)), st.integers(1, 16))
def test_pieces_cover_every_byte_once_in_full_chunks(sizes: list[int], chunk_bytes: int) -> None:
    found = list(pieces(sizes, chunk_bytes))
    covered = [(piece.storage, byte) for piece in found for byte in range(piece.start, piece.stop)]
    assert covered == [(storage, byte) for storage, size in enumerate(sizes) for byte in range(size)]
    places = [
        piece.chunk * chunk_bytes + piece.offset + byte for piece in found for byte in range(piece.stop - piece.start)
    ]
    assert places == list(range(sum(sizes)))
    assert all(piece.offset + piece.stop - piece.start <= chunk_bytes for piece in found)


@given(st.lists(st.integers(1, 40), min_size=1), st.integers(1, 64))
def test_every_view_is_what_it_was_after_a_move(sizes: list[int], chunk_bytes: int) -> None:
    tensors = [torch.randn(size) for size in sizes]
    views = [tensor[1:].view(-1) for tensor in tensors]
    want = [tensor.clone() for tensor in tensors]
    moved = MovableStorages([*tensors, *views], chunk_bytes)
    for _ in range(2):
        moved.to_host()
        moved.to_host()
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        moved.to_device()
        moved.to_device()
        for tensor, view, original in zip(tensors, views, want, strict=True):
            assert torch.equal(tensor, original) and torch.equal(view, original[1:])


def test_values_that_nobody_waits_for_come_back_as_zeros() -> None:
    tensor, empty = torch.ones(10), torch.empty(0)
    moved = MovableStorages([tensor, empty])
    moved.to_host(keep=False)
    moved.to_device()
    assert torch.equal(tensor, torch.zeros(10))


def test_on_a_cpu_slot_nothing_moves() -> None:
    tensor = torch.ones(10)
    MovableStorages.on_gpu([tensor]).to_host()
    assert torch.equal(tensor, torch.ones(10))


BACKENDS = {
    "dtensor": ["policy.dtensor_cfg.enabled=true"],
    "megatron": ["policy.megatron_cfg.enabled=true", "policy.dtensor_cfg.enabled=false"],
}


@pytest.fixture(scope="module")
def checksums(tiny_model: Path) -> dict[str, list[dict[str, str]]]:
    return run_ranks(stayed_and_moved, 2, str(tiny_model), 2, BACKENDS)[0]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_between_which_everything_leaves_the_device_train_the_same_bits(
    backend: str, checksums: dict[str, list[dict[str, str]]]
) -> None:
    stayed, moved = checksums[backend]
    assert moved == stayed


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.booleans(), st.integers(1, 3))
def test_the_policys_own_weights_come_back_after_the_reference_was_asked(
    sizes: list[int], fails: bool, times: int
) -> None:
    first = [torch.randn(size) for size in sizes]
    weights = [torch.nn.Parameter(one.clone()) for one in first]
    reference = ReferenceWeights(weights)
    for step in range(times):
        with torch.no_grad():
            for weight in weights:
                weight.add_(step + 1.0)
        own = [weight.detach().clone() for weight in weights]
        try:
            with reference.swapped_in(weights):
                # Those that the run began with, however often the policy has moved since.
                assert all(torch.equal(weight, one) for weight, one in zip(weights, first, strict=True))
                if fails:
                    raise LookupError
        except LookupError:
            pass
        assert all(torch.equal(weight, one) for weight, one in zip(weights, own, strict=True))
