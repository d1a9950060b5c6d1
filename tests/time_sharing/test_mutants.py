"""Mutants of the scheduler and its agents fit the code, and those that break much are found in the first scenarios."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl.utils import record

ROOT = Path(record.__file__).parents[2]
MUTANTS = ROOT / "tests" / "time_sharing" / "stranger_mutants.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/mutants.py", str(MUTANTS), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
def test_a_sample_of_mutants_is_found_within_a_few_scenarios() -> None:
    """One each of what is known, decided and done; by a name that there is not, nothing is run."""
    sample = ("wake-does-not-raise-epoch", "cooling-ignored", "superseded-command-stays-open")
    said = run("--scenarios", "5", "--only", *sample)
    assert said.returncode == 0, said.stdout + said.stderr
    assert "3 of 3 found" in said.stdout
    assert "has no nonsense" in run("--only", "nonsense").stderr


def test_every_mutant_changes_one_place_of_the_code_as_it_is() -> None:
    given = runpy.run_path(str(MUTANTS))
    mutants = given["MUTANTS"]
    assert len(mutants) == 100 and given["EQUIVALENT"].keys() < {mutant.name for mutant in mutants}
    for name, file, old, new, _ in mutants:
        sound = (ROOT / "nemo_rl" / "time_sharing" / file).read_text()
        assert sound.count(old) == 1, name
        compile(sound.replace(old, new), file, "exec")


def test_every_planted_fault_outside_the_scheduler_fits_the_code_and_has_its_tests() -> None:
    given = runpy.run_path(str(ROOT / "tests" / "planted_faults.py"))
    mutants = given["MUTANTS"]
    names = [mutant[0] for mutant in mutants]
    assert len(mutants) - len(given["EQUIVALENT"]) >= 60 and len(set(names)) == len(names)
    assert given["EQUIVALENT"].keys() < set(names)
    for name, file, old, new, _, tests in mutants:
        sound = (ROOT / "nemo_rl" / file).read_text()
        assert sound.count(old) == 1, name
        compile(sound.replace(old, new), file, "exec")
        assert tests and all((ROOT / test).is_file() for test in tests), name
