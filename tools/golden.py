"""Fingerprints of what runs compute, to hold a rearrangement of the code against: equal before and after, or explained.

    python tools/golden.py --write golden.json      # on the commit before
    python tools/golden.py --compare golden.json    # on the commit after; exit code 1 where something differs

Five short CPU runs of the arithmetic task (synchronous, on the data plane, on Megatron-Core, SFT, and a synchronous job
on GPUs that a pool lends it) give SHA-256 of their last weights, of their metrics without times, and of their records
without times and places. Fifty random scenarios of the scheduler, faults included, each give one of every plan and
event that its log holds. Fingerprints depend on the versions of torch and vLLM and on the processor: compare on one
machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from safetensors.torch import load_file  # noqa: E402

from nemo_rl.time_sharing.simulation.random_scenarios import random_scenario  # noqa: E402
from nemo_rl.time_sharing.simulation.world import World  # noqa: E402
from nemo_rl.utils import record_events as ev  # noqa: E402
from nemo_rl.utils.metrics_file import read_metrics  # noqa: E402
from nemo_rl.utils.record import Entry, MemoryRecord, read_record  # noqa: E402

SCENARIOS = 50
CONFIGS = ROOT / "examples" / "configs"
GRPO = (
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "grpo.max_num_steps=4",
    "grpo.val_period=2",
    "grpo.max_val_samples=16",
    "grpo.val_batch_size=16",
    "data.train.held_out=16",
    # A model that has learnt nothing earns nothing for sums, and would not be changed by training.
    "env.math.function=tools.golden.odd_length",
    "policy.train_global_batch_size=16",
    "policy.optimizer.kwargs.lr=0.01",
)
SFT = (
    "sft.max_num_steps=4",
    "sft.val_global_batch_size=64",
    "data.validation.held_out=64",
)
EVERY = ("checkpointing.save_period=4", "checkpointing.metric_name=null", "logger.tensorboard_enabled=false")
RUNS = {
    "synchronous": ("run_grpo.py", "grpo_arithmetic_cpu.yaml", GRPO),
    "data_plane": ("run_grpo.py", "grpo_arithmetic_cpu.yaml", (*GRPO, "data_plane.enabled=true")),
    "megatron": ("run_grpo.py", "grpo_arithmetic_megatron_cpu.yaml", GRPO),
    "sft": ("run_sft.py", "sft_arithmetic_cpu.yaml", SFT),
    # A turn that loses its engine begins again from its own seed, so that hand-overs leave no trace in the numbers.
    "pool": ("run_time_sharing.py", "grpo_arithmetic_cpu.yaml", (*GRPO, "policy.generation.on_preempt=redo_turn")),
}
# What an entry of a record says that depends neither on the clock nor on which engine took which request.
_LASTING: dict[type, tuple[str, ...]] = {
    ev.GroupAdmitted: ("group_id", "prompt_id", "samples", "target_step"),
    ev.GroupCommitted: ("group_id", "version", "tokens"),
    ev.GroupTrained: ("group_id", "step"),
    ev.GroupDropped: ("group_id", "reason"),
    ev.TokensGenerated: ("sample_id", "group_id", "spans", "mixed_kv"),
    ev.VersionPublished: ("version",),
    ev.StepFinished: ("step", "version", "groups"),
    ev.Validated: ("version", "samples"),
}
_MEASURED = ("per_sec", "time", "seconds", "memory", "mfu", "_gib")
_TIMED = ("timing/", "performance/", "environment/", "refit/", "ray/", "gpu/", "memory")


def odd_length(response: str) -> float:
    """A reward that some responses of a random model earn and some do not."""
    return float(len(response) % 2)


def fingerprint(lines: Iterable[str]) -> str:
    """SHA-256 of some lines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def run(name: str, folder: Path, model: Path) -> dict[str, str]:
    """Runs one of `RUNS` and returns the fingerprints of what it left."""
    script, config, overrides = RUNS[name]
    here = folder / name
    places = (
        f"policy.model_name={model}",
        f"checkpointing.checkpoint_dir={here / 'checkpoints'}",
        f"logger.log_dir={here / 'logs'}",
    )
    command = [sys.executable, str(ROOT / "examples" / script)]
    if script == "run_time_sharing.py":
        command += ["--gpus", "2", "--device", "cpu", "--port", "0", "--log-dir", str(here / "pool"), "--pipelines"]
    else:
        command += ["--config"]
    command += [str(CONFIGS / config), *overrides, *EVERY, *places]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(f"{' '.join(command)}\nended with exit code {ended.returncode}:\n{ended.stdout}{ended.stderr}")
    found = {f"{name}/weights": weights(here / "checkpoints"), f"{name}/metrics": metrics(here / "logs")}
    return found if name == "sft" else found | {f"{name}/record": record(here / "logs")}


def weights(checkpoints: Path) -> str:
    """Of the tensors of the newest checkpoint's model."""
    newest = max(checkpoints.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    tensors = {name: value for path in newest.rglob("model*.safetensors") for name, value in load_file(path).items()}
    if not tensors:
        sys.exit(f"{newest} holds no model.safetensors to take a fingerprint of")
    return fingerprint(
        f"{name} {tuple(value.shape)} {hashlib.sha256(value.contiguous().view(-1).numpy().tobytes()).hexdigest()}"
        for name, value in sorted(tensors.items())
    )


def metrics(logs: Path) -> str:
    """Of every series that is no measurement of time or memory."""
    series = read_metrics(logs).series
    return fingerprint(
        f"{name} {sorted(values.items())}" for name, values in sorted(series.items()) if not _is_measured(name)
    )


def _is_measured(name: str) -> bool:
    return name.startswith(_TIMED) or any(word in name for word in _MEASURED)


def record(logs: Path) -> str:
    """Of what was drawn, committed, trained and published. Engines answer in any order: entries are sorted."""
    entries = [entry for path in sorted(logs.rglob("record.jsonl")) for entry in read_record(path)]
    return fingerprint(sorted(line for entry in entries if (line := _lasting(entry))))


def _lasting(entry: Entry) -> str:
    names = _LASTING.get(type(entry.event), ())
    # As the file has them: without names of classes that they are made of.
    values = json.dumps([getattr(entry.event, name) for name in names])
    return f"{type(entry.event).__name__} {values}" if names else ""


def simulation() -> dict[str, str]:
    """Of the scheduler's log in every scenario, virtual times included."""
    logging.disable()
    found = {}
    for seed in range(SCENARIOS):
        world = World(random_scenario(seed), seed, lambda clock: MemoryRecord(clock=clock))
        world.run()
        found[f"simulation/{seed}"] = fingerprint(
            f"{entry.time:.6f} {type(entry.event).__name__} "
            f"{json.dumps(dataclasses.asdict(entry.event), sort_keys=True, default=str)}"  # type: ignore[call-overload]
            for entry in world.entries
        )
    logging.disable(logging.NOTSET)
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--only", nargs="+", choices=[*RUNS, "simulation"], help="some of them (default: all)")
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--write", type=Path, metavar="FILE", help="where to put the fingerprints")
    way.add_argument("--compare", type=Path, metavar="FILE", help="fingerprints that must come out again")
    chosen = parser.parse_args()
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="golden-") as place:
        folder = Path(place)
        model = folder / "model"
        make = [sys.executable, str(ROOT / "examples" / "make_tiny_model.py"), str(model), "--layers", "2"]
        subprocess.run([*make, "--hidden", "128"], check=True, capture_output=True)
        todo: dict[str, Callable[[], dict[str, str]]] = {
            **{name: lambda name=name: run(name, folder, model) for name in RUNS},  # type: ignore[misc]
            "simulation": simulation,
        }
        for name in chosen.only or todo:
            for key, value in todo[name]().items():
                print(f"{key:<22} {value}", flush=True)
                found[key] = value
    if chosen.write:
        chosen.write.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return
    before = json.loads(chosen.compare.read_text(encoding="utf-8"))
    differ = [key for key, value in found.items() if before.get(key) != value]
    print(f"golden={'equal' if not differ else 'different: ' + ' '.join(differ)}")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
