"""Agents train, with real engines behind the endpoint: that of the documentation, with its files and its command, on a
mixture of experts whose routes and sampling masks are replayed; and those of the OpenAI Agents SDK and of verifiers,
which call a tool; the first learns to.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

import pytest
import ray

from nemo_rl.utils.metrics_file import read_metrics
from tests import forks
from tests.conftest import example
from tests.glossary import undocumented
from tests.test_documentation import blocks

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples" / "configs"
OWN = ["logger.tensorboard_enabled=false", "cluster.cpu_slots=1"]
VERIFIERS = "verifiers==0.4.0"


def test_the_agent_of_the_page_trains(tiny_moe_model: Path, tmp_path: Path, ray_session: None) -> None:
    for language in ("python", "yaml"):
        ((title, text),) = [block for block in blocks("docs/agents.md", language) if block[0]]
        (tmp_path / title).write_text(text.replace("defaults: examples/", f"defaults: {ROOT}/examples/"))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]),
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
    }
    command = [str(ROOT / "examples" / "run_grpo.py"), "--config", "checker.yaml"]
    own = [f"policy.model_name={tiny_moe_model}", "logger.tensorboard_enabled=false", "grpo.max_num_steps=1"]
    own += ["policy.router_replay.enabled=true", "policy.sampling_mask_replay=true", "policy.generation.top_p=0.9"]
    done = forks.run([*command, *own], environment, timeout_s=450, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "endpoint: http://127.0.0.1:" in done.stderr
    metrics = read_metrics(tmp_path / "logs" / "checker")
    assert undocumented(metrics.series) == []
    series = metrics.series
    # A model that knows no sums is asked twice, and the second question continues the first conversation.
    assert (series["train/agent_branches_per_sample"][1], series["train/avg_turns_per_sample"][1]) == (1.0, 2.0)
    # Both turns have their routes, and so does the question between them.
    assert series["train/routed_tokens_share"][1] == series["train/router_replay_share"][1] == 1.0
    assert 0.0 < series["train/sampling_mask_share"][1] <= 1.0
    assert 1.0 <= series["train/token_mult_prob_error"][1] < 1.001


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory, ray_session: None) -> Path:
    """A folder with the model that the examples with a tool begin with, in small: one digit less, half as wide."""
    folder = tmp_path_factory.mktemp("agents")
    results = folder / "results" / "arithmetic"
    example("make_tiny_model").save_tiny_model(results / "base", layers=2, hidden=64, heads=2, kv_heads=1)
    (results / "calls.jsonl").write_text(run(folder, "openai_agent.py", "--count", "1000", "--max-operand", "9"))
    quiet = ["sft.max_num_steps=100", "sft.val_period=0", "sft.val_at_start=false", "sft.val_at_end=false"]
    quiet += ["policy.train_global_batch_size=32", "policy.train_micro_batch_size=32"]
    run(folder, "run_sft.py", "--config", str(CONFIGS / "sft_tool_calls_cpu.yaml"), *OWN, *quiet)
    return folder


def run(folder: Path, script: str, *arguments: str) -> str:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")]),
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
    }
    done = forks.run([str(ROOT / "examples" / script), *arguments], environment, timeout_s=400, folder=folder)
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


def train(folder: Path, name: str, prompts: int, steps: int, *own: str) -> Mapping[str, Mapping[int, float]]:
    """Trains some steps of the example `name`; returns its metrics."""
    small = [f"grpo.num_prompts_per_step={prompts}", f"policy.train_global_batch_size={8 * prompts}"]
    small += [f"grpo.max_num_steps={steps}"]
    small += ["grpo.val_at_start=false", "grpo.val_period=0", "grpo.val_at_end=false", "checkpointing.enabled=false"]
    small += ["data.validation=null", "policy.optimizer.kwargs.lr=1.5e-3", "policy.scheduler=null"]
    run(folder, "run_grpo.py", "--config", str(CONFIGS / f"{name}.yaml"), *OWN, *small, *own)
    series = read_metrics(folder / "logs" / name).series
    # A call, and the answer after what it returned.
    assert series["train/avg_turns_per_sample"][steps] > 1.5 and series["train/agent_branches_per_sample"][steps] == 1.0
    return series


def test_an_agent_of_openais_sdk_learns_to_call_its_tool(warm: Path) -> None:
    # Rewards of 0.27 and 0.59 where it was measured.
    own = ["data.train.max_operand=9", "data.train.num_problems=32", "data.train.held_out=16"]
    series = train(warm, "grpo_arithmetic_openai_agent_cpu", 8, 5, *own)
    rewards = [series["train/reward"][step] for step in range(1, 6)]
    assert mean(rewards[-3:]) > mean(rewards[:2]) + 0.2, rewards


@pytest.fixture(scope="module")
def verifiers_python(request: pytest.FixtureRequest) -> str:
    """The interpreter of a virtual environment with the package `verifiers`, whose packages do not go with a run's. It
    stays in pytest's cache, as Python takes longer to compile its packages than to import them.
    """
    folder = request.config.cache.mkdir(VERIFIERS.replace("==", "-"))
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        pytest.skip("there is no uv to make an environment for verifiers; `make install` brings it")
    python = str(folder / "bin" / "python")
    links = {"UV_FIND_LINKS": ",".join(os.environ["PIP_FIND_LINKS"].split())} if "PIP_FIND_LINKS" in os.environ else {}
    commands: list[Sequence[str]] = [["venv", "--allow-existing", "--python", sys.executable, str(folder)]]
    commands.append(["pip", "install", "--python", python, VERIFIERS])
    for command in commands:
        done = subprocess.run(
            [uv, *command], env=os.environ | links, capture_output=True, text=True, timeout=150, check=False
        )
        if done.returncode != 0:
            pytest.skip(f"{VERIFIERS} cannot be installed here: {done.stderr[-500:]}")
    return python


def test_a_taskset_of_verifiers_with_a_tool_is_trained_on(warm: Path, verifiers_python: str) -> None:
    tasks = ["verifiers_sums", "max_operand=9", "count=32"]
    agent = [verifiers_python, str(ROOT / "examples" / "verifiers_agent.py")]
    written = subprocess.run([*agent, *tasks], capture_output=True, text=True, timeout=300, check=True)
    (warm / "sums.jsonl").write_text(written.stdout)
    own = [f"env.taskset.{key}" for key in (f"python={verifiers_python}", "max_operand=9", "count=32")]
    # Each sample starts a program of verifiers, so one step of a few samples; the test above shows learning.
    series = train(warm, "grpo_arithmetic_verifiers_cpu", 2, 1, *own)
    assert max(series["train/grad_norm"].values()) > 0.0
    # The reward goes by the name that the taskset gives it.
    assert series["train/reward/right"][1] == series["train/reward"][1] > 0.0
