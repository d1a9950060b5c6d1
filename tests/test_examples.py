"""Every file below `examples` starts as it is: a configuration is read, placed and given its data, a script answers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml

from nemo_rl.config.check import RecipeVerdict, check_file
from nemo_rl.time_sharing.pipelines.command_config import EXTERNAL
from nemo_rl.time_sharing.pipelines.job import read_jobs
from nemo_rl.time_sharing.pipelines.wrapper import CONFIG_PATH
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.shipped_scenarios import fitted, shipped_scenarios
from nemo_rl.time_sharing.simulation.scenario_reading import load_scenario
from tests import forks

EXAMPLES = Path(__file__).parents[1] / "examples"
FILES = sorted(EXAMPLES.rglob("*.yaml"))
# The others run in an environment of their own, as their texts say.
SCRIPTS = [file for file in sorted(EXAMPLES.rglob("*.py")) if "verifiers" not in file.stem]
CONVERSATION = '{"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}\n'


def content_of(file: Path) -> dict[str, object]:
    return dict(yaml.safe_load(file.read_text()))


def is_job(file: Path) -> bool:
    return bool({CONFIG_PATH, EXTERNAL} & content_of(file).keys())


SIMULATED = [file for file in FILES if file.parent.name == "time_sharing"]
JOBS = [file for file in FILES if is_job(file)]
CONFIGURATIONS = [file for file in FILES if file not in SIMULATED and file not in JOBS]


def named(file: Path) -> str:
    return str(file.relative_to(EXAMPLES))


@pytest.mark.parametrize("file", CONFIGURATIONS, ids=named)
def test_a_configuration_gets_as_far_as_a_start_without_ray(
    file: Path, tiny_model: Path, tiny_moe_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    calls, sums = tmp_path / "calls.jsonl", tmp_path / "sums.jsonl"
    calls.write_text(CONVERSATION * 400)
    sums.write_text('{"input": "1+1=", "output": "2"}\n' * 64)
    # What earlier steps of the walk-throughs make: models, an interpreter's environment, a file of conversations.
    overrides = []
    text = file.read_text()
    if "_cpu" in file.stem or file.stem == "warm_start":
        key = "generation.model_name" if file.stem.startswith("eval") else "policy.model_name"
        overrides.append(f"{key}={tiny_moe_model if 'moe' in file.stem else tiny_model}")
    if "calls.jsonl" in text:
        overrides.append(f"data.train.data_path={calls}")
    if "verifiers-env" in text:
        overrides += [f"env.taskset.python={sys.executable}", f"data.train.data_path={sums}"]
        overrides.append(f"data.validation.data_path={sums}")
    if file.stem.startswith("distillation") and "_cpu" in file.stem:
        overrides.append(f"teacher.model_name={tiny_model}")
    checked = check_file(file, overrides, as_a_start=True)
    assert checked.verdict is RecipeVerdict.RUNS, [*checked.problems]
    assert not checked.files and not checked.models


@pytest.mark.parametrize("file", JOBS, ids=named)
def test_a_pools_file_can_be_submitted_to_four_gpus(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    pool = Pool(1, 4)
    (job,) = read_jobs([file], pool)
    assert job.topology(pool).ranks


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
@pytest.mark.parametrize("letter", sorted(shipped_scenarios()))
def test_a_scenario_fits_the_pools_that_it_is_scaled_to(letter: str, gpus: int, tmp_path: Path) -> None:
    pool = Pool(1, gpus)
    whole = read_jobs(shipped_scenarios()[letter], Pool(1, 4))
    jobs = read_jobs(fitted(shipped_scenarios()[letter], pool, tmp_path, scale=True, on_cpu=True), pool)
    assert [job.name for job in jobs] == [job.name for job in whole]
    for job, before in zip(jobs, whole, strict=True):
        assert len(job.train) == (max(1, len(before.train) * gpus // 4) if before.train else 0)
        assert max(job.infer) == gpus - 1


@pytest.mark.parametrize("file", SIMULATED, ids=named)
def test_a_simulations_file_is_read(file: Path) -> None:
    assert load_scenario(file).jobs


@pytest.mark.parametrize("script", SCRIPTS, ids=named)
def test_a_script_says_how_it_is_used_or_is_a_module(script: Path) -> None:
    text = script.read_text()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), str(EXAMPLES)])}
    # A module without a command does nothing more when it is run.
    done = forks.run([str(script), "--help"], environment, timeout_s=120.0)
    assert done.returncode == 0, done.stderr[-2000:]
    assert ("usage: " in done.stdout) is ("__main__" in text)
