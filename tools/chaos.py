"""The asynchronous arithmetic run on the data plane while parts of it are killed at random: nothing may be lost by it.

Kills an engine, a training worker, the driver or a storage unit on a seeded schedule; the run must survive an engine's
death, and goes on from its last checkpoint after any other. At the end every prompt must have been trained once, the
accuracy be that of an undisturbed run of as many steps, and no process, socket or shared memory be left. Knows the run
from outside only: its processes, its record and its metrics.
"""

from __future__ import annotations

import argparse
import glob
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil

from nemo_rl.utils.checkpoint import saved_steps
from nemo_rl.utils.metrics_file import read_metrics
from nemo_rl.utils.record import read_record
from nemo_rl.utils.record_events import GroupAdmitted, GroupTrained, StepFinished

ROOT = Path(__file__).parents[1]
MARK = "NRL_CHAOS_RUN"
# How a process is known by the title that Ray or vLLM gives it.
TARGETS = {
    "engine": ("ray::VllmGenerationWorker", "VLLM::EngineCore"),
    "worker": ("ray::PolicyWorker",),
    "storage unit": ("ray::SimpleStorageUnit",),
    "driver": ("examples/run_grpo.py",),
}
ENDS_AFTER_S, GONE_WITHIN_S, STEP_WITHIN_S = 300.0, 90.0, 900.0


class Failed(Exception):
    """What the run must not do."""


class Run:
    """The run under way, and what it has left behind.

    Args:
        folder: Where it logs and saves.
        model: The model that it trains.
        overrides: More settings.
    """

    def __init__(self, folder: Path, model: str, overrides: list[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.checkpoints = folder, folder / "checkpoints"
        self._settings = [
            f"policy.model_name={model}",
            f"logger.log_dir={folder}/logs",
            f"checkpointing.checkpoint_dir={self.checkpoints}",
            "checkpointing.save_period=2",
            "checkpointing.metric_name=null",
            "checkpointing.keep_top_k=2",
            "checkpointing.save_on_signal=true",
            "data_plane.enabled=true",
            "cluster.gpus_per_node=3",
            "cluster.cpu_slots=3",
            "policy.generation.colocated.resources.gpus_per_node=2",
            "grpo.val_at_start=false",
            "grpo.val_period=0",
            *overrides,
        ]
        self._mark = ""
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, steps: int) -> None:
        """Begins, or goes on from the last checkpoint, up to a step."""
        self._mark = uuid.uuid4().hex
        config = "examples/configs/grpo_arithmetic_async_cpu.yaml"
        line = [sys.executable, "examples/run_grpo.py", "--config", config, *self._settings]
        with (self.folder / "output.txt").open("ab") as log:
            self.process = subprocess.Popen(
                [*line, f"grpo.max_num_steps={steps}"],
                cwd=ROOT,
                env=os.environ | {MARK: self._mark, "PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ended(self, within_s: float) -> int:
        """Its exit code.

        Raises:
            Failed: It does not end.
        """
        if self.process is None:
            raise Failed("the run was never started")
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired as error:
            raise Failed(f"the run did not end within {within_s:.0f} s; see {self.folder}/output.txt") from error

    def saved(self) -> int:
        """The last checkpoint's step; 0 without one."""
        return max(saved_steps(self.checkpoints), default=0)

    def wait_for_step(self, step: int) -> bool:
        """Waits for a checkpoint of at least this step; False where the run ended before.

        Raises:
            Failed: It hangs.
        """
        deadline = time.monotonic() + STEP_WITHIN_S
        while self.saved() < step:
            if self.process is not None and self.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise Failed(f"no step {step} within {STEP_WITHIN_S:.0f} s; see {self.folder}/output.txt")
            time.sleep(0.5)
        return True

    def rebuilt(self) -> int:
        """How many engines were built anew, in all parts of the run."""
        return (self.folder / "output.txt").read_text(errors="replace").count("rebuild=done")

    def wait_until_rebuilt(self, engines: int) -> None:
        """Waits until so many engines were built anew: with the last one the run may end.

        Raises:
            Failed: It ended, or they were not.
        """
        deadline = time.monotonic() + STEP_WITHIN_S
        while self.rebuilt() < engines:
            if self.process is not None and self.process.poll() is not None:
                raise Failed(f"the run ended by an engine's death; see {self.folder}/output.txt")
            if time.monotonic() > deadline:
                raise Failed(f"no engine was built anew within {STEP_WITHIN_S:.0f} s; see {self.folder}/output.txt")
            time.sleep(0.5)

    def processes(self, titles: Sequence[str] = ("",)) -> list[psutil.Process]:
        """The run's living processes whose command line holds one of `titles`."""
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE
                if ours and any(title in " ".join(process.cmdline()) for title in titles):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def wait_until_gone(self) -> None:
        """Waits until no process of the run is left.

        Raises:
            Failed: Some are.
        """
        deadline = time.monotonic() + GONE_WITHIN_S
        while left := self.processes():
            if time.monotonic() > deadline:
                names = sorted({" ".join(process.cmdline())[:80] for process in left})
                raise Failed(f"{len(left)} processes outlived the run: {names}")
            time.sleep(0.5)

    def accuracy(self) -> float:
        """Of the validation at the end."""
        found = read_metrics(self.folder / "logs").last("validation/accuracy")
        if found is None:
            raise Failed(f"{self.folder} has no validation")
        return found


def disturb(run: Run, minutes: float, every_s: float, seed: int, kinds: list[str]) -> Counter[str]:
    """Drives the run for some minutes and kills; how often each kind was killed.

    Raises:
        Failed: The run did what it must not.
    """
    draw, killed, far, rebuilt = random.Random(seed), Counter[str](), 10**6, 0
    end = time.monotonic() + 60 * minutes
    run.start(far)
    began_at = run.saved()
    while time.monotonic() < end:
        if not run.wait_for_step(began_at + 2):
            raise Failed(f"the run ended by itself with exit code {run.ended(1.0)}; see {run.folder}/output.txt")
        time.sleep(draw.uniform(0.5, 1.5) * every_s)
        kind = draw.choice(kinds)
        victims = run.processes(TARGETS[kind])
        if not victims:
            raise Failed(f"there is no {kind} to kill")
        victim = draw.choice(sorted(victims, key=lambda process: process.pid))
        print(f"{time.strftime('%X')} step={run.saved()} kill={kind} pid={victim.pid}", flush=True)
        victim.kill()
        killed[kind] += 1
        if kind == "engine":
            run.wait_until_rebuilt(rebuilt := rebuilt + 1)
        else:
            run.ended(ENDS_AFTER_S)
            run.wait_until_gone()
            run.start(far)
        began_at = run.saved()
    run.wait_for_step(began_at + 2)
    if run.process is not None and run.process.poll() is None:
        run.process.send_signal(signal.SIGINT)
    run.ended(ENDS_AFTER_S)
    run.wait_until_gone()
    return killed


def finish(run: Run, steps: int) -> None:
    """Drives a run to a step, which must end well.

    Raises:
        Failed: It did not.
    """
    run.start(steps)
    if code := run.ended(3600.0):
        raise Failed(f"the run ended with exit code {code}; see {run.folder}/output.txt")
    run.wait_until_gone()


def check_prompts(run: Run, steps: int) -> int:
    """How many prompts were trained, each once and in one step.

    Raises:
        Failed: One was trained twice, or a step is missing.
    """
    parts = [list(read_record(path, recover=True)) for path in sorted(run.folder.glob("logs/exp_*/record.jsonl"))]
    firsts = [next((e.event.step for e in part if isinstance(e.event, StepFinished)), None) for part in parts]
    trained: Counter[str] = Counter()
    seen: set[int] = set()
    for index, part in enumerate(parts):
        # What a part trained behind the step from which a later one went on is lost, and trained anew there.
        until = min((first for first in firsts[index + 1 :] if first is not None), default=steps)
        prompt_of = {e.event.group_id: e.event.prompt_id for e in part if isinstance(e.event, GroupAdmitted)}
        for entry in part:
            if isinstance(entry.event, GroupTrained) and entry.event.step < until:
                trained[prompt_of[entry.event.group_id]] += 1
                seen.add(entry.event.step)
    if twice := [prompt for prompt, count in trained.items() if count > 1]:
        raise Failed(f"{len(twice)} prompts were trained more than once: {twice[:5]}")
    if missing := set(range(steps)) - seen:
        raise Failed(f"steps {sorted(missing)[:5]} trained nothing")
    return len(trained)


def check_nothing_is_left() -> None:
    """Looks for shared memory and sockets of processes that are gone.

    Raises:
        Failed: There is some.
    """
    left = [
        path
        for pattern in ("/dev/shm/nemo_rl-*", "/tmp/nemo_rl-sockets-*")
        for path in glob.glob(pattern)
        if not psutil.pid_exists(int(Path(path).name.removeprefix("nemo_rl-").removeprefix("sockets-").split("-")[0]))
    ]
    if left:
        raise Failed(f"left behind: {left}")


def main() -> int:
    """Runs, and says what came of it; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="how long parts are killed")
    parser.add_argument("--every", type=float, default=60.0, help="mean seconds of training between two kills")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule")
    parser.add_argument("--kinds", default=",".join(TARGETS), help="what is killed")
    parser.add_argument("--model", default="results/arithmetic/sft/latest", help="as `make demo` warm-starts it")
    parser.add_argument("--folder", type=Path, default=Path("results/chaos"), help="a new folder")
    parser.add_argument("--band", type=float, default=0.1, help="by how much the accuracy may differ")
    options, overrides = parser.parse_known_args()
    if options.folder.exists():
        parser.error(f"{options.folder} exists; remove it, or name another with --folder")
    folder, model = options.folder.resolve(), str(Path(options.model).resolve())
    run, undisturbed = Run(folder / "disturbed", model, overrides), Run(folder / "undisturbed", model, overrides)
    try:
        killed = disturb(run, options.minutes, options.every, options.seed, options.kinds.split(","))
        steps = run.saved() + 1
        finish(run, steps)
        prompts = check_prompts(run, steps)
        check_nothing_is_left()
        finish(undisturbed, steps)
        ours, theirs = run.accuracy(), undisturbed.accuracy()
        if abs(ours - theirs) > options.band:
            raise Failed(f"accuracy {ours:.3f}, undisturbed {theirs:.3f}: further apart than {options.band}")
    except Failed as error:
        print(f"chaos=failed {error}")
        return 1
    finally:
        for process in [*run.processes(), *undisturbed.processes()]:
            process.kill()
    kills = " ".join(f"{kind.replace(' ', '_')}={count}" for kind, count in sorted(killed.items()))
    print(f"chaos=passed steps={steps} prompts={prompts} {kills} accuracy={ours:.3f} undisturbed={theirs:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
