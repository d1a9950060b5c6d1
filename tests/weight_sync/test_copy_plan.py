"""A plan made of what a loader did leaves the loader's bits; a loader that did more than copy gets none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.weight_sync.copy_plan import CopyPlans
from nemo_rl.weight_sync.layout import TensorMeta, Window, align, plan_buckets

Weights = Iterable[tuple[str, torch.Tensor]]


class Shard(torch.nn.Module):
    """One tensor-parallel rank of a small model, with the loading habits of an engine."""

    def __init__(self, rank: int, ranks: int, *, hidden: int = 8, vocab: int = 10, dtype: str = "float32") -> None:
        super().__init__()
        self.rank, self.ranks, kind = rank, ranks, getattr(torch, dtype)

        def weight(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.full(shape, -1.0, dtype=kind), requires_grad=False)

        self.embed = weight(-(-vocab // 4) * 4, hidden)
        self.head = self.embed
        self.qkv = weight(3 * hidden // ranks, hidden)
        self.gate_up = weight(2 * hidden // ranks, hidden)
        self.down = weight(hidden, hidden // ranks)
        self.turned = weight(hidden, vocab)
        self.register_buffer("scale", torch.full((hidden,), -1.0))

    def load_weights(self, weights: Weights) -> None:
        for name, loaded in weights:
            self.load(name, loaded)

    def load(self, name: str, loaded: torch.Tensor) -> None:
        fused = {"q": (self.qkv, 0), "k": (self.qkv, 1), "v": (self.qkv, 2), "gate": (self.gate_up, 0)}
        fused["up"] = (self.gate_up, 1)
        if name == "embed":
            self.embed[: len(loaded)].data.copy_(loaded)
            self.embed[len(loaded) :].data.fill_(0)
        elif name in fused:
            parameter, place = fused[name]
            rows = loaded.shape[0] // self.ranks
            part = loaded.narrow(0, self.rank * rows, rows)
            parameter.data.narrow(0, place * rows, rows).copy_(part)
        elif name == "down":
            columns = loaded.shape[1] // self.ranks
            self.down.data.copy_(loaded.narrow(1, self.rank * columns, columns))
        elif name == "turned":
            self.turned.data.copy_(loaded.t())
        elif name == "scale":
            self.scale.copy_(loaded)
        else:
            assert name == "head", "tied to embed"


def sent(seed: int, *, hidden: int = 8, vocab: int = 10, dtype: str = "float32") -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    square = dict.fromkeys(("q", "k", "v", "gate", "up", "down"), (hidden, hidden))
    shapes = {
        "embed": (vocab, hidden),
        **square,
        "turned": (vocab, hidden),
        "scale": (hidden,),
        "head": (vocab, hidden),
    }
    return {name: torch.randn(shape, generator=draw).to(getattr(torch, dtype)) for name, shape in shapes.items()}


def windows(weights: dict[str, torch.Tensor], bucket_bytes: int = 1 << 20, together: int = 1) -> list[Window]:
    metas = [TensorMeta(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in weights.items()]
    buckets = plan_buckets(metas, bucket_bytes)
    made = []
    for first in range(0, len(buckets), together):
        chosen = tuple(buckets[first : first + together])
        buffer_B = torch.zeros(sum(align(bucket.nbytes) for bucket in chosen), dtype=torch.uint8)
        window = Window(buffer_B, chosen)
        for part_B, bucket in window.parts():
            for meta, offset in zip(bucket.tensors, bucket.offsets, strict=True):
                view = part_B[offset : offset + meta.nbytes]
                view.copy_(weights[meta.name].contiguous().view(-1).view(torch.uint8))
        made.append(window)
    return made


def session(plans: CopyPlans, parts: list[Window], loader: Callable[[Weights], Any]) -> list[bool]:
    plans.begin()
    replayed = [plans.load(window, loader) for window in parts]
    plans.finish()
    return replayed


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    ranks=st.sampled_from([1, 2, 4]),
    rank=st.integers(0, 3),
    vocab=st.integers(5, 13),
    bucket_bytes=st.sampled_from([512, 1024, 1 << 20]),
    together=st.integers(1, 3),
    stored=st.sampled_from(["float32", "bfloat16"]),
    travels=st.sampled_from(["float32", "bfloat16"]),
)
def test_a_replay_leaves_the_bits_that_the_loader_leaves(
    ranks: int, rank: int, vocab: int, bucket_bytes: int, together: int, stored: str, travels: str
) -> None:
    model = Shard(rank % ranks, ranks, vocab=vocab, dtype=stored)
    expected = Shard(rank % ranks, ranks, vocab=vocab, dtype=stored)
    plans = CopyPlans(lambda: model)
    first = windows(sent(1, vocab=vocab, dtype=travels), bucket_bytes, together)
    later = windows(sent(2, vocab=vocab, dtype=travels), bucket_bytes, together)
    assert not any(session(plans, first, model.load_weights)) and plans.refusal is None
    expected.load_weights(pair for window in first for pair in window)
    assert equal(state(model), state(expected))
    # What slept without its bytes comes back as a whole.
    for tensor in model.state_dict().values():
        tensor.fill_(7)

    def unwanted(weights: Weights) -> None:
        raise AssertionError("the loader ran again")

    assert all(session(plans, later, unwanted))
    expected.load_weights(pair for window in later for pair in window)
    assert equal(state(model), state(expected))


def test_writes_that_overlap_are_replayed_in_their_order() -> None:
    model, parts = Shard(0, 1), windows(sent(1))

    def loader(weights: Weights) -> None:
        for name, loaded in weights:
            if name in ("q", "k", "v"):
                model.qkv.data[:8].copy_(loaded)
                model.qkv.data[4:12].copy_(loaded.t())
            elif name == "scale":
                model.scale.copy_(loaded)
                model.scale[2:].fill_(3.0)

    plans = CopyPlans(lambda: model)
    session(plans, parts, loader)
    wanted = state(model)
    model.qkv[:12].fill_(0)
    model.scale.fill_(0)
    assert session(plans, parts, loader) == [True]
    assert equal(state(model), wanted)


KEPT: list[object] = []


def arithmetic(model: Shard, name: str, loaded: torch.Tensor) -> None:
    model.load(name, loaded + 1)


def in_place(model: Shard, name: str, loaded: torch.Tensor) -> None:
    model.load(name, loaded)
    model.scale.mul_(2)


def looks(model: Shard, name: str, loaded: torch.Tensor) -> None:
    if float(loaded.view(-1)[0]) > 0:
        model.load(name, loaded)


def lists(model: Shard, name: str, loaded: torch.Tensor) -> None:
    model.load(name, torch.tensor(loaded.tolist()))


def through_numpy(model: Shard, name: str, loaded: torch.Tensor) -> None:
    if name == "scale":
        model.scale.numpy()[:] = loaded.numpy()


def keeps(model: Shard, name: str, loaded: torch.Tensor) -> None:
    KEPT.append(loaded)


def keeps_a_part(model: Shard, name: str, loaded: torch.Tensor) -> None:
    if name == "scale":
        model.scale[:4].copy_(loaded[:4])
        KEPT.append(loaded[4:])
    else:
        model.load(name, loaded)


def copies_first(model: Shard, name: str, loaded: torch.Tensor) -> None:
    model.load(name, loaded.t().contiguous().t())


def replaces(model: Shard, name: str, loaded: torch.Tensor) -> None:
    if name == "scale":
        model.scale = torch.zeros(loaded.shape)
    else:
        model.load(name, loaded)


def from_elsewhere(model: Shard, name: str, loaded: torch.Tensor) -> None:
    model.load(name, torch.ones(loaded.shape))


BESIDE = torch.zeros(1)


def writes_beside(model: Shard, name: str, loaded: torch.Tensor) -> None:
    BESIDE.fill_(1)
    model.load(name, loaded)


@pytest.mark.parametrize(
    ("habit", "reason"),
    [
        (arithmetic, "add"),
        (in_place, "mul_"),
        (looks, "_local_scalar_dense"),
        (lists, "tolist of weights was taken"),
        (through_numpy, "numpy of weights was taken"),
        pytest.param(keeps, "kept a tensor", marks=pytest.mark.slow),
        pytest.param(keeps_a_part, "kept a tensor", marks=pytest.mark.slow),
        (copies_first, "clone"),
        (replaces, "parameters were replaced"),
        (from_elsewhere, "a copy went elsewhere"),
        (writes_beside, "wrote beside the model"),
    ],
)
def test_a_loader_that_does_more_than_copy_runs_each_time(habit: Any, reason: str) -> None:
    KEPT.clear()
    model = Shard(0, 1)
    plans = CopyPlans(lambda: model)
    ran = []

    def loader(weights: Weights) -> None:
        ran.append(1)
        for name, loaded in weights:
            habit(model, name, loaded)

    # Several windows: one refusal counts for all, since a loader may wait for the last of what it was given.
    parts = windows(sent(1), bucket_bytes=1024)
    assert len(parts) > 2
    with torch.no_grad():
        assert not any(session(plans, parts, loader))
        assert reason in (plans.refusal or "") and not len(plans)
        if habit is not replaces:
            assert not any(session(plans, parts, loader))
            assert len(ran) == 2 * len(parts)


def test_replaced_parameters_drop_the_plan_and_get_a_new_one() -> None:
    model, parts = Shard(0, 2), windows(sent(1))
    plans = CopyPlans(lambda: model)
    session(plans, parts, model.load_weights)
    assert session(plans, parts, model.load_weights) == [True]
    model.down = torch.nn.Parameter(torch.zeros_like(model.down), requires_grad=False)
    assert session(plans, parts, model.load_weights) == [False]
    assert torch.equal(model.down, sent(1)["down"][:, :4])
    assert session(plans, parts, model.load_weights) == [True]


def test_what_an_abandoned_session_saw_is_not_believed() -> None:
    model, parts = Shard(0, 1), windows(sent(1), bucket_bytes=1024)
    plans = CopyPlans(lambda: model)
    plans.begin()
    plans.load(parts[0], model.load_weights)
    plans.abandon()
    assert not any(session(plans, parts, model.load_weights))
    assert all(session(plans, parts, model.load_weights))


def test_layouts_that_no_session_used_for_long_are_forgotten() -> None:
    model = Shard(0, 1)
    plans = CopyPlans(lambda: model)
    small, large = windows(sent(1), bucket_bytes=1024), windows(sent(1))
    session(plans, small, model.load_weights)
    for _ in range(5):
        session(plans, large, model.load_weights)
    assert len(plans) == len(large)


def test_a_window_need_not_begin_where_its_buffer_does() -> None:
    model = Shard(0, 1, dtype="bfloat16")
    (window,) = windows(sent(1, dtype="bfloat16"))
    plans = CopyPlans(lambda: model)
    session(plans, [window], model.load_weights)
    wanted = state(model)
    around_B = torch.zeros(512 + window.bytes_B.numel() + 7, dtype=torch.uint8)
    inside_B = around_B[512:]
    inside_B[: window.bytes_B.numel()].copy_(window.bytes_B)
    model.gate_up.fill_(0)
    assert session(plans, [Window(inside_B, window.buckets)], model.load_weights) == [True]
    assert equal(state(model), wanted)
