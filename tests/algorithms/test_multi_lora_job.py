"""A job of many adapters in real parts: joining, failing alone, leaving, full slots, checkpoints and resume; and random
schedules of all that. More of them: `make adapter-stress`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from nemo_rl.algorithms.multi_lora.assembly import Shared, shared_parts
from nemo_rl.algorithms.multi_lora.http import JobUnreachable, call, serve
from nemo_rl.algorithms.multi_lora.job import AdapterPhase, MultiLoraJob, SlotsFull, UnknownAdapter
from nemo_rl.algorithms.multi_lora.passes import AdapterRemoved
from nemo_rl.config.multi_lora import load_adapter, load_base
from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.log.reading import merge_by_machine_time
from nemo_rl.utils.adapter_files import read_adapter
from nemo_rl.utils.files import ADAPTERS_ADDRESS
from nemo_rl.utils.progress import StartPhases
from nemo_rl.utils.record import Entry, read_record
from nemo_rl.utils.record_events import TokensGenerated

_BASE = """
defaults: {examples}/grpo_arithmetic_cpu.yaml
multi_lora: {{slots: 3, wait_s: 0.2}}
grpo: {{num_prompts_per_step: 2, num_generations_per_prompt: 2, max_num_steps: 2, val_at_start: false, val_period: 0,
       val_at_end: false}}
loss_fn: {{reference_policy_kl_penalty: 0.01}}
policy:
  model_name: {model}
  train_global_batch_size: 4
  train_micro_batch_size: 2
  logprob_batch_size: 4
  optimizer: {{kwargs: {{lr: 0.01}}}}
  dtensor_cfg: {{lora_cfg: {{enabled: true, dim: 8}}}}
logger: {{log_dir: {folder}/logs, tensorboard_enabled: false}}
checkpointing: {{checkpoint_dir: {folder}/results, save_period: 1}}
"""
_FUNCTION = """
data:
  default: {{prompt_file: null, env_name: mine}}
  train: {{dataset_name: arithmetic, split: train, max_operand: 20, num_problems: 64, held_out: 16, env_name: mine}}
env: {{mine: {{function: adapter_rewards.{name}}}}}
grpo: {{seed: {seed}, max_num_steps: {steps}}}
"""
_REWARDS = """
import zlib

def by_text(response, expected):
    return float(zlib.crc32(response.encode()) % 2)

def failing(response, expected):
    raise ArithmeticError("planted")
"""
_TIMEOUT_S = 120.0
_SCHEDULES = int(os.environ.get("NRL_ADAPTER_SCHEDULES", "2"))
_SEED = int(os.environ.get("NRL_ADAPTER_SEED", "0"))


def _until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


class Workplace:
    """Files of a base and adapters."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        examples = Path(__file__).parents[2] / "examples" / "configs"
        path = self._write("base", _BASE.format(examples=examples, model=model, folder=folder))
        self.base, self.raw = load_base(path)

    def _write(self, name: str, text: str) -> Path:
        path = self.folder / f"{name}.yaml"
        path.write_text(text)
        return path

    def adapter(self, name: str, *, reward: str = "by_text", seed: int = 1, steps: int = 2) -> Path:
        """The file of an adapter."""
        return self._write(name, _FUNCTION.format(name=reward, seed=seed, steps=steps))

    def add(self, job: MultiLoraJob, name: str, **keys: Any) -> None:
        """Lets it join."""
        job.add(load_adapter(self.raw, self.adapter(name, **keys)))

    def samples(self, name: str, step: int) -> list[dict[str, Any]]:
        """The samples that an adapter's newest run trained on."""
        newest = sorted((self.folder / "logs" / name).glob("exp_*"))[-1]
        path = next(newest.rglob(f"train_data_step{step}.jsonl"))
        return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def parts(
    tiny_model: Path, ray_session: None, user_modules: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Workplace, Shared]]:
    (user_modules / "adapter_rewards.py").write_text(_REWARDS)
    workplace = Workplace(tmp_path_factory.mktemp("multi_lora"), tiny_model)
    with shared_parts(workplace.base, StartPhases()) as shared:
        yield workplace, shared


def _phase(job: MultiLoraJob, name: str) -> AdapterPhase:
    return next(state.phase for state in job.states() if state.name == name)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.vllm
def test_adapters_join_fail_and_leave_alone_and_go_on_where_they_were(parts: tuple[Workplace, Shared]) -> None:
    workplace, shared = parts
    logs = workplace.folder / "logs"
    job = MultiLoraJob(workplace.base, shared)
    with serve(job, workplace.raw, logs, 0):
        workplace.add(job, "one", seed=1)
        workplace.add(job, "long", seed=2, steps=1000)
        answer: Any = call(logs, "POST", "/adapters", {"file": str(workplace.adapter("bad", reward="failing"))})
        assert answer["phase"] == "joining" and answer["slot"] == 2
        with pytest.raises(JobUnreachable, match=r"all multi_lora.slots=3 are taken, by one .*; (one|bad) ends soon"):
            call(logs, "POST", "/adapters", {"file": str(workplace.adapter("late"))})
        with pytest.raises(JobUnreachable, match="names an adapter so already"):
            call(logs, "POST", "/adapters", {"file": str(workplace.folder / "one.yaml")})
        with pytest.raises(JobUnreachable, match="expected"):
            call(logs, "POST", "/adapters", {"path": "x"})
        odd = workplace.adapter("odd")
        odd.write_text(odd.read_text() + "policy: {dtensor_cfg: {lora_cfg: {target_modules: [q_prj]}}}\n")
        with pytest.raises(JobUnreachable, match="q_prj matches no linear layer"):
            call(logs, "POST", "/adapters", {"file": str(odd)})
        _until(lambda: _phase(job, "one") is AdapterPhase.DONE and _phase(job, "bad") is AdapterPhase.FAILED)
        listed: Any = call(logs, "GET", "/adapters")
        reason = next(state["reason"] for state in listed if state["name"] == "bad")
        assert "planted" in reason and "ray::" not in reason
        # What others do does not touch an adapter that runs, and it leaves in the middle of a step.
        _until(lambda: next(state.step for state in job.states() if state.name == "long") >= 3)
        assert call(logs, "DELETE", "/adapters/long")["phase"] == "leaving"  # type: ignore[index]
        _until(lambda: _phase(job, "long") is AdapterPhase.REMOVED)
        with pytest.raises(JobUnreachable, match="no adapter long runs here; there are none"):
            call(logs, "DELETE", "/adapters/long")
        with pytest.raises(UnknownAdapter):
            job.remove("long")
        assert (logs / ADAPTERS_ADDRESS).stat().st_mode & 0o077 == 0
    assert job.wait(1.0) and shared.engines.version("one") is None
    versions: Any = shared.engines.generation.fleet.call([0], "adapter_versions")
    assert versions == [{}]
    with pytest.raises(JobUnreachable, match="no job of adapters runs"):
        call(logs, "GET", "/adapters")
    info, factors = read_adapter(workplace.folder / "results/one/step_2/policy/weights")
    assert info.r == 8 and any(tensor.abs().sum() > 0 for name, tensor in factors.items() if name.endswith("lora_B"))
    # No prompt is lost and no token under another version, also where an adapter left in the middle of a step.
    for name in ("one", "long", "bad"):
        entries = list(read_record(next((logs / name).glob("exp_*/record.jsonl"))))
        assert check(entries) == []
        assert name == "bad" or any(isinstance(entry.event, TokensGenerated) for entry in entries)
    # A further job goes on with it; an adapter draws beside others what it draws alone.
    beside = [[row["token_ids"] for row in workplace.samples("one", step)] for step in (1, 2)]
    again = MultiLoraJob(workplace.base, shared)
    workplace.add(again, "one", seed=1, steps=3)
    workplace.add(again, "twin", seed=1)
    assert again.wait(_TIMEOUT_S)
    done = {state.name: (state.phase, state.step) for state in again.states()}
    assert done == {"one": (AdapterPhase.DONE, 3), "twin": (AdapterPhase.DONE, 2)}
    twin = [[row["token_ids"] for row in workplace.samples("twin", step)] for step in (1, 2)]
    assert twin[0] == beside[0]
    # Later answers follow weights that differ by rounding; prompts do not.
    assert [ids[:3] for ids in twin[1]] == [ids[:3] for ids in beside[1]]
    last = MultiLoraJob(workplace.base, shared)
    workplace.add(last, "ended", steps=1000)
    last.close()
    assert _phase(last, "ended") is AdapterPhase.REMOVED
    ending = MultiLoraJob(workplace.base, shared)
    ending.end_after_steps()
    with pytest.raises(AdapterRemoved, match="the job ends"):
        workplace.add(ending, "late")


class Schedule:
    """Adapters that come and go at random times on one job, and in every third schedule an engine that is killed."""

    def __init__(self, number: int, workplace: Workplace, shared: Shared) -> None:
        self._rng = random.Random(f"{_SEED}/{number}")
        self._number, self._workplace, self._shared = number, workplace, shared
        self._names = [f"r{number}{letter}" for letter in "abcde"[: self._rng.randint(3, 5)]]
        self.removed = self.full = self.killed = 0

    def play(self) -> dict[str, AdapterPhase]:
        """How each adapter ended."""
        rng, job = self._rng, MultiLoraJob(self._workplace.base, self._shared)
        steps = {name: rng.choice((1, 2, 3, 1000)) for name in self._names}
        seeds = {name: rng.randint(0, 99) for name in self._names}
        kill_after = rng.randint(1, 2) if self._number % 3 == 2 else None
        waiting = list(self._names)
        while waiting:
            try:
                self._workplace.add(job, waiting[0], seed=seeds[waiting[0]], steps=steps[waiting[0]])
                waiting.pop(0)
            except SlotsFull:
                self.full += 1
                self._remove_one(job)
            time.sleep(rng.uniform(0.0, 1.5))
            if kill_after is not None and len(self._names) - len(waiting) > kill_after:
                kill_after = None
                ray.kill(self._shared.engines.generation.group.workers[0])
                self.killed += 1
        while any(steps[state.name] == 1000 and not state.phase.over for state in job.states()):
            self._remove_one(job)
            time.sleep(rng.uniform(0.0, 1.0))
        assert job.wait(_TIMEOUT_S)
        # Those that were removed come back, and go on from what they had saved.
        again = MultiLoraJob(self._workplace.base, self._shared)
        ended = {state.name: state.phase for state in job.states()}
        for name in [name for name, phase in ended.items() if phase is AdapterPhase.REMOVED][:2]:
            self._workplace.add(again, name, seed=seeds[name], steps=2)
        assert again.wait(_TIMEOUT_S)
        states = [*job.states(), *again.states()]
        assert [(state.name, state.reason) for state in states if state.phase is AdapterPhase.FAILED] == []
        return {state.name: state.phase for state in states}

    def _remove_one(self, job: MultiLoraJob) -> None:
        running = [state.name for state in job.states() if not state.phase.over]
        if running:
            job.remove(self._rng.choice(running))
            self.removed += 1

    def entries(self) -> list[Entry]:
        """What the records of all its adapters say, in the order in which it happened."""
        logs = self._workplace.folder / "logs"
        records = [path for name in self._names for path in sorted((logs / name).glob("exp_*/record.jsonl"))]
        return list(merge_by_machine_time(records))


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.timeout(300 + 120 * _SCHEDULES)
def test_random_schedules_lose_no_prompt_and_mix_no_adapter(parts: tuple[Workplace, Shared]) -> None:
    workplace, shared = parts
    seen: Counter[str] = Counter()
    for number in range(_SCHEDULES):
        schedule = Schedule(number, workplace, shared)
        phases = schedule.play()
        entries = schedule.entries()
        assert check(entries) == [], (_SEED, number)
        seen.update(type(entry.event).__name__ for entry in entries)
        seen.update(phase.value for phase in phases.values())
        seen.update({"removals": schedule.removed, "full": schedule.full, "kills": schedule.killed})
        assert shared.engines.generation.fleet.healthy() == [0]
        versions: Any = shared.engines.generation.fleet.call([0], "adapter_versions")
        assert versions == [{}], (_SEED, number)
    assert seen["TokensGenerated"] and seen["StepFinished"] and seen["removals"]
    sys.stderr.write(f"{_SCHEDULES} schedules of seed {_SEED}: {dict(seen)}\n")
