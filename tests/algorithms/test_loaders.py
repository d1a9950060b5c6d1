"""How many prompts the loaders of a run draw, and which validation rows are never read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_rl.algorithms.grpo.assembly import make_loaders
from nemo_rl.algorithms.startup import never_validated
from nemo_rl.config import load_master_config
from nemo_rl.data.setup import load_datasets
from tests.data.conftest import build_tokenizer

CONFIG = Path(__file__).parents[2] / "examples" / "configs" / "grpo_arithmetic_cpu.yaml"
TWO = "[{{dataset_name: arithmetic, max_samples: {}}}, {{dataset_name: arithmetic, max_samples: {}}}]"


def loaders_of(*overrides: str) -> tuple[Any, Any]:
    config = load_master_config(CONFIG, ["data.num_workers=0", *overrides])
    datasets = load_datasets(build_tokenizer(), config.data)
    return make_loaders(config, datasets), datasets


@pytest.mark.parametrize("multiplier", [1, 2, 3])
@pytest.mark.parametrize("multiple", [False, True])
def test_a_generation_batch_has_as_many_prompts_with_one_loader_as_with_several(
    multiple: bool, multiplier: int
) -> None:
    several = ["data.use_multiple_dataloader=true", "data.num_prompts_per_dataloader=4"]
    loaders, _ = loaders_of(
        f"data.train={TWO.format(64, 64)}",
        "grpo.num_prompts_per_step=8",
        "policy.train_global_batch_size=64",
        "grpo.use_dynamic_sampling=true",
        "grpo.adv_estimator.use_leave_one_out_baseline=false",
        f"grpo.batch_multiplier={multiplier}",
        *(several if multiple else []),
    )
    assert next(iter(loaders.train)).size == 8 * multiplier


@pytest.mark.parametrize(
    ("sizes", "most", "batch", "reached", "missed"),
    [
        ((20, 10), "8", 8, 8, ["arithmetic_2"]),
        ((20, 10), "20", 8, 16, ["arithmetic_2"]),
        ((8, 10), "8", 8, 8, ["arithmetic_2"]),
        ((8, 10), "12", 4, 12, []),
        ((20, 10), "null", 8, 32, []),
        ((4, 2), "8", 8, 6, []),
    ],
)
def test_a_validation_set_that_no_validation_reaches_is_named(
    sizes: tuple[int, int], most: str, batch: int, reached: int, missed: list[str]
) -> None:
    loaders, datasets = loaders_of(
        f"data.validation={TWO.format(*sizes)}", f"grpo.max_val_samples={most}", f"grpo.val_batch_size={batch}"
    )
    assert loaders.validated_rows == reached
    lines = list(never_validated(datasets.validation_by_task, loaders.validated_rows))
    assert [line.partition(")")[0] for line in lines] == [f"data.validation ({task}" for task in missed]
    assert all(f"none of its {sizes[1]} rows" in line and f"the first {reached} rows" in line for line in lines)
    assert not list(never_validated(datasets.validation_by_task, None))
