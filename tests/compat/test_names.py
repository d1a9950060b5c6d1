"""Names that scripts import from NeMo-RL: where they are, and what the differing ones say."""

from __future__ import annotations

import importlib
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.compat.names import ABSENT, ABSENT_MEMBERS, AT_HOME, CHANGED, CONTROL_PLANE, NAMES
from nemo_rl.compat.page import _DIFFERENT, page
from nemo_rl.config import MasterConfig
from nemo_rl.config.differences import DIFFERENCES
from nemo_rl.config.errors import UserError
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EnvironmentReturn

ROOT = Path(__file__).parents[2]
ALL = [(module, name) for table in (NAMES, AT_HOME) for module, names in table.items() for name in names]


@pytest.mark.parametrize(("module", "name"), ALL)
def test_every_name_resolves_at_its_path(module: str, name: str) -> None:
    found = getattr(importlib.import_module(module), name)
    assert found is not None
    assert module not in NAMES or name in dir(importlib.import_module(module))


def test_there_are_at_least_sixty_names_and_none_is_in_two_tables() -> None:
    assert len(ALL) == len(set(ALL)) > 100
    assert {f"{module}.{name}" for module, name in ALL}.isdisjoint(ABSENT)
    assert set(CHANGED) <= {f"{module}.{name}" for module, name in ALL}


def names_in_use() -> dict[str, list[list[str]]]:
    """Module -> lines of `names_in_use.txt`, in words."""
    found: dict[str, list[list[str]]] = {}
    for line in (Path(__file__).parent / "names_in_use.txt").read_text().splitlines():
        if line.startswith("["):
            section = found.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            section.append(line.split())
    return found


def resolved(home: str) -> object:
    """What `module:name.member` names; `module` alone is the module."""
    module, _, path = home.partition(":")
    found: object = importlib.import_module(module)
    for part in filter(None, path.split(".")):
        found = getattr(found, part)
    return found


def resolves(home: str) -> bool:
    try:
        resolved(home)
    except (ImportError, AttributeError):
        return False
    return True


def test_every_name_in_use_resolves_or_stands_on_the_page_with_its_new_form() -> None:
    used = names_in_use()
    seeds = [name for line in used.pop("control planes") for name in line]
    counted = {"here": 0, "elsewhere": 0}
    for module, lines in used.items():
        for name, *members in lines:
            absent = module in ABSENT or f"{module}.{name}" in ABSENT or f"{module}.{name}" in ABSENT_MEMBERS
            assert resolves(f"{module}:{name}") != absent, f"{module}.{name}"
            counted["elsewhere" if absent else "here"] += 1
            for member in members if not absent else ():
                listed = f"{module}.{name}.{member}" in ABSENT_MEMBERS
                assert resolves(f"{module}:{name}.{member}") != listed, f"{module}.{name}.{member}"
    assert counted["here"] >= 100 and counted["elsewhere"] <= 20
    assert [name for name in seeds if name not in CONTROL_PLANE] == []
    text = page()
    assert [name for name in (*ABSENT, *ABSENT_MEMBERS, *CONTROL_PLANE) if f"`{name}`" not in text] == []


def test_every_home_of_a_control_planes_name_exists() -> None:
    homes = {name: home for name, home in CONTROL_PLANE.items() if home.startswith("nemo_rl.")}
    assert len(homes) > 30
    assert {name: home for name, home in homes.items() if not resolves(home)} == {}
    # Words that name a class and its member are no less true.
    assert all(
        map(
            resolves,
            (
                "nemo_rl.models.generation.elastic:ElasticGeneration.refresh",
                "nemo_rl.models.policy.weights:PolicyWeightCache.version",
                "nemo_rl.models.generation.vllm.fleet:EngineFleet.call",
                "nemo_rl.time_sharing.agents.agent:Agent.end_progress",
                "nemo_rl.time_sharing.pipelines.job:Job.widths",
                "nemo_rl.time_sharing.pipelines.job:Job.mappings",
                "nemo_rl.time_sharing.pipelines.job:read_jobs",
                "nemo_rl.time_sharing.pipelines.lent:LentAccelerators",
            ),
        )
    )


@pytest.mark.parametrize("path", ABSENT)
def test_what_is_not_here_is_not_here(path: str) -> None:
    module, _, name = path.rpartition(".")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError:
        return
    with pytest.raises(AttributeError) as caught:
        getattr(found, name)
    if module in NAMES:
        assert ABSENT[path] in str(caught.value)


@pytest.mark.slow
def test_importing_a_path_of_nemo_rls_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from nemo_rl.algorithms.grpo import MasterConfig; from nemo_rl.models.policy import PolicyConfig; "
        "from nemo_rl.utils.config import load_config; print(sorted({'ray', 'torch', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_committed_page_is_current() -> None:
    assert (ROOT / "docs/from_nemo_rl.md").read_text() == page(), "run `python -m nemo_rl.compat`"


def test_functions_called_in_nemo_rls_shape_say_what_has_changed() -> None:
    from nemo_rl.algorithms import grpo, sft
    from nemo_rl.evals import eval as evals

    config = MasterConfig()
    for call in (
        lambda: grpo.setup(config, "tokenizer", "dataset", "val_dataset"),
        lambda: grpo.grpo_train("policy", "generation", "loader"),
        lambda: grpo.async_grpo_train(policy="policy"),
        lambda: grpo.validate("generation", 0),
        lambda: sft.sft_train("policy", "loader"),
        lambda: evals.run_env_eval("generation", "dataloader", "env", config),
    ):
        with pytest.raises(TypeError, match=r"docs/from_nemo_rl.md|required positional argument"):
            call()
    with pytest.raises(UserError, match="str is no tokenizer"):
        grpo.setup(config, "tokenizer")


class Lengths:
    """Rewards a response by its length, and on odd tasks with a second component."""

    def __init__(self, components: bool) -> None:
        self.components = components

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn[Any]:
        sizes = torch.tensor([float(len(log[-1]["content"])) for log in message_log_batch])
        count = len(message_log_batch)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "ok"}] * count,
            metadata=list(metadata),
            next_stop_strings=None,
            rewards={"reward/size": sizes, "reward/one": torch.ones(count)} if self.components else sizes,
            terminateds=torch.ones(count, dtype=torch.bool),
            answers=[log[-1]["content"] for log in message_log_batch],
        )


def test_rewards_are_calculated_by_task_in_the_batchs_order() -> None:
    from nemo_rl.experience.rollouts import calculate_rewards

    texts = ["a", "bbb", "cc", "dddd"]
    batch: Any = BatchedDataDict(
        message_log=[[{"role": "assistant", "content": text}] for text in texts],
        task_name=["one", "two", "one", "two"],
        extra_env_info=[{"row": row} for row in range(4)],
    )
    plain = calculate_rewards(batch, {"one": Lengths(False), "two": Lengths(False)})
    assert plain.rewards.tolist() == [1.0, 3.0, 2.0, 4.0] and list(plain.answers) == texts
    assert [item["row"] for item in plain.metadata] == [0, 1, 2, 3] and plain.terminateds.all()
    mixed = calculate_rewards(batch, {"one": Lengths(True), "two": Lengths(True)})
    assert mixed.rewards["reward/size"].tolist() == [1.0, 3.0, 2.0, 4.0]


def test_a_generation_configuration_is_filled_in_from_the_tokenizer() -> None:
    from nemo_rl.models.generation import configure_generation_config
    from nemo_rl.models.generation.interfaces import should_use_async_rollouts

    class Tokenizer:
        eos_token_id, pad_token_id = 7, 3

    plain: dict[str, Any] = {"stop_token_ids": None, "vllm_cfg": {}}
    assert configure_generation_config(plain, Tokenizer()) is plain
    assert (
        plain["stop_token_ids"] == [7] and plain["_pad_token_id"] == 3 and plain["vllm_cfg"]["load_format"] == "dummy"
    )
    section = MasterConfig().policy.generation
    configure_generation_config(section, Tokenizer(), is_eval=True)
    assert section.stop_token_ids == [7] and section.vllm_cfg.load_format == "auto"
    assert should_use_async_rollouts(section)


@pytest.mark.parametrize(
    ("script", "config"),
    [
        ("run_grpo.py", "grpo_math_1B.yaml"),
        ("run_sft.py", "sft.yaml"),
        ("run_eval.py", "evals/eval.yaml"),
        ("run_grpo_sliding_puzzle.py", "grpo_sliding_puzzle.yaml"),
        ("run_grpo_single_controller.py", "grpo_math_1B_single_controller.yaml"),
    ],
)
def test_scripts_start_the_documented_configuration(script: str, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_rl.algorithms import commands

    taken: list[Path] = []
    for name in ("grpo", "sft", "evaluate"):
        monkeypatch.setattr(commands, name, lambda arguments, default_config: taken.append(default_config) or 0)
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    assert taken == [ROOT / "examples/configs" / config]


# Rows about what a configuration does not tell: they are said where it is read, or by their own line.
SAID_ELSEWHERE = {
    "`use_dynamic_sampling` with `use_leave_one_out_baseline`",
    "`probs_ratio*` with `disable_ppo_ratio`",
    "`sampling_importance_ratio` with `sequence_level_importance_ratios`",
    "a question with choices (`multichoice_qa_processor`) without `prompt_file`",
    "`examples/prompts/cot.txt` and other prompts of NeMo-RL's examples",
    "`policy.generation.stop_token_ids: null`",
    "`env.code`: which packages may be imported",
    "values of the configurations that scripts start without --config",
    "unknown keys",
}
# Of functions, files and the form of rows, by which no number of a run changes.
OF_NO_RUN = {
    "arguments of tool calls that rows have as JSON text, as OpenAI's format has them",
    "judging by tests or by what a script prints",
    "`read_columns()` of columns that are no tensors",
    "metrics of packers (`collect_metrics`)",
}


def test_every_difference_is_said_at_the_start_of_a_run_that_it_touches() -> None:
    of_runs = [difference.what for difference in DIFFERENCES]
    assert len(of_runs) == len(set(of_runs))
    assert set(of_runs) | SAID_ELSEWHERE | OF_NO_RUN == set(_DIFFERENT)
    assert not set(of_runs) & SAID_ELSEWHERE
