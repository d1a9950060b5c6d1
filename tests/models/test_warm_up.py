"""What makes the first step short: rows for passes before it, and a folder for compiled kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.loss import ClippedPGLossFn
from nemo_rl.models.policy.policy_worker import CACHES, WARM_UP_TOKENS, keep_compiled, warm_up_rows
from tests.models.policy_ranks import run_config
from tests.ranks import run_ranks


@pytest.mark.parametrize("longest", [24, 768, 100_000])
def test_rows_fit_the_model_and_stay_short(tiny_model: Path, longest: int) -> None:
    config = run_config(tiny_model, 1, f"policy.max_total_sequence_length={longest}", "data.max_input_seq_length=16")
    rows = warm_up_rows(config.policy, 320, WARM_UP_TOKENS)
    assert rows.size >= 2 and int(rows["input_lengths"].sum()) <= WARM_UP_TOKENS
    assert int(rows["input_lengths"].max()) <= longest and int(rows["input_ids"].max()) < 320
    assert int(rows["input_lengths"].min()) > 1


def test_compiled_kernels_are_kept_where_the_user_says_or_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CACHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert keep_compiled() == str(tmp_path / "nemo_rl" / "inductor")
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert keep_compiled() == "a temporary folder"


def passes_before_a_step(model: str) -> tuple[object, object]:
    """The loss of a step, and the same after a warm-up; with compiled layers."""
    from torch import nn

    from nemo_rl.models.policy import policy_worker as module
    from tests.models.policy_ranks import grouped_batch, make_worker, shard_of

    module.WARM_UP_TOKENS = 64
    nn.Module.compile = compiled_by(without_kernels)
    found = []
    for warm in (False, True):
        config = run_config(model, 1, "policy.dtensor_cfg.torch_compile=true")
        worker = make_worker(config)
        loss = ClippedPGLossFn(config.loss_fn)
        if warm:
            assert worker.warm_up(loss) > 0
        result = worker.train(shard_of(worker, grouped_batch()), loss, eval_mode=False, gbs=8, mbs=2)
        found.append((result["loss"], result["grad_norm"], worker.weight_checksums()))
    return found[0], found[1]


@pytest.mark.slow
def test_passes_before_the_first_step_leave_no_trace_in_it(tiny_model: Path) -> None:
    ((cold, warm),) = run_ranks(passes_before_a_step, 1, str(tiny_model))
    assert cold == warm


def nothing_to_compile(model: str) -> float:
    from tests.models.policy_ranks import make_worker

    config = run_config(model, 1)
    return make_worker(config).warm_up(ClippedPGLossFn(config.loss_fn))


def test_there_is_nothing_to_warm_up_on_cpu_slots(tiny_model: Path) -> None:
    assert run_ranks(nothing_to_compile, 1, str(tiny_model)) == [0.0]


LONG = 150
"""Tokens from which other kernels are made for a row, in these tests."""


def without_kernels(graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A compiler that makes no kernels, but asks for the length of rows as Inductor does on GPUs."""
    import torch

    for size in inputs:
        if isinstance(size, torch.SymInt):
            bool(size >= LONG)
    return graph.forward


def compiled_by(backend: Callable[..., Any]) -> Callable[..., None]:
    """`nn.Module.compile` with another compiler."""
    from torch import nn

    original = nn.Module.compile
    return lambda self, **options: original(self, backend=backend, **options)


def graphs_after_a_warm_up(model: str, lora: bool) -> tuple[int, int]:
    """Graphs of compiled layers after a warm-up, and after a step of scoring (the reference too) and training."""
    from torch import nn
    from torch._dynamo.utils import counters

    from nemo_rl.models.policy import policy_worker as module
    from tests.models.policy_ranks import grouped_batch, make_worker, shard_of

    # As wide as the model, as 2 x 768 tokens are for one of 1,536.
    module.WARM_UP_TOKENS = 128
    nn.Module.compile = compiled_by(without_kernels)
    packing = "{enabled: true, share_prompts: true, train_mb_tokens: 256, logprob_mb_tokens: 256}"
    keys = "policy.dtensor_cfg.torch_compile=true", f"policy.sequence_packing={packing}"
    adapter = f"policy.dtensor_cfg.lora_cfg.enabled={str(lora).lower()}"
    config = run_config(model, 1, *keys, adapter, "policy.max_total_sequence_length=64", "data.max_input_seq_length=16")
    worker = make_worker(config, init_reference_model=True)
    loss = ClippedPGLossFn(config.loss_fn)
    worker.warm_up(loss)
    before = counters["stats"]["unique_graphs"]
    scored = shard_of(worker, grouped_batch(), training=False)
    worker.get_logprobs(scored)
    worker.get_reference_policy_logprobs(scored)
    worker.train(shard_of(worker, grouped_batch()), loss, eval_mode=False, gbs=8, mbs=2)
    return before, counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_what_a_warm_up_compiled_serves_the_rows_of_a_step(tiny_model: Path, lora: bool) -> None:
    ((before, after),) = run_ranks(graphs_after_a_warm_up, 1, str(tiny_model), lora)
    assert before == after > 0
