"""Training on groups as they finish: what is trained, in which order, and what becomes of prompts that fail."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl.algorithms.grpo.loop import drive
from nemo_rl.algorithms.grpo.stages import joined_metrics
from nemo_rl.algorithms.grpo.streaming import check_streaming
from nemo_rl.config import ConfigError, load_master_config
from nemo_rl.environments.interfaces import EnvironmentFailure
from nemo_rl.experience.collector import Collector
from nemo_rl.experience.rollout_tasks import CollectorError
from nemo_rl.models.generation.interfaces import GenerationError
from nemo_rl.utils.record_events import GroupCommitted, GroupDropped, GroupTrained, StepFinished
from tests.experience.plane_in_process import plane_in_process
from tests.virtual_world import PROMPTS, SAMPLES, Loader, World, save_in_memory

STREAMING = Path(__file__).parents[2] / "examples" / "configs" / "grpo_arithmetic_streaming_cpu.yaml"
PARTS = (
    "async_rl.min_groups_for_streaming_train=1",
    f"async_rl.max_buffered_rollouts={2 * PROMPTS}",
    "async_rl.rollout_failure.backoff_base_s=0.01",
)
WINDOW = "async_rl.sampler.max_lookahead_versions"
STALENESS = "async_rl.sampler.max_staleness_versions"


@pytest.fixture(autouse=True)
def _saving(monkeypatch: pytest.MonkeyPatch) -> None:
    save_in_memory(monkeypatch)


class Streamed(World):
    """Rollouts take the time that a test says, end once so many prompts are trained as it says, and fail as it says."""

    def __init__(self, tmp_path: Path, *overrides: str, **arguments: Any) -> None:
        tmp_path.mkdir(exist_ok=True)
        super().__init__(tmp_path, *PARTS, *overrides, config=STREAMING, **arguments)
        self.takes = lambda prompt: 0.0
        self.after = lambda prompt: 0
        self.fails: dict[int, list[Exception]] = {}
        self.finished: list[int] = []
        self.late_s = 0.0

    async def roll_out_group(self, batch: Any, plan: Any) -> Any:
        prompt = int(batch["idx"][0])
        await asyncio.sleep(self.takes(prompt))
        while len(self.trained) < self.after(prompt):
            await asyncio.sleep(0.002)
        if self.fails.get(prompt):
            raise self.fails[prompt].pop(0)
        rollout = await super().roll_out_group(batch, plan)
        self.finished.append(prompt)
        return rollout

    def drive(self) -> Streamed:
        drive(self.run)
        return self


def test_groups_are_trained_as_they_finish_and_the_version_ticks_once_a_step(tmp_path: Path) -> None:
    world = Streamed(tmp_path, f"{WINDOW}=0", "grpo.max_num_steps=3")
    # The last prompt of a step ends first, each other one when the one behind it is trained.
    world.after = lambda prompt: prompt // PROMPTS * PROMPTS + (PROMPTS - 1 - prompt % PROMPTS)
    world.drive()
    assert world.trained == [2, 1, 0, 5, 4, 3, 8, 7, 6] == world.finished
    assert world.sample_numbers == [*range(PROMPTS * SAMPLES)] * 3
    steps = [what for what in world.happened if what.split()[0] in ("begin", "train", "finish", "refit")]
    assert steps[:7] == ["refit 0", "begin", "train 1", "train 2", "train 3", "finish", "refit 1"]
    assert steps.count("begin") == steps.count("finish") == 3
    assert [event.version for event in world.events(StepFinished)] == [1, 2, 3]
    assert all(logged["streaming/parts"] == 3 for logged in world.logged)
    world.every_prompt_is_accounted_for()


def test_early_groups_are_trained_while_a_slow_one_generates(tmp_path: Path) -> None:
    world = Streamed(tmp_path, f"{WINDOW}=0", "grpo.max_num_steps=1")
    trained_two = threading.Event()

    async def roll_out_group(batch: Any, plan: Any) -> Any:
        if int(batch["idx"][0]) == 1:
            assert await asyncio.to_thread(trained_two.wait, 30.0), "training waited for the slow group"
        return await World.roll_out_group(world, batch, plan)

    world.roll_out_group = roll_out_group  # type: ignore[method-assign]
    train_on = world._train_on

    def training(data: Any) -> None:
        train_on(data)
        if len(world.trained) == PROMPTS - 1:
            trained_two.set()

    world._train_on = training  # type: ignore[method-assign]
    world.drive()
    assert world.trained[-1] == 1 and sorted(world.trained) == [0, 1, 2]


@pytest.mark.parametrize(
    "overrides",
    [
        (f"{WINDOW}=0",),
        (f"{WINDOW}=1",),
        ("async_rl.sampler.name=weight_fifo", f"{STALENESS}=1"),
        ("async_rl.sampler.name=windowed", f"{STALENESS}=1"),
        ("async_rl.sampler.name=windowed", f"{STALENESS}=2", "async_rl.sampler.sample_freshest_first=true"),
        ("async_rl.sampler.name=ready_first", f"{STALENESS}=1"),
        ("async_rl.max_inflight_prompts=2",),
        ("async_rl.min_groups_for_streaming_train=2",),
    ],
    ids=lambda overrides: " ".join(one.rpartition(".")[2] for one in overrides),
)
def test_every_sampler_trains_every_prompt_once(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    world = Streamed(tmp_path, "grpo.max_num_steps=6", *overrides, loader=Loader(6))
    world.takes = lambda prompt: 0.02 * (prompt * 7 % 5)
    world.drive()
    assert sorted(world.trained) == list(range(6 * PROMPTS))
    lags = [logged["lag/max"] for logged in world.logged]
    if "name=ready_first" not in " ".join(overrides):
        assert max(lags) <= int((*overrides, f"{WINDOW}=1")[-1][-1] if overrides[0][-1].isdigit() else 2)
    if overrides[0] == f"{WINDOW}=0":
        assert lags == [0.0] * 6, "strictly on-policy"
    world.every_prompt_is_accounted_for()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["in_order", "windowed"])
def test_a_restart_from_any_checkpoint_trains_every_prompt_once(tmp_path: Path, name: str) -> None:
    sampler = (f"async_rl.sampler.name={name}", "checkpointing.save_period=1", "grpo.max_num_steps=6")
    whole = Streamed(tmp_path / "whole", *sampler, loader=Loader(6))
    whole.takes = lambda prompt: 0.02 * (prompt * 7 % 5)
    whole.drive()
    for step in [step for step in whole.saved if step < 6]:
        again: Any = whole.resumed(step, *sampler)
        again.takes = whole.takes
        again.drive()
        before = whole.trained[: step * PROMPTS]
        assert sorted(before + again.trained) == list(range(6 * PROMPTS)), step
        again.every_prompt_is_accounted_for()


def test_asynchronous_and_streaming_runs_go_on_from_each_others_checkpoints(tmp_path: Path) -> None:
    whole = World(tmp_path, "checkpointing.save_period=1", loader=Loader(6))
    drive(whole.run)
    in_order = ("async_rl.sampler.name=in_order", "checkpointing.save_period=1", "grpo.max_num_steps=5")

    def go_on(before: World, step: int, kind: type[World], *overrides: str) -> World:
        again = before.resumed(step, *overrides, kind=kind)
        drive(again.run)
        restored = sum(event.restored for event in again.events(GroupCommitted))
        assert restored == len(before.saved[step][1]["replay_buffer.pt"]["groups"]) > 0
        return again

    streamed = go_on(whole, 2, Streamed, *in_order)
    back = go_on(streamed, 3, World)
    first = whole.trained[: 2 * PROMPTS]
    for trained in (streamed.trained, streamed.trained[:PROMPTS] + back.trained):
        assert sorted(first + trained) == whole.trained


def test_a_group_that_becomes_too_old_while_it_is_stored_is_generated_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = ("async_rl.sampler.name=windowed", f"{STALENESS}=0", "grpo.max_num_steps=2")
    world = Streamed(tmp_path, *sampler, loader=Loader(2))
    published, store = threading.Event(), world.run.store.write_pending

    def publish(collector: Any, version: int, publish: Any = Collector.set_weight_version) -> None:
        publish(collector, version)
        if version == 1:
            published.set()

    def write_pending(columns: Any) -> Any:
        if int(columns.tokens["input_ids"][0, 0]) == PROMPTS and not published.is_set():
            assert published.wait(60.0)
        return store(columns)

    monkeypatch.setattr(Collector, "set_weight_version", publish)
    monkeypatch.setattr(world.run.store, "write_pending", write_pending)
    world.drive()
    assert sorted(world.trained) == list(range(2 * PROMPTS))
    assert all(logged["lag/max"] == 0 for logged in world.logged)
    world.every_prompt_is_accounted_for()


def test_on_the_data_plane_the_same_prompts_are_trained_and_no_row_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = plane_in_process(monkeypatch)
    world = Streamed(tmp_path, "grpo.max_num_steps=4", loader=Loader(4), plane=plane)
    clear_samples, cleared = plane.clear_samples, []

    def clear(ids: Any, partition: str) -> None:
        cleared.append((len(ids), world.happened.count("finish")))
        clear_samples(ids, partition)

    monkeypatch.setattr(plane, "clear_samples", clear)
    world.drive()
    assert sorted(world.trained) == list(range(4 * PROMPTS))
    # Once a step, all of its rows, when it is trained.
    assert [rows for rows, _ in cleared] == [PROMPTS * SAMPLES] * 4
    assert all(finished > step for step, (_, finished) in enumerate(cleared))
    assert all(logged["streaming/parts"] >= 1 for logged in world.logged)
    assert plane.list_samples("train") == {}


def test_a_step_for_which_no_prompt_is_left_is_neither_begun_nor_counted(tmp_path: Path) -> None:
    world = Streamed(tmp_path, loader=Loader(2))
    world.run.total_steps = 4
    world.drive()
    assert world.run.state.step == 2 and sorted(world.trained) == list(range(2 * PROMPTS))
    assert [world.happened.count(what) for what in ("begin", "finish", "abort")] == [2, 2, 0]
    assert world.happened[-1] == "save 2"


def test_failures_of_the_machinery_are_retried_and_end_the_run_beyond_their_budget(tmp_path: Path) -> None:
    world = Streamed(tmp_path / "a", "grpo.max_num_steps=2", "async_rl.rollout_failure.max_infra_attempts_per_prompt=3")
    world.fails = {1: [GenerationError("shard 0 ended"), GenerationError("shard 1 ended")]}
    world.drive()
    assert sorted(world.trained) == list(range(2 * PROMPTS))

    world = Streamed(tmp_path / "b", "grpo.max_num_steps=2", "async_rl.rollout_failure.max_infra_attempts_per_prompt=2")
    world.fails = {4: [GenerationError(f"shard {n} ended") for n in range(2)]}
    with pytest.raises(CollectorError, match=r"group 1-1 failed 2 times.*max_infra_attempts_per_prompt=2.*shard 1 end"):
        world.drive()
    assert not world.step_open
    world.every_prompt_is_accounted_for()


BAD_PROMPT = [EnvironmentFailure("environment math raised"), EnvironmentFailure("environment math raised")]


def test_a_prompt_that_fails_is_dropped_and_its_step_is_smaller_or_the_next_one_moves_up(tmp_path: Path) -> None:
    budget = (
        "async_rl.rollout_failure.max_skipped_prompts=2",
        "async_rl.rollout_failure.max_consecutive_dropped_prompts=1",
        "async_rl.rollout_failure.min_step_batch_fraction=0.5",
        "grpo.max_num_steps=3",
    )
    world = Streamed(tmp_path / "shrink", *budget, loader=Loader(3))
    world.fails = {4: list(BAD_PROMPT)}
    world.drive()
    assert sorted(world.trained) == [prompt for prompt in range(3 * PROMPTS) if prompt != 4]
    assert [event.groups for event in world.events(StepFinished)] == [3, 2, 3]
    assert [(event.group_id, event.reason) for event in world.events(GroupDropped)] == [("1-1", "failed")]
    world.every_prompt_is_accounted_for()

    for window in (0, 1):
        replace = (*budget, "async_rl.rollout_failure.on_dropped_prompt=replace", f"{WINDOW}={window}")
        world = Streamed(tmp_path / f"replace_{window}", *replace, loader=Loader(3))
        world.fails = {4: list(BAD_PROMPT)}
        world.drive()
        assert [event.groups for event in world.events(StepFinished)] == [3, 3, 2]
        if window == 0:
            assert all(logged["lag/max"] == 0 for logged in world.logged)
        world.every_prompt_is_accounted_for()

    world = Streamed(tmp_path / "too_many", *budget[:2], "grpo.max_num_steps=3")
    world.fails = {4: list(BAD_PROMPT)}
    with pytest.raises(CollectorError, match="step 1 lost 1 of its 3 prompts.*min_step_batch_fraction"):
        world.drive()


def test_without_a_budget_a_prompt_that_fails_ends_the_run_by_name(tmp_path: Path) -> None:
    world = Streamed(tmp_path, "grpo.max_num_steps=2")
    world.fails = {1: list(BAD_PROMPT)}
    with pytest.raises(CollectorError, match=r"group 0-1 failed 2 times.*max_skipped_prompts=0"):
        world.drive()


@pytest.mark.slow
def test_a_stall_is_said_with_what_waits_for_what(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    watchdog = ("async_rl.stall_watchdog.interval_s=0.1", "async_rl.stall_watchdog.stall_timeout_s=1.5")
    world = Streamed(tmp_path / "warn", *watchdog, f"{WINDOW}=0", "grpo.max_num_steps=1")
    world.takes = lambda prompt: 4.0 if prompt == 1 else 0.0
    world.drive()
    assert "step 0 waits for 1 of 3 groups" in caplog.text and "rolling ['0-1']" in caplog.text

    world = Streamed(tmp_path / "abort", *watchdog, "async_rl.stall_watchdog.stall_action=abort")
    world.takes = lambda prompt: 30.0 if prompt == 1 else 0.0
    begun = time.monotonic()
    with pytest.raises(CollectorError, match=r"no group was finished for 2 s; step 0 waits for \d of 3 groups"):
        world.drive()
    assert time.monotonic() - begun < 29 and world.happened[-1] == "abort"
    world.every_prompt_is_accounted_for()

    # Where nothing runs at all, there is nothing to wait for either.
    world = Streamed(tmp_path / "nothing", *watchdog, "async_rl.stall_watchdog.stall_action=abort")
    monkeypatch.setattr(Collector, "_launch", lambda collector: None)
    with pytest.raises(CollectorError, match=r"step 0 waits for 3 of 3 groups, of all groups .*rolling \[\]"):
        world.drive()
    world.every_prompt_is_accounted_for()


def test_a_step_that_fails_is_aborted_and_nothing_is_counted_as_trained(tmp_path: Path) -> None:
    world = Streamed(tmp_path, f"{WINDOW}=0")
    train_on = world._train_on

    def training(data: Any) -> None:
        train_on(data)
        if len(world.trained) >= PROMPTS + 2:
            raise RuntimeError("out of memory")

    world._train_on = training  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        world.drive()
    assert not world.step_open and world.happened[-1] == "abort"
    assert [event.step for event in world.events(GroupTrained)] == [0] * PROMPTS and world.run.state.step == 1
    world.every_prompt_is_accounted_for()


def test_a_step_that_cannot_be_begun_is_not_aborted(tmp_path: Path) -> None:
    world = Streamed(tmp_path, f"{WINDOW}=0", "grpo.max_num_steps=1")

    def begin(loss_fn: Any, *, gbs: int | None = None) -> None:
        raise RuntimeError("a worker is gone")

    world.begin_train_step = begin  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="a worker is gone"):
        world.drive()
    assert "abort" not in world.happened


@pytest.mark.slow
def test_nothing_of_the_driver_blocks_the_loop_where_requests_are_dispatched(tmp_path: Path) -> None:
    world = Streamed(tmp_path, "grpo.max_num_steps=5")
    lags: list[float] = []

    async def watch() -> None:
        while True:
            begun = time.monotonic()
            await asyncio.sleep(0.005)
            lags.append(time.monotonic() - begun)

    train_on = world._train_on

    def training(data: Any) -> None:
        time.sleep(0.3)
        train_on(data)

    world._train_on = training  # type: ignore[method-assign]
    future = world.loop.start(watch())
    world.drive()
    future.cancel()
    # Every training pass takes 0.3 s; a loop that waited for one would show it.
    assert sum(lag > 0.25 for lag in lags) < len(world.logged) and len(lags) > 50
    assert all(0 <= logged["streaming/dispatch_loop_lag_s"] < 10 for logged in world.logged)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("grpo.adv_estimator.name=reinforce_plus_plus", "whitens advantages over all trained tokens of the step"),
        ("grpo.use_dynamic_sampling=true", "dynamic sampling fills a step"),
        ("async_rl.sampler.name=custom", "named by module:Class"),
        ("async_rl.max_buffered_rollouts=64", "set it to at least 128"),
        ("async_rl.min_groups_for_streaming_train=65", "lower it to at most that"),
        ("+async_rl.min_prompt_groups_per_batch=65", "min_prompt_groups_per_batch=65 is more than"),
        ("+async_rl.target_prompt_groups_per_step=63", "must equal grpo.num_prompts_per_step=64"),
        ("async_rl.rollout_failure.max_skipped_prompts=1", "set that to at least 1, too"),
        ("async_rl.stall_watchdog.stall_timeout_s=30", "must be more than"),
        ("loss_fn.use_importance_sampling_correction=false", "strictly on-policy"),
        ("+async_rl.sampler.window=3", r"only a custom sampler takes further keys, not \['window'\]"),
        ("grpo.async_grpo.enabled=true", "both say how rollouts run beside training"),
    ],
)
def test_what_cannot_be_streamed_is_refused_by_name(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_streaming(load_master_config(STREAMING, [override]))


def test_a_custom_sampler_is_made_or_refused_by_name(user_modules: Path, tmp_path: Path) -> None:
    (user_modules / "freshest_only.py").write_text(
        "from nemo_rl.experience.samplers import Windowed\n"
        "class Freshest(Windowed):\n"
        "    def __init__(self, staleness):\n"
        "        super().__init__(staleness, True)\n"
    )
    name = ("async_rl.sampler.name=custom", "async_rl.sampler.target=freshest_only:Freshest")
    world = Streamed(tmp_path, *name, "+async_rl.sampler.staleness=1", "grpo.max_num_steps=4", loader=Loader(4)).drive()
    assert sorted(world.trained) == list(range(4 * PROMPTS))
    with pytest.raises(ConfigError, match="expected module:Class and the keys that it takes"):
        check_streaming(load_master_config(STREAMING, [*name, "+async_rl.sampler.wrong=1"]))
    with pytest.raises(ConfigError, match="No module named 'nowhere'"):
        check_streaming(load_master_config(STREAMING, [name[0], "async_rl.sampler.target=nowhere:Class"]))


def test_metrics_of_parts_are_joined_by_their_kind() -> None:
    def part(size: int, **metrics: object) -> Any:
        return SimpleNamespace(rows=SimpleNamespace(size=size), metrics=metrics)

    rates = {"max_seq_error_rate": 1.0, "advantages/max/mean": 4.0}
    joined = joined_metrics([part(1, **rates), part(1, **dict.fromkeys(rates, 0.0))])
    assert joined == {name: value / 2 for name, value in rates.items()}
    one = {"num_masked": 1.0, "advantages/sum": 2.0, "advantages/max": 5.0, "min_seq": 0.5, "lag/mean": 1.0}
    two = {"num_masked": 2.0, "advantages/sum": 3.0, "advantages/max": 4.0, "min_seq": 0.1, "lag/mean": 4.0}
    joined = joined_metrics([part(1, **one), part(3, **two, late=7.0)])
    assert joined == {
        "num_masked": 3.0,
        "advantages/sum": 5.0,
        "advantages/max": 5.0,
        "min_seq": 0.1,
        "lag/mean": 3.25,
        "late": 7.0,
    }
