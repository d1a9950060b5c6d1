"""A pool of CPU slots for hours, with jobs that come, go and die, and what grows meanwhile in one picture.

    make night HOURS=8

Three jobs train for the whole time: GRPO with agents over the endpoint, SFT, and adapters on one base. Every few
minutes something happens, in an order drawn from the seed: a short job comes and ends, a job is drained or cancelled
and submitted again, an engine or a training worker is killed. Memory and descriptors of every process, files, disk and
what Ray keeps are written to `night.jsonl` and drawn in `night.png`. Slopes are those of what follows the first hour,
or of the second half of a shorter time. Exit status 1: a process grew by more than its noise, the record broke an
invariant, or something was left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import yaml
from chaos_run import processes

ROOT = Path(__file__).resolve().parents[1]
MARK = "NRL_NIGHT"
LASTING = ("agents", "sft", "adapters")
_SAMPLE_S, _TABLES_S, _EVENT_S = 15.0, 120.0, (60.0, 240.0)
_START_S, _COMMAND_S, _END_S = 300.0, 400.0, 120.0
_LEAST_S = 300.0
"""A process that lives for less has no slope."""
_FREE_MIB_PER_HOUR, _NOISES = 4.0, 3.0
_TABLES = """
import json, ray
import ray.experimental.internal_kv as kv
from nemo_rl.distributed.ray_joining import join_cluster
from nemo_rl.time_sharing.open_pools import the_open_pool
pool = the_open_pool(None, lambda line: None)
join_cluster(pool.address, (pool.auth_mode, pool.token))
actors = ray._private.state.actors()
print(json.dumps({"actors": len(actors), "dead actors": sum(a["State"] == "DEAD" for a in actors.values()),
    "placement groups": len(ray.util.placement_group_table()),
    "kv": sum(len(kv._internal_kv_list(b"", namespace=name) or []) for name in (None, b"nemo_rl", b"fun"))}))
"""


class Slope(NamedTuple):
    """How a process grew, in MiB an hour, and by how much that may be chance."""

    process: str
    per_hour: float
    noise: float
    mib: float

    @property
    def grows(self) -> bool:
        """Whether it grew by more than chance, and by more than anybody would notice in a week."""
        return self.per_hour > max(_FREE_MIB_PER_HOUR, _NOISES * self.noise)


def slope_of(process: str, points: Sequence[tuple[float, float]]) -> Slope:
    """Theil's slope of (seconds, MiB): the median over pairs of points far apart; noise from how the pairs scatter."""
    half = len(points) // 2
    pairs = list(zip(points[:half], points[-half:], strict=True))
    slopes = sorted((b[1] - a[1]) / (b[0] - a[0]) * 3600 for a, b in pairs)
    spread = statistics.median(abs(one - statistics.median(slopes)) for one in slopes)
    noise = 1.5 * spread / max(1.0, len(slopes)) ** 0.5
    return Slope(process, statistics.median(slopes), noise, points[-1][1])


def role_of(process: psutil.Process) -> str:
    """A short name of what a process is for."""
    line = " ".join(process.cmdline())
    known = {
        "VLLM::EngineCore": "engine",
        "gcs_server": "Ray: gcs_server",
        "raylet/raylet": "Ray: raylet",
        "run_multi_lora": "adapters' command",
        "time_sharing serve": "the pool's command",
        "arithmetic_agent": "agent",
    }
    for part, role in known.items():
        if part in line:
            return role
    if line.startswith("ray::"):
        return line.partition(".")[0].removeprefix("ray::").strip()
    return line.split(" ")[0].rpartition("/")[2][:24] or "?"


@dataclass
class Night:
    """The pool under way. `folder`: where everything of it is."""

    folder: Path
    mark: str
    draw: random.Random
    base: Path
    samples: list[dict[str, Any]] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    short: int = 0

    @property
    def environment(self) -> dict[str, str]:
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        folders = os.pathsep.join([str(ROOT), str(ROOT / "examples")])  # the agent is an example
        return os.environ | {
            "PYTHONPATH": folders,
            MARK: self.mark,
            "RAY_ADDRESS": "local",
            "TMPDIR": str(temporary),
            "RAY_TMPDIR": "/tmp",
        }

    def now(self) -> float:
        return time.monotonic() - self.began

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command of the pool."""
        environment = {name: value for name, value in self.environment.items() if name != "RAY_ADDRESS"}
        line = [sys.executable, "-m", "nemo_rl.time_sharing", *arguments]
        return subprocess.run(
            line, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=_COMMAND_S, check=False
        )

    def submit(self, file: Path) -> None:
        done = self.command("submit", str(file))
        if done.returncode:
            raise SystemExit(f"submit {file}: {done.stderr}")

    def write_jobs(self) -> None:
        """The files of the jobs that last."""
        configs = ROOT / "examples" / "configs"
        small = {"policy": {"model_name": str(self.base)}}
        forever = {"max_num_steps": 10**7, "val_period": 0, "val_at_start": False, "val_at_end": False}
        saves = {"save_period": 50, "keep_top_k": 2, "metric_name": None}
        agents: dict[str, Any] = {
            "defaults": str(configs / "grpo_arithmetic_agent_cpu.yaml"),
            "grpo": {**forever, "num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_num_epochs": 10**6},
            "data": {"validation": None},
        }
        agents["policy"] = {**small["policy"], "train_global_batch_size": 16, "train_micro_batch_size": 8}
        sft: dict[str, Any] = {
            "defaults": str(configs / "sft_arithmetic_cpu.yaml"),
            "sft": {**forever, "max_num_epochs": 10**6},
            "data": {"validation": None},
            **small,
        }
        for name, content in (("agents", agents), ("sft", sft)):
            content["logger"] = {"log_dir": f"logs/{name}"}
            content["checkpointing"] = {"checkpoint_dir": f"results/{name}", **saves}
            (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
        adapters = {
            "pipeline_cls": "RollMultiLoraPipeline",
            "exp_name": "adapters",
            "nemo_config_path": str(configs / "multi_lora" / "base.yaml"),
            "adapters": ["add.yaml", "sort.yaml"],
            "infer_device_mapping": [1],
            "nemo_config_overrides": [
                f"policy.model_name={self.base}",
                "grpo.max_num_steps=10000000",
                "grpo.val_period=0",
                "grpo.val_at_start=false",
                "grpo.val_at_end=false",
                "logger.log_dir=logs/adapters",
                "checkpointing.checkpoint_dir=results/adapters",
            ],
        }
        (self.folder / "adapters.yaml").write_text(yaml.safe_dump(adapters))

    # -- what is measured ----------------------------------------------------------------------------------------------

    def sample(self, tables: dict[str, int]) -> None:
        found: dict[str, list[float]] = {}
        for process in processes({MARK: self.mark}):
            with suppress(psutil.Error):
                uss = process.memory_full_info().uss / 2**20
                found[f"{role_of(process)} {process.pid}"] = [round(uss, 2), process.num_fds(), process.num_threads()]
        files, used = tree_size(self.folder)
        one = {"s": round(self.now(), 1), "processes": found, "files": files, "mib": round(used / 2**20, 1), **tables}
        self.samples.append(one)
        with (self.folder / "night.jsonl").open("a") as file:
            file.write(json.dumps(one) + "\n")

    def tables(self) -> dict[str, int]:
        """How much Ray keeps."""
        environment = {name: value for name, value in self.environment.items() if name not in ("RAY_ADDRESS", MARK)}
        done = subprocess.run(
            [sys.executable, "-c", _TABLES], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        return dict(json.loads(done.stdout)) if done.returncode == 0 else {}

    # -- what happens --------------------------------------------------------------------------------------------------

    def happen(self) -> None:
        what = self.draw.choice(["short job", "drain", "kill engine", "kill worker", "cancel"])
        if what == "short job":
            self.short += 1
            content = yaml.safe_load((self.folder / "sft.yaml").read_text())
            content["sft"]["max_num_steps"] = 20
            content["logger"]["log_dir"] = f"logs/short_{self.short}"
            content["checkpointing"]["checkpoint_dir"] = f"results/short_{self.short}"
            file = self.folder / f"short_{self.short}.yaml"
            file.write_text(yaml.safe_dump(content))
            self.submit(file)
        elif what in ("drain", "cancel"):
            name = self.draw.choice(LASTING)
            done = self.command(what, name)
            self.submit(self.folder / f"{name}.yaml")
            what = f"{what} {name}" + ("" if done.returncode == 0 else f" (exit {done.returncode})")
        else:
            titles = ("VLLM::EngineCore",) if what == "kill engine" else ("ray::PolicyWorker",)
            there = processes({MARK: self.mark}, titles)
            if there:
                with suppress(psutil.NoSuchProcess):
                    self.draw.choice(there).kill()
            what += "" if there else " (none there)"
        self.events.append((self.now(), what))
        print(f"{self.now():7.0f} s  {what}", flush=True)

    def mend(self) -> None:
        """Submits again what a killed part has ended."""
        shown = self.command("status", "--json")
        if shown.returncode:
            return
        ended = {one["name"]: one["outcome"] for one in json.loads(shown.stdout)["pipelines"] if one["outcome"]}
        for name in LASTING:
            if name in ended:
                said = f"{ended[name]['kind']} {ended[name]['reason'][:80]}".strip()
                if "ConfigError" in said:
                    raise SystemExit(f"{name} cannot run: {ended[name]['reason']}")
                print(f"{self.now():7.0f} s  {name} had ended ({said}), and is submitted again", flush=True)
                self.submit(self.folder / f"{name}.yaml")

    def last(self, hours: float) -> None:
        end, next_event, next_tables = hours * 3600, self.draw.uniform(*_EVENT_S), 0.0
        tables: dict[str, int] = {}
        while self.now() < end:
            if self.now() >= next_tables:
                tables, next_tables = self.tables(), self.now() + _TABLES_S
            self.sample(tables)
            if self.now() >= next_event:
                self.happen()
                self.mend()
                next_event = self.now() + self.draw.uniform(*_EVENT_S)
            time.sleep(_SAMPLE_S)


def tree_size(folder: Path) -> tuple[int, int]:
    files, used = 0, 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            if path.is_file() and not path.is_symlink():
                files, used = files + 1, used + path.stat().st_blocks * 512
    return files, used


def slopes(samples: Sequence[dict[str, Any]]) -> Iterator[Slope]:
    """Of each process that lived long enough, after the first hour or in the second half of a shorter time."""
    begin = min(3600.0, samples[-1]["s"] / 2)
    points: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for one in samples:
        for name, (uss, *_) in one["processes"].items():
            if one["s"] >= begin:
                points[name].append((one["s"], uss))
    for name, series in sorted(points.items()):
        # What began meanwhile has a first rise of its own.
        whole = [point for one in samples if name in one["processes"] for point in [one["s"]]]
        if series[-1][0] - series[0][0] >= _LEAST_S and whole[0] < begin and len(series) >= 8:
            yield slope_of(name, series)


def draw_picture(samples: Sequence[dict[str, Any]], events: Sequence[tuple[float, str]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(3, 2, figsize=(16, 14), sharex=True)
    names = sorted({name for one in samples for name in one["processes"]})
    # One colour for all processes of a kind, whatever their ids.
    kinds: dict[str, str] = {}
    for name in names:
        points = [(one["s"] / 60, one["processes"][name]) for one in samples if name in one["processes"]]
        if len(points) < 4:
            continue
        kind = name.rpartition(" ")[0]
        label = "" if kind in kinds else kind
        color = kinds.setdefault(kind, f"C{len(kinds) % 10}")
        style = "-" if list(kinds).index(kind) < 10 else "--"
        for axes, place in ((panels[0][0], 0), (panels[0][1], 1)):
            line = {"label": label or None, "color": color, "linestyle": style, "linewidth": 1}
            axes.plot([at for at, _ in points], [values[place] for _, values in points], **line)
    minutes = [one["s"] / 60 for one in samples]
    totals = [sum(values[0] for values in one["processes"].values()) for one in samples]
    panels[1][0].plot(minutes, totals)
    panels[1][1].plot(minutes, [len(one["processes"]) for one in samples], label="processes")
    panels[2][0].plot(minutes, [one["files"] for one in samples], label="files")
    panels[2][0].plot(minutes, [one["mib"] for one in samples], label="MiB on the disk")
    for key in ("actors", "dead actors", "placement groups", "kv"):
        panels[2][1].plot(minutes, [one.get(key) for one in samples], label=key)
    titles = ("own memory, MiB", "descriptors", "own memory of all, MiB", "processes", "disk", "what Ray keeps")
    for axes, title in zip(panels.flat, titles, strict=True):
        axes.set_title(title)
        for at, _ in events:
            axes.axvline(at / 60, color="0.85", zorder=0)
    panels[0][0].legend(fontsize=7, loc="upper left", ncols=3)
    panels[0][0].set_ylim(top=1.6 * panels[0][0].get_ylim()[1])
    for axes in (panels[1][1], panels[2][0], panels[2][1]):
        axes.legend(fontsize=8)
    for axes in panels[2]:
        axes.set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--folder", type=Path, default=Path("results/night"), help="emptied first")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    chosen = parser.parse_args(arguments)
    folder = chosen.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    base = folder / "base"
    tiny = [
        sys.executable,
        str(ROOT / "examples" / "make_tiny_model.py"),
        str(base),
        "--layers",
        "2",
        "--hidden",
        "128",
    ]
    subprocess.run(tiny, check=True)
    night = Night(folder, uuid.uuid4().hex, random.Random(chosen.seed), base)
    night.write_jobs()
    print(f"seed {chosen.seed}, {chosen.hours:g} hours in {folder}", flush=True)
    line = [sys.executable, "-m", "nemo_rl.time_sharing", "serve", "--gpus", "2", "--device", "cpu"]
    failures: list[str] = []
    with (folder / "serve.log").open("wb") as log:
        serve = subprocess.Popen(
            [*line, "--log-dir", str(folder / "pool"), "--port", "0"],
            cwd=folder,
            env=night.environment,
            stdout=log,
            stderr=log,
        )
        try:
            deadline = time.monotonic() + _START_S
            while b"submit with" not in (folder / "serve.log").read_bytes():
                if serve.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the pool did not open; see {folder}/serve.log")
                time.sleep(1.0)
            for name in LASTING:
                night.submit(folder / f"{name}.yaml")
            night.last(chosen.hours)
        finally:
            serve.send_signal(signal.SIGINT)
            try:
                serve.wait(_END_S)
            except subprocess.TimeoutExpired:
                failures.append(f"the pool did not close within {_END_S:g} s")
                serve.kill()
    time.sleep(2.0)
    left = processes({MARK: night.mark})
    failures += [f"left behind: {process.pid} {role_of(process)}" for process in left]
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    logs = sorted((folder / "pool" / "latest").glob("*.jsonl"))
    check = [sys.executable, "-m", "nemo_rl.time_sharing", "check", *map(str, logs)]
    checked = subprocess.run(check, capture_output=True, text=True, check=False)
    print(checked.stdout + checked.stderr)
    if checked.returncode:
        failures.append("the record broke an invariant")
    for slope in slopes(night.samples):
        print(f"{slope.process:<44} {slope.mib:8.1f} MiB  {slope.per_hour:+8.2f} +- {slope.noise:.2f} MiB/h")
        if slope.grows:
            failures.append(f"{slope.process} grew by {slope.per_hour:.1f} MiB an hour (chance: {slope.noise:.1f})")
    draw_picture(night.samples, night.events, folder / "night.png")
    print("\n".join(failures) or "nothing grew, nothing was left")
    return 1 if failures else 0


if __name__ == "__main__":
    tempfile.tempdir = None
    sys.exit(main())
