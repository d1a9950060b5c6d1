"""Every shipped recipe trains: three steps of the tiny model, one recipe with engines and the others on what it
recorded.
"""

import math
import os
from pathlib import Path

import pytest
import ray
import yaml

from nemo_rl.utils.metrics_file import RunMetrics, read_metrics
from tests import forks
from tests.glossary import undocumented

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples" / "configs"
RECIPES = sorted(path.stem for path in (CONFIGS / "recipes").glob("*.yaml"))
LIVE = "grpo_math_1B_dapo"
RUN_ALL = """
import pathlib, sys
from nemo_rl.algorithms.launch import grpo as main
sys.exit(max(main(["--config", file], default_config=pathlib.Path(file)) for file in sys.argv[1:]))
"""


def tiny(recipe: str, folder: Path, model: Path, **grpo: object) -> Path:
    """The recipe with a tiny model, tiny batches and a machine without a GPU; what makes the recipe is untouched."""
    config = {
        "defaults": str(CONFIGS / "recipes" / f"{recipe}.yaml"),
        "grpo": {
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 4,
            "max_num_steps": 3,
            "max_num_epochs": 9,
            "val_period": 0,
            **grpo,
        },
        "policy": {
            "model_name": str(model),
            "precision": "float32",
            "max_total_sequence_length": 64,
            "train_global_batch_size": 16 if recipe == LIVE else 32,
            "optimizer": {"kwargs": {"lr": 0.01}},
            "tokenizer": {"chat_template": None},
            "generation": {"max_new_tokens": 8, "vllm_kwargs": {"kv_cache_memory_bytes": 1 << 26, "max_num_seqs": 64}},
        },
        "data": {
            "num_workers": 0,
            "default": {"prompt_file": None},
            "train": {
                "_override_": True,
                "dataset_name": "arithmetic",
                "num_problems": 64,
                "held_out": 0,
                "env_name": "parity",
                "prompt_file": None,
            },
        },
        "env": {"parity": {"class": "tests.end_to_end.parity.Parity"}},
        "cluster": {"device": "cpu", "cpu_slots": 1},
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": str(folder / recipe), "monitor_gpus": False},
    }
    if recipe == LIVE:
        config["grpo"]["reward_shaping"] = {"overlong_buffer_length": 4, "max_response_length": 8}
    file = folder / f"{recipe}.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def run(files: list[Path]) -> None:
    """One process runs all of them, one after the other, on the cluster that is there."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    run_all = files[0].with_name("run_all.py")
    run_all.write_text(RUN_ALL)
    done = forks.run([str(run_all), *map(str, files)], environment, timeout_s=600)
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.fixture(scope="module")
def metrics(ray_session: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunMetrics]:
    folder = tmp_path_factory.mktemp("recipes")
    record = str(folder / "recorded")
    # Dynamic sampling draws more than a step's prompts at a time; the others train on all of them.
    others = [
        tiny(recipe, folder, tiny_model, rollout_replay=record, num_prompts_per_step=8)
        for recipe in RECIPES
        if recipe != LIVE
    ]
    run([tiny(LIVE, folder, tiny_model, rollout_record=record), *others])
    return {recipe: read_metrics(folder / recipe) for recipe in RECIPES}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_three_steps(metrics: dict[str, RunMetrics], recipe: str) -> None:
    assert undocumented(metrics[recipe].series) == []
    steps, losses = metrics[recipe].scalars("train/loss")
    _, norms = metrics[recipe].scalars("train/grad_norm")
    assert steps == [1, 2, 3]
    assert all(map(math.isfinite, losses))
    assert all(norm > 0 for norm in norms)


def test_the_table_of_recipes_lists_every_recipe() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert [recipe for recipe in RECIPES if f"{recipe}.yaml" not in page] == []
