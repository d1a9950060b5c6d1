"""Counts the files and functions that one piece of work passes through.

    python tools/trails.py step
    python tools/trails.py all

Runs the CPU case of a trail with a probe in the first line of every function of nemo_rl, in every process, and prints
what ran between two entries of the run's record: files in the order in which they were entered first, by package, with
their functions. Configuration and the record itself are left out (but of a start), and what other work of that time
ran: `_ASIDE`. Files of which only classes and constants are read do not count, since no function of theirs runs.

| trail | from | to |
|---|---|---|
| step | the refit of a step has ended | the step is finished |
| step-on-the-data-plane | the same, with `data_plane.enabled` | |
| refit | the sync of a step begins | the step's first request is sent |
| hand-over | the scheduler's command to vacate a rank | a rank of another job serves; files of every one |
| start | the command begins | the first step begins |
| request | an agent's first request of a step | the step's first group is committed |

`--check` compares with `tools/shape.toml`.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PROBES = "NRL_TRAILS"
_PACKAGE = ROOT / "nemo_rl"
_BUCKET_S = 0.02
_PROBE = "__nrl_trail__"
_ASIDE = {
    # Reports of the step before are written in the background.
    "step": ("config/", "utils/", "algorithms/memory_watch", "algorithms/grpo/step_reports", "weight_sync/"),
    "refit": ("config/", "utils/"),
    # Meanwhile the jobs generate and train.
    "hand-over": (
        *("config/", "utils/", "algorithms/", "experience/", "loss/", "data", "environments/"),
        *("models/policy/", "models/dtensor/"),
    ),
    "start": (),
    "request": ("config/", "utils/", "algorithms/", "weight_sync/", "models/policy/", "models/dtensor/"),
}
_ASIDE["step-on-the-data-plane"] = _ASIDE["step"]
_FIRST_OF_A_REQUEST = "models/generation/endpoint/endpoint_http.py"
_CONFIGS = ROOT / "examples" / "configs"
_QUICK = (
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "grpo.max_num_steps=4",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "data.validation=null",
    "policy.train_global_batch_size=16",
    "checkpointing.enabled=false",
    "logger.tensorboard_enabled=false",
)
_RUNS = {
    "own": ("run_grpo.py", "grpo_arithmetic_cpu.yaml", ()),
    "data-plane": ("run_grpo.py", "grpo_arithmetic_cpu.yaml", ("data_plane.enabled=true",)),
    "agents": ("run_grpo.py", "grpo_arithmetic_agent_cpu.yaml", ()),
    "pool": ("run_time_sharing.py", "grpo_arithmetic_async_cpu.yaml", ()),
}
TRAILS = {
    "step": "own",
    "step-on-the-data-plane": "data-plane",
    "refit": "own",
    "hand-over": "pool",
    "start": "own",
    "request": "agents",
}


class Hit(NamedTuple):
    """A function of `file` (below nemo_rl) ran in the bucket of time that begins at `time`, in seconds of the clock."""

    time: float
    file: str
    function: str


# -- inside the processes ---------------------------------------------------------------------------------------------


def install(folder: str) -> None:
    """Writes what runs in this process to a file of its own in `folder`. Called by a `sitecustomize` module."""
    import importlib.machinery
    import importlib.util
    import time

    out = open(f"{folder}/{os.getpid()}.hits", "a", buffering=1, encoding="utf-8")  # noqa: SIM115
    known: set[tuple[str, int]] = set()

    def probe(where: str) -> None:
        if out.name != (mine := f"{folder}/{os.getpid()}.hits"):
            return reopen(mine, where)
        now = int(time.time() / _BUCKET_S)
        if (where, now) not in known:
            known.add((where, now))
            out.write(f"{now * _BUCKET_S:.2f} {where}\n")
        return None

    def reopen(mine: str, where: str) -> None:
        # A process that was forked.
        nonlocal out
        out = open(mine, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        probe(where)

    class Loader(importlib.machinery.SourceFileLoader):
        def source_to_code(self, data: bytes, path: str, *, _optimize: int = -1) -> object:  # type: ignore[override]
            tree = ast.parse(data)
            relative = str(Path(path).relative_to(_PACKAGE))
            for function, name in _functions(tree, ""):
                first = ast.get_docstring(function) is not None
                call = ast.parse(f"{_PROBE}({relative + ' ' + name!r})").body[0]
                function.body.insert(int(first), call)
            for node in ast.walk(tree):
                if not hasattr(node, "lineno") and "lineno" in getattr(node, "_attributes", ()):
                    node.lineno = node.col_offset = 0  # type: ignore[attr-defined]
            return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True, optimize=_optimize)

        def get_code(self, fullname: str) -> object:  # type: ignore[override]
            # Compiled files hold no probes.
            path = self.get_filename(fullname)
            return self.source_to_code(self.get_data(path), path)

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Sequence[str] | None, target: object = None) -> object:
            if name.partition(".")[0] != "nemo_rl":
                return None
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            if spec is not None and spec.origin and spec.origin.endswith(".py"):
                spec.loader = Loader(name, spec.origin)
            return spec

    import builtins

    setattr(builtins, _PROBE, probe)
    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]


def _functions(node: ast.AST, within: str) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child, within + child.name
            yield from _functions(child, f"{within}{child.name}.")
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{within}{child.name}.")
        else:
            yield from _functions(child, within)


# -- outside ----------------------------------------------------------------------------------------------------------


class Run:
    """One CPU run with probes: what ran when, and its records."""

    def __init__(self, name: str, folder: Path, model: Path) -> None:
        script, config, overrides = _RUNS[name]
        here = folder / name
        (here / "hits").mkdir(parents=True)
        (here / "sitecustomize.py").write_text(
            f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r})\n"
            f"import trails; trails.install({str(here / 'hits')!r})\n"
        )
        command = [sys.executable, str(ROOT / "examples" / script)]
        if script == "run_time_sharing.py":
            files = [str(here / f"{job}.yaml") for job in "ab"]
            for job, path in zip("ab", files, strict=True):
                Path(path).write_text(
                    f"defaults: {_CONFIGS / config}\nlogger: {{log_dir: {here / 'logs' / job}}}\n", encoding="utf-8"
                )
            command += ["--gpus", "2", "--device", "cpu", "--port", "0", "--log-dir", str(here / "pool")]
            command += ["--pipelines", *files]
        else:
            command += ["--config", str(_CONFIGS / config), f"logger.log_dir={here / 'logs'}"]
        command += [*_QUICK, *overrides, f"policy.model_name={model}"]
        environment = os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{ROOT}", "RAY_ADDRESS": "local"}
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode:
            sys.exit(f"{' '.join(command)}\nended with exit code {ended.returncode}:\n{ended.stdout}{ended.stderr}")
        self.hits = sorted(_hits(here / "hits"))
        self.records = here

    def entries(self, folder: str, *kinds: str) -> list[tuple[float, dict[str, object]]]:
        """Time and content of the entries of these kinds below a folder, in order of time."""
        lines: list[dict[str, object]] = []
        for path in sorted((self.records / folder).rglob("*.jsonl*")):
            if path.is_symlink():
                continue
            lines += [entry for entry in _lines(path) if entry.get("kind") in kinds]
        return sorted(((float(str(entry["t"])), entry) for entry in lines), key=lambda found: found[0])


def _lines(path: Path) -> Iterator[dict[str, object]]:
    import lzma

    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open(encoding="utf-8") as file:
        yield from (json.loads(line) for line in file if line.startswith("{"))


def _hits(folder: Path) -> Iterator[Hit]:
    for path in folder.glob("*.hits"):
        for line in path.read_text(encoding="utf-8").splitlines():
            time, file, function = line.split(" ", 2)
            yield Hit(float(time), file, function)


def windows(trail: str, run: Run) -> list[tuple[float, float]]:
    """Begin and end of each passage of a trail in a run, in seconds of the clock."""
    return _hand_overs(run) if trail == "hand-over" else [_window(trail, run)]


def _window(trail: str, run: Run) -> tuple[float, float]:
    steps = run.entries("logs", "step_begun", "step_finished", "sync_started", "sync_finished", "request_submitted")
    begun = [time for time, entry in steps if entry["kind"] == "step_begun"]
    ended = [time for time, entry in steps if entry["kind"] == "step_finished"]
    if trail == "start":
        return 0.0, begun[0]
    # The last step is followed by the end of the run.
    begin, end = begun[-2], ended[-2]
    inside = [(time, str(entry["kind"])) for time, entry in steps if begin <= time <= end]
    first_request = next((time for time, kind in inside if kind == "request_submitted"), end)
    syncs = [time for time, kind in inside if kind == "sync_started" and time <= first_request]
    if trail == "refit":
        return (syncs[0] if syncs else begin), first_request
    if trail == "request":
        committed = [time for time, _ in run.entries("logs", "group_committed") if time >= begin]
        asked = [hit.time for hit in run.hits if hit.file == _FIRST_OF_A_REQUEST and hit.time >= begin]
        return asked[0], committed[0]
    synced = [time for time, kind in inside if kind == "sync_finished" and time <= first_request]
    return (synced[-1] + _BUCKET_S if synced else begin), end


def _hand_overs(run: Run) -> list[tuple[float, float]]:
    """All hand-overs before the first job leaves."""
    entries = run.entries("pool", "ts_command", "ts_rank", "ts_leaving")
    leaves = min((time for time, entry in entries if entry["kind"] == "ts_leaving"), default=float("inf"))
    found: list[tuple[float, float]] = []
    for begin, left in entries:
        if left.get("verb") != "vacate":
            continue
        rose = (
            time
            for time, entry in entries
            if time > begin and entry.get("phase") == "serving" and entry.get("pipeline") != left.get("pipeline")
        )
        if (end := next(rose, leaves)) < leaves:
            found.append((begin, end))
    if not found:
        sys.exit("no GPU went from one job to the other in this run")
    return found


def files_of(trail: str, run: Run) -> dict[str, list[str]]:
    """Files of nemo_rl that ran in every passage of a trail, in order of first entry, each with its functions: what a
    pool does besides is in some hand-overs only.
    """
    passages: list[dict[str, dict[str, None]]] = []
    for begin, end in windows(trail, run):
        found: dict[str, dict[str, None]] = {}
        for hit in run.hits:
            if begin - _BUCKET_S < hit.time <= end and not hit.file.startswith(_ASIDE[trail]):
                found.setdefault(hit.file, {})[hit.function] = None
        passages.append(found)
    always = set.intersection(*(set(found) for found in passages))
    return {file: list(functions) for file, functions in passages[0].items() if file in always}


def show(trail: str, files: dict[str, list[str]], *, functions: bool) -> None:
    """Prints a trail."""
    packages = Counter(file.partition("/")[0] for file in files)
    print(f"\n{trail}: {len(files)} files, {sum(map(len, files.values()))} functions")
    print("  " + ", ".join(f"{package} {count}" for package, count in packages.most_common()))
    grouped: dict[str, list[str]] = defaultdict(list)
    for file in files:
        grouped[str(Path(file).parent)].append(Path(file).stem)
    for folder, stems in grouped.items():
        print(f"  {folder}/ {', '.join(stems)}")
    if functions:
        for file, names in files.items():
            print(f"    {file}: {', '.join(names)}")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trail", nargs="+", choices=[*TRAILS, "all"])
    parser.add_argument("--functions", action="store_true", help="also the functions of each file")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 where one is longer than tools/shape.toml says"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where to leave the runs")
    chosen = parser.parse_args()
    trails = list(TRAILS) if "all" in chosen.trail else chosen.trail
    runs: dict[str, Run] = {}
    found: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="trails-") as place:
        folder = chosen.keep or Path(place)
        model = folder / "model"
        make = [sys.executable, str(ROOT / "examples" / "make_tiny_model.py"), str(model), "--layers", "2"]
        subprocess.run([*make, "--hidden", "128"], check=True, capture_output=True)
        for trail in trails:
            name = TRAILS[trail]
            if name not in runs:
                runs[name] = Run(name, folder, model)
            files = files_of(trail, runs[name])
            show(trail, files, functions=chosen.functions)
            found[trail] = len(files)
    if chosen.check:
        most = tomllib.loads((ROOT / "tools" / "shape.toml").read_text(encoding="utf-8"))["trails"]
        longer = [
            f"{trail}: {count} files, at most {most[trail]}" for trail, count in found.items() if count > most[trail]
        ]
        print("\n" + ("\n".join(longer) or "no trail is longer than tools/shape.toml says"))
        sys.exit(bool(longer))


if __name__ == "__main__":
    main()
