"""Names that scripts import from NeMo-RL: where they are, and what the differing ones say."""

from __future__ import annotations

import importlib
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.launch import _PROMPT
from nemo_rl.compat.names import ABSENT, ABSENT_MEMBERS, AT_HOME, CHANGED, CONTROL_PLANE, NAMES
from nemo_rl.config import MasterConfig
from nemo_rl.config.differences import DIFFERENCES
from nemo_rl.config.errors import UserError
from nemo_rl.config.load import load_layers
from nemo_rl.config.validate import examine
from nemo_rl.data.interfaces import _of_theirs
from nemo_rl.data.model_tokens import StopTokens
from nemo_rl.data.setup import OTHER_ARGUMENTS
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.code_environment import CodeEnvironment
from nemo_rl.environments.interfaces import EnvironmentReturn
from tools.pages.from_nemo_rl_page import _DIFFERENT, page

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
                "nemo_rl.time_sharing.agents.agent:Agent.set_demand",
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
    from nemo_rl.algorithms import launch

    taken: list[Path] = []
    for name in ("grpo", "sft", "evaluate"):
        monkeypatch.setattr(launch, name, lambda arguments, default_config, prog: taken.append(default_config) or 0)
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    assert taken == [ROOT / "examples/configs" / config]


# Of functions, files and the form of rows, by which no number of a run changes.
OF_NO_RUN = {
    "judging by tests or by what a script prints",
    "`read_columns()` of columns that are no tensors",
    "metrics of packers (`collect_metrics`)",
}
_PREDICTS = ["policy.megatron_cfg.mtp_num_layers=1", "policy.megatron_cfg.mtp_loss_scaling_factor=0.1"]
_CODE = ["data.default.env_name=code", "data.default.processor=default"]
_MEGATRON = ["policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true", "cluster.device=cuda"]
# Overrides by which a run is touched by a row, and words of the line that says so.
SAID_OF_A_CONFIGURATION: dict[str, tuple[list[str], str]] = {
    "`use_dynamic_sampling` with `use_leave_one_out_baseline`": (
        ["grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=2"],
        "keeps or drops whole groups",
    ),
    "`probs_ratio*` with `disable_ppo_ratio`": (["loss_fn.disable_ppo_ratio=true"], "ratios of probabilities"),
    "`sampling_importance_ratio` with `sequence_level_importance_ratios`": (
        ["loss_fn.sequence_level_importance_ratios=true", "loss_fn.token_level_loss=false"],
        "mean over sequences of their importance weights",
    ),
    "rewards of samples that the environment flags (`mask_sample`, `invalid_tool_call`) or whose prompt was cut": (
        ["grpo.should_mask_flagged_samples=true"],
        "rewards of flagged samples",
    ),
    "the loss of multi-token prediction (`mtp_num_layers`) beside a sequence-level loss": (
        [*_MEGATRON, *_PREDICTS, "loss_fn.token_level_loss=false"],
        "multi-token prediction is a mean over sequences",
    ),
    "groups of a step": ([], "equal prompts of two rows"),
    "the last observation of an episode that ended, where it is longer than the room in `max_total_sequence_length`": (
        ["grpo.max_rollout_turns=2"],
        "a last observation",
    ),
    "`dapo_math_verify` and the choices": (["env.math.math_verify_impl=dapo_math_verify"], "answers are read as"),
    "`hf_math_verify`: a `%` without the backslash that LaTeX wants": ([], "`%` is"),
    "`hf_math_verify`: numbers below 1, and an interval answered by inequalities": ([], "small numbers are compared"),
    "a whole number as an expected answer that pandas has written as `7.0`": ([], "7.0 is 7"),
    "which checkpoints `keep_top_k` ranks without `ft_save_period` and `ft_keep_latest_k`": (
        ["grpo.max_num_steps=15"],
        "keep_top_k ranks",
    ),
    "`env.code`: what a cell without a value shows, and its reward": (_CODE, "a cell without a value"),
    "`env.code_jaccard`: lengths": (["data.default.env_name=code_jaccard"], "code_jaccard's lengths"),
    "`env.sliding_puzzle`: wording, `view`, rows and columns": (
        ["env.sliding_puzzle_game.cfg.max_moves=9"],
        "the puzzle's words",
    ),
    "a question with choices (`multichoice_qa_processor`) without `prompt_file`": (
        [
            "data.default.dataset_name=gpqa",
            "data.default.processor=multichoice_qa_processor",
            "data.default.prompt_file=null",
        ],
        "asked with their choices",
    ),
}
# The same of what is read beside the configuration, with the line itself.
SAID_OF_ITS_PARTS: dict[str, tuple[Callable[[], str | None], str]] = {
    "`examples/prompts/cot.txt` and other prompts of NeMo-RL's examples": (
        lambda: _of_theirs("examples/prompts/cot.txt"),
        "not shipped",
    ),
    "`policy.generation.stop_token_ids: null`": (lambda: StopTokens((1, 2), {1: "a", 2: "b"}).line(), "a (1), b (2)"),
    "arguments of tool calls that rows have as JSON text, as OpenAI's format has them": (
        lambda: OTHER_ARGUMENTS,
        "reach the chat template as vLLM's server gives them",
    ),
    "`env.code`: which packages may be imported": (
        lambda: CodeEnvironment.start_line({"sandbox": "limits"}),
        "cells import the standard library without",
    ),
    "values of the configurations that scripts start without --config": (lambda: _PROMPT, "not shipped"),
    "unknown keys": (
        lambda: str(examine({"grpo": {"sed": 1}}, MasterConfig).problems[0]),
        "Did you mean 'seed'",
    ),
}


def test_the_table_and_the_lines_of_starts_have_the_same_differences() -> None:
    of_runs = [difference.what for difference in DIFFERENCES]
    assert len(of_runs) == len(set(of_runs)) and set(of_runs) <= set(SAID_OF_A_CONFIGURATION)
    parts = [set(SAID_OF_A_CONFIGURATION), set(SAID_OF_ITS_PARTS), OF_NO_RUN]
    assert set.union(*parts) == set(_DIFFERENT) and sum(map(len, parts)) == len(_DIFFERENT)


@pytest.mark.parametrize("what", SAID_OF_A_CONFIGURATION)
def test_a_start_says_what_differs_from_nemo_rl_in_its_configuration(what: str) -> None:
    overrides, said = SAID_OF_A_CONFIGURATION[what]
    examined = examine(load_layers(None, overrides, MasterConfig).values, MasterConfig)
    assert examined.problems == []
    assert any(said in note for note in examined.notes)


@pytest.mark.parametrize("what", SAID_OF_ITS_PARTS)
def test_a_start_says_what_differs_from_nemo_rl_in_its_parts(what: str) -> None:
    line, said = SAID_OF_ITS_PARTS[what]
    assert said in (line() or "")
