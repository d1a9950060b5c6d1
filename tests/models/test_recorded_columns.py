"""What is recorded of generation is checked against the batch and the model, and packed beside its tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.config import load_master_config
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy.batches import NothingRecordedError, microbatches
from nemo_rl.models.policy.packed import pack
from nemo_rl.models.policy.router_replay import RouterPass, RouterReplay, RouterReplayError, RouterTarget, Routes
from nemo_rl.models.policy.scoring import KeptTokens, LogitTransform, SamplingMaskError, score_tokens

CPU = torch.device("cpu")
CONFIG = Path(__file__).parents[2] / "examples" / "configs" / "grpo_arithmetic_cpu.yaml"


def _batch(rows: int = 3, width: int = 6, layers: int = 2, experts: int = 8) -> BatchedDataDict[Any]:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.tensor([6, 3, 5])[:rows]
    valid = torch.arange(width) < lengths[:, None] - 1
    routes = torch.rand(rows, width, layers, experts, generator=draw).topk(2).indices.to(torch.uint8)
    ids = torch.randint(0, 50, (rows, width), generator=draw)
    counts = torch.tensor([[0, 0, 2, 3, 0, 1], [0, 0, 2, 0, 0, 0], [0, 0, 0, 1, 4, 0]])[:rows]
    kept = [torch.cat([ids[r, s] + torch.arange(counts[r, s]) for s in range(width)]).int() for r in range(rows)]
    return BatchedDataDict(
        input_ids=ids,
        input_lengths=lengths,
        routed_experts=routes,
        routed_experts_valid=valid,
        sampling_mask_counts=counts.int(),
        sampling_mask_ids=kept,
    )


def _replay() -> RouterReplay:
    return RouterReplay([RouterTarget(layer, CPU) for layer in range(2)], 2, 8, 2)


def test_routes_and_sets_lie_beside_their_tokens_in_a_packed_row() -> None:
    data = _batch()
    row = pack(data, CPU, multiple=8)
    assert row.routes is not None and row.kept is not None
    places = [(r, s) for r in range(3) for s in range(int(data["input_lengths"][r]))]
    ends = row.kept.counts_T.cumsum(0).tolist()
    for place, (r, s) in enumerate(places):
        assert torch.equal(row.routes.experts_TLK[place], data["routed_experts"][r, s])
        assert bool(row.routes.valid_T[place]) == (s < data["input_lengths"][r] - 1)
        count = int(data["sampling_mask_counts"][r, s + 1]) if s + 1 < data["input_lengths"][r] else 0
        assert int(row.kept.counts_T[place]) == count
        drawn = row.kept.ids_M[ends[place] - count : ends[place]]
        assert drawn.tolist() == [int(data["input_ids"][r, s + 1]) + n for n in range(count)] if count else True
    assert not row.routes.valid_T[14:].any() and len(row.routes.valid_T) == 16


def test_what_training_reads_ends_before_the_last_trained_token() -> None:
    data = _batch()
    data["token_mask"] = torch.tensor([[0, 0, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    routes = pack(data, CPU).routes
    assert routes is not None
    assert routes.read_T.tolist() == [True] * 3 + [False] * 3 + [True] * 2 + [False] * 6
    assert routes.valid_T.tolist() == [True] * 5 + [False] + [True] * 2 + [False] + [True] * 4 + [False]


def test_rows_share_a_prefix_as_far_as_nothing_was_drawn_from_a_set() -> None:
    ids = torch.arange(300).repeat(2, 1)
    counts = torch.zeros_like(ids)
    counts[:, 200] = 1
    data = BatchedDataDict(input_ids=ids, input_lengths=torch.tensor([300, 300]))
    whole = len(pack(data, CPU, share=True).input_ids_T)
    data["sampling_mask_counts"], data["sampling_mask_ids"] = counts, [torch.tensor([200]), torch.tensor([200])]
    assert whole == 301 and len(pack(data, CPU, share=True).input_ids_T) == 600 - 199
    data["routed_experts"] = torch.zeros(2, 300, 1, 1, dtype=torch.uint8)
    data["routed_experts_valid"] = torch.zeros(2, 300, dtype=torch.bool)
    assert len(pack(data, CPU, share=True).input_ids_T) == 600


@pytest.mark.slow
@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=8),
    width=st.sampled_from([3, 4, 12]),
    places=st.sets(st.integers(0, 7)),
)
def test_slices_of_the_vocabulary_exclude_what_the_whole_excludes(
    counts: list[int], width: int, places: set[int]
) -> None:
    draw = torch.Generator().manual_seed(sum(counts))
    ids = [torch.randperm(12, generator=draw)[:count] for count in counts]
    kept = KeptTokens(torch.tensor(counts), torch.cat(ids).int())
    whole = torch.tensor([[bool(len(own)) and token not in own.tolist() for token in range(12)] for own in ids])
    assert torch.equal(torch.cat([kept.excluded(first, width) for first in range(0, 12, width)], dim=1), whole)
    chosen = sorted(place for place in places if place < len(counts))
    assert torch.equal(kept.at(torch.tensor(chosen, dtype=torch.long)).excluded(0, 12), whole[chosen])


@pytest.mark.parametrize("chunk", [None, 2])
def test_the_softmax_runs_over_the_recorded_set(chunk: int | None) -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=draw).requires_grad_() for shape in ((5, 6), (11, 6)))
    target = torch.tensor([3, 7, 0, 10, 4])
    sets = [[3], [1, 7, 9], [], [2, 10], []]
    kept = KeptTokens(
        torch.tensor([len(own) for own in sets]), torch.tensor([token for own in sets for token in own]).int()
    )
    transform = LogitTransform(temperature=1.3, top_p=0.5)
    scores = score_tokens(hidden, weight, None, target, transform, chunk=chunk, kept=kept)
    assert scores.unfiltered_T is scores.logprobs_T
    got = torch.autograd.grad((scores.logprobs_T * torch.arange(1, 6)).sum(), [hidden, weight])
    logits = hidden @ weight.t() / 1.3
    want_T = torch.stack(
        [row[t] - (row[own] if own else row).logsumexp(-1) for row, t, own in zip(logits, target, sets, strict=True)]
    )
    want = torch.autograd.grad((want_T * torch.arange(1, 6)).sum(), [hidden, weight])
    torch.testing.assert_close(scores.logprobs_T, want_T)
    torch.testing.assert_close(list(got), list(want))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("routed_experts_valid"), "needs both columns"),
        (lambda data: data.update(routed_experts=data["routed_experts"][:, :5]), "expected .B, S, L, K."),
        (
            lambda data: data.update(routed_experts=data["routed_experts"][:, :, :1]),
            "expected .14, 2, 2.",
        ),
        (
            lambda data: data["routed_experts"].__setitem__((0, 0, 0, 0), 8),
            "token 0, layer 0 .*0 to 7",
        ),
        (lambda data: data["routed_experts"].__setitem__((2, 3, 1), 5), "layer 1 .*one of them twice"),
    ],
)
def test_routes_that_do_not_fit_are_refused(change: Any, message: str) -> None:
    data = _batch()
    change(data.data)
    with pytest.raises(RouterReplayError, match=message):
        _replay().check(pack(data, CPU).routes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("sampling_mask_ids"), "needs both columns"),
        (lambda data: data["sampling_mask_ids"].__setitem__(1, torch.tensor([1])), "ids per row"),
        (lambda data: data["sampling_mask_counts"].__setitem__((0, 0), -1), "at least 0"),
        (lambda data: data["sampling_mask_ids"][2].__setitem__(0, 49), "row 2, token 3: .* does not contain"),
    ],
)
def test_sets_that_do_not_fit_are_refused(change: Any, message: str) -> None:
    data = _batch()
    change(data.data)
    with pytest.raises(SamplingMaskError, match=message):
        pack(data, CPU)


def test_values_are_checked_on_the_first_row_and_on_all_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    replay, good = _replay(), pack(_batch(), CPU).routes
    assert good is not None
    bad = dataclasses.replace(good, experts_TLK=torch.full_like(good.experts_TLK, 9))
    nothing = Routes(bad.experts_TLK, torch.zeros_like(bad.valid_T), bad.read_T)
    replay.check(nothing)
    with pytest.raises(RouterReplayError):
        replay.check(bad)
    replay.check(good)
    replay.check(bad)
    monkeypatch.setenv("NRL_ROUTER_REPLAY_VALIDATE", "1")
    with pytest.raises(RouterReplayError):
        replay.check(bad)


def test_a_layer_that_is_run_again_takes_the_routes_of_its_own_microbatch() -> None:
    target, natural = RouterTarget(0, CPU), torch.tensor([[0, 1]])
    routes = [
        Routes(torch.full((1, 1, 2), n, dtype=torch.uint8), torch.tensor([True]), torch.tensor([True])) for n in (2, 3)
    ]

    def run(own: Routes) -> None:
        target.enter()
        assert target.choose(natural).tolist() == own.experts_TLK[:, 0].tolist()

    for own in routes:
        target.aim(RouterPass(own), recomputes=True, counts=True)
        with torch.no_grad():
            run(own)
    for own in routes:
        run(own)
    assert target.counts.tolist() == [2.0, 2.0, 2.0]


def test_columns_are_replayed_where_the_configuration_says_so() -> None:
    data = _batch()
    off, routes, masks = (
        load_master_config(CONFIG, overrides).policy
        for overrides in (
            ["policy.sequence_packing.enabled=false"],
            ["policy.sequence_packing.enabled=false", "policy.router_replay.enabled=true"],
            [
                "policy.sequence_packing.enabled=false",
                "policy.sampling_mask_replay=true",
                "policy.generation.top_p=0.8",
            ],
        )
    )
    seen = [set(microbatches(data, config, 2)[0]) for config in (off, routes, masks)]
    found = [("routed_experts" in names, "sampling_mask_counts" in names) for names in seen]
    assert found == [(False, False), (True, False), (False, True)]
    bare = BatchedDataDict({name: data[name] for name in ("input_ids", "input_lengths")})
    for config, key in ((routes, "policy.router_replay.enabled"), (masks, "policy.sampling_mask_replay")):
        with pytest.raises(NothingRecordedError, match=key):
            microbatches(bare, config, 2)
