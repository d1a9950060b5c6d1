"""What the documentation says can be done is done: code blocks build a task that trains, and commands are commands."""

import gc
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.config import load_master_config
from nemo_rl.config.errors import OverridesError
from nemo_rl.data.datasets.registry import load_response_dataset
from nemo_rl.environments.environment_registry import environment_class, environment_settings
from nemo_rl.time_sharing.simulation.scenario_reading import load_scenario
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
# Runs take minutes; tests of their own carry them to the end (test_first_hour, test_runs, test_evaluation), and here
# these functions, which run what has been read and checked, do nothing.
RUNS = {
    "nemo_rl.algorithms.launch": ("grpo.run", "distillation.run", "sft.run", "evaluate.run"),
    "nemo_rl.algorithms.multi_lora.__main__": ("run",),
}


# All that a command gets of the environment of the tests.
CLEAN = ("HOME", "LANG", "PATH", "TMPDIR", "VIRTUAL_ENV")
# A simulation of minutes.
LONG = "with_faults.yaml"
# Commands on a pool that is open, or that keep one open; tests/time_sharing carries them out.
LIVE = ("serve", "submit", "status", "explain", "drain", "cancel", "adapters", "page", "reload")
LIVE += ("drain-node", "give-back", "add-node")


_COMMAND = re.compile(r"([A-Z_0-9]+=\S+ )*(\S*/)?(python|make|git|pip|docker|sbatch|bash|ray)( |$)")
"""How a command of the documentation begins."""


def lines_of(text: str) -> list[str]:
    """Command lines, continued ones joined and comments left out."""
    lines = (line.removeprefix("$ ").split("  #")[0].split(" #")[0].strip() for line in joined(text).splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def joined(text: str) -> str:
    """A text whose continued lines are one."""
    return re.sub(r"\\\n\s*#?", " ", text)


def commands() -> list[str]:
    """Every command line of every page, and of the comments of every example."""
    fenced = [text for page in PAGES for kind in ("bash", "console") for _, text in blocks(page, kind)]
    comments = [
        line.removeprefix("#").strip()
        for file in sorted((ROOT / "examples").rglob("*.yaml"))
        for line in joined(file.read_text()).splitlines()
        if line.startswith("#") and _COMMAND.match(line.removeprefix("#").strip())
    ]
    return list(dict.fromkeys(line for text in [*fenced, *comments] for line in lines_of(text)))


def test_commands_stand_in_fenced_blocks_one_on_a_line() -> None:
    wrong: list[str] = []
    for page in PAGES:
        outside = _BLOCK.sub("", (ROOT / page).read_text())
        wrong += [f"{page}: {line}" for line in outside.splitlines() if re.match(r" {4,}\S", line) and _begins(line)]
    for line in commands():
        # A second command after a word that ends the first one's arguments nowhere.
        words = shlex.split(line)
        again = [word for word in words[1:] if Path(word).name == Path(words[0]).name and "&&" not in words]
        wrong += [f"{line}: {again} begins a second command"] * bool(again)
    assert wrong == []


def _begins(line: str) -> bool:
    return _COMMAND.match(line.strip()) is not None and not line.strip().endswith((".", ","))


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
    (folder / "models").mkdir()
    (folder / "models" / "my_model").symlink_to(tiny_model)
    for kind in ("json", "yaml", "python"):
        for title, text in blocks("docs/bring_your_own.md", kind):
            if title:
                # The page shows the first of many rows.
                (folder / title).write_text(text * (10 if kind == "json" else 1))
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
    assignments = [word for word in words if re.fullmatch(r"[A-Z_0-9]+=.*", word) and words[0] != "make"]
    words = [word for word in words if word not in assignments]
    live = "nemo_rl.time_sharing" in words and (words[3] in LIVE or "logs/time_sharing" in line)
    if live or "run_time_sharing.py" in line:
        return shared(words)
    # Those that write something for a later command are carried out; tests/time_sharing has the others.
    if "simulate" in words and (words[4].endswith(LONG) or len(words) == 5):
        return "" if load_scenario(ROOT / words[4]).jobs else f"{words[4]} has no jobs"
    if len(words) > 1 and (ROOT / words[1]).is_file() and re.fullmatch(r"run_\w+\.py", Path(words[1]).name):
        return started(words[1:], dict(word.split("=", 1) for word in assignments), workplace)
    environment = {name: os.environ[name] for name in CLEAN if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(workplace)] if assignments else [str(ROOT)])
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
    from nemo_rl.config.overrides import parse_override
    from nemo_rl.time_sharing.__main__ import parser
    from nemo_rl.time_sharing.launcher import launcher_parser
    from nemo_rl.time_sharing.pipelines.job import read_jobs
    from nemo_rl.time_sharing.protocol.topology import Pool
    from nemo_rl.time_sharing.shipped_scenarios import ALL, fitted, shipped_scenarios

    launches = words[1].endswith("run_time_sharing.py")
    try:
        chosen, rest = (
            launcher_parser().parse_known_args(words[2:]) if launches else (parser().parse_args(words[3:]), [])
        )
        overrides = [*rest, *(name for name in getattr(chosen, "pipelines", None) or [] if "=" in name)]
        [parse_override(text) for text in overrides]
    except (SystemExit, OverridesError) as error:
        return f"{words} is no command line: {error}"
    given = (chosen.pipelines or []) if launches else getattr(chosen, "files", [])
    files = [ROOT / name for name in given if "=" not in name and name.startswith("examples/")]
    pool = Pool(1, chosen.gpus if launches else 8)
    if launches and chosen.scenario is not None:
        letters = (
            shipped_scenarios() if chosen.scenario == ALL else {chosen.scenario: shipped_scenarios()[chosen.scenario]}
        )
        with tempfile.TemporaryDirectory() as folder:
            sets = {key: fitted(each, pool, Path(folder) / key, scale=chosen.scale) for key, each in letters.items()}
            return "" if all(read_jobs(each, pool, overrides) for each in sets.values()) else "no jobs"
    # Overrides may be for files that are not here.
    here = len(files) == len([name for name in given if "=" not in name])
    return "" if not files or read_jobs(files, pool, overrides if here else []) else f"{files} are no jobs"


def started(words: list[str], variables: dict[str, str], workplace: Path) -> str:
    """Whether a script of a run takes its arguments and configuration: its main runs here, up to where Ray starts."""
    if words[1:2] in (["add"], ["remove"], ["list"]):
        # On a job that runs; tests/algorithms/test_multi_lora_job.py carries them out.
        files = [name for name in words if name.endswith(".yaml")]
        return "" if all((workplace / name).is_file() for name in files) else f"{files} are not all there"
    if words[-1] == "...":
        words = words[:-1]
    said, thresholds = io.StringIO(), gc.get_threshold()
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(said):
        for module, names in RUNS.items():
            for name in names:
                patch.setattr(f"{module}.{name}", lambda *_, **__: 0)
        patch.chdir(workplace)
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", words)
        try:
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")
        except SystemExit as ended:
            return "" if ended.code == 0 else f"exit code {ended.code}: {said.getvalue()[-1500:]}"
        finally:
            gc.set_threshold(*thresholds)
    return f"{words} has no end"


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
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
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
