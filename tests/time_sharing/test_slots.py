"""GPUs that several jobs use at once: how slots are numbered, who gets which, and that trainers take turns."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.config import MasterConfig
from nemo_rl.time_sharing.__main__ import main
from nemo_rl.time_sharing.arguments import slots
from nemo_rl.time_sharing.history.checker import check
from nemo_rl.time_sharing.launcher import serve
from nemo_rl.time_sharing.log import events as ev
from nemo_rl.time_sharing.opening import LIVE_LIMITS
from nemo_rl.time_sharing.pipelines.command import CommandPipeline
from nemo_rl.time_sharing.pipelines.command_config import CommandConfig
from nemo_rl.time_sharing.pipelines.grpo import PoolHandles
from nemo_rl.time_sharing.pipelines.job import Job, read_jobs
from nemo_rl.time_sharing.pipelines.residents import SlotTooSmall, slot_bytes
from nemo_rl.time_sharing.pipelines.shared_cluster import SharedCluster
from nemo_rl.time_sharing.pipelines.slot_choice import choose_slots, needs_of
from nemo_rl.time_sharing.planning.job_placement import Mapped, column_for
from nemo_rl.time_sharing.planning.plan import Expand, Grant, Plan, Shrink, Wait, explain
from nemo_rl.time_sharing.pool_jobs import PoolError
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.protocol.types import Priority
from nemo_rl.time_sharing.simulation.baselines import GAP_RATIO, OURS, QUEUE, SERIAL, STATIC, WAYS
from nemo_rl.time_sharing.simulation.scenario_reading import load_scenario, parse_scenario
from nemo_rl.time_sharing.simulation.world import World
from nemo_rl.time_sharing.viewing.page_server import prometheus_text
from nemo_rl.time_sharing.viewing.pool_report import report_data
from nemo_rl.time_sharing.viewing.timeline import build_timeline
from nemo_rl.time_sharing.viewing.trace import trace_events
from nemo_rl.utils.record import MemoryRecord

_GIB = 1 << 30
CONFIGS = Path(__file__).parents[2] / "examples" / "configs"


@given(nodes=st.integers(1, 3), per_node=st.integers(1, 8), slots=st.integers(1, 4))
def test_every_slot_lies_on_one_gpu_and_has_a_name_of_its_own(nodes: int, per_node: int, slots: int) -> None:
    pool = Pool(nodes, per_node, slots)
    assert len({pool.name_of(unit) for unit in range(pool.size)}) == pool.size
    everywhere = pool.slots_on(range(pool.gpus), None)
    assert everywhere == list(range(pool.slots))
    for gpu in range(pool.gpus):
        assert pool.local_gpus(pool.slots_on([gpu], None)) == pool.local_gpus(pool.turns_of([gpu * slots]) or [gpu])
        assert pool.local_gpus(pool.slots_on([gpu], None)) == [gpu % per_node]
    columns = [pool.slots_on(range(pool.gpus), column) for column in range(slots)]
    assert sorted(slot for column in columns for slot in column) == everywhere
    for column in columns:
        assert [pool.gpu_of(slot) for slot in column] == list(range(pool.gpus)), "ranks of a job are on different GPUs"
    turns = pool.turns_of(everywhere)
    assert turns == ([] if slots == 1 else list(range(pool.slots, pool.size)))
    assert [pool.gpu_of(turn) for turn in turns] == ([] if slots == 1 else list(range(pool.gpus)))


def test_a_job_comes_to_the_slot_on_which_the_fewest_are() -> None:
    there: list[Mapped] = []
    chosen = []
    for _ in range(5):
        column = column_for((0, 1), 2, there)
        there.append(Mapped((0,), (0, 1), column))
        chosen.append(column)
    assert chosen == [0, 1, 0, 1, 0]
    assert column_for((0, 1), 2, [Mapped((0,), (0, 1), None)]) == 0, "who has the whole GPU counts on every slot"
    assert column_for((2, 3), 2, there) == 0, "jobs on other GPUs do not count"


def test_slots_too_small_for_an_engine_are_refused_with_the_most_that_fit() -> None:
    assert slot_bytes(80 * _GIB, 1) is None
    with pytest.raises(SlotTooSmall, match=r"--slots-per-gpu 40: .* ask for at most 16"):
        slot_bytes(80 * _GIB, 40)
    assert slot_bytes(80 * _GIB, 16) is not None


@given(device_gib=st.integers(16, 192), slots=st.integers(2, 8))
def test_engines_of_all_jobs_fit_beside_the_one_that_trains(device_gib: int, slots: int) -> None:
    device_bytes = device_gib * _GIB
    try:
        sizes = slot_bytes(device_bytes, slots)
    except SlotTooSmall:
        assert device_bytes * 0.88 / (slots + 1) < 4 * _GIB
        return
    assert sizes is not None and sizes.trainer > sizes.engines
    assert (slots - 1) * sizes.engines + sizes.trainer <= device_bytes * 0.88
    assert slots * sizes.engines <= device_bytes * 0.88


_SHAPES = {
    "small": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "large": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """A job of each shape of model on one GPU; there are no weights, only the models' configurations."""
    folder = tmp_path_factory.mktemp("shapes")
    found = {}
    for name, shape in _SHAPES.items():
        config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 151936} | shape
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 2}))
        file = folder / f"{name}.yaml"
        example = CONFIGS / "grpo_arithmetic_cpu.yaml"
        file.write_text(f"defaults: {example}\npolicy: {{model_name: {folder / name}, precision: bfloat16}}\n")
        (found[name],) = read_jobs([file], Pool(1, 1))
    return found


def test_as_many_slots_as_jobs_that_fit(jobs: dict[str, Job]) -> None:
    pool, small, large = Pool(1, 1), jobs["small"], jobs["large"]
    assert choose_slots([small], pool, 80 * _GIB).slots == 1
    assert [choose_slots([small] * count, pool, 141 * _GIB).slots for count in (2, 3, 4, 9)] == [2, 3, 4, 4]
    assert choose_slots([large] * 3, pool, None).slots == 3, "memory of CPU slots is not divided"
    alone = choose_slots([large, small], pool, 80 * _GIB)
    assert alone.slots == 1 and re.search(r"with 2, the trainer of large needs about \d+", alone.why)
    assert choose_slots([replace(large, column=None), small, small], pool, 80 * _GIB).slots == 2, "it takes whole GPUs"


@pytest.fixture(scope="module")
def adapters(jobs: dict[str, Job], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Job]:
    """A job of adapters on the small model, by its slots and rank and by further keys of its wrapper."""
    folder, small = tmp_path_factory.mktemp("adapters"), jobs["small"].config
    assert isinstance(small, MasterConfig)

    def job(slots: int, rank: int, pool: Pool, **keys: object) -> Job:
        lora = {"lora_cfg": {"enabled": True, "dim": rank}}
        policy = {"model_name": small.policy.model_name, "precision": "bfloat16", "dtensor_cfg": lora}
        base = {"defaults": str(CONFIGS / "grpo_arithmetic_cpu.yaml"), "policy": policy, "multi_lora": {"slots": slots}}
        (folder / "base.yaml").write_text(json.dumps(base))
        (folder / "one.yaml").write_text("grpo: {seed: 1}")
        (folder / "job.yaml").write_text(json.dumps({"nemo_config_path": "base.yaml", "adapters": ["one.yaml"]} | keys))
        return read_jobs([folder / "job.yaml"], pool)[0]

    return job


def test_a_job_of_adapters_takes_one_slot_unless_it_asks_for_whole_gpus(adapters: Callable[..., Job]) -> None:
    pool = Pool(1, 2, 2)
    assert adapters(2, 8, pool).widths(pool) == {"actor_infer": 1}
    assert adapters(2, 8, pool).mappings(pool)["actor_infer"] == [0, 2]
    assert adapters(2, 8, pool, whole_gpus=True).widths(pool) == {"actor_infer": 2}


@pytest.mark.slow
def test_engine_and_trainer_of_adapters_share_a_slot_with_room_for_all_of_them(adapters: Callable[..., Job]) -> None:
    pool = Pool(1, 1)
    few, many = (needs_of(adapters(slots, 16, pool)) for slots in (2, 10))
    # Qwen2.5-0.5B has 8.8 million trained numbers at rank 16.
    assert many.trainer - few.trainer == pytest.approx(8 * 8.8e6 * 16, rel=0.01)
    assert many.engines - few.engines > 8 * 8.8e6 * 2
    for device_gib in (48, 80, 141):
        for number in (2, 3):
            sizes = slot_bytes(device_gib * _GIB, number)
            assert sizes is not None
            lack = few.lacks(sizes)
            assert (lack is None) is (few.engines + few.trainer <= sizes.engines)
            if lack is None:
                engines, trainer = few.divided(sizes.engines)
                assert engines + trainer <= sizes.engines and engines >= few.engines and trainer >= few.trainer
            else:
                assert "engine and trainer of job need about" in lack
    assert choose_slots([adapters(2, 16, pool)] * 3, pool, 80 * _GIB).slots == 3
    crowded = choose_slots([adapters(100, 128, pool)] * 3, pool, 80 * _GIB)
    assert crowded.slots == 1 and "engine and trainer of job need" in crowded.why


@pytest.mark.slow
@given(device_gib=st.integers(16, 512), count=st.integers(2, 6))
@settings(max_examples=30, deadline=None)
def test_what_is_chosen_fits_and_one_more_would_not(device_gib: int, count: int, jobs: dict[str, Job]) -> None:
    needs, several = needs_of(jobs["small"]), [jobs["small"]] * count
    chosen = choose_slots(several, Pool(1, 1), device_gib * _GIB).slots
    fits = []
    for number in range(2, min(count, 4) + 1):
        try:
            sizes = slot_bytes(device_gib * _GIB, number)
        except SlotTooSmall:
            continue
        if sizes is not None and needs.lacks(sizes) is None:
            fits.append(number)
    assert chosen == max(fits, default=1)


def test_auto_needs_the_jobs() -> None:
    assert [slots(text) for text in ("1", "4", "auto")] == [1, 4, "auto"]
    for text in ("0", "-1", "two", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="a whole number from 1, or auto"):
            slots(text)
    with pytest.raises(PoolError, match="does not know its jobs; give a number"):
        serve(argparse.Namespace(slots_per_gpu="auto"))


@pytest.mark.slow
def test_other_ways_of_running_jobs_have_no_slots_and_a_record_of_slots_can_be_fitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
pool: {{gpus_per_node: 2, slots_per_gpu: {slots}}}
jobs:
  - {{name: a, train: [0], infer: [{a}], steps: 2, train_s: 4.0}}
  - {{name: b, train: [{b0}], infer: [{b}], steps: 2, train_s: 4.0}}
"""
    shared, whole = tmp_path / "slots.yaml", tmp_path / "whole.yaml"
    shared.write_text(text.format(slots=2, a="0, 2", b0=1, b="1, 3"))
    whole.write_text(text.format(slots=1, a="0, 1", b0=0, b="0, 1"))
    record, fitted = tmp_path / "run.jsonl", tmp_path / "fitted.yaml"
    said = []
    for file in (shared, whole):
        assert main(["simulate", str(file), "--log", str(record)] if file is shared else ["simulate", str(file)]) == 0
        said.append(capsys.readouterr().out)
    ways = [{line.split()[0]: line.split()[1:] for line in out.splitlines() if line.startswith(WAYS)} for out in said]
    assert "2 jobs, 2 GPUs of 2 slots" in said[0] and "2 jobs, 2 GPUs," in said[1]
    for way in (SERIAL, STATIC, QUEUE, GAP_RATIO):
        assert ways[0][way] == ways[1][way], way
    assert float(ways[0][OURS][0]) < float(ways[0][SERIAL][0])
    assert main(["fit", str(record), "-o", str(fitted)]) == 0
    again = load_scenario(fitted)
    assert again.pool.slots_per_gpu == 2
    assert {job.name: (job.train, job.infer) for job in again.jobs} == {"a": ((0,), (0, 2)), "b": ((1,), (1, 3))}


def test_decisions_name_slots_and_turns() -> None:
    pool = Pool(1, 2, 2)
    plan = Plan(
        grants=[Grant("a", "actor_train", 0, Priority.ACTOR_TRAINING, (1, 4), (), ("evicts", (0,)))],
        shrinks=[Shrink("b", 2, ("for_grant", (1, 4), "actor_train", "a"))],
        expands=[Expand("b", 1, (3,), False, ("spare",))],
        waits=[Wait("c", "actor_train", 0, ("held", 4, "actor_train of a"))],
    )
    assert list(explain(plan, name_of=pool.name_of)) == [
        "a gets actor_train (GPUs 0.1, 0's training turn) for ACTOR_TRAINING: "
        "generation ranks 0 on its GPUs can make way.",
        "rank 2 of b goes to sleep: GPUs 0.1, 0's training turn go to actor_train of a.",
        "rank 1 of b wakes on GPUs 1.1: the GPUs would be idle otherwise.",
        "c waits for actor_train: GPU 0's training turn is held by actor_train of a until it releases.",
    ]


def test_figures_are_of_gpus_where_these_have_slots() -> None:
    pool = Pool(1, 2, 2)
    scenario = parse_scenario(
        {
            "pool": {"gpus_per_node": 2, "slots_per_gpu": 2},
            "jobs": [
                {
                    "name": f"job{number}",
                    "train": pool.slots_on((0,), number),
                    "infer": pool.slots_on(range(2), number),
                    "steps": 3,
                    "train_s": 5.0,
                }
                for number in range(2)
            ],
        }
    )
    records: list[MemoryRecord] = []
    World(scenario, 0, lambda clock: records.append(MemoryRecord(clock=clock)) or records[0]).run()
    timeline = build_timeline(records[0].entries)
    page = report_data(timeline, None, (), "two jobs on slots")
    assert page["gpus"] == 2
    assert page["rows"] == ["0.0", "0.1", "1.0", "1.1", "0's training turn", "1's training turn"]
    held, seconds = page["held"], page["gpuSeconds"]
    assert isinstance(held, float) and 0.3 < held <= 1.0
    assert isinstance(seconds, list) and sum(seconds) <= 2 * timeline.end + 1
    assert max(level.value for level in timeline.gpus) == 1.0 and max(active for _, active in timeline.active_gpus) == 2
    figures = prometheus_text(timeline, ()).decode()
    assert "nrl_pool_gpus 2.0" in figures
    named = {event["args"]["name"] for event in trace_events(timeline) if event["name"] == "thread_name"}  # type: ignore[index]
    assert "GPU 1.0 (node 0, local 1)" in named


@pytest.mark.parametrize(("slots", "gpus"), [(1, (5, 6)), (2, (5, 6)), (3, (7,))])
def test_a_command_sees_the_gpus_that_its_slots_lie_on(
    slots: int, gpus: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pool = Pool(2, 4, slots)
    # The driver's names, which differ from the pool's numbers where CUDA_VISIBLE_DEVICES hides some GPUs.
    monkeypatch.setattr(
        SharedCluster,
        "slots",
        lambda self: [SimpleNamespace(device_index=f"GPU-{node}{bundle}") for node, bundle in self.places()],
    )
    config = CommandConfig(command=["sh", "-c", "echo $CUDA_VISIBLE_DEVICES"], gpus=len(gpus))
    job = Job("sweep", config, (), gpus, folder=str(tmp_path), column=None)
    pipeline = CommandPipeline(job, PoolHandles(None, pool, "cuda", LIVE_LIMITS, str(tmp_path)), 0)
    holding = SimpleNamespace(held=lambda: [tuple(pool.slots_on(gpus, None))])
    with (tmp_path / "log").open("wb") as log:
        process = pipeline._start(holding, log)  # pyrefly: ignore[bad-argument-type]
        assert process is not None and process.wait(timeout=60) == 0
    assert (tmp_path / "log").read_text().split() == [",".join(f"GPU-{gpu // 4}{gpu % 4}" for gpu in gpus)]


@pytest.mark.slow
@settings(max_examples=12)
@given(seed=st.integers(0, 10_000), slots=st.integers(2, 3), jobs=st.integers(2, 4))
def test_jobs_of_one_gpu_generate_together_and_train_one_at_a_time(seed: int, slots: int, jobs: int) -> None:
    gpus = 2
    pool = Pool(1, gpus, slots)
    scenario = parse_scenario(
        {
            "pool": {"gpus_per_node": gpus, "slots_per_gpu": slots},
            "jobs": [
                {
                    "name": f"job{number}",
                    "train": pool.slots_on((number % gpus,), number % slots),
                    "infer": pool.slots_on(range(gpus), number % slots),
                    "steps": 3,
                    "train_s": 5.0,
                }
                for number in range(jobs)
            ],
            "faults": {"agent_crashes": 20.0, "scheduler_crashes": 20.0, "until_s": 200.0},
        }
    )
    records: list[MemoryRecord] = []
    world = World(scenario, seed, lambda clock: records.append(MemoryRecord(clock=clock)) or records[0])
    world.run()
    assert all(job.finished_at is not None for job in world.jobs.values())
    assert check(records[0].entries) == []
    trained = [
        entry.event for entry in world.entries if isinstance(entry.event, ev.Granted) and "train" in str(entry.event)
    ]
    assert trained and all(set(pool.turns_of(grant.gpus)) <= set(grant.gpus) for grant in trained), (
        "who trains on a slot holds its GPU's turn, which the checker grants to one at a time"
    )
