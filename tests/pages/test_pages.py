"""The pages that are made from the code's own tables are current and complete."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_rl.config import load_master_config
from nemo_rl.config.data_rules import GRPO_TRAINING, GRPO_VALIDATION, SFT_TRAINING, SFT_VALIDATION
from nemo_rl.data.datasets.registry import ALIASES, GENERATED, SOURCES
from nemo_rl.data.processors import PROCESSORS
from nemo_rl.environments.environment_registry import CLASSES
from tests.glossary import undocumented
from tools.pages import sizing_page, tasks_page
from tools.pages.__main__ import PAGES
from tools.pages.metrics_page import METRICS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_current(name: str) -> None:
    assert (ROOT / "docs" / f"{name}.md").read_text() == PAGES[name](), "run `python -m tools.pages`"


def test_whatever_can_be_named_is_listed_with_what_it_reads() -> None:
    cells = [line.strip("| ").split(" | ") for line in tasks_page.page().splitlines() if line.startswith("| `")]
    listed = {name for row in cells for name in re.findall(r"`([^`]+)`", row[0])}
    assert listed >= {*SOURCES, *ALIASES, *GENERATED, *PROCESSORS, *CLASSES}
    for row in cells[: len(SOURCES)]:
        assert re.search(r"`\w+", row[3]), f"{row[0]}: no column is named"


def test_metrics_that_keys_may_name_are_in_the_glossary() -> None:
    names = [f"train/{name}" for name in (*GRPO_TRAINING, *SFT_TRAINING)]
    names += [f"validation/{name}" for name in (*GRPO_VALIDATION, *SFT_VALIDATION)]
    assert undocumented(names) == []
    assert undocumented(["train/no_such_metric", "reward"]) == ["train/no_such_metric", "reward"]


# Where metrics are named in the code, and under which group they are logged.
MEASURE = {
    "algorithms/grpo/step_reports.py": ("train", "performance", "validation"),
    "algorithms/grpo/stages.py": ("train",),
    "algorithms/grpo/advantages.py": ("train",),
    "algorithms/grpo/collect.py": ("train", "timing/train"),
    "algorithms/grpo/loop.py": ("timing/train",),
    "algorithms/training_loop.py": ("timing/train",),
    "algorithms/grpo/step_trainer.py": ("timing/train",),
    "algorithms/grpo/async_source.py": ("train", "timing/train"),
    "algorithms/grpo/streaming.py": ("train", "timing/train"),
    "algorithms/grpo/refitter.py": ("refit", "timing/train"),
    "algorithms/sft/driver.py": ("train", "validation", "performance", "timing/train"),
    "experience/rollouts.py": ("train",),
    "loss/clipped_pg.py": ("train",),
    "models/generation/vllm/engine_stats.py": ("generation_metrics",),
    "time_sharing/pipelines/lent.py": ("timing/train",),
}


def named(path: Path) -> Iterator[str]:
    """Names that a file gives to numbers: `metrics["x"]`, `timer.time("x")`, `rate("x", ...)`, and keys of dictionaries
    that it returns or adds to metrics.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("metrics"):
            yield from literal(node.slice)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("timer.time", "rate")) and node.args:
            yield from literal(node.args[0])
        elif isinstance(node, (ast.AugAssign, ast.Assign)):
            target = node.target if isinstance(node, ast.AugAssign) else node.targets[0]
            yield from keys(node.value) if ast.unparse(target).endswith("metrics") else ()
        elif isinstance(node, ast.FunctionDef) and node.name.endswith("metrics"):
            for inside in ast.walk(node):
                if isinstance(inside, ast.Return) and inside.value is not None:
                    yield from keys(inside.value)


def keys(node: ast.expr) -> Iterator[str]:
    for inside in ast.walk(node):
        if isinstance(inside, ast.Dict):
            for key in inside.keys:
                yield from literal(key)


def literal(node: ast.expr | None) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


@pytest.mark.parametrize(("file", "groups"), MEASURE.items())
def test_metrics_that_the_code_names_are_in_the_glossary(file: str, groups: tuple[str, ...]) -> None:
    found = set(named(ROOT / "nemo_rl" / file))
    assert found, f"{file} names no metric any more"
    lacking = [name for name in found if len(undocumented([f"{group}/{name}" for group in groups])) == len(groups)]
    assert lacking == [], f"tools/pages/metrics.tsv lacks them, which {file} logs"


def test_the_glossary_lists_nothing_that_is_not_measured() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "nemo_rl").rglob("*.py"))
    parts = [part for metrics in METRICS.values() for metric in metrics for part in re.split(r"[*/.]", metric.name)]
    assert [part for part in parts if part.strip("_").removesuffix("_s") not in source] == []


def test_larger_models_take_more_gpus_and_larger_gpus_fewer() -> None:
    for lora in (False, True):
        small, large = (
            [sizing_page.gpus_to_train(shape, gib, lora=lora) or 999 for shape in sizing_page.SHAPES]
            for gib in (80, 141)
        )
        assert all(a >= b for a, b in zip(small, large, strict=True)) and small[0] == 1 and small[-1] > small[3]
    config = load_master_config(str(ROOT / "examples" / "configs" / "grpo_math_7B_8gpus.yaml"))
    shape = next(one for one in sizing_page.SHAPES if config.policy.model_name.endswith(one.name))
    assert (sizing_page.gpus_to_train(shape, 80) or 999) <= config.cluster.gpus_per_node
    assert config.policy.sequence_packing.train_mb_tokens == 16384, "the tokens that the page computes with"
