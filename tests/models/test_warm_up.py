"""What makes the first step short: rows for passes before it, and a folder for compiled kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl.loss import ClippedPGLossFn
from nemo_rl.models.policy.policy_worker import CACHES, WARM_UP_TOKENS, keep_compiled, warm_up_rows
from tests.models.policy_ranks import run_config
from tests.ranks import run_ranks


@pytest.mark.parametrize("longest", [24, 768, 100_000])
def test_rows_fit_the_model_and_stay_short(tiny_model: Path, longest: int) -> None:
    config = run_config(tiny_model, 1, f"policy.max_total_sequence_length={longest}", "data.max_input_seq_length=16")
    rows = warm_up_rows(config.policy, 320)
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
    """The loss of a step, and the same after the passes of a warm-up on rows that the loss takes."""
    from tests.models.policy_ranks import grouped_batch, make_worker, shard_of

    found = []
    for warm in (False, True):
        config = run_config(model, 1)
        worker = make_worker(config)
        loss = ClippedPGLossFn(config.loss_fn)
        if warm:
            assert worker.warm_up(loss) == 0.0  # nothing is compiled on CPU slots
            rows = warm_up_rows(config.policy, 320)
            worker.backend.logprobs([rows], filtered=True, idle=0)
            worker.backend.start_step()
            worker.backend.forward_backward([rows], loss, idle=0)
            worker.backend.discard_gradients()
        result = worker.train(shard_of(worker, grouped_batch()), loss, eval_mode=False, gbs=8, mbs=2)
        found.append((result["loss"], result["grad_norm"], worker.weight_checksums()))
    return found[0], found[1]


def test_passes_before_the_first_step_leave_no_trace_in_it(tiny_model: Path) -> None:
    ((cold, warm),) = run_ranks(passes_before_a_step, 1, str(tiny_model))
    assert cold == warm


def graphs_after_a_warm_up(model: str) -> tuple[int, int]:
    """Graphs of compiled layers after the passes of a warm-up, and after a step of scoring and training."""
    from torch import nn
    from torch._dynamo.utils import counters

    from nemo_rl.models.policy import policy_worker as module
    from tests.models.policy_ranks import grouped_batch, make_worker, shard_of

    # As wide as the model, as 2 x 768 tokens are for one of 1,536.
    module.WARM_UP_TOKENS = 128
    compile_layer = nn.Module.compile
    # Which graphs there are does not depend on what makes kernels of them.
    nn.Module.compile = lambda self, **options: compile_layer(self, backend="eager", **options)
    packing = "{enabled: true, share_prompts: true, train_mb_tokens: 128, logprob_mb_tokens: 128}"
    keys = "policy.dtensor_cfg.torch_compile=true", f"policy.sequence_packing={packing}"
    config = run_config(model, 1, *keys, "policy.max_total_sequence_length=64", "data.max_input_seq_length=16")
    worker = make_worker(config)
    loss = ClippedPGLossFn(config.loss_fn)
    rows = warm_up_rows(config.policy, 320)
    worker.backend.logprobs([rows], filtered=True, idle=0)
    worker.backend.start_step()
    worker.backend.forward_backward([rows], loss, idle=0)
    worker.backend.discard_gradients()
    before = counters["stats"]["unique_graphs"]
    worker.get_logprobs(shard_of(worker, grouped_batch(), training=False))
    worker.train(shard_of(worker, grouped_batch()), loss, eval_mode=False, gbs=8, mbs=2)
    return before, counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_what_a_warm_up_compiled_serves_the_rows_of_a_step(tiny_model: Path) -> None:
    ((before, after),) = run_ranks(graphs_after_a_warm_up, 1, str(tiny_model))
    assert before == after > 0
