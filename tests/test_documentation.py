"""What the documentation says can be done is done: code blocks build a task that trains, and commands are commands."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.config import load_master_config
from nemo_rl.data.datasets.registry import load_response_dataset
from nemo_rl.environments.registry import environment_class, environment_settings
from tests import forks

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: str, language: str) -> list[tuple[str, str]]:
    """(title, text) of a page's fenced blocks in a language."""
    return [(title, text) for kind, title, text in _BLOCK.findall((ROOT / page).read_text()) if kind == language]


@pytest.fixture(scope="module")
def task(user_modules: Path) -> Path:
    """The walk-through's files, as a reader would write them; returns its YAML."""
    for title, text in blocks("docs/extending.md", "python"):
        file = user_modules / title
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    ((title, text),) = [block for block in blocks("docs/extending.md", "yaml") if block[0]]
    file = user_modules / title
    file.write_text(text.replace("defaults: examples/", f"defaults: {ROOT}/examples/"))
    return file


def test_the_walk_throughs_dataset_and_environment_do_what_they_say(task: Path) -> None:
    config = load_master_config(str(task))
    dataset = load_response_dataset(config.data.train[0])
    row = dataset.dataset[0]
    assert [message["content"] for message in row["messages"]] == ["a in banana: ", "3"]
    section = config.env.of("judge")
    judge = environment_class("judge", section)(environment_settings(section))
    logs: list[Any] = [[{"role": "assistant", "content": answer}] for answer in ("3", "4", "?")]
    judged = judge.step(logs, [{"ground_truth": "3", "word": "banana"}] * 3)
    assert judged.rewards.tolist() == pytest.approx([1.0, 0.1, 0.0])


def test_the_walk_throughs_loss_adds_up_over_parts_of_a_batch(task: Path) -> None:
    from nemo_rl.algorithms.grpo.assembly import make_loss

    loss_fn = make_loss(load_master_config(str(task)).loss_fn)
    generator = torch.Generator().manual_seed(0)
    data = {
        "token_mask": torch.ones(4, 6),
        "sample_mask": torch.tensor([1.0, 1.0, 0.0, 1.0]),
        "advantages": torch.randn(4, 6, generator=generator),
    }
    logprobs = -torch.rand(4, 5, generator=generator)
    whole, _ = loss_fn(data, 3.0, 15.0, next_token_logprobs=logprobs)
    parts = [
        loss_fn({k: v[i : i + 2] for k, v in data.items()}, 3.0, 15.0, next_token_logprobs=logprobs[i : i + 2])[0]
        for i in (0, 2)
    ]
    assert float(whole) == pytest.approx(float(sum(parts)))


def test_yaml_blocks_of_the_walk_through_load() -> None:
    import yaml

    for _, text in blocks("docs/extending.md", "yaml"):
        assert isinstance(yaml.safe_load(text), dict)


PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
# Runs of training and evaluation take minutes; tests of their own carry them to the end (test_first_hour, test_runs,
# test_evaluation), and here they go as far as their configuration.
RUNS = {
    "run_grpo.py": "MasterConfig",
    "run_grpo_single_controller.py": "MasterConfig",
    "run_grpo_sliding_puzzle.py": "MasterConfig",
    "run_sft.py": "SFTMasterConfig",
    "run_distillation.py": "DistillationMasterConfig",
    "run_multi_lora.py": "MultiLoraMasterConfig",
    "run_eval.py": "EvalMasterConfig",
}


# Commands on a pool that is open, or that keep one open; tests/time_sharing carries them out.
LIVE = ("serve", "submit", "status", "explain", "drain", "cancel", "adapters", "page")


def commands() -> list[str]:
    """Every command line of every page, comments left out."""
    lines = [
        line for page in PAGES for _, text in blocks(page, "bash") for line in text.replace("\\\n", " ").splitlines()
    ]
    return list(
        dict.fromkeys(
            line.split("  #")[0].split(" #")[0].strip() for line in lines if line.strip() and not line.startswith("#")
        )
    )


@pytest.fixture(scope="module")
def workplace(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout as a reader has it after the demo: a run's logs and its checkpoints."""
    from nemo_rl.config import LoggerConfig
    from nemo_rl.utils.convert import from_hugging_face
    from nemo_rl.utils.logger import Logger, get_next_experiment_dir
    from nemo_rl.utils.route_trace import RouteTrace
    from tests.utils.test_route_trace import columns

    folder = tmp_path_factory.mktemp("checkout")
    for name in ("examples", "docs", "nemo_rl", "tools", "Makefile", "pyproject.toml", "ray.sub"):
        (folder / name).symlink_to(ROOT / name)
    from_hugging_face(tiny_model, folder / "results" / "arithmetic" / "grpo")
    with Logger(LoggerConfig(log_dir=str(get_next_experiment_dir(folder / "logs" / "grpo_arithmetic_cpu")))) as logger:
        for step in (1, 2):
            logger.log_metrics({"reward": 0.5 * step, "loss": 1.0}, step, "train")
    trace, batch = RouteTrace(folder / "logs" / "r3_trace", 1, 1), columns(3)
    trace.produced(0, batch)
    trace.fetched("train", batch)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_command_of_the_documentation_works(workplace: Path, task: Path) -> None:
    (workplace / task.name).write_text(task.read_text())
    wrong = {line: said for line in commands() if (said := attempt(line, workplace))}
    assert wrong == {}


def attempt(line: str, workplace: Path) -> str:
    """Carries a command out as far as a test can; what went wrong, or nothing."""
    words = shlex.split(line)
    if words[0] == "docker":
        return "" if (ROOT / words[words.index("-f") + 1]).is_file() else f"{words} names no file"
    if words[:2] in (["git", "clone"], ["pip", "install"]) or "sbatch" in words:
        return "" if "sbatch" not in words or (ROOT / words[-1]).is_file() else f"{words[-1]} does not exist"
    assignments = [word for word in words if re.fullmatch(r"[A-Z_]+=.*", word) and words[0] != "make"]
    words = [word for word in words if word not in assignments]
    live = "nemo_rl.time_sharing" in words and (words[3] in LIVE or "logs/time_sharing" in line)
    if live or "run_time_sharing.py" in line:
        return shared(words)
    script = next((Path(word).name for word in words if Path(word).name in RUNS), None)
    if script is not None:
        return configured(words, RUNS[script], workplace)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    if words[0].endswith("python"):
        done = forks.run(words[1:], environment, timeout_s=300.0, folder=workplace)
    else:
        words = ["make", "--dry-run", *words[1:]] if words[0] == "make" else words
        done = subprocess.run(
            words, cwd=workplace, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    return "" if done.returncode == 0 else f"exit code {done.returncode}: {done.stderr[-1500:]}"


def shared(words: list[str]) -> str:
    """Whether a command on a pool is one, and its files, where they are here, can be submitted."""
    from nemo_rl.time_sharing.cli import parser
    from nemo_rl.time_sharing.launcher import launcher_parser
    from nemo_rl.time_sharing.pipelines.job import read_jobs
    from nemo_rl.time_sharing.protocol.topology import Pool

    launches = words[1].endswith("run_time_sharing.py")
    try:
        chosen, _ = launcher_parser().parse_known_args(words[2:]) if launches else (parser().parse_args(words[3:]), [])
    except SystemExit:
        return f"{words} is no command line"
    given = (chosen.pipelines or []) if launches else getattr(chosen, "files", [])
    files = [ROOT / name for name in given if "=" not in name and name.startswith("examples/")]
    return "" if not files or read_jobs(files, Pool(1, chosen.gpus if launches else 8)) else f"{files} are no jobs"


def configured(words: list[str], kind: str, workplace: Path) -> str:
    """Whether the configuration of a run loads."""
    import nemo_rl.config

    arguments = words[2:]
    if kind == "MultiLoraMasterConfig" and arguments[0] in ("add", "remove", "list"):
        # On a job that runs; tests/algorithms/test_multi_lora_job.py carries them out.
        files = [name for name in arguments if name.endswith(".yaml")]
        return "" if all((workplace / name).is_file() for name in files) else f"{files} are not all there"
    file = workplace / arguments[arguments.index("--config") + 1] if "--config" in arguments else None
    overrides = [word for word in arguments if "=" in word]
    try:
        load_master_config(None if file is None else str(file), overrides, kind=getattr(nemo_rl.config, kind))
    except nemo_rl.config.ConfigError as error:
        return str(error)
    return ""


def test_the_readmes_table_of_what_is_here_is_true() -> None:
    import nemo_rl.config

    table = [line.split("|")[1:4] for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| ")]
    for what, here, how in table:
        for key in re.findall(r"`([a-z_.]+=\w+)`", how):
            refused = ""
            try:
                load_master_config(None, [key])
            except nemo_rl.config.ConfigError as error:
                refused = str(error)
            assert ("not built yet" in refused) == (here.strip() == "no"), (what, key, refused)


def test_the_containers_recipe_names_what_is_there() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert copied and [word for word in copied if not (ROOT / word).exists()] == []
    (target,) = re.findall(r"make (\S+) EXTRAS", text)
    command = ["make", "--dry-run", "--always-make", target, "EXTRAS=vllm", "TORCH_BACKEND=cu129"]
    planned = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "--torch-backend cu129 -e '.[vllm]'" in planned


@pytest.mark.slow
def test_the_site_builds_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "concepts.html").is_file()
