"""fp8 beside bfloat16 generation on one GPU: prints one table of agreement with the policy, speed and memory, and ends
with an error where fp8 does not take the weights of a refit.

`python -m tests.gpu.fp8_generation FOLDER --layers 28 --hidden 1536 --heads 12` for a model of 1.5 billion parameters.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from nemo_rl.distributed.ray_runtime import init_ray, shutdown_ray
from nemo_rl.models.generation.interfaces import GenerationResult
from tests.gpu.conftest import save_model
from tests.models.engines import Colocated, colocated

_TOKENS = 256
# Rounding of bfloat16 alone, and of products of fp8 numbers with three bits after the point.
_AGREE = {"bfloat16": 1.05, "fp8": 1.3}
_VLLM = "policy.generation.vllm_cfg"


def measure(model: Path, precision: str, requests: int, *more: str) -> dict[str, float]:
    """One engine beside its policy, before and after the weights change, and after it slept in between."""
    overrides = [
        "cluster.device=cuda",
        "policy.precision=bfloat16",
        f"{_VLLM}.precision={precision}",
        f"{_VLLM}.gpu_memory_utilization=0.5",
        f"policy.generation.vllm_kwargs.kv_cache_memory_bytes={8 << 30}",
        "policy.max_total_sequence_length=512",
        f"{_VLLM}.max_model_len=512",
        f"policy.generation.max_new_tokens={_TOKENS}",
        "loss_fn.use_importance_sampling_correction=true",
        "weight_sync.verify=true",
        *more,
    ]
    with colocated(model, 1, *overrides, cuda=True) as engine:
        probe = engine.requests(16)
        row = {"agrees": engine.disagreement(probe, engine.run(probe))}
        (ranks,) = engine.generation.group.run("model_bytes")
        row["weights GiB"] = sum(rank["weights"] for rank in ranks) / 2**30
        engine.refitter.release_device()
        engine.train_step()
        engine.refitter.bring_to(1)
        after = engine.run(probe)
        row["agrees after refit"] = engine.disagreement(probe, after)
        engine.train_step()
        row["stale"] = engine.disagreement(probe, after)
        engine.refitter.bring_to(2)
        row["agrees again"] = engine.disagreement(probe, engine.run(probe))
        row["tokens/s"] = _speed(engine, requests)
    return row


def _speed(engine: Colocated, count: int) -> float:
    engine.run(engine.requests(count, 16))
    started = time.monotonic()
    results: Sequence[GenerationResult] = engine.run(engine.requests(count, _TOKENS))
    return sum(len(result.token_ids) for result in results) / (time.monotonic() - started)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for name, default in (("layers", 4), ("hidden", 1024), ("heads", 8), ("requests", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("overrides", nargs="*", help="further keys of the configuration")
    asked = parser.parse_args()
    model = asked.folder / "model"
    save_model(model, layers=asked.layers, hidden=asked.hidden, heads=asked.heads, kv_heads=asked.heads // 2)
    init_ray(device="cuda")
    try:
        rows = {precision: measure(model, precision, asked.requests, *asked.overrides) for precision in _AGREE}
    finally:
        shutdown_ray()
    names = list(rows["bfloat16"])
    sys.stdout.write(" " * 10 + "".join(f"{name:>20}" for name in names) + "\n")
    for precision, row in rows.items():
        sys.stdout.write(f"{precision:<10}" + "".join(f"{row[name]:>20.3f}" for name in names) + "\n")
    for precision, row in rows.items():
        now = max(row["agrees"], row["agrees after refit"], row["agrees again"])
        # What an engine that kept its weights would show is far from what rounding shows.
        assert now < _AGREE[precision] and now - 1 < (row["stale"] - 1) / 2, (precision, row)
    assert rows["fp8"]["weights GiB"] < 0.8 * rows["bfloat16"]["weights GiB"], rows


if __name__ == "__main__":
    main()
