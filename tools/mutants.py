"""Plants defects, one at a time, and says what finds each: in time-sharing random scenarios, elsewhere named tests.

    python tools/mutants.py tests/time_sharing/stranger_mutants.py
    python tools/mutants.py tests/planted_faults.py

A mutant with tests is applied to a copy of package and tests, and is found if one of them fails; they must pass
without it. One without tests is a mutant of time-sharing.

Each of those is applied to a copy of the package and runs the soak's scenarios in a process of its own until one is
bad: the checker names a violation, a job never ends or ends far too late, the validator refuses a plan, something
raises, a scenario takes far longer than any sound one, or 300 scenarios leave out what sound ones reach. Mutants that
the file shows to be EQUIVALENT are not run. For those that survive it says in how many of the scenarios the changed
lines are reached at all. Exit status 1 unless every other mutant is found.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("nemo_rl", "time_sharing")
_LATE_S = 3200.0
"""Virtual seconds at which every sound scenario has long ended: faults strike for the first 600 s."""
_SCENARIO_S = 30
"""Seconds of a core; a sound scenario takes one or two."""
_MEMORY = 8 << 30
_ENOUGH = 300
"""So many scenarios reach everything that the soak expects."""
_SLOWDOWN = 20.0
"""How many times slower than on a core of its own a process may be on a busy machine."""


class Mutant(NamedTuple):
    """`old`, which occurs once in `file`, becomes `new`; `what` goes wrong then. `tests` are files of tests that judge
    it; with them `file` is a path in nemo_rl, without them one in nemo_rl/time_sharing.
    """

    name: str
    file: str
    old: str
    new: str
    what: str
    tests: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """From the root of the repository."""
        return (Path("nemo_rl") if self.tests else PACKAGE) / self.file


class Found(NamedTuple):
    """What became of a mutant: the scenarios that were run, the last of which was the first bad one, and what was bad;
    "" if none was.
    """

    scenarios: int
    by: str


def load_mutants(path: Path) -> tuple[list[Mutant], dict[str, str]]:
    """The MUTANTS of a Python file, and why some of them are EQUIVALENT to the sound code. Raises SystemExit for one
    that does not fit the package as it is.
    """
    given = runpy.run_path(str(path))
    mutants = [Mutant(*mutant) for mutant in given["MUTANTS"]]
    for mutant in mutants:
        count = (ROOT / mutant.path).read_text().count(mutant.old)
        if count != 1:
            raise SystemExit(f"{path}: {mutant.name}: {mutant.file} must hold its old text once, found {count} times")
    return mutants, given.get("EQUIVALENT", {})


def try_tests(tests: Sequence[str], seconds: float, mutant: Mutant | None = None) -> str:
    """Runs tests against a copy of the package, mutated or not; which of them failed first, "" if none did."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        for name in ("nemo_rl", "tests", "examples", "tools"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "docs", "README.md"):
            (copy / name).symlink_to(ROOT / name)
        if mutant is not None:
            file = copy / mutant.path
            file.write_text(file.read_text().replace(mutant.old, mutant.new))
        command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", *tests]
        environment = os.environ | {
            "PYTHONPATH": str(copy),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(copy / "examples-of-tests"),
        }
        process = subprocess.Popen(
            command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            output = process.communicate(timeout=seconds)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return f"takes more than {seconds:g} s"
    if process.returncode == 0:
        return ""
    lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (lines or [f"pytest exits with {process.returncode}"])[0]


def judge_by_tests(mutants: Sequence[Mutant], seconds: float) -> list[Mutant]:
    """Runs the tests of each mutant and says what failed; the mutants that no test found. Raises SystemExit: tests fail
    without any mutant.
    """
    for tests in dict.fromkeys(mutant.tests for mutant in mutants):
        if failed := try_tests(tests, seconds):
            raise SystemExit(f"{' '.join(tests)}: {failed} without any mutant")
    survivors = []
    for mutant in mutants:
        began = time.monotonic()
        by = try_tests(mutant.tests, seconds, mutant)
        took = f"{time.monotonic() - began:5.1f} s"
        print(f"{mutant.name:<40} {took}  {by or 'SURVIVES: ' + mutant.what}", flush=True)
        if not by:
            survivors.append(mutant)
    print(f"\n{len(mutants) - len(survivors)} of {len(mutants)} found by tests")
    return survivors


def try_mutant(mutant: Mutant, first: int, scenarios: int, seconds: float) -> Found:
    """Runs scenarios `first`, `first` + 1, ... against a mutated copy of the package, for at most `seconds` of a
    core.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "nemo_rl", copy / "nemo_rl")
        file = copy / PACKAGE / mutant.file
        file.write_text(file.read_text().replace(mutant.old, mutant.new))
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
            compiled.unlink()
        said = list(_run(copy, ["--judge", str(first), str(scenarios), str(seconds)], seconds * _SLOWDOWN))
    return Found(len(said), said[-1] if said else "")


def _run(package: Path, arguments: Sequence[str], seconds: float) -> Iterator[Any]:
    """Runs this file on the package in a folder; yields what each line of its output says."""
    command = [sys.executable, "-B", str(Path(__file__).resolve()), *arguments]
    environment = os.environ | {"PYTHONPATH": str(package)}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=package, env=environment, stdout=output, stderr=subprocess.PIPE)
        try:
            _, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            errors = b""
        output.seek(0)
        lines = [line for line in output.read().split("\n") if line]
    # One that dies before it says anything of its first scenario, at import say, is found by that.
    if process.returncode > 0 and (not lines or not json.loads(lines[-1])):
        lines.append(json.dumps("dies: " + errors.decode(errors="replace").strip().rpartition("\n")[2]))
    yield from map(json.loads, lines)


# In the process that has the mutated package.


def judge_here(first: int, scenarios: int, seconds: float) -> None:
    """Says in a line of JSON each what is bad of each scenario ("": nothing), and stops at the first that is."""
    from nemo_rl.time_sharing.simulation.coverage import EXPECTED
    from nemo_rl.time_sharing.simulation.random_scenarios import run_scenario

    _prepare()
    left_out = dict.fromkeys(EXPECTED)
    for seed in range(first, first + scenarios):
        signal.setitimer(signal.ITIMER_PROF, _SCENARIO_S)
        try:
            verdict = run_scenario(seed)
            left_out = {what: None for what in left_out if not verdict.reached[what]}
            bad = _problem(verdict)
            if not bad and left_out and seed == first + scenarios - 1 and scenarios >= _ENOUGH:
                bad = f"left out: {'; '.join(left_out)}"
        except Exception as error:  # noqa: BLE001 -- whatever a mutant raises has found it
            bad = f"{type(error).__name__}: {error}"
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        print(json.dumps(bad[:200]), flush=True)
        if bad or time.process_time() > seconds:
            return


def _problem(verdict: Any) -> str:
    if verdict.violations:
        return f"checker: {verdict.violations[0]}"
    if verdict.stuck:
        return f"never ended: {', '.join(verdict.stuck)}"
    if verdict.ended_s >= _LATE_S:
        return f"ended late, at {verdict.ended_s:.0f} s"
    return "validator refuses a plan" if verdict.reached["PlanRejected"] else ""


def trace_here(first: int, scenarios: int, files: Sequence[str]) -> None:
    """Says in a line of JSON for each file in how many scenarios each of its lines was run."""
    from nemo_rl.time_sharing import simulation
    from nemo_rl.time_sharing.simulation.random_scenarios import run_scenario

    _prepare()
    package = Path(str(simulation.__file__)).parent.parent
    times: dict[str, dict[int, int]] = {str(package / file): {} for file in files}
    hit: set[tuple[str, int]] = set()

    def on_call(frame: FrameType, event: str, argument: object) -> Any:
        return on_line if frame.f_code.co_filename in times else None

    def on_line(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            hit.add((frame.f_code.co_filename, frame.f_lineno))
        return on_line

    for seed in range(first, first + scenarios):
        hit.clear()
        sys.settrace(on_call)
        run_scenario(seed)
        sys.settrace(None)
        for file, line in hit:
            times[file][line] = times[file].get(line, 0) + 1
    for file in files:
        print(json.dumps([file, sorted(times[str(package / file)].items())]), flush=True)


def _prepare() -> None:
    logging.disable()
    gc.set_threshold(200_000, 20, 20)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    signal.signal(signal.SIGPROF, _too_long)


def _too_long(signum: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"a scenario took more than {_SCENARIO_S} s")


# What is reported.


def reached(mutants: Sequence[Mutant], first: int, scenarios: int) -> dict[str, int]:
    """In how many scenarios the lines that a mutant changes are run, by its name."""
    files = sorted({mutant.file for mutant in mutants})
    arguments = ["--trace", str(first), str(scenarios), *files]
    lines = {file: dict(times) for file, times in _run(ROOT, arguments, 60.0 * scenarios)}
    return {
        mutant.name: max((lines[mutant.file].get(line, 0) for line in _changed_lines(mutant)), default=0)
        for mutant in mutants
    }


def _changed_lines(mutant: Mutant) -> Iterable[int]:
    """Numbers of the lines of the sound file that the mutant changes or drops."""
    sound = (ROOT / PACKAGE / mutant.file).read_text()
    at = sound.index(mutant.old)
    same = _same(mutant.old, mutant.new)
    tail = _same(mutant.old[same:][::-1], mutant.new[same:][::-1])
    changed = mutant.old[same : len(mutant.old) - tail] or "."
    begin = sound.count("\n", 0, at + same) + changed.startswith("\n")
    return range(begin + 1, begin + len(changed.strip("\n").split("\n")) + 1)


def _same(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("mutants", type=Path, help="a Python file with MUTANTS")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants alone")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--scenarios", type=int, default=300, help="for each mutant (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=300.0, help="for each mutant at most (default: %(default)s)")
    chosen = parser.parse_args(arguments)
    mutants, equivalent = load_mutants(chosen.mutants)
    if chosen.only:
        unknown = sorted(set(chosen.only) - {mutant.name for mutant in mutants})
        if unknown:
            parser.error(f"--only: {chosen.mutants} has no {', '.join(unknown)}")
        mutants = [mutant for mutant in mutants if mutant.name in chosen.only]
    survivors, alike = [], [mutant for mutant in mutants if mutant.name in equivalent]
    for mutant in alike:
        print(f"{mutant.name:<40} EQUIVALENT: {equivalent[mutant.name]}", flush=True)
    mutants = [mutant for mutant in mutants if mutant not in alike]
    if with_tests := [mutant for mutant in mutants if mutant.tests]:
        left = judge_by_tests(with_tests, chosen.seconds)
        mutants = [mutant for mutant in mutants if not mutant.tests]
        if not mutants:
            return 1 if left else 0
        survivors += left
    for mutant in mutants:
        began = time.monotonic()
        found = try_mutant(mutant, chosen.first, chosen.scenarios, chosen.seconds)
        took = f"{time.monotonic() - began:5.1f} s"
        print(f"{mutant.name:<40} {found.scenarios:>4} {took}  {found.by or 'SURVIVES: ' + mutant.what}", flush=True)
        if not found.by:
            survivors.append(mutant)
    print(
        f"\n{len(mutants) - len(survivors)} of {len(mutants)} found" + (f", {len(alike)} equivalent" if alike else "")
    )
    if survivors:
        for name, times in reached(survivors, chosen.first, min(chosen.scenarios, 100)).items():
            print(f"{name:<40} its lines are run in {times} of {min(chosen.scenarios, 100)} scenarios")
    return 1 if survivors else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--judge"]:
        judge_here(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
    elif sys.argv[1:2] == ["--trace"]:
        trace_here(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    else:
        sys.exit(main())
